"""The ledger: every byte a rank holds at the peak of a step, by line, and the moment of that peak.

    rank   = states + all-gathered and unreduced tensors (cost/resident.py)
           + microbatches in flight × saved activations (cost/activations.py) + what the moment adds
    device = rank at its peak + allocator cache + CUDA and NCCL context

A step is a few moments: the loss of a microbatch, the first and the last block of its backward, the optimizer's step.
Each holds other things, so the peak is the largest of their sums, not the sum of what is largest. Which microbatches
are in flight is read off the schedule, action by action.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from meshwright.cost.activations import (
    MicrobatchShape,
    SavedActivations,
    activation_policy,
    microbatch_shape,
    saved_activations,
)
from meshwright.cost.job import Job
from meshwright.cost.layout import LedgerEntry, Name, ResidentMemory, state_layout, total
from meshwright.cost.rank_view import placement, stage_lengths, still_blocks
from meshwright.cost.resident import PIECE, SLOTS, buffered, host_states, largest_weight, served, sharded
from meshwright.cost.traffic import FIRST
from meshwright.hardware.cluster import Cluster
from meshwright.spec.params import trained
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import Kind, Schedule, actions
from meshwright.spec.units import GIB, gib, html_table

STEADY: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb1p", "zbv", "dualpipev")  # rounds in their middle are alike
ROUNDS = 4  # microbatches ÷ pp after which a further round shows a rank nothing new
WITHOUT_LAYERS = 2  # stages that the output projection and the loss can fill without a layer
OUTSIDE_TORCH = ("allocator_cache", "cuda_nccl_context")  # what torch's count of allocated bytes leaves out

Role = Literal["only", "first", "middle", "last"]

Lines = dict[Name, float]


class OffloadedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one rank. They are compared with a GPU's share of its node."""

    host: tuple[LedgerEntry, ...] = ()
    disk: tuple[LedgerEntry, ...] = ()

    @property
    def host_bytes(self) -> int:
        return total(self.host)

    @property
    def disk_bytes(self) -> int:
        return total(self.disk)


NOWHERE = OffloadedMemory()


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds when it holds most."""

    lines: tuple[LedgerEntry, ...]
    moment: str  # of the peak
    role: Role  # of the rank in the pipeline
    rank: int  # its place on the axis pp
    low: float  # what is measured ÷ what is said here, nine times in ten between these two
    high: float
    published: Literal["allocated", "reserved", "shown"]  # which number the stack's reports print
    offloaded: OffloadedMemory = NOWHERE  # what it keeps outside its device

    @property
    def allocated(self) -> int:
        """What torch's allocator gives out at most: `torch.cuda.max_memory_allocated`."""
        return total(line for line in self.lines if line.name not in OUTSIDE_TORCH)

    @property
    def reserved(self) -> int:
        """What it has taken from the device to give out: `torch.cuda.max_memory_reserved`."""
        return total(line for line in self.lines if line.name != "cuda_nccl_context")

    @property
    def shown(self) -> int:
        """What nvidia-smi shows: with the device's context and the buffers of collectives."""
        return total(self.lines)

    @property
    def reported(self) -> int:
        """The number that the stack's own reports print."""
        return int(getattr(self, self.published))

    def _repr_html_(self) -> str:
        rows = [(line.label, f"{line.bytes / GIB:.2f}", line.why) for line in self.lines if line.bytes]
        low, high = (self.shown * bound / GIB for bound in (self.low, self.high))
        rows.append(("total", f"{self.shown / GIB:.2f}", f"{low:.2f} to {high:.2f} GiB, nine times in ten"))
        return html_table(f"memory of the most loaded rank, {self.moment}", ("part", "GiB", "why"), rows)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job's most loaded rank has room."""

    fits: bool | None  # None: the device has room, and nobody says whether the host or the disk has
    headroom_bytes: int  # what is left of the device; what lacks, when negative
    ledger: Ledger  # of the most loaded rank
    why: str  # the reason, in a sentence
    host_question: str | None = None  # what would have to be known, where `fits` is None


