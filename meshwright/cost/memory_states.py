"""Bytes of the model states that one rank of our trainer holds: weights, gradients, moments, and what a step adds.

A test builds the real model, takes a step and finds exactly these bytes; docs/axes/shard.md has the formulas in words.
Activations and the buffers of collectives are no part of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from meshwright.cost.job import Rounding
from meshwright.cost.memory_line import Line
from meshwright.cost.memory_widths import shares_weights, widths
from meshwright.cost.traffic_held import Group, Seat, grid, groups, local_shape, padded, placement, share
from meshwright.cost.traffic_weights import IN_SIGHT
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, Split
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import Schedule, actions

HOSTED = ("weights", "gradients", "moments", "master")
FIRST: Mapping[str, int] = {}  # the place of the first rank: every coordinate is 0


def states(arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, rounding: Rounding = "master") -> tuple[Line, ...]:
    """What one rank holds of the model, its gradient and its optimizer.

    `place`: the rank's coordinates on the plan's axes. Ranks differ by their pipeline stages and, where a dim does not
    divide evenly, by the length of their part.
    """
    seat = Seat(arch=arch, plan=plan, sequence=0, place=place)  # states do not depend on the sequence
    held = tuple(groups(seat))
    stored = sum(_stored(group, seat) for group in held) // seat.wide
    updated = sum(_updated(group, seat) for group in held) // seat.wide
    among = f"over {plan.shards} ranks" if plan.shards > 1 else "whole"
    width = widths(plan, rounding)
    summed = stored * width.gradient
    gathered = 0 if shares_weights(plan, rounding) else _gathered(held, seat)
    low = (Line(name="master", bytes=updated * width.low, why=f"the bits that bf16 leaves out, {among}"),)
    return (
        Line(name="weights", bytes=stored * width.weight, why=_why_weights(seat, width.weight, among)),
        Line(name="gradients", bytes=summed, why=_why_gradients(seat, width.gradient, among)),
        Line(name="moments", bytes=updated * width.moments, why=_why_moments(seat, among)),
        *(low if width.low else ()),
        Line(name="gathered", bytes=gathered, why=_why_gathered(plan, rounding)),
        Line(name="waiting", bytes=max(_unsummed(held, seat) - summed, 0), why=_why_waiting(plan)),
    )


def hosted(arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, rounding: Rounding = "master") -> tuple[Line, ...]:
    """Of them, what lies in host memory under `plan.offload_weights`: what stays from step to step, and the sums."""
    if not plan.offload_weights:
        return ()
    beside = states(arch, msgspec.structs.replace(plan, offload_weights=False), place, rounding)
    return tuple(line for line in beside if line.name in HOSTED and line.bytes)


def _stored(group: Group, seat: Seat) -> int:
    """A rank's shard as it is stored: every rank's is as long as the longest."""
    _, shards = grid(group, seat.plan)
    return group.count * sum(padded(local_shape(param, seat), shards) // shards for param in group.params) * seat.wide


def _updated(group: Group, seat: Seat) -> int:
    """A rank's shard without what fills it up: the optimizer sees no more."""
    return group.count * sum(_own(param, group, seat) for param in group.params) * seat.wide


def _own(param: Param, group: Group, seat: Seat) -> int:
    """Numbers of a weight that are this rank's."""
    shape, plan = local_shape(param, seat), seat.plan
    _, shards = grid(group, plan)
    if len(shape) == 3 and any(size % shards == 0 for size in shape):
        return math.prod(shape) // shards
    rank = seat.at("shard") * plan.cp + seat.at("cp") if plan.zero else 0
    rank //= plan.ep if group.shared_by_ep and plan.zero else 1
    return share(shape[0], shards, rank) * math.prod(shape[1:])


def _whole(group: Group, seat: Seat) -> int:
    """A group's gradient before it is scattered."""
    return group.count * sum(_unscattered(param, group, seat) for param in group.params) * seat.wide


def _unscattered(param: Param, group: Group, seat: Seat) -> int:
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
    return plan.pp > 1 or (plan.zero <= 1 and plan.accumulate > 1)


def _unsummed(held: Iterable[Group], seat: Seat) -> int:
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
    return plan.schedule, plan.pp, plan.chunks, plan.accumulate


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


