"""Seconds that a step takes at least: cheap, and never above its price."""

from functools import lru_cache

from meshwright.cost.job import Job
from meshwright.cost.kernels import slowest
from meshwright.cost.time_away import NOTHING, away_of
from meshwright.cost.time_layer import Bench, again, bench, block, ends
from meshwright.cost.time_stages import Keep, Kind, kinds_of, least_pipeline, lengths_of, placed, stage_passes
from meshwright.cost.time_weights import Behind, least_seconds
from meshwright.spec.efficiency import Efficiency
from meshwright.spec.recompute import by_operation, runs


def work_bound(job: Job, efficiency: Efficiency | None = None) -> float:
    """Without playing the schedule, and as if weights cost nothing: the same for every replicate, shard and zero."""
    return _working(bench(job, efficiency), job) + job.stack.speed.step_seconds


def lower_bound(job: Job, efficiency: Efficiency | None = None) -> float:
    """Without playing the schedule, with what the first rank's weights cost at least, whatever is computed anew."""
    at = bench(job, efficiency)
    kinds, places = kinds_of(job.arch, lengths_of(job))
    ranks = placed(job.plan.schedule, job.plan.pp, job.plan.chunks)
    mine = [place for place, rank in zip(places, ranks, strict=True) if rank == 0]
    timed = [_seconds(at, kind, ("none", NOTHING)) for kind in kinds]
    forward = sum(timed[place][1] for place in mine)
    behind = Behind(forward=forward, backward=sum(timed[place][0] for place in mine) - forward)
    more, together = least_seconds(job, 0, at.rates, behind)
    return max(_working(at, job) + more, together) + job.stack.speed.step_seconds


def _working(at: Bench, job: Job) -> float:
    kinds, places = kinds_of(job.arch, lengths_of(job))
    keep = (job.plan.recompute, away_of(job.plan))
    timed = [_seconds(at, kind, keep) for kind in kinds]
    seconds, forwards = [timed[place][0] for place in places], [timed[place][1] for place in places]
    return least_pipeline(seconds, forwards, job.plan) * (1 + slowest(job.plan.world, at.rates))


@lru_cache(maxsize=16384)
def _seconds(at: Bench, kind: Kind, keep: Keep) -> tuple[float, float]:
    """One microbatch through a stage, and its forward alone."""
    recompute, away = keep
    outside = ends(at, kind.first, kind.last)
    if away != NOTHING:
        passes = stage_passes(at, kind.dense, kind.mixtures, keep) + outside
        return passes.seconds, passes.forward.seconds
    whole, forward = outside.seconds, outside.forward.seconds
    for mixture, count in ((False, kind.dense), (True, kind.mixtures)):
        if count:
            once, going, anew = _block_seconds(at, mixture, by_operation(recompute))
            whole += count * (once + anew * _share(recompute, kind.dense + kind.mixtures))
            forward += count * going
    return whole, forward


@lru_cache(maxsize=16384)
def _block_seconds(at: Bench, mixture: bool, operations: bool) -> tuple[float, float, float]:
    """A block without recomputation, its forward alone, and what recomputation adds."""
    one = block(at, mixture)
    return one.seconds, one.forward.seconds, again(at, mixture, operations).seconds


@lru_cache(maxsize=1024)
def _share(recompute: str, layers: int) -> float:
    """Of so many layers, those that are computed anew."""
    return sum(map(len, runs(recompute, layers))) / layers
