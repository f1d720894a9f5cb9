"""Bytes of the model states that one rank of our trainer holds: weights, gradients, moments, and what a step adds.

A test builds the real model, takes a step and finds exactly these bytes; docs/axes/shard.md has the formulas in words.
Activations and the buffers of collectives are no part of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Literal

import msgspec

from meshwright.cost.activations import padded_vocab
from meshwright.cost.job import Job, MasterWeights, StateDtype
from meshwright.cost.rank_view import (
    ITEM_BYTES,
    ParamGroup,
    RankView,
    grid,
    groups,
    local_shape,
    padded,
    placement,
    share,
)
from meshwright.cost.traffic import IN_SIGHT
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, Split, count, params
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import Schedule, actions

MOMENTS = 2  # AdamW keeps a mean and a mean square of every gradient
HALVES = 6  # states of 16 bits: what the narrow weight lacks, and both moments
PIECE, SLOTS = 1 << 24, 4  # elements that are moved together, and pieces on their way, as in optim/offload_update.py
WIDE = 4  # bytes of a number in which updates are computed
# Wide tensors of one piece alive at once while it is rounded: the gradient, the weight, both moments, what an update is
# made of, and the draws. Counted in optim/master_weights.py and optim/offload_update.py.
ROUNDING_COPIES = 8


class ParamBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one parameter has of each kind."""

    weight: int  # on the device, where the optimizer or the arithmetic reads it
    gradient: int  # the sum over microbatches
    moments: int  # both
    low: int = 0  # the bits that a weight in bf16 leaves out, beside it
    away: int = 0  # off the device: wide weight and moments, or all of it


def widths(plan: Plan, master_weights: MasterWeights = "fp32", states: StateDtype = "fp32") -> ParamBytes:
    """Of our own trainer."""
    if plan.cpu_offload:
        # Sums over copies stay on the device until the last microbatch; nothing else does.
        near = widths(msgspec.structs.replace(plan, cpu_offload=False), master_weights, states)
        summed = (8 if plan.precision == "fp64" else WIDE) if plan.copies > 1 and plan.grad_accum > 1 else 0
        away = near.weight + near.gradient + near.moments + near.low
        return ParamBytes(weight=0, gradient=summed, moments=0, away=away)
    narrow, wide = ITEM_BYTES[plan.precision], 8 if plan.precision == "fp64" else WIDE
    once = plan.grad_accum == 1
    if plan.optimizer_offload != "none":
        away = HALVES if states == "bf16" else (1 + MOMENTS) * wide
        return ParamBytes(weight=narrow, gradient=narrow if once else wide, moments=0, away=away)
    if master_weights != "fp32":
        summed_wide = plan.bf16_params and not once  # a lone rank adds up wide; sharded gradients are as their weights
        low = 2 if master_weights == "split" else 0
        return ParamBytes(weight=narrow, gradient=wide if summed_wide else narrow, moments=MOMENTS * wide, low=low)
    return ParamBytes(weight=wide, gradient=narrow if plan.bf16_params and once else wide, moments=MOMENTS * wide)


def shares_weights(plan: Plan, master_weights: MasterWeights = "fp32") -> bool:
    """Whether a lone rank computes with the very weights that it holds, narrow as they are."""
    return plan.world == 1 and plan.bf16_params and (plan.optimizer_offload != "none" or master_weights != "fp32")


def slot_bytes(plan: Plan, largest: int, states: StateDtype) -> int:
    """Device memory for pieces of states on their way to an update there; none larger than the largest weight."""
    if plan.optimizer_offload == "none" or plan.optimizer_offload_update == "host":
        return 0
    return SLOTS * min(PIECE, largest) * widths(plan, states=states).away


def update_bytes(plan: Plan, largest: int, master_weights: MasterWeights, states: StateDtype) -> int:
    """What rounding makes on the device while it goes through the pieces of a weight."""
    if plan.cpu_offload:
        return 0  # the host's affair
    halves = plan.optimizer_offload != "none" and plan.optimizer_offload_update == "device" and states == "bf16"
    return ROUNDING_COPIES * WIDE * min(PIECE, largest) if halves or master_weights != "fp32" else 0


