"""Plan: how one run uses the machines. Found by the planner, obeyed by the trainer, changed by neither afterwards."""

import difflib
import math
import re
from functools import cache, lru_cache
from itertools import accumulate
from typing import Literal

import msgspec

from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.problem import Problem
from meshwright.spec.schedule import SPLIT_BACKWARD, Schedule
from meshwright.spec.units import html_table, plural

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
LOW_PRECISIONS = ("bf16", "fp16", "fp8")  # whose sums and master weights are in more bits
FP8_MULTIPLE = 16  # of every dimension of an FP8 matmul, the reduced one too
LOGIT_BYTES = 2**31  # of the logits that a loss in chunks has at one time
LOGIT_ROWS = 1024  # a chunk's rows are a multiple of this: matmuls run faster
FROZEN_SHARE = 4  # chunks in the place of one where no gradient of the projection has to be summed over them
Arithmetic = Precision | Literal["tf32"]  # what a device has a peak of

AXES = ("pp", "replicate", "shard", "cp", "tp")  # of the world, outermost to innermost: the chattiest are neighbours
Affects = Literal["memory", "time", "numerics"]
# Recompute policies.
WORDS = ("none", "full", "selective", "sqrt")
COUNTED = re.compile(r"(every|first|selective)-([1-9][0-9]{0,8})")
PATTERN = f"^({'|'.join(WORDS)}|{COUNTED.pattern})$"  # for whoever checks a run file by its schema


