"""What a step sends in deterministic mode, where sums are exchanged and added by the ranks themselves."""

import math
from collections.abc import Iterator

from meshwright.cost.traffic_collective import Collective
from meshwright.cost.traffic_held import Group, Seat, groups
from meshwright.cost.traffic_weights import gathers
from meshwright.spec.params import params

NUMBER = 8  # bytes: losses and squares are added in double precision


def deterministic_traffic(seat: Seat) -> Iterator[Collective]:
    """Everything: the mode has no axes but replicate and shard, so only weights, gradients and the verdict travel."""
    for group in groups(seat):
        yield from _over_shard(group, seat)
        yield from _over_replicate(group, seat)
    yield from _verdict(seat)


def rows(size: int, shards: int) -> int:
    """Of a dim 0 of some size, those that every rank makes room for."""
    return math.ceil(size / shards)


def _numbers(group: Group, shards: int) -> int:
    """In one rank's shard of a group, filled up; nothing but dim 0 is ever cut."""
    return sum(rows(param.shape[0], shards) * math.prod(param.shape[1:]) for param in group.params)


def _over_shard(group: Group, seat: Seat) -> Iterator[Collective]:
    """Weights are gathered as ever; each gradient changes hands once, whatever zero says."""
    plan = seat.plan
    if plan.shards == 1:
        return
    numbers = _numbers(group, plan.shards) * plan.shards
    count = group.count * gathers(group.stage, plan, root=group.params[0].layer < 0)
    size = numbers * seat.narrow
    yield Collective(kind="all_gather", axis="shard", count=count, bytes=size, overlappable=True)
    size = numbers * seat.wide
    yield Collective(kind="all_to_all", axis="shard", count=group.count, bytes=size, overlappable=True)


def _over_replicate(group: Group, seat: Seat) -> Iterator[Collective]:
    """Each replica adds up one part of the gradient and gives the sum to the others."""
    plan = seat.plan
    if plan.copies == 1:
        return
    size = math.ceil(_numbers(group, plan.shards) / plan.copies) * plan.copies * seat.wide
    yield Collective(kind="all_to_all", axis="replicate", count=group.count, bytes=size, overlappable=True)
    yield Collective(kind="all_gather", axis="replicate", count=group.count, bytes=size, overlappable=True)


def _verdict(seat: Seat) -> Iterator[Collective]:
    """A loss and a wish to stop from every rank, and a sum of squares for every row of every weight."""
    plan = seat.plan
    if plan.world > 1:
        yield Collective(kind="all_gather", axis="world", count=1, bytes=plan.world * 2 * NUMBER)
    if plan.shards > 1:
        size = sum(rows(param.shape[0], plan.shards) for param in params(seat.arch)) * plan.shards * NUMBER
        yield Collective(kind="all_gather", axis="shard", count=1, bytes=size)