def _gathered(held: Iterable[Group], seat: Seat) -> int:
    """The most that is gathered at one time, in the precision of the arithmetic; what is on its way is counted too."""
    plan = seat.plan
    if not _copies(plan):
        return 0
    if plan.pp > 1:
        return _gathered_by_stages(held, seat)
    if plan.zero == 3:
        return _two_blocks(held, seat)
    return sum(group.count * _once(group, seat) for group in held)


def gathered_outside(arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST) -> int:
    """Bytes gathered of what is outside the blocks, which is all there is between a forward and its backward."""
    seat = Seat(arch=arch, plan=plan, sequence=0, place=place)
    return sum(_once(group, seat) for group in groups(seat) if group.params[0].layer < 0) if _copies(plan) else 0


def _copies(plan: Plan) -> bool:
    """Whether the arithmetic reads a copy of the weights: torch makes one even of weights that are whole already."""
    return plan.world > 1 or plan.shadow or plan.offload_weights or plan.precision in ("bf16", "fp16")


def _once(group: Group, seat: Seat) -> int:
    """Bytes of one layer's group when it is gathered."""
    _, shards = grid(group, seat.plan)
    return sum(padded(local_shape(param, seat), shards) for param in group.params) * seat.narrow


def _two_blocks(held: Iterable[Group], seat: Seat) -> int:
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


class _Instant(msgspec.Struct, frozen=True):
    """The stages of a pipeline rank that torch's runtime has asked for, and those of them it has also used."""

    asked: frozenset[int]
    used: frozenset[int]


def _gathered_by_stages(held: Iterable[Group], seat: Seat) -> int:
    """At the fullest instant of a pipeline rank: what lies on several ranks is there from when it is asked for.

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
def _instants(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> frozenset[_Instant]:
    """Every state that a rank's stages are in during a step, when it holds the IN_SIGHT ones that it computes next."""
    stages = [action.stage for action in actions(schedule, pp, chunks, microbatches)[rank]]
    sights: list[list[int]] = [[]]
    for stage in reversed(stages):
        sights.append([stage, *(other for other in sights[-1] if other != stage)][:IN_SIGHT])
    used = frozenset[int]()
    found = set[_Instant]()
    for stage, sight in zip(stages, reversed(sights), strict=False):
        asked = frozenset(sight)
        used = (used & asked) | {stage}
        found.add(_Instant(asked, used))
    return frozenset(found)


def _why_gradients(seat: Seat, width: int, among: str) -> str:
    if seat.plan.offload_weights:
        waits = f"{_name(width, seat.plan)}, {among}, until the last microbatch is summed over copies" if width else ""
        return waits or "each block's leaves for host memory when it is summed"
    return f"{_name(width, seat.plan)}, {among}, after the last backward"


def _why_weights(seat: Seat, width: int, among: str) -> str:
    if seat.plan.offload_weights:
        return "in host memory"
    if seat.plan.offload != "none":
        return f"{_name(width, seat.plan)}, {among}: the wide ones are in {_home(seat.plan)}"
    return f"{_name(width, seat.plan)}, {among}, filled up to equal parts"


def _why_moments(seat: Seat, among: str) -> str:
    if seat.plan.offload_weights:
        return "AdamW's two are in host memory"
    if seat.plan.offload != "none":
        return f"AdamW's two are in {_home(seat.plan)}"
    return f"AdamW's two, {_name(seat.wide, seat.plan)}, {among}"


def _home(plan: Plan) -> str:
    return {"host": "host memory", "disk": "files", "none": "place"}[plan.offload]


def _why_gathered(plan: Plan, rounding: Rounding) -> str:
    if not _copies(plan) or shares_weights(plan, rounding):
        return "nothing: the weights are used where they lie"
    if plan.pp > 1:
        return f"{plan.precision}, the stages that are computed next, of {placement(plan).count(0)} on a rank"
    if plan.shadow:
        return f"{plan.precision}, a shadow of the whole model"
    if plan.zero == 3:
        return f"{plan.precision}, what is outside the blocks, one block and the next"
    return f"{plan.precision}, the whole model until the last backward"


def _why_waiting(plan: Plan) -> str:
    if not _waits(plan):
        return "nothing: every microbatch scatters its own gradient"
    return "whole gradients until the last microbatch, beyond the shard that remains of them"


def _name(size: int, plan: Plan) -> str:
    """The numbers that have so many bytes."""
    narrow = plan.precision if plan.precision in ("bf16", "fp16") else "bf16"
    return {2: narrow, 4: "fp32", 8: "fp64"}[size]