class Plan(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """One way of splitting the work. world = pp · replicate · shard · cp · tp."""

    replicate: int = 1
    shard: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    tp: int = 1
    cp: int = 1
    cp_kind: Literal["ring", "ulysses"] = "ring"
    ep: int = 1
    pp: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1
    stages: tuple[int, ...] = ()
    microbatch: int
    grad_accum: int = 1
    precision: Precision = "fp32"
    recompute: str = "none"
    activation_quant: Literal["none", "fp8", "int8"] = "none"
    activation_offload: bool = False
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    fp8_accumulate: Literal["fast", "exact"] = "fast"
    fp8_grad: Literal["e4m3", "e5m2"] = "e4m3"
    tf32: bool = False
    bf16_params: bool = False
    optimizer_offload: Literal["none", "host", "disk"] = "none"
    optimizer_offload_update: Literal["host", "device"] = "host"
    optimizer_offload_host_bytes: int = 0
    optimizer_offload_folder: str = ""
    cpu_offload: bool = False
    staleness: int | None = None
    sync_every: int = 1
    outer: Literal["average", "slowmo", "diloco"] = "average"
    outer_fragments: int = 1
    outer_quant: Literal["none", "int8", "int4"] = "none"
    grad_reduce: Literal["default", "bf16", "fp16", "int8", "int4", "fp8"] = "default"
    powersgd: int = 0
    error_feedback: bool = True
    grad_reduce_node: int = 1
    gather: Literal["default", "int8", "fp8"] = "default"
    secondary_shard: int = 1
    kernels: Literal["auto", "plain", "fused"] = "auto"
    compile: bool = False
    deterministic: bool = False

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Groups of ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Groups of ranks that share no gradients in a step: replicas that sync rarely, or push to servers."""
        return self.replicate if self.sync_every > 1 or self.is_served else 1

    @property
    def is_served(self) -> bool:
        """Whether replicas send their gradients to a parameter server."""
        return self.staleness is not None

    @property
    def has_outer_loop(self) -> bool:
        """Whether replicas train apart and sync every so many steps."""
        return self.parts > 1 and not self.is_served

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of a weight and add up its gradient: without sharding cp replicates too."""
        together = self.replicate // self.parts
        return together if self.zero else together * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which a weight's part is sharded."""
        return self.shard * self.cp if self.zero else 1

    @property
    def shard_nodes(self) -> int:
        """Nodes, between which rounded gradients are rounded once more; 0: all shards sum at once."""
        return self.shards // self.grad_reduce_node if self.grad_reduce_node > 1 else 0

    @property
    def reduces_lossily(self) -> bool:
        """Whether gradients are rounded or factored on their way to each other."""
        return self.grad_reduce != "default" or self.powersgd > 0

    @property
    def arithmetic(self) -> Arithmetic:
        """That most matmuls run in: fp32's own, unless TF32 is allowed."""
        return "tf32" if self.precision == "fp32" and self.tf32 else self.precision

    @property
    def splits_backward(self) -> bool:
        """Whether stages go back for their inputs, and later for their weights."""
        return self.pp > 1 and self.schedule in SPLIT_BACKWARD

    @property
    def attends_whole(self) -> bool:
        """Whether one call of attention sees whole sequences; a ring meets them block by block."""
        return self.cp == 1 or self.cp_kind == "ulysses"

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step, over the whole job."""
        return self.microbatch * self.grad_accum * self.data

    def uses(self, name: str) -> bool:
        """Whether a field is set to something else than its neutral value."""
        return getattr(self, name) != NEUTRAL[name]

    def __str__(self) -> str:
        """The plan as a person would write it: what is neutral is left out."""
        return " ".join(text for field in FIELDS if (text := field.text(self)))

    def _repr_html_(self) -> str:
        used = [field for field in FIELDS if self.uses(field.name) or field.shown == "always"]
        rows = [(field.name, str(getattr(self, field.name)), field.help) for field in used]
        return html_table(f"plan of {plural(self.world, 'rank')}", ("field", "value", "meaning"), rows)


class PlanField(msgspec.Struct, frozen=True):
    """What is to be known of a field beside its type (the choices) and its default (the neutral value).

    Plan strings, table columns, the order of equally fast plans, what the search chooses, a plan's neighbours and the
    section of docs/run-file.md are made of these.
    """

    name: str
    help: str
    affects: tuple[Affects, ...] = ("memory", "time")
    shown: Literal["used", "always", "never"] = "used"  # in a line that says the plan
    when: str = ""  # shown where another field than itself is used
    weighs: bool = False  # one more thing to understand in a plan: of plans that are alike the one with fewer is first
    searched: bool = True  # the search chooses it where it is not fixed
    halves: bool = False  # a neighbour of a plan has half of it, or twice as much
    others: tuple[str | bool, ...] = ()  # what a neighbour may have instead

    def text(self, plan: Plan) -> str:
        """How a plan says it: name=value, a flag by its name alone, "" where it is neutral."""
        value = getattr(plan, self.name)
        if self.shown == "never" or (self.shown == "used" and not plan.uses(self.when or self.name)):
            return ""
        if value is True:
            return self.name
        return f"{self.name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"


FIELDS = (
    PlanField("pp", "ranks that share the layers", weighs=True, halves=True),
    PlanField("replicate", "copies of the (sharded) weights; gradients are summed over them", weighs=True),
    PlanField("shard", "ranks that share one copy of the weights", weighs=True),
    PlanField("cp", "ranks that share each sequence", weighs=True, halves=True),
    PlanField("tp", "ranks that share each matrix, with the sequence split between matrices", weighs=True, halves=True),
    PlanField("ep", "ranks that share the experts; borrowed from shard · cp, not a factor of the world", weighs=True),
    PlanField("zero", "sharded over shard · cp: 0 nothing, 1 optimizer states, 2 and gradients, 3 and weights"),
    PlanField(
        "cp_kind",
        "keys and values travel, or heads change places",
        affects=("time",),
        when="cp",
        others=("ring", "ulysses"),
    ),
    PlanField("schedule", "of a pipeline: the order of its forwards and backwards", when="pp"),
    PlanField("stages", "layers of each stage, with that of MTP; pp · chunks of them, empty when pp is 1", when="pp"),
    PlanField("microbatch", "sequences in one forward pass of one rank", shown="always", halves=True),
    PlanField("grad_accum", "gradient accumulation: forward and backward passes in one step", shown="always"),
    PlanField(
        "precision",
        "of the arithmetic; master weights and gradient sums are fp32 (fp64 in proofs)",
        affects=("memory", "time", "numerics"),
        shown="always",
    ),
    PlanField(
        "recompute",
        "activation checkpointing: none, full, sqrt, selective(-K), every-K, first-K",
        weighs=True,
        others=("none", "selective", "full"),
    ),
    PlanField(
        "activation_quant",
        "saved activations in eight bits: not exact",
        affects=("memory", "time", "numerics"),
        weighs=True,
    ),
    PlanField("activation_offload", "saved activations wait for the backward in host memory", weighs=True),
    PlanField(
        "optimizer_offload",
        "where a single rank keeps master weights and optimizer states, if not on the device",
        weighs=True,
    ),
    PlanField(
        "optimizer_offload_update",
        "where they are updated; device: they are copied there and back",
        affects=("time",),
        when="optimizer_offload",
    ),
    PlanField(
        "cpu_offload",
        "parameters, gradients and optimizer states live in host memory",
        weighs=True,
    ),
    PlanField(
        "staleness",
        "asynchronous replicas with a parameter server on their hosts: how many updates old weights may be at most",
        affects=("memory", "time", "numerics"),
        weighs=True,
        searched=False,
    ),
    PlanField(
        "sync_every",
        "steps between two syncs of the replicas (local SGD, DiLoCo); 1: gradients are summed in every step",
        affects=("memory", "time", "numerics"),
        weighs=True,
        searched=False,
    ),
    PlanField(
        "outer",
        "of sync_every: replicas are averaged (local SGD), or take an outer step of SlowMo or DiLoCo",
        affects=("memory", "numerics"),
        when="sync_every",
        searched=False,
    ),
    PlanField(
        "outer_fragments",
        "of sync_every: parts of the model that are synced at staggered steps (streaming DiLoCo)",
        affects=("time", "numerics"),
        searched=False,
    ),
    PlanField(
        "outer_quant",
        "of sync_every: what replicas send each other is rounded to so many bits",
        affects=("memory", "time", "numerics"),
        searched=False,
    ),
    PlanField(
        "grad_reduce",
        "what gradients are rounded to on their way to each other (with shard: qgZ); sums are never in so few bits",
        affects=("memory", "time", "numerics"),
        weighs=True,
        searched=False,
    ),
    PlanField(
        "powersgd",
        "rank of the two factors as which replicas exchange each matrix's gradient; 0: as it is",
        affects=("memory", "time", "numerics"),
        weighs=True,
        searched=False,
    ),
    PlanField(
        "error_feedback",
        "of grad_reduce and powersgd: what rounding took from a gradient is added to the next one",
        affects=("memory", "numerics"),
        searched=False,
    ),
    PlanField(
        "grad_reduce_node",
        "of grad_reduce over shards: ranks of a node, which sum first and round that sum for other nodes; 1: one level",
        affects=("memory", "time", "numerics"),
        searched=False,
    ),
    PlanField(
        "gather",
        "int8, fp8: sharded weights are all-gathered in blocks of eight bits (int8: ZeRO++ qwZ)",
        affects=("time", "numerics"),
        weighs=True,
        searched=False,
    ),
    PlanField(
        "secondary_shard",
        "of zero 3: ranks that share the weights between forward and backward (ZeRO++ hpZ); 1: all shards do",
        weighs=True,
        searched=False,
    ),
    PlanField(
        "bf16_params",
        "a resident bf16 copy of the parameters beside the fp32 master weights, on a single rank",
        searched=False,
    ),
    PlanField("kernels", "hand-written ones; auto: where there is a GPU and Triton", affects=("time",), searched=False),
    PlanField("compile", "torch.compile of each block before the first step", searched=False, others=(False,)),
    PlanField(
        "deterministic",
        "sums in a fixed order: the same bits for every replicate · shard",
        affects=("time", "numerics"),
        searched=False,
    ),
    PlanField("chunks", "stages on each rank", shown="never", weighs=True),  # the stages say it
    PlanField(
        "fp8_scaling",
        "of fp8: what has a scale of its own",
        affects=("time", "numerics"),
        shown="never",
        searched=False,
    ),
    PlanField(
        "fp8_accumulate",
        "of fp8: how the matmuls of gradients add up; exact: in fp32, as torchao's do; the output's is always fast",
        affects=("time", "numerics"),
        searched=False,
    ),
    PlanField(
        "fp8_grad",
        "of fp8: the format of gradients; e5m2 has more range and one bit less",
        affects=("numerics",),
        searched=False,
    ),
    PlanField(
        "tf32",
        "matmuls of fp32 numbers in TF32 on GPUs that have it: 11 bits of each factor, sums in fp32",
        affects=("time", "numerics"),
        searched=False,
    ),
    PlanField(
        "optimizer_offload_host_bytes",
        "of optimizer_offload = disk: as much of them stays in host memory",
        affects=("memory",),
        shown="never",
        searched=False,
    ),
    PlanField(
        "optimizer_offload_folder",
        "of optimizer_offload = disk: where its files lie; empty: in the run's folder",
        affects=(),
        shown="never",
        searched=False,
    ),
)
NEUTRAL = {field.name: field.default for field in msgspec.structs.fields(Plan)}


def problem(policy: str) -> Problem | None:
    """What is wrong with a recompute policy, if anything."""
    if policy in WORDS or COUNTED.fullmatch(policy):
        return None
    remedy = f"use one of {', '.join(WORDS)}, every-K, first-K or selective-K with a whole K of at least 1"
    if near := difflib.get_close_matches(policy, (*WORDS, "every-2", "first-2", "selective-2"), 1):
        remedy = f"did you mean {near[0]}? {remedy}"
    return Problem(f"plan.recompute = {policy!r} is not a recompute policy", remedy, "plan.recompute")


def logit_rows(vocab: int, itemsize: int, is_frozen: bool) -> int:
    """Rows of one chunk of the loss, whose logits exist at one time; fewer where the projection is frozen."""
    most = LOGIT_BYTES // FROZEN_SHARE if is_frozen else LOGIT_BYTES
    return max(most // (vocab * itemsize) // LOGIT_ROWS, 1) * LOGIT_ROWS


def by_operation(policy: str) -> bool:
    """Whether a block saves what its costly operations return, and recomputes only the others."""
    return policy.startswith("selective")


@lru_cache(maxsize=1024)
def runs(policy: str, blocks: int, ahead: bool = False) -> tuple[range, ...]:
    """Which blocks of a stage (or of a model without stages) are recomputed, those of one run together.

    Of a run only its input is saved for the backward; of a block in no run, everything. Under `selective` each block is
    a run of its own, of which `by_operation` saves more; under `selective-K` the first are. `ahead`: the last block is
    one of multi-token prediction, which is by itself: the model's last norm and its loss come before it.
    """
    assert problem(policy) is None, "refused before ranks start"
    if ahead and in_runs(policy):
        return (*runs(policy, blocks - 1), range(blocks - 1, blocks))
    if policy == "none":
        return ()
    counted = COUNTED.fullmatch(policy)
    if counted is None:
        length = max(round(math.sqrt(blocks)), 1) if policy == "sqrt" else 1
        return _cut(blocks, length)
    word, number = counted[1], int(counted[2])
    return _cut(blocks, number) if word == "every" else _cut(min(number, blocks), 1)


def in_runs(policy: str) -> bool:
    """Whether blocks are recomputed several together."""
    return policy == "sqrt" or policy.startswith("every-")


def _cut(blocks: int, length: int) -> tuple[range, ...]:
    """Blocks in runs of one length; the last may be shorter."""
    return tuple(range(start, min(start + length, blocks)) for start in range(0, blocks, length))


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers over stages; what is left over goes to the earlier ones."""
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))


