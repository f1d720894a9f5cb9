"""The moments of a step that may be its peak, and what a rank holds in each."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory_flight import Scene, scenes
from meshwright.cost.memory_foreign import buffered
from meshwright.cost.memory_kept import Kept, kept
from meshwright.cost.memory_line import Line, Name, Rest
from meshwright.cost.memory_sharded import sharded
from meshwright.cost.memory_work import work_of
from meshwright.cost.traffic_held import placement

Lines = dict[Name, float]
BACKWARDS = ("B", "I")


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A time of the step by name, and what a rank holds then."""

    name: str
    lines: tuple[Line, ...]
    bytes: int


def moments(job: Job, place: Mapping[str, int]) -> Iterator[Moment]:
    """Every moment that may be the peak of a rank."""
    rank, plan = place.get("pp", 0), job.plan
    rest = _rest(_layout(job), tuple(sorted(place.items())))
    parts = _parts(job, rank)
    for scene in scenes(plan.schedule, plan.pp, plan.chunks, plan.accumulate, rank):
        if scene.kind == "F":
            yield _moment(_words(job, scene, "the end of a forward"), rest, _flying(job, scene, parts))
        elif scene.kind == "W":
            yield _moment(_words(job, scene, "the weights' half of a backward"), rest, _flying(job, scene, parts))
        else:
            yield from _backward(job, scene, parts, rest)
    done: Lines = {} if rest.buffered else {"gathered": 0, "waiting": 0, "buffers": 0}
    yield _moment("the optimizer's step", rest, {**done, "update": rest.update})


def _backward(job: Job, scene: Scene, parts: Mapping[int, Kept], rest: Rest) -> Iterator[Moment]:
    """A backward's loss, its first block and its last: in between one thing shrinks while another grows."""
    part, flying = parts[scene.stage], _flying(job, scene, parts)
    summed_before = job.plan.accumulate > 1 or job.plan.pp > 1 or rest.buffered
    none: Lines = {} if summed_before else {"gradients": 0, "waiting": 0}
    if part.logits:
        at_loss: Lines = {} if rest.buffered else {"gathered": rest.gathered_at_loss, "buffers": 0, **none}
        loss: Lines = {"logits": flying["logits"] + part.loss}
        yield _moment(_words(job, scene, "the loss"), rest, flying | at_loss | loss)
    inside: Lines = {"recompute": part.anew, "backward": part.passing, "logits": flying["logits"] - part.logits}
    after = flying | inside
    yield _moment(_words(job, scene, "the first block of a backward"), rest, after | none)
    left = after["activations"] - part.activations + part.first_run
    missing = 0.0 if summed_before else rest.block_share * part.first_blocks + rest.begin_share
    grown: Lines = {"activations": left, "gradients": rest.of("gradients") * max(1 - missing, 0)}
    yield _moment(_words(job, scene, "the last block of a backward"), rest, after | grown)
    if job.arch.tied and job.plan.pp == 1:
        gone: Lines = {"activations": left - part.first_run, "recompute": 0}
        gone["backward"] = 2 * _table(job)  # the lookup's gradient, and its sum with the projection's
        yield _moment(_words(job, scene, "the embedding's gradient"), rest, after | gone)


def _moment(name: str, rest: Rest, changed: Mapping[Name, float]) -> Moment:
    """The resting lines with some of them changed."""
    lines = tuple(Line(name=line, bytes=round(changed.get(line, size)), why=why) for line, size, why in rest.lines)
    return Moment(name=name, lines=lines, bytes=sum(line.bytes for line in lines))


def _flying(job: Job, scene: Scene, parts: Mapping[int, Kept]) -> Lines:
    """What microbatches in flight have left on a rank."""
    activations = sum(parts[stage].activations * count for stage, count in scene.kept)
    activations += sum(parts[stage].between * count for stage, count in scene.between)
    logits = sum((parts[stage].logits + _output(job, parts[stage])) * count for stage, count in scene.kept)
    found: Lines = {"activations": activations, "logits": logits + _before(job, parts)}
    if job.stack.holds.states == "buffers":
        found["gathered"] = work_of(job).left
    else:
        found |= {} if scene.kind in BACKWARDS else {"buffers": 0}
        found |= {} if scene.summing else {"gradients": 0, "waiting": 0}
    return found


def _output(job: Job, part: Kept) -> float:
    """The logits of a microbatch, which torch's pipeline holds from the last stage's forward to its backward."""
    if job.plan.pp == 1 or job.stack.holds.states == "buffers":
        return 0.0
    work = work_of(job)
    return part.logits / work.wide * work.narrow


def _before(job: Job, parts: Mapping[int, Kept]) -> float:
    """Logits of the microbatch before, where something still holds them."""
    if job.plan.accumulate == 1 or not job.stack.holds.logits_left:
        return 0.0
    return sum(part.logits for part in parts.values()) / work_of(job).wide * job.stack.holds.logits_left


def _table(job: Job) -> float:
    """Bytes of a rank's part of the embedding in the precision of the arithmetic."""
    work = work_of(job)
    return work.vocab * job.arch.hidden / work.tp * work.narrow


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
    accumulate = plan.accumulate if plan.pp > 1 else min(plan.accumulate, 2)
    plan = msgspec.structs.replace(plan, microbatch=1, accumulate=accumulate, recompute="none", kernels="auto")
    return msgspec.structs.replace(job, plan=plan, sequence=0)


@lru_cache(maxsize=4096)
def _rest(job: Job, key: tuple[tuple[str, int], ...]) -> Rest:
    """What a rank holds whatever the moment."""
    place = dict(key)
    return buffered(job, place) if job.stack.holds.states == "buffers" else sharded(job, place)


def _words(job: Job, scene: Scene, moment: str) -> str:
    """A moment with the stage and the microbatches in flight, where there are several."""
    if job.plan.pp == 1:
        return f"{moment} of {'the last' if job.plan.accumulate > 1 else 'the'} microbatch"
    flying = sum(count for _, count in scene.kept)
    return f"{moment}, stage {scene.stage}, {flying} microbatch{'es' * (flying != 1)} in flight"
