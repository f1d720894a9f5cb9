"""The moments of a step that may be its peak, and what a rank holds in each."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory_flight import Scene, scenes, settled
from meshwright.cost.memory_foreign import buffered
from meshwright.cost.memory_kept import Kept, kept
from meshwright.cost.memory_line import Line, Name, Rest
from meshwright.cost.memory_sharded import sharded
from meshwright.cost.memory_work import Work, work_of
from meshwright.cost.traffic_held import placement

Lines = dict[Name, float]
BACKWARDS = ("B", "I")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A time of the step by name, and what a rank holds then."""

    name: str
    lines: tuple[Line, ...]
    bytes: int
    sent: float  # to the host, by the microbatches in flight when most of it is there


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job, with what all moments of its step have in common."""

    job: Job
    work: Work
    rest: Rest
    parts: Mapping[int, Kept]  # what a microbatch keeps, by stage
    output: float  # of its logits, what torch's pipeline holds from the last stage's forward to its backward
    narrowed: float  # what is left of log-probabilities between the halves of a backward: the logits' gradient, narrow
    before: float  # logits of the microbatch before, where something still holds them


class _Then(NamedTuple):
    """A moment by what differs from rest, made into lines only if it is the peak."""

    words: str
    scene: Scene | None
    changed: Lines


def peak(job: Job, place: Mapping[str, int]) -> Moment:
    """The moment of the step in which a rank holds most."""
    rank = _rank(job, place)
    resting = {name: round(size) for name, size, _ in rank.rest.lines}
    total = sum(resting.values())

    def held(then: _Then) -> int:
        found = total
        for name, size in then.changed.items():
            found += round(size) - resting[name]
        return found

    moments = list(_moments(rank, place.get("pp", 0)))
    fullest = max(moments, key=held)
    lines = tuple(
        Line(name=name, bytes=round(fullest.changed.get(name, size)), why=why) for name, size, why in rank.rest.lines
    )
    sent = max((_sent(rank, then.scene) for then in moments), default=0.0) if rank.work.sent else 0.0
    return Moment(name=_words(job, fullest), lines=lines, bytes=sum(line.bytes for line in lines), sent=sent)


def _sent(rank: _Rank, scene: Scene | None) -> float:
    return sum(rank.parts[stage].sent * count for stage, count in scene.kept) if scene else 0.0


def _rank(job: Job, place: Mapping[str, int]) -> _Rank:
    work, parts, holds = work_of(job), _parts(job, place.get("pp", 0)), job.stack.holds
    logits = sum(part.logits for part in parts.values())
    holds_output = job.plan.pp > 1 and holds.states != "buffers"
    return _Rank(
        job=job,
        work=work,
        rest=_rest(_layout(job), tuple(sorted(place.items()))),
        parts=parts,
        output=work.narrow / work.wide if holds_output else 0.0,
        narrowed=work.narrow / work.wide,
        before=logits / work.wide * holds.logits_left if job.plan.accumulate > 1 else 0.0,
    )


def _moments(rank: _Rank, number: int) -> Iterator[_Then]:
    """Every moment that may be the peak of a rank."""
    plan = rank.job.plan
    accumulate = settled(plan.schedule, plan.pp, plan.accumulate)
    for scene in scenes(plan.schedule, plan.pp, plan.chunks, accumulate, number):
        if scene.kind == "F":
            yield _Then("the end of a forward", scene, _flying(rank, scene))
        elif scene.kind == "W":
            yield _Then("the weights' half of a backward", scene, _flying(rank, scene))
        else:
            yield from _backward(rank, scene)
    done: Lines = {} if rank.rest.buffered else {"waiting": 0, "buffers": 0}
    if not rank.rest.buffered and not plan.shadow:  # a shadow stays, to be written anew
        done["gathered"] = 0
    yield _Then("the optimizer's step", None, {**done, "update": rank.rest.update})


def _backward(rank: _Rank, scene: Scene) -> Iterator[_Then]:
    """A backward's loss, its first block and its last: in between one thing shrinks while another grows."""
    plan, rest = rank.job.plan, rank.rest
    part, flying = rank.parts[scene.stage], _flying(rank, scene)
    summed_before = plan.accumulate > 1 or plan.pp > 1 or rest.buffered
    none: Lines = {} if summed_before else {"gradients": 0, "waiting": 0}
    if part.logits:
        at_loss: Lines = {} if rest.buffered else {"gathered": rest.gathered_at_loss, "buffers": 0, **none}
        loss: Lines = {"logits": flying["logits"] + part.loss}
        yield _Then("the loss", scene, flying | at_loss | loss)
    inside: Lines = {"recompute": part.anew, "backward": part.passing, "logits": flying["logits"] - part.logits}
    after = flying | inside
    yield _Then("the first block of a backward", scene, after | none)
    left = after["activations"] - part.activations - part.pair + part.first_run
    missing = 0.0 if summed_before else rest.block_share * part.first_blocks + rest.begin_share
    grown: Lines = {"activations": left, "gradients": rest.of("gradients") * max(1 - missing, 0)}
    if rest.gathered_at_end is not None:
        grown["gathered"] = rest.gathered_at_end
    yield _Then("the last block of a backward", scene, after | grown)
    if rest.outside_sums:
        ended: Lines = {"activations": left - part.first_run, "recompute": 0, "backward": 0}
        sums: Lines = {"gathered": rest.outside, "buffers": rest.outside_sums}
        yield _Then("the sum of what is outside the blocks", scene, after | ended | sums)
    if rank.job.arch.tied and plan.pp == 1:
        gone: Lines = {"activations": left - part.first_run, "recompute": 0}
        gone["backward"] = 2 * _table(rank.work)  # the lookup's gradient, and its sum with the projection's
        yield _Then("the embedding's gradient", scene, after | gone)