class InFlight(msgspec.Struct, frozen=True):
    """A rank in the middle of an action: what its forwards have left and its backwards not yet taken."""

    kind: Kind
    stage: int
    saved: tuple[tuple[int, int], ...]  # of each stage, microbatches whose activations are held
    between: tuple[tuple[int, int], ...]  # of each stage, those of them between the halves of their backward
    summing: frozenset[int]  # stages whose gradients exist

    def covers(self, other: "InFlight") -> bool:
        """Whether this holds at least what another scene does."""
        saved, between = dict(self.saved), dict(self.between)
        return all(saved.get(stage, 0) >= count for stage, count in other.saved) and all(
            between.get(stage, 0) >= count for stage, count in other.between
        )


class PeakMoment(msgspec.Struct, frozen=True, kw_only=True):
    """A time of the step by name, and what a rank holds then."""

    name: str
    lines: tuple[LedgerEntry, ...]
    bytes: int
    offloaded: float  # to the host, by the microbatches in flight when most of it is there


def ledger(job: Job, place: Mapping[str, int] = FIRST) -> Ledger:
    """The ledger of one rank, by its coordinates on the plan's axes."""
    fullest = peak(job, place)
    holds, rank = job.stack.holds, place.get("pp", 0)
    role = "only" if job.plan.pp == 1 else "first" if rank == 0 else "last" if rank == job.plan.pp - 1 else "middle"
    slack = LedgerEntry(
        name="allocator_cache",
        bytes=round(fullest.bytes * holds.slack),
        why="reserved by PyTorch's caching allocator, not allocated",
    )
    context = LedgerEntry(
        name="cuda_nccl_context",
        bytes=round(holds.context_bytes),
        why="outside PyTorch: the CUDA context and NCCL's channels",
    )
    return Ledger(
        lines=(*fullest.lines, slack, context),
        moment=fullest.name,
        role=role,
        rank=rank,
        low=holds.low,
        high=holds.high,
        published=holds.published,
        offloaded=_offloaded(job, fullest.offloaded, place),
    )


def worst(job: Job) -> Ledger:
    """The ledger of the most loaded pipeline rank."""
    return max((_ledger(job, rank) for rank in _rivals(job.plan)), key=lambda found: found.allocated)


def too_large(job: Job) -> Ledger | None:
    """The ledger of the first rank found that has not enough memory, None if every one has."""
    found = (_ledger(job, rank) for rank in _rivals(job.plan))
    return next((each for each in found if each.shown > job.cluster.gpu.memory_bytes or overflows(job, each)), None)


def fits(job: Job) -> Fit:
    """Whether what the driver would show of the fullest rank is within the device's memory, and every rank has work."""
    found = worst(job)
    headroom = int(job.cluster.gpu.memory_bytes) - found.shown
    idle = job.plan.stages.count(0) > WITHOUT_LAYERS
    fullest = found
    if found.offloaded.host and job.plan.pp > 1:
        fullest = max((_ledger(job, rank) for rank in _rivals(job.plan)), key=lambda each: each.offloaded.host_bytes)
    beyond = _beyond(job, fullest)
    why = "some pipeline ranks would have nothing to compute" if idle else beyond or _why(found, headroom)
    if headroom < 0 or idle or beyond:
        return Fit(fits=False, headroom_bytes=headroom, ledger=found, why=why)
    asked = _unstated(job.cluster, fullest.offloaded)
    return Fit(fits=None if asked else True, headroom_bytes=headroom, ledger=found, why=why, host_question=asked)


def overflows(job: Job, found: Ledger) -> str:
    """The place outside the device in which a rank has too little room, "" if there is none or nobody knows."""
    if 0 < job.cluster.host_bytes < found.offloaded.host_bytes:
        return "host"
    return "disk" if 0 < job.cluster.disk_bytes < found.offloaded.disk_bytes else ""


@lru_cache(maxsize=4096)
def _ledger(job: Job, rank: int) -> Ledger:
    return ledger(job, {"pp": rank})