Name = Literal[
    "weights",
    "master",
    "gradients",
    "moments",
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
LABELS: Mapping[str, str] = {"all_gathered_params": "all-gathered params", "cuda_nccl_context": "CUDA+NCCL context"}


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of thing takes. Entries add up to the most that a rank holds during a step."""

    name: Name
    bytes: int
    why: str

    @property
    def label(self) -> str:
        """The name as people read it."""
        return LABELS.get(self.name, self.name.replace("_", " "))


class ResidentMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a rank as most moments of a step have them; each moment says which it has otherwise."""

    lines: tuple[tuple[Name, float, str], ...]  # name, bytes, why
    buffered: bool  # gradients are there from the first moment on
    gathered_at_loss: float = 0.0
    block_share: float = 0.0  # of all gradients, a block's
    begin_share: float = 0.0  # and those that the backward makes last, before the blocks
    gathered_at_end: float | None = None  # when the last backward reaches the first block; None: as ever
    outside: float = 0.0  # gathered, of what is outside the blocks: summed last
    outside_sums: float = 0.0  # its gradient as it came, and wide for the sum; 0: it is not summed as a whole
    update: float = 0.0  # what the optimizer's step makes beside its states

    def of(self, name: Name) -> float:
        """Bytes of one line."""
        return next(size for line, size, _ in self.lines if line == name)


def total(lines: Iterable[LedgerEntry]) -> int:
    """Bytes of all lines."""
    return sum(line.bytes for line in lines)


HOSTED = ("weights", "gradients", "moments", "master")
FIRST: Mapping[str, int] = {}  # the place of the first rank: every coordinate is 0


def states(
    arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, master_weights: MasterWeights = "fp32"
) -> tuple[LedgerEntry, ...]:
    """What one rank holds of the model, its gradient and its optimizer.

    `place`: the rank's coordinates on the plan's axes. Ranks differ by their pipeline stages and, where a dim does not
    divide evenly, by the length of their part.
    """
    seat = RankView(arch=arch, plan=plan, sequence=0, place=place)  # states do not depend on the sequence
    held = tuple(groups(seat))
    stored = sum(_stored(group, seat) for group in held) // seat.wide
    updated = sum(_updated(group, seat) for group in held) // seat.wide
    among = f"sharded over {plan.shards} ranks" if plan.shards > 1 else "not sharded"
    width = widths(plan, master_weights)
    summed = stored * width.gradient
    gathered = 0 if shares_weights(plan, master_weights) else _gathered(held, seat)
    low = (
        LedgerEntry(
            name="master", bytes=updated * width.low, why=f"the 16 low bits of the fp32 master weights, {among}"
        ),
    )
    return (
        LedgerEntry(name="weights", bytes=stored * width.weight, why=_why_weights(seat, width.weight, among)),
        LedgerEntry(name="gradients", bytes=summed, why=_why_gradients(seat, width.gradient, among)),
        LedgerEntry(name="moments", bytes=updated * width.moments, why=_why_moments(seat, among)),
        *(low if width.low else ()),
        LedgerEntry(name="all_gathered_params", bytes=gathered, why=_why_gathered(plan, master_weights)),
        LedgerEntry(name="unreduced_grads", bytes=max(_unsummed(held, seat) - summed, 0), why=_why_waiting(plan)),
    )


def hosted(
    arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, master_weights: MasterWeights = "fp32"
) -> tuple[LedgerEntry, ...]:
    """Of them, what lies in host memory under `plan.cpu_offload`: what stays from step to step, and the sums."""
    if not plan.cpu_offload:
        return ()
    beside = states(arch, msgspec.structs.replace(plan, cpu_offload=False), place, master_weights)
    return tuple(line for line in beside if line.name in HOSTED and line.bytes)


def _stored(group: ParamGroup, seat: RankView) -> int:
    """A rank's shard as it is stored: every rank's is as long as the longest."""
    _, shards = grid(group, seat.plan)
    return group.count * sum(padded(local_shape(param, seat), shards) // shards for param in group.params) * seat.wide


def _updated(group: ParamGroup, seat: RankView) -> int:
    """A rank's shard without what fills it up: the optimizer sees no more."""
    return group.count * sum(_own(param, group, seat) for param in group.params) * seat.wide


def _own(param: Param, group: ParamGroup, seat: RankView) -> int:
    """Numbers of a weight that are this rank's."""
    shape, plan = local_shape(param, seat), seat.plan
    _, shards = grid(group, plan)
    if len(shape) == 3 and any(size % shards == 0 for size in shape):
        return math.prod(shape) // shards
    rank = seat.at("shard") * plan.cp + seat.at("cp") if plan.zero else 0
    rank //= plan.ep if group.shared_by_ep and plan.zero else 1
    return share(shape[0], shards, rank) * math.prod(shape[1:])


def _whole(group: ParamGroup, seat: RankView) -> int:
    """A group's gradient before it is scattered."""
    return group.count * sum(_unscattered(param, group, seat) for param in group.params) * seat.wide


def _unscattered(param: Param, group: ParamGroup, seat: RankView) -> int:
    """Numbers of a weight's gradient as torch leaves it.

    That of an embedding that tp cuts is a window on rows for the whole vocabulary, unless it is copied: to be widened,
    or to add the gradient of a tied projection.
    """
    projects = seat.arch.tied and group.stage == len(placement(seat.plan)) - 1
    if param.split is Split.VOCAB and seat.narrow == seat.wide and not projects:
        return param.numel
    return math.prod(local_shape(param, seat))


def _waits(plan: Plan) -> bool:
    """Whether whole gradients are kept from one microbatch to the next: up to zero 1, and in a pipeline always."""
    return plan.pp > 1 or (plan.zero <= 1 and plan.grad_accum > 1)


def _unsummed(held: Iterable[ParamGroup], seat: RankView) -> int:
    """The most that gradients take while a later microbatch will add to them."""
    if seat.plan.pp == 1:
        return sum(_whole(group, seat) for group in held) if _waits(seat.plan) else 0
    whole, shard = Counter[int](), Counter[int]()
    for group in held:
        whole[group.stage] += _whole(group, seat)
        shard[group.stage] += _stored(group, seat)
    return max(
        sum(whole[stage] for stage in then.wide)
        + sum(whole[stage] for stage in then.narrow) * seat.narrow // seat.wide
        + sum(shard[stage] for stage in then.summed)
        for then in _waiting(*_order(seat.plan), seat.at("pp"), seat.narrow < seat.wide)
    )


def _order(plan: Plan) -> tuple[Schedule, int, int, int]:
    """What decides the order of a pipeline's actions."""
    return plan.schedule, plan.pp, plan.chunks, plan.grad_accum


class _Waiting(msgspec.Struct, frozen=True):
    """The stages of a pipeline rank whose gradients wait whole, wide or as narrow as they came, or are summed."""

    wide: frozenset[int]
    narrow: frozenset[int]
    summed: frozenset[int]


@lru_cache(maxsize=4096)
def _waiting(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int, low: bool) -> frozenset[_Waiting]:
    """Every place that the gradients of a rank's stages are in after some backward; `low`: in low precision.

    Torch widens them at the end of a backward that reaches a stage's input. The weights' half of a split backward does
    not, so in low precision what it leaves lies beside the wide sum until the stage's next backward.
    """
    wide, narrow, summed = set[int](), set[int](), set[int]()
    backwards = Counter[int]()
    found = set[_Waiting]()
    for action in actions(schedule, pp, chunks, microbatches)[rank]:
        stage = action.stage
        if action.kind == "F" or (action.kind == "I" and stage == 0):  # the first stage leaves both halves to the W
            continue
        if action.kind == "W" and stage > 0 and low:
            narrow.add(stage)
        elif action.kind != "I" or stage in narrow:
            narrow.discard(stage)
            wide.add(stage)
        found.add(_Waiting(frozenset(wide), frozenset(narrow), frozenset(summed)))
        backwards[stage] += action.kind != "I"
        if backwards[stage] == microbatches:
            wide.discard(stage)
            narrow.discard(stage)
            summed.add(stage)
    return frozenset(found)


def _gathered(held: Iterable[ParamGroup], seat: RankView) -> int:
    """The most that is gathered at one time, in the precision of the arithmetic; what is on its way is counted too."""
    plan = seat.plan
    if not _copies(plan):
        return 0
    if plan.zero < 3:  # of a pipeline too: no stage has its last backward before every other one has been used
        return sum(group.count * _once(group, seat) for group in held)
    return _gathered_by_stages(held, seat) if plan.pp > 1 else _two_blocks(held, seat)


def gathered_outside(arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST) -> int:
    """Bytes gathered of what is outside the blocks, which is all there is between a forward and its backward."""
    seat = RankView(arch=arch, plan=plan, sequence=0, place=place)
    return sum(_once(group, seat) for group in groups(seat) if group.params[0].layer < 0) if _copies(plan) else 0


def _copies(plan: Plan) -> bool:
    """Whether the arithmetic reads a copy of the weights: torch makes one even of weights that are whole already."""
    return plan.world > 1 or plan.bf16_params or plan.cpu_offload or plan.precision in ("bf16", "fp16")


def _once(group: ParamGroup, seat: RankView) -> int:
    """Bytes of one layer's group when it is gathered."""
    _, shards = grid(group, seat.plan)
    return sum(padded(local_shape(param, seat), shards) for param in group.params) * seat.narrow


def _two_blocks(held: Iterable[ParamGroup], seat: RankView) -> int:
    """What is outside the blocks, a block, and of the one before it what the backward has already asked for.

    Experts that have a group of their own are asked for after the rest of their block. What lies on one rank is copied
    when it is used, and not before.
    """
    outside, dense, experts = 0, {False: 0, True: 0}, {False: 0, True: 0}
    for group in held:
        layer = group.params[0].layer
        if layer < 0:
            outside += _once(group, seat)
        else:
            kind = experts if group.shared_by_ep else dense
            kind[seat.arch.is_mixture(layer)] += _once(group, seat)
    layers = [seat.arch.is_mixture(layer) for layer in range(seat.arch.layers)]
    ahead = [0, *(dense[mixture] if seat.plan.shards > 1 else 0 for mixture in layers)]
    return outside + max(dense[mixture] + experts[mixture] + more for mixture, more in zip(layers, ahead, strict=False))


class _GatheredStages(msgspec.Struct, frozen=True):
    """The stages of a pipeline rank that torch's runtime has asked for, and those of them it has also used."""

    asked: frozenset[int]
    used: frozenset[int]


def _gathered_by_stages(held: Iterable[ParamGroup], seat: RankView) -> int:
    """At the fullest instant of a pipeline rank under zero 3: what lies on several ranks is there when it is asked for.

    The rest is copied when it is used.
    """
    asked, used = Counter[int](), Counter[int]()
    for group in held:
        _, shards = grid(group, seat.plan)
        (asked if shards > 1 else used)[group.stage] += group.count * _once(group, seat)
    return max(
        sum(asked[stage] for stage in instant.asked) + sum(used[stage] for stage in instant.used)
        for instant in _instants(*_order(seat.plan), seat.at("pp"))
    )


@lru_cache(maxsize=4096)
def _instants(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> frozenset[_GatheredStages]:
    """Every state that a rank's stages are in during a step, when it holds the IN_SIGHT ones that it computes next."""
    stages = [action.stage for action in actions(schedule, pp, chunks, microbatches)[rank]]
    sights: list[list[int]] = [[]]
    for stage in reversed(stages):
        sights.append([stage, *(other for other in sights[-1] if other != stage)][:IN_SIGHT])
    used = frozenset[int]()
    found = set[_GatheredStages]()
    for stage, sight in zip(stages, reversed(sights), strict=False):
        asked = frozenset(sight)
        used = (used & asked) | {stage}
        found.add(_GatheredStages(asked, used))
    return frozenset(found)


def _why_gradients(seat: RankView, width: int, among: str) -> str:
    if seat.plan.cpu_offload:
        waits = (
            f"{_name(width, seat.plan)}, {among}, until the last microbatch is reduced over replicas" if width else ""
        )
        return waits or "each block's are offloaded to host memory once reduced"
    return f"{_name(width, seat.plan)}, {among}, after the last backward"


def _why_weights(seat: RankView, width: int, among: str) -> str:
    if seat.plan.cpu_offload:
        return "in host memory"
    if seat.plan.optimizer_offload != "none":
        return f"{_name(width, seat.plan)}, {among}: the fp32 master weights are in {_home(seat.plan)}"
    return f"{_name(width, seat.plan)}, {among}" + (", padded" if seat.plan.shards > 1 else "")


def _why_moments(seat: RankView, among: str) -> str:
    if seat.plan.cpu_offload:
        return "AdamW's two are in host memory"
    if seat.plan.optimizer_offload != "none":
        return f"AdamW's two are in {_home(seat.plan)}"
    return f"AdamW's two, {_name(seat.wide, seat.plan)}, {among}"


def _home(plan: Plan) -> str:
    return {"host": "host memory", "disk": "files", "none": "place"}[plan.optimizer_offload]


def _why_gathered(plan: Plan, master_weights: MasterWeights) -> str:
    if not _copies(plan) or shares_weights(plan, master_weights):
        return "none: the weights are used in place"
    if plan.pp > 1 and plan.zero == 3:
        return f"{plan.precision}, the stages computed next, of {placement(plan).count(0)} on a rank"
    if plan.pp > 1:
        return f"{plan.precision}, all stages of the rank until their last backward"
    if plan.bf16_params:
        return f"{plan.precision}, a resident copy of the whole model"
    if plan.zero == 3:
        return f"{plan.precision}, embedding and output, one block and the prefetched next one"
    return f"{plan.precision}, the whole model until the last backward"


def _why_waiting(plan: Plan) -> str:
    if not _waits(plan):
        return "none: every microbatch reduce-scatters its gradients"
    return "unsharded gradients accumulated until the last microbatch, beyond the shard that stays"


def _name(size: int, plan: Plan) -> str:
    """The numbers that have so many bytes."""
    narrow = plan.precision if plan.precision in ("bf16", "fp16") else "bf16"
    return {2: narrow, 4: "fp32", 8: "fp64"}[size]


def sharded(job: Job, place: Mapping[str, int]) -> ResidentMemory:
    """Of our own trainer, and of others that shard as `fully_shard` does."""
    plan, holds = job.plan, job.stack.holds
    held = {line.name: line for line in states(job.arch, plan, place, job.master_weights)}
    outside = (
        gathered_outside(job.arch, plan, place)
        if plan.zero == 3 and plan.pp == 1
        else held["all_gathered_params"].bytes
    )
    updated = held["moments"].bytes / MOMENTS / (8 if plan.precision == "fp64" else 4)
    largest = largest_weight(job.arch) // plan.shards
    slots = slot_bytes(plan, largest, job.state_dtype)
    lines: list[tuple[Name, float, str]] = [(line.name, line.bytes, line.why) for line in held.values()]
    return ResidentMemory(
        lines=(
            *lines,
            ("activations", 0, "saved for the backward by the microbatches in flight"),
            ("recompute", 0, "the blocks recomputed together, beyond what was saved of them"),
            ("activation_grads", 0, "gradients of activations inside one block"),
            ("logits", 0, "log-probabilities, and at the loss their gradients"),
            (
                "reduce_buffers",
                _reducing(job, place),
                "a block's gradients in the compute dtype, and in fp32 for the reduction",
            ),
            ("update", slots, "temporaries of the optimizer step, and pieces of offloaded states in transit"),
            ("workspace", holds.workspace_bytes, "of cuBLAS and other libraries"),
        ),
        buffered=False,
        block_share=max(param_counts(job.arch)[0]) / count(job.arch),
        begin_share=param_counts(job.arch)[1] / count(job.arch),
        gathered_at_loss=outside,
        gathered_at_end=_left_at_end(job, place),
        outside=gathered_outside(job.arch, plan, place),
        outside_sums=_outside_sums(job, place),
        update=holds.update_bytes * updated + slots + update_bytes(plan, largest, job.master_weights, job.state_dtype),
    )


@cache
def largest_weight(arch: Arch) -> int:
    """Numbers of the largest weight."""
    return max(param.numel for param in params(arch))


@cache
def param_counts(arch: Arch) -> tuple[tuple[int, ...], int]:
    """Parameters of each block, and of what is before the blocks and nowhere else."""
    blocks = Counter[int]()
    for param in params(arch):
        blocks[param.layer] += param.numel
    begin = sum(
        param.numel
        for param in params(arch)
        if param.name.startswith("positions") or (param.name.startswith("embed") and not arch.tied)
    )
    return tuple(blocks[layer] for layer in range(arch.layers)), begin


def _left_at_end(job: Job, place: Mapping[str, int]) -> float | None:
    """Gathered weights when a lone backward reaches the first block: each block's go when its gradient is summed."""
    plan = job.plan
    if (
        plan.zero == 3 or plan.bf16_params or plan.grad_accum > 1 or plan.pp > 1
    ):  # a shadow stays, as between microbatches
        return None
    blocks, outside, seat = _unsummed_shards(job, place)
    return (blocks + outside) * seat.narrow if gathered_outside(job.arch, plan, place) else None


def _outside_sums(job: Job, place: Mapping[str, int]) -> float:
    """Of what is outside the blocks, the gradient as it came, and its copy in the precision of sums."""
    _, outside, seat = _unsummed_shards(job, place)
    if job.plan.bf16_params or job.plan.pp > 1 or _unmoved(job, seat):
        return 0
    return outside * (seat.narrow + seat.wide) + _leaving(job, outside, seat)


def _unmoved(job: Job, seat: RankView) -> bool:
    """Whether gradients stay where autograd puts them: on a lone rank that computes with its own weights."""
    return job.plan.world == 1 and seat.narrow == seat.wide and not job.plan.cpu_offload


def _leaving(job: Job, numbers: int, seat: RankView) -> int:
    """Of summed gradients on their way to host memory, this rank's part; elsewhere it is among the gradients."""
    return numbers * seat.wide // job.plan.shards if job.plan.cpu_offload else 0


def _arriving(job: Job, largest: int, seat: RankView) -> int:
    """A block's weights from host memory: this rank's part, narrowed for the gather, and of one weight the wide one."""
    if not job.plan.cpu_offload:
        return 0
    weight = largest_weight(job.arch) * seat.wide // job.plan.shards
    return weight + (largest * seat.narrow // job.plan.shards if job.plan.shards > 1 else 0)


def _unsummed_shards(job: Job, place: Mapping[str, int]) -> tuple[int, int, RankView]:
    """Numbers in the largest block, and outside the blocks, before they are cut into shards."""
    seat = RankView(arch=job.arch, plan=job.plan, sequence=0, place=place)
    blocks, outside = [0], 0
    for group in groups(seat):
        numbers = sum(math.prod(local_shape(param, seat)) for param in group.params)
        if group.params[0].layer >= 0:
            blocks.append(numbers)
        else:
            outside += numbers
    return max(blocks), outside, seat


def _reducing(job: Job, place: Mapping[str, int]) -> int:
    """The largest block's gradient as it came, and its copy in the precision of sums; a lone fp32 rank has neither.

    What is outside the blocks is summed last, so the output projection's gradient waits as it came. Beside a shadow
    torch adds up weight by weight, and nothing at all if there is one microbatch.
    """
    if job.plan.bf16_params and job.plan.grad_accum == 1:
        return 0
    seat = RankView(arch=job.arch, plan=job.plan, sequence=0, place=place)
    if _unmoved(job, seat):
        return 0
    if job.plan.bf16_params:
        largest = max(math.prod(local_shape(param, seat)) for group in groups(seat) for param in group.params)
        return largest * (seat.narrow + seat.wide)
    largest, outside, _ = _unsummed_shards(job, place)
    waits = outside if job.plan.pp == 1 else 0  # a pipeline keeps all gradients wide, among those that wait
    moving = _leaving(job, largest, seat) + _arriving(job, largest, seat)
    return largest * (seat.narrow + seat.wide) + waits * seat.narrow + moving


BUFFERED_MOMENTS = 8.0  # bytes of a parameter's two, in fp32


def buffered(job: Job, place: Mapping[str, int]) -> ResidentMemory:
    """Weights and one gradient buffer for the whole step; the optimizer's copy and moments, from zero 1 in shares."""
    holds, plan = job.stack.holds, job.plan
    rest, experts = parameters(job.arch, plan, padded_vocab(job), place.get("pp", 0))
    numbers = rest + experts
    data = plan.replicate * plan.shard * plan.cp
    shared = rest / data + experts / max(data // plan.ep, 1)  # an expert's copies are on fewer ranks
    moved = shared if plan.zero else numbers
    kept = shared if plan.zero == 3 else numbers
    summed = shared if plan.zero >= 2 else numbers
    moments = min(BUFFERED_MOMENTS, holds.optimizer_bytes)
    among = f"sharded over {data} ranks" if plan.zero and data > 1 else "not sharded"
    return ResidentMemory(
        lines=(
            ("weights", holds.weight_bytes * kept, f"{holds.weight_bytes:g} bytes a parameter"),
            ("master", (holds.optimizer_bytes - moments) * moved, f"the optimizer's fp32 copy, {among}"),
            ("gradients", holds.gradient_bytes * summed, f"one buffer, {holds.gradient_bytes:g} bytes a parameter"),
            ("moments", moments * moved, f"two in fp32, {among}"),
            ("all_gathered_params", 0, "all-gathered inputs whose memory cannot be reused at once"),
            ("activations", 0, "saved for the backward by the microbatches in flight"),
            ("recompute", 0, "the blocks recomputed together, beyond what was saved of them"),
            ("activation_grads", 0, "gradients of activations inside one block"),
            ("logits", 0, "of the loss, forward and backward"),
            ("reduce_buffers", holds.bucket_bytes * numbers * (data > 1), "buckets in which gradients are reduced"),
            ("update", 0, "temporaries of the optimizer step"),
            ("workspace", holds.workspace_bytes, "of cuBLAS and other libraries"),
        ),
        buffered=True,
        update=holds.update_bytes * moved,
    )


@lru_cache(maxsize=4096)
def parameters(arch: Arch, plan: Plan, vocab: int, rank: int) -> tuple[int, int]:
    """Numbers in a rank's part of its weights, the vocabulary filled up; those of experts that ep shares out apart."""
    seat = RankView(arch=arch, plan=plan, sequence=0, place={"pp": rank})
    found = {False: 0, True: 0}
    for group in groups(seat):
        found[group.shared_by_ep] += group.count * sum(_numbers(param, seat, vocab) for param in group.params)
    return found[False], found[True]


def _numbers(param: Param, seat: RankView, vocab: int) -> int:
    if param.layer < 0 and param.split in (Split.VOCAB, Split.COLUMN):
        return vocab // seat.plan.tp * param.shape[1]
    return math.prod(local_shape(param, seat))
