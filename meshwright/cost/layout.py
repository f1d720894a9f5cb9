"""The state layout: in how many bytes, where and how long a rank holds weights, gradients and optimizer states.

`state_layout` reads the flags of a plan and the optimizer's keys once, into a table; the ledger, the time of an update,
the bounds of the search, explanations and out-of-memory messages are functions of that table (as bytes of a
rank: cost/resident.py).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from meshwright.cost.activations import ITEM_BYTES
from meshwright.cost.job import Job, MasterWeights, StateDtype
from meshwright.spec.communication import outer_states
from meshwright.spec.optimizers import ADAMW, DESCRIPTIONS, OptimizerSpec
from meshwright.spec.plan import Plan, Precision

LOW_BYTES = 2  # what a bf16 weight lacks of its fp32 master

Location = Literal["device", "host", "disk"]

Name = Literal[
    "weights",
    "master",
    "reference",
    "gradients",
    "moments",
    "outer_states",
    "error_feedback",
    "all_gathered_params",
    "unreduced_grads",
    "update",
    "activations",
    "recompute",
    "activation_grads",
    "logits",
    "reduce_buffers",
    "workspace",
    "allocator_cache",
    "cuda_nccl_context",
    "states",
    "pieces",
]

LABELS: Mapping[str, str] = {  # those of names that are not the words themselves
    "moments": "optimizer states",  # of any optimizer: SGD has a momentum instead
    "all_gathered_params": "all-gathered params",
    "cuda_nccl_context": "CUDA+NCCL context",
}


class StateRow(msgspec.Struct, frozen=True):
    """One state of every parameter in a rank's shard; gradients live from the backward to the update, others always."""

    name: Name
    bytes: int  # of one parameter; of optimizer states that parameters do not have alike, the least
    location: Location = "device"