@cache
def balanced_stages(arch: Arch, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that the costliest stage costs least, and the others are as even as they can be.

    Cost is the weights a token is multiplied with, which is what a stage's time is made of: the output projection
    counts to the last stage, and the embedding, which is looked up, to none. Multi-token prediction is one layer more,
    and projects too.
    """
    if not 1 <= stages <= arch.blocks:
        return (0,) * stages  # refused by the rules, with the reason
    costs = [0] * arch.blocks
    for param in params(arch):
        if param.layer >= 0:
            active = param.numel * arch.top_k // arch.experts if param.expert and arch.top_k else param.numel
            costs[param.layer] += active
    costs[-1] += arch.vocab * arch.hidden * (1 + arch.mtp_layers)
    return _even(costs, stages, _least_bound(costs, stages))


def _least_bound(costs: list[int], stages: int) -> int:
    """The smallest cost that no stage needs to exceed, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        bound = (low + high) // 2
        needed, spent = 1, 0
        for cost in costs:
            if spent + cost > bound:
                needed, spent = needed + 1, 0
            spent += cost
        low, high = (low, bound) if needed <= stages else (bound + 1, high)
    return low


def _even(costs: list[int], stages: int, bound: int) -> tuple[int, ...]:
    """Within a bound, the cut whose stage costs have the least sum of squares; among equals, longer stages first."""
    ends = [0, *accumulate(costs)]
    layers = len(costs)
    # best[i]: the least sum of squares of the stages from layer i to the end, and the first of those stages' lengths.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for remaining in range(1, stages + 1):
        following, best = best, {}
        for start in range(layers - remaining, -1, -1):
            for end in range(layers - remaining + 1, start, -1):
                cost = ends[end] - ends[start]
                if cost > bound or end not in following:
                    continue
                squares, lengths = following[end]
                total = squares + cost * cost
                if start not in best or total < best[start][0]:
                    best[start] = (total, (end - start, *lengths))
    return best[0][1]