def _rivals(plan: Plan) -> list[int]:
    """Pipeline ranks that may be the most loaded: both ends, and of those with equally long stages the first."""
    ranks = placement(plan)
    found: dict[tuple[int, ...], int] = {}
    for rank in range(1, plan.pp - 1):
        mine = tuple(length for length, owner in zip(plan.stages, ranks, strict=True) if owner == rank)
        found.setdefault(mine, rank)
    return sorted({0, plan.pp - 1, *found.values()})


def _beyond(job: Job, found: Ledger) -> str:
    """What lacks outside the device, "" if nothing does."""
    where = overflows(job, found)
    if not where:
        return ""
    on_host = where == "host"
    lines = found.offloaded.host if on_host else found.offloaded.disk
    have = job.cluster.host_bytes if on_host else job.cluster.disk_bytes
    said = ", ".join(f"{line.label} {gib(line.bytes)}" for line in lines)
    place = "host RAM" if on_host else "disk"
    return f"needs {gib(total(lines))} GiB of {place} per GPU; there are {gib(have)} ({said})"


def _unstated(cluster: Cluster, offloaded: OffloadedMemory) -> str | None:
    """The question whether there is room outside the device of which the cluster says nothing; None: it says enough."""
    places = (
        ("host memory", "host_gib", offloaded.host_bytes, cluster.host_bytes),
        ("disk", "disk_gib", offloaded.disk_bytes, cluster.disk_bytes),
    )
    unsaid = [(place, key, math.ceil(size / GIB)) for place, key, size, room in places if size and not room]
    if not unsaid:
        return None
    ranks = min(cluster.per_node, cluster.gpus)
    whole = " and ".join(f"{gib * ranks:,} GiB of {place}" for place, _, gib in unsaid)
    each = f", {' and '.join(f'{gib:,}' for _, _, gib in unsaid)} GiB for each of its {ranks} GPUs" if ranks > 1 else ""
    keys = " ".join(f"goal.{key}={gib}" for _, key, gib in unsaid)
    per_gpu = " (per GPU)" if ranks > 1 else ""
    return (
        f"Does each machine have {whole} free{each}? {cluster.name} does not say: add {keys}{per_gpu}, or what it has."
    )


def _why(found: Ledger, headroom: int) -> str:
    """Why the device has, or has not, enough memory."""
    fullest = max(found.lines, key=lambda line: line.bytes)
    where = f"the {found.role} pipeline rank" if found.role != "only" else "a rank"
    amount = f"{gib(abs(headroom))} GiB {'of headroom' if headroom >= 0 else 'short'}"
    largest = f"the largest entry is {fullest.label}, {gib(fullest.bytes)} GiB"
    return f"{where} peaks at {found.moment}, {amount}; {largest}"


def _offloaded(job: Job, activations: float, place: Mapping[str, int] = FIRST) -> OffloadedMemory:
    """Of a rank whose microbatches in flight have offloaded so many bytes of activations."""
    layout = state_layout(job)
    host, disk = [*served(job, place)], []
    if layout.cpu_offload:
        host = [*_on_host(_state_job(job), tuple(place.items())), *host]
    if activations:
        why = "saved activations, offloaded until the backward"
        host.append(LedgerEntry(name="activations", bytes=round(activations), why=why))
    if (states := layout.offloaded) is not None:
        whole = sum(param.numel for param in trained(job.arch)) * states.bytes
        near = whole if states.location == "host" else min(layout.resident_states, whole)
        why = f"fp32 master weights and optimizer states, {states.bytes} bytes per parameter"
        host.append(LedgerEntry(name="states", bytes=near, why=why))
        disk.append(LedgerEntry(name="states", bytes=whole - near, why=why))
        # Pieces on their way, as optim/host_memory.py counts them: from files, and gradients and weights to the host.
        fetched = states.bytes if states.location == "disk" else 0
        travelling = 2 * layout.accum_bytes if layout.update == "host" else 0
        size = SLOTS * min(PIECE, largest_weight(job.arch)) * (fetched + travelling)
        why = "transfer buffers of states, gradients and weights"
        host.append(LedgerEntry(name="pieces", bytes=size, why=why))
    near_lines, far_lines = (tuple(line for line in lines if line.bytes) for lines in (host, disk))
    return OffloadedMemory(host=near_lines, disk=far_lines)