class StateLayout(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """What a plan's flags and the optimizer's keys mean for the states of a rank."""

    rows: tuple[StateRow, ...]
    compute_bytes: int  # of an element in the compute dtype: activations, gathered weights
    accum_bytes: int  # of one in sums and updates
    # Which weights the arithmetic reads: those that are stored, a copy that is freed after use, or one that stays.
    reads: Literal["stored", "gathered", "resident"]
    # What adds a microbatch's gradients to a sum: nothing, as there is one; autograd, in place; or the trainer.
    sums: Literal["never", "in_place", "by_param", "by_block"]
    waits: bool  # unsharded gradients are kept from one microbatch to the next
    update: Literal["device", "host"] = "device"  # where the optimizer's arithmetic runs
    rounds: bool = False  # the update rounds weights or states to 16 bits
    resident_states: int = 0  # bytes of states on disk that stay in host memory
    optimizer: OptimizerSpec = ADAMW
    state_width: int = 4  # bytes of an element of its states

    def has(self, name: Name, location: Location) -> bool:
        """Whether a state is in a place, were it of no bytes there."""
        return any((row.name, row.location) == (name, location) for row in self.rows)

    def of(self, name: Name, location: Location = "device") -> int:
        """Bytes of one state of a parameter in one place."""
        return sum(row.bytes for row in self.rows if (row.name, row.location) == (name, location))

    @property
    def bf16_states(self) -> bool:
        """Whether states beside bf16 weights are bf16, and rounded."""
        return self.state_width == 2 and any(row.name == "moments" for row in self.rows)

    @property
    def offloaded(self) -> StateRow | None:
        """Master weights and optimizer states where a single rank keeps them outside its device."""
        return next((row for row in self.rows if row.name == "states"), None)

    @property
    def cpu_offload(self) -> bool:
        """Whether weights, gradients and optimizer states all live in host memory."""
        return self.has("weights", "host")


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of thing takes. Entries add up to the most that a rank holds during a step."""

    name: Name
    bytes: int
    why: str

    @property
    def label(self) -> str:
        """The name as people read it."""
        return label_of(self.name)


class ResidentMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a rank as most moments of a step have them; each moment says which it has otherwise."""

    lines: tuple[tuple[Name, float, str], ...]  # name, bytes, why
    buffered: bool  # gradients are there from the first moment on
    gathered_at_loss: float = 0.0
    block_share: float = 0.0  # of all gradients, a block's
    begin_share: float = 0.0  # and those that the backward makes last, before the blocks
    gathered_at_end: float | None = None  # when the last backward reaches the first block; None: as ever
    copy_stays: bool = False  # the gathered copy is still there at the update, to be rewritten
    outside: float = 0.0  # gathered, of what is outside the blocks: summed last
    outside_sums: float = 0.0  # its gradient as it came, and in fp32 for the sum; 0: it is not summed as a whole
    update: float = 0.0  # what the optimizer's step makes beside its states

    def of(self, name: Name) -> float:
        """Bytes of one line."""
        return next(size for line, size, _ in self.lines if line == name)


def state_layout(job: Job) -> StateLayout:
    """The states of a job's rank."""
    return layout_of(job.plan, job.master_weights, job.state_dtype, job.optimizer)


@lru_cache(maxsize=1024)
def layout_of(
    plan: Plan, master_weights: MasterWeights = "fp32", state_dtype: StateDtype = "fp32", optimizer: str = "adamw"
) -> StateLayout:
    """The same of a plan and the optimizer's keys."""
    return _layout(
        plan.precision,
        plan.bf16_params,
        (plan.optimizer_offload, plan.optimizer_offload_update, plan.optimizer_offload_host_bytes),
        plan.cpu_offload,
        alone=plan.world == 1,
        copied=plan.copies > 1,
        several=plan.grad_accum > 1,
        waits=plan.pp > 1 or (plan.zero <= 1 and plan.grad_accum > 1),
        optim=(master_weights, state_dtype, optimizer),
        outer=len(outer_states(plan)),
        served=plan.is_served,
    )


@lru_cache(maxsize=1024)
def _layout(
    precision: Precision,
    bf16_params: bool,
    offload: tuple[Location | Literal["none"], Literal["device", "host"], int],
    cpu_offload: bool,
    *,
    alone: bool,
    copied: bool,
    several: bool,
    waits: bool,
    optim: tuple[MasterWeights, StateDtype, str],
    outer: int,
    served: bool,
) -> StateLayout:
    """`alone`: on one rank; `copied`: gradients are summed over replicas; `several`: microbatches.

    `outer`: states of replicas that sync rarely. `served`: a parameter server has the optimizer's.
    """
    location, update, resident_states = offload
    master_weights, state_dtype, optimizer = optim
    spec = DESCRIPTIONS[optimizer]
    compute_bytes = ITEM_BYTES[precision]
    accum_bytes = max(compute_bytes, 4)
    halved = state_dtype == "bf16" and master_weights != "fp32"  # beside bf16 weights
    width = 2 if halved else accum_bytes
    kept = StateRow("moments", spec.state_bytes(width))
    if location != "none":
        rest = LOW_BYTES + spec.state_bytes(2) if state_dtype == "bf16" else accum_bytes + spec.state_bytes(accum_bytes)
        summed = accum_bytes if several else compute_bytes
        found = [StateRow("weights", compute_bytes), StateRow("gradients", summed), StateRow("states", rest, location)]
    elif master_weights == "fp32":
        summed = compute_bytes if bf16_params and not several else accum_bytes
        kept = StateRow("moments", kept.bytes, "host") if served else kept
        found = [StateRow("weights", accum_bytes), StateRow("gradients", summed), kept]
    else:  # sharded gradients are as their weights; a lone rank adds up in fp32
        summed = accum_bytes if bf16_params and several else compute_bytes
        low = [StateRow("master", LOW_BYTES)] if master_weights == "split" else []
        found = [StateRow("weights", compute_bytes), StateRow("gradients", summed), kept, *low]
    found += [StateRow("outer_states", outer * accum_bytes)] if outer else []
    if cpu_offload:  # sums over replicas stay on the device until the last microbatch; nothing else does
        found = [StateRow(row.name, row.bytes, "host") for row in found]
        found += [StateRow("gradients", accum_bytes)] if copied and several else []
    in_place = alone and bf16_params and (location != "none" or master_weights != "fp32")
    gathers = not alone or bf16_params or cpu_offload or precision in ("bf16", "fp16")
    unmoved = alone and compute_bytes == accum_bytes and not cpu_offload
    on_device = location == "none" or update == "device"
    return StateLayout(
        rows=tuple(found),
        compute_bytes=compute_bytes,
        accum_bytes=accum_bytes,
        reads="stored" if in_place or not gathers else "resident" if bf16_params else "gathered",
        sums=("by_param" if several else "never") if bf16_params else "in_place" if unmoved else "by_block",
        waits=waits,
        update="device" if on_device and not (cpu_offload or served) else "host",
        rounds=master_weights != "fp32" or (location != "none" and on_device and state_dtype == "bf16"),
        resident_states=resident_states if location == "disk" else 0,
        optimizer=spec,
        state_width=2 if state_dtype == "bf16" else width,
    )


def label_of(name: str) -> str:
    """The name of a part of a ledger or a waterfall as people read it."""
    return LABELS.get(name, name.replace("_", " "))


def total(lines: Iterable[LedgerEntry]) -> int:
    """Bytes of all lines."""
    return sum([line.bytes for line in lines])  # a search adds up some hundred thousand: a list is faster
