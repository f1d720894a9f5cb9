"""Seconds of one microbatch in each stage of a pipeline, and of all microbatches in all of them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.links import axis_span, collective_seconds
from meshwright.cost.simulate import StageCost, makespan
from meshwright.cost.time_away import NOTHING, Away, away_of, with_away
from meshwright.cost.time_layer import Bench, again, block, ends
from meshwright.cost.time_terms import Passes
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.recompute import by_operation, runs
from meshwright.spec.schedule import Schedule, stage_ranks

DRAINED = ("naive", "gpipe", "1f1b", "interleaved", "looped")  # a rank's last action is its first stage's backward


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch through each stage of the model, and what a message between them takes."""

    passes: tuple[Passes, ...]
    seconds: tuple[float, ...]  # of each stage's passes together
    send: float
    ranks: tuple[int, ...]  # of each stage

    def of(self, rank: int) -> list[Passes]:
        """The passes through a rank's stages."""
        return [each for each, on in zip(self.passes, self.ranks, strict=True) if on == rank]


Keep = tuple[str, Away]  # what the backward computes anew, and what becomes of what is kept


class Kind(NamedTuple):
    """What the time of a stage depends on."""

    dense: int  # layers without experts
    mixtures: int
    first: bool
    last: bool


def stages_of(at: Bench, job: Job) -> Stages:
    """The stages of a job; a model without a pipeline is one."""
    plan = job.plan
    ranks = placed(plan.schedule, plan.pp, plan.chunks)
    return _timed(at, lengths_of(job), ranks, (plan.recompute, away_of(plan)), _send(at, job))


@lru_cache(maxsize=1024)
def placed(schedule: Schedule, pp: int, chunks: int) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return stage_ranks(schedule, pp, chunks) if pp > 1 else (0,)


def lengths_of(job: Job) -> tuple[int, ...]:
    """Layers of each stage."""
    return job.plan.stages if job.plan.pp > 1 else (job.arch.layers,)


@lru_cache(maxsize=8192)
def _timed(at: Bench, lengths: tuple[int, ...], ranks: tuple[int, ...], keep: Keep, send: float) -> Stages:
    """Most stages are alike, so each kind is timed once."""
    kinds, places = kinds_of(at.arch, lengths)
    timed = [stage_passes(at, kind.dense, kind.mixtures, keep) + ends(at, kind.first, kind.last) for kind in kinds]
    seconds = [passes.seconds for passes in timed]
    return Stages(
        passes=tuple([timed[place] for place in places]),
        seconds=tuple([seconds[place] for place in places]),
        send=send,
        ranks=ranks,
    )


@lru_cache(maxsize=1024)
def kinds_of(arch: Arch, lengths: tuple[int, ...]) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The kinds of stage that there are, and for every stage the place of its kind among them."""
    found: dict[Kind, int] = {}
    places, start, last = [], 0, len(lengths) - 1
    for stage, length in enumerate(lengths):
        mixtures = sum(map(arch.is_mixture, range(start, start + length))) if arch.experts else 0
        kind = Kind(length - mixtures, mixtures, stage == 0, stage == last)
        places.append(found.setdefault(kind, len(found)))
        start += length
    return tuple(found), tuple(places)


@lru_cache(maxsize=8192)
def stage_passes(at: Bench, dense: int, mixtures: int, keep: Keep) -> Passes:
    """The blocks of a stage; of those that are computed anew, each kind has its fair share."""
    recompute, away = keep
    layers = dense + mixtures
    anew = sum(map(len, runs(recompute, layers))) / layers if layers else 0.0
    operations = by_operation(recompute)
    total = Passes()
    for mixture, count in ((False, dense), (True, mixtures)):
        if not count:
            continue
        if away == NOTHING:  # what is computed anew is all that blocks differ in
            repeated = again(at, mixture, operations) * anew
            total += msgspec.structs.replace(block(at, mixture), again=repeated) * count
        else:
            total += _kept_so(at, mixture, away, None) * (count * (1 - anew))
            total += _kept_so(at, mixture, away, operations) * (count * anew)
    return total


@lru_cache(maxsize=8192)
def _kept_so(at: Bench, mixture: bool, away: Away, operations: bool | None) -> Passes:
    """One block, which computes nothing anew (None), costly operations apart (True), or everything."""
    one = block(at, mixture)
    if operations is not None:
        one = msgspec.structs.replace(one, again=again(at, mixture, operations))
    return with_away(at, away, mixture, one)


def _send(at: Bench, job: Job) -> float:
    """A message between stages: hidden states, or their gradient; where tp scatters it, each rank sends its part."""
    if job.plan.pp == 1:
        return 0.0
    size = at.tokens * at.arch.hidden * at.rates.width / (job.plan.tp if at.speed.scattered_sends else 1)
    return collective_seconds("send", size, axis_span("pp", job.plan, job.cluster), job.cluster)


def least_pipeline(seconds: Sequence[float], forwards: Sequence[float], plan: Plan) -> float:
    """The busiest rank's work, and what must come before the first of it and after the last; from stages' seconds."""
    ranks = placed(plan.schedule, plan.pp, plan.chunks)
    busy = [0.0] * plan.pp
    for each, rank in zip(seconds, ranks, strict=True):
        busy[rank] += each
    first = seconds if plan.schedule in DRAINED else forwards
    least = before = 0.0
    for stage in range(plan.pp):  # the first stage that each rank holds
        least = max(least, before + busy[ranks[stage]] * plan.accumulate)
        before += first[stage]
    return least


def pipeline_seconds(stages: Stages, job: Job) -> float:
    """From the first forward to the last backward."""
    plan = job.plan
    if plan.pp == 1:
        return stages.seconds[0] * plan.accumulate
    blocked, travel = (stages.send, 0.0) if job.stack.speed.blocking_sends else (0.0, stages.send)
    forwards = [each.forward.seconds for each in stages.passes]
    cost = StageCost(
        forward_seconds=tuple(each + blocked for each in forwards),
        input_seconds=tuple(each.again.seconds + each.input.seconds + blocked for each in stages.passes),
        weight_seconds=tuple(each.weight.seconds for each in stages.passes),
        activation=(0.0,) * len(stages.passes),
    )
    played = makespan(plan.schedule, plan.pp, plan.accumulate, cost, travel)
    return max(played, least_pipeline(stages.seconds, forwards, plan))