def peak(job: Job, place: Mapping[str, int]) -> PeakMoment:
    """The moment of the step in which a rank holds most."""
    work, parts, holds = microbatch_shape(job), _parts(job, place.get("pp", 0)), job.stack.holds
    logits = sum(part.logits for part in parts.values())
    rank = _RankMoments(
        job=job,
        work=work,
        rest=_resident(_state_job(job), tuple(sorted(place.items()))),
        parts=parts,
        output=work.compute_bytes / work.accum_bytes if job.plan.pp > 1 and holds.states != "buffers" else 0.0,
        cast=work.compute_bytes / work.accum_bytes,
        before=logits / work.accum_bytes * holds.logits_left if job.plan.grad_accum > 1 else 0.0,
    )
    resting = {name: round(size) for name, size, _ in rank.rest.lines}
    total = sum(resting.values())

    def held(then: _Instant) -> int:
        found = total
        for name, size in then.changed.items():
            found += round(size) - resting[name]
        return found

    moments = list(_moments(rank, place.get("pp", 0)))
    fullest = max(moments, key=held)
    lines = tuple(
        LedgerEntry(name=name, bytes=round(fullest.changed.get(name, size)), why=why)
        for name, size, why in rank.rest.lines
    )
    offloaded = max(
        (
            sum(rank.parts[stage].offloaded * count for stage, count in then.scene.saved)
            for then in moments
            if rank.work.offloads and then.scene
        ),
        default=0.0,
    )
    return PeakMoment(
        name=_moment_words(job, fullest), lines=lines, bytes=sum(line.bytes for line in lines), offloaded=offloaded
    )


