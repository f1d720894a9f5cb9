"""What weights and their gradients send: over shard, over replicate, between tied copies, and over tp where cut."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from meshwright.cost.traffic_collective import Axis, Collective
from meshwright.cost.traffic_held import (
    Group,
    Seat,
    cut_shape,
    grid,
    groups,
    local_shape,
    padded,
    parts,
    placement,
    share,
)
from meshwright.spec.params import Param, Split, params
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import Schedule, actions

IN_SIGHT = 3  # stages that torch's pipeline runtime holds gathered on a rank: those it computes next


def weight_traffic(seat: Seat) -> Iterator[Collective]:
    """Everything that is sent because several ranks hold, or share, a weight."""
    for group in groups(seat):
        yield from _over_shard(group, seat)
        yield from _over_replicate(group, seat)
        yield from _over_tp(group, seat)
    yield from _over_tied(seat)


def data_traffic(seat: Seat) -> Iterator[Collective]:
    """Of that, what is sent between ranks that see other data, and between tied copies."""
    for group in groups(seat):
        yield from _over_shard(group, seat)
        yield from _over_replicate(group, seat)
    yield from _over_tied(seat)


def gathers(stage: int, plan: Plan, root: bool) -> int:
    """How often a step gathers a weight: once, and under zero 3 for every forward and every backward.

    A pipeline keeps the weights of a stage gathered from one microbatch to the next. What is outside the blocks (the
    root) ends a forward and begins the backward, and is not gathered between.
    """
    if plan.pp > 1:
        rank = placement(plan)[stage]
        return _fetches(plan.schedule, plan.pp, plan.chunks, plan.accumulate, rank)[stage]
    return plan.accumulate * (1 if root else 2) if plan.zero == 3 else 1


def reductions(plan: Plan) -> int:
    """How often a step scatters each gradient: once, or from zero 2 on, where no rank keeps a whole one, every time."""
    return plan.accumulate if plan.zero >= 2 and plan.pp == 1 else 1


@lru_cache(maxsize=1024)
def _fetches(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> Counter[int]:
    """How often a pipeline rank gathers each of its stages, when it holds the IN_SIGHT ones that it computes next."""
    stages = [action.stage for action in actions(schedule, pp, chunks, microbatches)[rank]]
    ahead: list[int] = []
    sights = []
    for stage in reversed(stages):
        ahead = [stage, *(other for other in ahead if other != stage)][:IN_SIGHT]
        sights.append(ahead)
    counts, held = Counter[int](), list[int]()
    for sight in reversed(sights):
        counts.update(stage for stage in sight if stage not in held)
        held = sight
    return counts


def _numbers(group: Group, seat: Seat, shards: int) -> int:
    return _travelling(group.params, (seat.plan.tp, seat.at("tp")), seat.plan.ep, shards)


@lru_cache(maxsize=16384)
def _travelling(weights: tuple[Param, ...], tp: tuple[int, int], ep: int, shards: int) -> int:
    """Numbers of some weights that travel when they are gathered; `tp`: its ranks, and which of them."""
    return sum(padded(cut_shape(param, tp, ep), shards) for param in weights)


def _over_shard(group: Group, seat: Seat) -> Iterator[Collective]:
    """Weights are gathered in the precision of the arithmetic, gradients summed in that of the weights."""
    _, shards = grid(group, seat.plan)
    if shards == 1:
        return
    axis: Axis = "expert_shard" if group.shared_by_ep else "shard"
    numbers = _numbers(group, seat, shards)
    count, size = group.count * gathers(group.stage, seat.plan, root=group.params[0].layer < 0), numbers * seat.narrow
    yield Collective(kind="all_gather", axis=axis, count=count, bytes=size, overlappable=True)
    count, size = group.count * reductions(seat.plan), numbers * seat.wide
    yield Collective(kind="reduce_scatter", axis=axis, count=count, bytes=size, overlappable=True)


def _over_replicate(group: Group, seat: Seat) -> Iterator[Collective]:
    """Copies add up their shard of the gradient once a step, after the last microbatch."""
    copies, shards = grid(group, seat.plan)
    if copies == 1:
        return
    axis: Axis = "expert_replicate" if group.shared_by_ep else "replicate"
    size = _numbers(group, seat, shards) // shards * seat.wide
    yield Collective(kind="all_reduce", axis=axis, count=group.count, bytes=size, overlappable=True)


def _over_tp(group: Group, seat: Seat) -> Iterator[Collective]:
    """A weight that all ranks of tp hold has seen a part of the sequence on each, so its gradients are added up."""
    plan = seat.plan
    if plan.tp == 1:
        return
    # What waits for the last microbatch waits in fp32; the gradient of one microbatch is as narrow as its weight was.
    waited = plan.pp > 1 or (plan.accumulate > 1 and reductions(plan) == 1)
    size = seat.wide if waited else seat.narrow
    for param in group.params:
        if _is_partial_over_tp(param):
            count = group.count * reductions(plan)
            yield Collective(kind="all_reduce", axis="tp", count=count, bytes=param.numel * size)


def _is_partial_over_tp(param: Param) -> bool:
    """Whether each rank of tp computes a part of a gradient that belongs to all of them.

    The bias after a row-cut product in a dense layer is the exception: it meets the gathered gradient. In a mixture,
    where every gradient is a part of a sum, there is none.
    """
    return param.split is Split.NONE and not param.name.endswith((".attn.out.bias", ".mlp.down.bias"))


def _over_tied(seat: Seat) -> Iterator[Collective]:
    """The first and the last stage of a tied model each have an embedding; their gradients, sharded, are added up."""
    plan, ranks = seat.plan, placement(seat.plan)
    holds = any(part.first or part.last for part in parts(seat))
    if not seat.arch.tied or not holds or ranks[0] == ranks[-1]:
        return
    rows, *rest = local_shape(params(seat.arch)[0], seat)
    mine = share(rows, plan.shards, seat.at("shard") * plan.cp + seat.at("cp") if plan.zero else 0)
    yield Collective(kind="all_reduce", axis="tied", count=1, bytes=mine * math.prod(rest) * seat.wide)