def _flying(rank: _Rank, scene: Scene) -> Lines:
    """What microbatches in flight have left on a rank."""
    parts = rank.parts
    activations = sum(parts[stage].activations * count for stage, count in scene.kept)
    activations += sum((parts[stage].between + parts[stage].sent) * count for stage, count in scene.between)
    activations += sum(_near(parts[stage], stage == scene.stage, count) for stage, count in scene.kept)
    halved = dict(scene.between)
    logits = sum(
        parts[stage].logits
        * ((1 + rank.output) * (count - halved.get(stage, 0)) + rank.narrowed * halved.get(stage, 0))
        for stage, count in scene.kept
    )
    found: Lines = {"activations": activations, "logits": logits + rank.before}
    if rank.rest.buffered:
        found["gathered"] = rank.work.left
    else:
        if scene.kind not in BACKWARDS:
            found["buffers"] = 0
        if not scene.summing:
            found["gradients"] = found["waiting"] = 0
    return found


def _near(part: Kept, active: bool, microbatches: int) -> float:
    """Of what blocks send to the host, the bytes still here, or here again.

    A stage at work has two blocks, and while it goes back the last one of a later forward, which has not left yet.
    """
    if not microbatches:
        return 0.0
    return part.pair + part.largest * (microbatches > 1) if active else part.largest


def _table(work: Work) -> float:
    """Bytes of a rank's part of the embedding in the precision of the arithmetic."""
    return work.vocab * work.arch.hidden / work.tp * work.narrow


def _parts(job: Job, rank: int) -> dict[int, Kept]:
    """What a microbatch keeps in each stage on a rank."""
    arch, plan = job.arch, job.plan
    ranks = placement(plan)
    lengths = plan.stages if plan.pp > 1 else (arch.layers,)
    work, last = work_of(job), len(ranks) - 1
    found = {}
    for stage, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        if ranks[stage] == rank:
            mixtures = tuple(arch.is_mixture(layer) for layer in range(end - length, end))
            found[stage] = kept(work, mixtures, stage == last, plan.recompute)
    return found


def _layout(job: Job) -> Job:
    """The job without what no state depends on, so that jobs that differ in it alone are counted once."""
    plan = job.plan
    accumulate = settled(plan.schedule, plan.pp, plan.accumulate)
    plan = msgspec.structs.replace(
        plan,
        microbatch=1,
        accumulate=accumulate,
        recompute="none",
        kernels="auto",
        compress="none",
        activations="device",
    )
    return msgspec.structs.replace(job, plan=plan, sequence=0)


@lru_cache(maxsize=4096)
def _rest(job: Job, key: tuple[tuple[str, int], ...]) -> Rest:
    """What a rank holds whatever the moment."""
    place = dict(key)
    return buffered(job, place) if job.stack.holds.states == "buffers" else sharded(job, place)


def _words(job: Job, then: _Then) -> str:
    """A moment with the stage and the microbatches in flight, where there are several."""
    if then.scene is None:
        return then.words
    if job.plan.pp == 1:
        return f"{then.words} of {'the last' if job.plan.accumulate > 1 else 'the'} microbatch"
    flying = sum(count for _, count in then.scene.kept)
    return f"{then.words}, stage {then.scene.stage}, {flying} microbatch{'es' * (flying != 1)} in flight"