class _RankMoments(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job, with what all moments of its step have in common."""

    job: Job
    work: MicrobatchShape
    rest: ResidentMemory
    parts: Mapping[int, SavedActivations]  # what a microbatch keeps, by stage
    output: float  # of its logits, what torch's pipeline holds from the last stage's forward to its backward
    cast: float  # what is left of log-probabilities between the halves of a backward: the logits' gradient, cast down
    before: float  # logits of the microbatch before, where something still holds them


class _Instant(NamedTuple):
    """A moment by what differs from rest, made into lines only if it is the peak."""

    words: str
    scene: InFlight | None
    changed: Lines


def _state_job(job: Job) -> Job:
    """The job without what no state depends on, so that jobs that differ in it alone are counted once."""
    plan = job.plan
    grad_accum = settled(plan.schedule, plan.pp, plan.grad_accum)
    plan = msgspec.structs.replace(
        plan,
        microbatch=1,
        grad_accum=grad_accum,
        recompute="none",
        kernels="auto",
        activation_quant="none",
        activation_offload=False,
    )
    return msgspec.structs.replace(job, plan=plan, sequence=0)


@lru_cache(maxsize=4096)
def _resident(job: Job, key: tuple[tuple[str, int], ...]) -> ResidentMemory:
    """What a rank holds whatever the moment."""
    place = dict(key)
    return buffered(job, place) if job.stack.holds.states == "buffers" else sharded(job, place)


@lru_cache(maxsize=4096)
def _on_host(job: Job, key: tuple[tuple[str, int], ...]) -> tuple[LedgerEntry, ...]:
    """What a rank's host holds of the states whatever the moment."""
    return host_states(job.arch, job.plan, dict(key), state_layout(job))


def _parts(job: Job, rank: int) -> dict[int, SavedActivations]:
    """What a microbatch keeps in each stage on a rank."""
    arch, plan = job.arch, job.plan
    ranks = placement(plan)
    lengths = stage_lengths(arch, plan)
    work, policy, last = microbatch_shape(job), activation_policy(job), len(ranks) - 1
    blocks = "none" if policy.recomputes_attention else policy.recompute
    found = {}
    for stage, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        if ranks[stage] == rank:
            is_moe = tuple(arch.is_moe(layer) for layer in range(end - length, end))
            still = min(max(still_blocks(arch) - (end - length), 0), length)
            found[stage] = saved_activations(work, is_moe, stage == last, blocks, still)
    return found


def _moments(rank: _RankMoments, number: int) -> Iterator[_Instant]:
    """Every moment that may be the peak of a rank."""
    plan = rank.job.plan
    grad_accum = settled(plan.schedule, plan.pp, plan.grad_accum)
    for scene in scenes(plan.schedule, plan.pp, plan.chunks, grad_accum, number):
        if scene.kind == "F":
            yield _Instant("the end of a forward", scene, _flying(rank, scene))
        elif scene.kind == "W":
            yield _Instant("the weight-gradient half of a backward", scene, _flying(rank, scene))
        else:
            yield from _backward(rank, scene)
    done: Lines = {} if rank.rest.buffered else {"unreduced_grads": 0, "reduce_buffers": 0}
    if not rank.rest.buffered and not rank.rest.copy_stays:
        done["all_gathered_params"] = 0
    yield _Instant("the optimizer step", None, {**done, "update": rank.rest.update})


def _backward(rank: _RankMoments, scene: InFlight) -> Iterator[_Instant]:
    """A backward's loss, its first block and its last: in between one thing shrinks while another grows."""
    plan, rest = rank.job.plan, rank.rest
    part, flying = rank.parts[scene.stage], _flying(rank, scene)
    summed_before = plan.grad_accum > 1 or plan.pp > 1 or rest.buffered
    none: Lines = {} if summed_before else {"gradients": 0, "unreduced_grads": 0}
    if part.logits or part.loss:  # a frozen projection saves no gradient, and has logits all the same
        at_loss: Lines = (
            {} if rest.buffered else {"all_gathered_params": rest.gathered_at_loss, "reduce_buffers": 0, **none}
        )
        loss: Lines = {"logits": flying["logits"] + part.loss}
        yield _Instant("the loss", scene, flying | at_loss | loss)
    waiting = _looked_up_first(rank)
    inside: Lines = {
        "recompute": part.recomputed,
        "activation_grads": part.activation_grads + waiting,
        "logits": flying["logits"] - part.logits,
    }
    after = flying | inside
    yield _Instant("the first block of a backward", scene, after | none)
    left = after["activations"] - part.activations - part.pair + part.first_run
    missing = 0.0 if summed_before else rest.block_share * part.first_blocks + rest.begin_share
    grown: Lines = {"activations": left, "gradients": rest.of("gradients") * max(1 - missing, 0)}
    if rest.gathered_at_end is not None:
        grown["all_gathered_params"] = rest.gathered_at_end
    yield _Instant("the last block of a backward", scene, after | grown)
    if rest.outside_sums:
        ended: Lines = {"activations": left - part.first_run, "recompute": 0, "activation_grads": 0}
        sums: Lines = {"all_gathered_params": rest.outside, "reduce_buffers": rest.outside_sums}
        yield _Instant("the reduction of embedding and output gradients", scene, after | ended | sums)
    if rank.job.arch.embeds_at_both_ends and plan.pp == 1:
        table = rank.work.vocab * rank.work.arch.hidden / rank.work.tp * rank.work.compute_bytes
        gone: Lines = {"activations": left - part.first_run, "recompute": 0}
        # The lookup's gradient, and its sum with the projection's, or with that of the other lookup, which waited.
        gone["activation_grads"] = 3 * waiting or 2 * table
        yield _Instant("the embedding's gradient", scene, after | gone)


def _looked_up_first(rank: _RankMoments) -> float:
    """The embedding's gradient by multi-token prediction, which waits all through a backward for that of the tokens.

    Where tp cuts an embedding, a lookup's gradient has rows for the whole vocabulary all the same. The last stage of a
    pipeline looks up once.
    """
    if not rank.job.arch.mtp_layers or rank.job.plan.pp > 1 or not rank.job.arch.trains("embed.weight"):
        return 0.0
    return float(rank.work.vocab * rank.work.arch.hidden * rank.work.compute_bytes)


def _flying(rank: _RankMoments, scene: InFlight) -> Lines:
    """What microbatches in flight have left on a rank."""
    parts = rank.parts
    activations = sum(parts[stage].activations * count for stage, count in scene.saved)
    activations += sum((parts[stage].between + parts[stage].offloaded) * count for stage, count in scene.between)
    # Of offloaded activations some are still here, or here again: a stage at work has two blocks, and while it goes
    # back the last one of a later forward, which has not left yet.
    activations += sum(
        parts[stage].pair + parts[stage].largest * (held > 1) if stage == scene.stage else parts[stage].largest
        for stage, held in scene.saved
        if held
    )
    halved = dict(scene.between)
    logits = sum(
        parts[stage].logits * ((1 + rank.output) * (count - halved.get(stage, 0)) + rank.cast * halved.get(stage, 0))
        for stage, count in scene.saved
    )
    found: Lines = {"activations": activations, "logits": logits + rank.before}
    if rank.rest.buffered:
        found["all_gathered_params"] = rank.work.left
    else:
        if scene.kind not in ("B", "I"):
            found["reduce_buffers"] = 0
        if not scene.summing:
            found["gradients"] = found["unreduced_grads"] = 0
    return found


def _moment_words(job: Job, then: _Instant) -> str:
    """A moment with the stage and the microbatches in flight, where there are several."""
    if then.scene is None:
        return then.words
    if job.plan.pp == 1:
        return f"{then.words} of {'the last' if job.plan.grad_accum > 1 else 'the'} microbatch"
    flying = sum(count for _, count in then.scene.saved)
    return f"{then.words}, stage {then.scene.stage}, {flying} microbatch{'es' * (flying != 1)} in flight"


@lru_cache(maxsize=4096)
def scenes(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[InFlight, ...]:
    """Every different state of a rank during a step."""
    if pp == 1:
        before = frozenset({0}) if microbatches > 1 else frozenset[int]()
        one = ((0, 1),)
        return InFlight("F", 0, one, (), before), InFlight("B", 0, one, (), frozenset({0}))
    held, halves = Counter[int](), Counter[int]()
    summing = frozenset[int]()
    found: dict[InFlight, None] = {}
    for action in actions(schedule, pp, chunks, microbatches)[rank]:
        stage, kind = action.stage, action.kind
        held[stage] += kind == "F"
        if kind in ("B", "W"):
            summing |= {stage}
        found[InFlight(kind, stage, tuple(sorted(held.items())), tuple(sorted(halves.items())), summing)] = None
        held[stage] -= kind in ("B", "W")
        halves[stage] += (kind == "I") - (kind == "W")
    # Of scenes that differ only in how many microbatches are held, those that no other exceeds in every stage.
    alike: dict[tuple[Kind, int, frozenset[int]], list[InFlight]] = {}
    for scene in found:
        rivals = alike.setdefault((scene.kind, scene.stage, scene.summing), [])
        if not any(rival.covers(scene) for rival in rivals):
            rivals[:] = [rival for rival in rivals if not scene.covers(rival)]
            rivals.append(scene)
    return tuple(scene for rivals in alike.values() for scene in rivals)


def settled(schedule: Schedule, pp: int, microbatches: int) -> int:
    """The least number of microbatches in which a rank goes through every state of so many.

    Without a pipeline the second is like all that follow. Orders in rounds of pp microbatches differ in their last one
    when it is short, so only whole rounds are left out.
    """
    if pp == 1:
        return min(microbatches, 2)
    if schedule not in STEADY or microbatches % pp:
        return microbatches
    return min(microbatches, ROUNDS * pp)
