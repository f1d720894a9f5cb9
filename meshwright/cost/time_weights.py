"""Seconds that weights cost a step: gathered, their gradients summed, and updated."""

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.kernels import Rates, moved_seconds
from meshwright.cost.links import call_seconds, inside_seconds
from meshwright.cost.time_layer import exposed
from meshwright.cost.traffic_collective import Collective
from meshwright.cost.traffic_held import Seat, grid, groups, local_shape
from meshwright.cost.traffic_weights import IN_SIGHT, weight_traffic
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import legal
from meshwright.spec.speed import Speed

ROUNDS = 8  # of a pipeline, that its weights are followed through; longer steps go on in proportion
SHARDED = ("shard", "expert_shard")
COPIED = ("replicate", "expert_replicate")


class WeightSeconds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is waited for, once a step, on one rank."""

    shard: float = 0.0
    replicate: float = 0.0
    tied: float = 0.0
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        return self.shard + self.replicate + self.tied + self.optimizer


class Behind(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Arithmetic of one microbatch that communication can hide behind."""

    forward: float
    backward: float


def weight_seconds(job: Job, rank: int, at: Rates, behind: Behind) -> WeightSeconds:
    """What weights cost the rank of a pipeline stage."""
    plan, speed = job.plan, job.stack.speed
    calls = [_as_sent(call, plan, speed) for call in _calls(job.arch, _essence(plan), rank)]
    timed = [(call, call_seconds(call, plan, job.cluster, speed.calls)) for call in calls]
    gather = sum(seconds for call, seconds in timed if call.axis in SHARDED and call.kind == "all_gather")
    if plan.chunks > IN_SIGHT:  # weights come and go with every round
        gather *= plan.accumulate / _essence(plan).accumulate
    reduce = sum(seconds for call, seconds in timed if call.axis in SHARDED and call.kind == "reduce_scatter")
    copies = sum(seconds for call, seconds in timed if call.axis in COPIED)
    left = max(behind.backward - (reduce if plan.zero else 0.0), 0.0)
    return WeightSeconds(
        shard=_exposed_shard(gather, reduce, plan, speed, behind)
        + _contended(calls, job, SHARDED, speed.overlap_shard),
        replicate=exposed(copies, left, speed.overlap_replicate)
        + _contended(calls, job, COPIED, speed.overlap_replicate),
        tied=sum(seconds for call, seconds in timed if call.axis == "tied"),
        optimizer=moved_seconds(held(job.arch, _essence(plan), rank) * speed.optimizer_bytes, at),
    )


def _contended(calls: Sequence[Collective], job: Job, axes: tuple[str, ...], overlap: float) -> float:
    """What arithmetic loses to communication beside it: both want the device's memory and some of its processors."""
    inside = sum(inside_seconds(call, job.plan, job.cluster) for call in calls if call.axis in axes)
    return job.stack.speed.contention * overlap * inside


def _exposed_shard(gather: float, reduce: float, plan: Plan, speed: Speed, behind: Behind) -> float:
    """Gathers run behind the forward and, where weights are given up between, the backward; scatters behind that."""
    each_time = plan.accumulate if plan.pp == 1 else 1
    forwards = each_time if plan.zero == 3 else 1
    backwards = each_time if plan.zero >= 2 else 1
    early = gather / 2 if plan.zero == 3 and plan.pp == 1 else gather
    return exposed(early, behind.forward * forwards, speed.overlap_shard) + exposed(
        gather - early + reduce, behind.backward * backwards, speed.overlap_shard
    )


def _as_sent(call: Collective, plan: Plan, speed: Speed) -> Collective:
    """The same call in the widths of another stack."""
    if call.kind == "all_gather":
        narrow = 4 if plan.precision in ("fp32", "fp64") else 2
        width = speed.gather_bytes / narrow if speed.gather_bytes else 1.0
    else:
        width = speed.reduce_bytes / 4
    return call if width == 1.0 else msgspec.structs.replace(call, bytes=round(call.bytes * width))


def _essence(plan: Plan) -> Plan:
    """The plan without what weights do not notice, and of a long step of a pipeline its beginning.

    A pipeline rank with few stages gathers each of them once, however many microbatches come.
    """
    accumulate = plan.accumulate
    if plan.pp > 1:
        few = plan.chunks <= IN_SIGHT and not legal(plan.schedule, plan.pp, plan.chunks, 2)
        accumulate = min(accumulate, 2 if few else ROUNDS * plan.pp)
    return msgspec.structs.replace(
        plan,
        microbatch=1,
        accumulate=accumulate,
        recompute="none",
        compile=False,
        deterministic=False,
        cp_kind="ring",
    )


@lru_cache(maxsize=4096)
def _calls(arch: Arch, plan: Plan, rank: int) -> tuple[Collective, ...]:
    return tuple(weight_traffic(Seat(arch=arch, plan=plan, sequence=1, place={"pp": rank})))


@lru_cache(maxsize=4096)
def held(arch: Arch, plan: Plan, rank: int) -> float:
    """Weights that a rank updates."""
    seat = Seat(arch=arch, plan=plan, sequence=1, place={"pp": rank})
    total = 0.0
    for group in groups(seat):
        _, shards = grid(group, plan)
        total += group.count * sum(math.prod(local_shape(param, seat)) for param in group.params) / shards
    return total
