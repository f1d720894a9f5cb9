"""When a run saves, what of it, and what it resumes from."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.checkpoint import format, remote, write
from meshwright.checkpoint import read as restoring
from meshwright.checkpoint.copies import Copies, Stall
from meshwright.checkpoint.format import Manifest, Progress, slice_share, state_digest
from meshwright.checkpoint.in_parts import PartReader, PartSaver
from meshwright.checkpoint.state import TensorShard, writers
from meshwright.checkpoint.storage import CorruptError, side_by_side
from meshwright.checkpoint.write import Saver
from meshwright.config.run import Checkpoint, Run, digests
from meshwright.config.weights import describe
from meshwright.optim import host_memory
from meshwright.optim.interface import SavedPart, learning_rate
from meshwright.parallel import precision
from meshwright.parallel.device import ArrivingNumbers
from meshwright.parallel.expert import learned_buffers
from meshwright.parallel.mesh import DENSE, EXPERT, Mesh, cut_dim, local, region_of
from meshwright.runtime import run_folder
from meshwright.runtime.records import SaveRecord
from meshwright.spec.arch import Arch
from meshwright.spec.communication import ANCHOR, OWN_ERRORS, SERVER_ERROR, calendar_of, kind_of, of_part, served_region
from meshwright.spec.optimizers import BESIDE
from meshwright.spec.params import saved, stored, trained
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.quantized import is_scales
from meshwright.spec.units import plural
from meshwright.train.state import State, owner_of

Say = Callable[[str], None]
PATIENCE_SECONDS = 0.1  # that a step waits for the save before it
SMALL_BYTES = 64 * 2**20  # a save of fewer is done in a moment, most of it flushes
SMALL_PATIENCE_SECONDS = 1.0


def holdings(state: State, run: Run, mesh: Mesh) -> list[TensorShard]:
    """Every part that this rank has, and whether it is the one to write it."""
    owners = {param.name: owner_of(param, run.plan) for param in saved(run.arch)}
    state.optimizer.settle()
    held, seen, found = state.optimizer.held(), set[str](), list[TensorShard]()
    outer, own = state.outer.states(), own_kinds(run.plan, {kind for each in held.values() for kind in each})
    for name, weight in (pair for chunk in state.chunks for pair in chunk.named_parameters() if pair[0] in owners):
        # A tied embedding may be on two stages, which hold the same numbers: the first has it to write.
        mine = owners[name] == mesh.place["pp"] and name not in seen
        seen.add(name)
        served = state.optimizer.region(weight)
        region = served or tuple((part.start, part.stop) for part in region_of(weight))
        lacking = {
            state.name: state.lacks(weight.dim()) for state in state.optimizer.spec.states_of(name, weight.dim())
        }
        frozen = {"weight": local(weight.detach())}
        tensors = {**held.get(id(weight), frozen), **outer.get(id(weight), {})}
        for apart in (False, True):
            kinds = tuple(kind for kind in tensors if (kind in own) == apart)
            for kind in kinds:
                lacks = lacking.get(kind, ())
                copy, copies = standing(weight, mesh, lacks, apart)
                writes = mine and (served is not None or chosen(run.arch, copies, kinds)[f"{kind}/{name}"] == copy)
                label = f"{of_part(kind, mesh.part if apart else 0)}/{name}"
                shape, part = _without(tuple(weight.shape), lacks), _without(region, lacks)
                whole = TensorShard(label, shape, part, tensors[kind], writes)
                if kind == SERVER_ERROR:  # of the rows that are the server's own
                    part = served_region(region, mesh.apart, mesh.part)
                    rows = tuple(slice(0, end - begin) for begin, end in part)  # without what fills up the last
                    whole = TensorShard(f"{kind}/{name}", shape, part, tensors[kind][rows], writes)
                parts = state.optimizer.saved_parts(weight, kind, tensors[kind])
                found += [_with_last(whole, each) for each in parts] or [whole]
    kept = (part for reduction in state.reductions for part in reduction.states(mesh))
    found += [TensorShard(each.name, each.shape, each.region, each.tensor, each.writes) for each in kept]
    learned = state.chunks if run.arch.adapter.kind == "none" else ()  # else they are the base's
    return found + list(_buffers(learned, run, mesh))


def _buffers(chunks: Iterable[nn.Module], run: Run, mesh: Mesh) -> Iterator[TensorShard]:
    """What is learned by other rules than gradients: whole on every rank of a stage, the first of which writes it."""
    writes = all(place == 0 for axis, place in mesh.place.items() if axis != "pp")
    for chunk in chunks:
        for name, buffer in learned_buffers(chunk, run.arch).items():
            shape = tuple(buffer.shape)
            yield TensorShard(f"weight/{name}", shape, tuple((0, size) for size in shape), buffer, writes)


def _with_last(whole: TensorShard, part: SavedPart) -> TensorShard:
    """A state's shard as that of its weight is, but for the last dim."""
    shape, region = (*whole.shape[:-1], part.size), (*whole.region[:-1], part.columns)
    return TensorShard(whole.name, shape, region, part.tensor, whole.writes and part.writes)


@torch.no_grad()
def whole_states(state: State, run: Run, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every optimizer state by its name in checkpoints, whole, on every rank; all of them must iterate to the end."""
    # A tied embedding may be held twice, and is written once.
    held = {each.name: each for each in holdings(state, run, mesh) if each.writes}
    spec = state.optimizer.spec
    dtype = next(iter(chain.from_iterable(state.optimizer.states().values()))).dtype
    for param in trained(run.arch):
        kinds = {kept.name: kept.shape_beside(param.shape) for kept in spec.states_of(param.name, len(param.shape))}
        if spec.compresses:
            kinds[SERVER_ERROR] = param.shape
        for kind, shape in kinds.items():
            name, whole = f"{kind}/{param.name}", torch.zeros(shape, dtype=dtype, device=mesh.device)
            part = held.get(name)
            if part is not None:
                whole[tuple(slice(*side) for side in part.region)] = part.tensor.to(mesh.device)
            if mesh.world > 1:
                dist.all_reduce(whole)
            yield name, whole.cpu()


Each = TypeVar("Each")


def _without(dims: tuple[Each, ...], lacks: tuple[int, ...]) -> tuple[Each, ...]:
    """Something of every dim of a weight, but for those that its state lacks."""
    return tuple(each for dim, each in enumerate(dims) if dim not in lacks)


def own_kinds(plan: Plan, kinds: Iterable[str]) -> frozenset[str]:
    """What each replica saves by itself: those that sync rarely their states, those that compress their errors.

    The others hold the same where they meet.
    """
    if not plan.has_outer_loop:
        return frozenset(kinds) & OWN_ERRORS
    return (frozenset(kinds) - BESIDE) | ({"weight"} if plan.outer_fragments > 1 else frozenset())


@cache
def chosen(arch: Arch, copies: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Which of its equal holders writes each tensor, of so many."""
    # Scales are few beside everything else.
    sizes = {f"{kind}/{param.name}": 1 if is_scales(kind) else param.numel for param in saved(arch) for kind in kinds}
    return dict(zip(sizes, writers(list(sizes.values()), copies), strict=True))


def standing(
    weight: Tensor | nn.Parameter, mesh: Mesh, lacks: tuple[int, ...] = (), apart: bool = False
) -> tuple[int, int]:
    """This rank's number among those of its stage that hold the same part of a weight, and how many they are.

    Or of a state that lacks some of its dims: those that cut only these hold the same. `apart`: only those of its own
    replica.
    """
    if not isinstance(weight, DTensor):
        return mesh.rank, mesh.world
    names = weight.device_mesh.mesh_dim_names or ()
    axes_of = zip(names, weight.placements, strict=True)
    cut = {name for name, placement in axes_of if cut_dim(placement, weight) not in (None, *lacks)}
    grid, axes = (mesh.expert, EXPERT) if "ep" in names else (mesh.dense, DENSE)
    place = grid.get_coordinate()
    assert place is not None, "every rank is in the grid"
    copy, copies = 0, 1
    for axis, number, length in zip(axes, place, grid.shape, strict=True):
        if axis != "pp" and axis not in cut and not (apart and axis == "outer"):
            copy, copies = copy * length + number, copies * length
    return copy, copies


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a run resumes from."""

    step: int
    folder: str
    state: str  # the logical digest of what was saved
    seconds: float  # that reading and checking took


def restore(state: State, run: Run, mesh: Mesh, folder: Path, say: Say) -> Restored | None:
    """Put the state where the newest good save has it; None if there is none, CorruptError if all are damaged."""
    began = time.perf_counter()
    state.say = say
    home = format.home(folder)
    note_base(state, run, mesh)
    remote.fetch(run, home, mesh, say)
    earlier = run_folder.earlier(folder)
    held = holdings(state, run, mesh)
    manifest, damage = from_memory(state, home, run, mesh, held, say, earlier.keys())
    kept_in = "" if manifest is None else " in host memory"
    if manifest is None:
        manifest = restoring.newest(home, run, mesh, held, say, earlier=earlier.keys())
    if manifest is None and damage is not None:
        raise damage  # what was read before it was found is in the weights
    if manifest is not None:
        state.outer.resume(manifest.progress.step, ANCHOR in {kind_of(tensor.name) for tensor in manifest.tensors})
    if manifest is None:
        follow(state, run, mesh, say)
        return None
    if manifest.progress.base != state.base:
        whose = run.init.folder or f"seed {run.seed}"
        what = (
            f"the frozen weights ({whose}) are not those beside which {format.name(manifest.progress.step)} was saved"
        )
        raise InputError([Problem(what, "put them back as they were, or start over with --fresh", "init.from")])
    precision.refresh(state.chunks)
    # Samples and draws need no more than these counters: they follow from the seed and the step.
    saved = manifest.progress
    step = state.step = saved.step
    state.optimizer.count.fill_(saved.updates)
    state.scale.value.fill_(saved.loss_scale)
    state.scale.streak.fill_(saved.streak)
    if state.adascale is not None:
        state.adascale.resume(saved.adascale, mesh.device)
    seconds = time.perf_counter() - began
    where = f"{format.name(step)}{kept_in}"
    say(f"resuming from step {step} ({where}, saved under {plan_of(manifest)}): read in {seconds:.1f} s")
    before = run if manifest.run in digests(run) else earlier[manifest.run]
    sample = saved.samples if _order(before) == _order(run) else 0
    state.loader.start_at(sample, step)
    if before is not run:
        old, steps = learning_rate(before.optim, min(step, before.steps - 1), before.steps), plural(run.steps, "step")
        rate = f"learning rate {old:.3g} → {learning_rate(run.optim, step, run.steps):.3g} ({steps} in total)"
        where = f"at sample {sample:,}" if sample else "at the first sample of its new order"
        say(f"from here on: {rate}, data {where}")
    return Restored(step=step, folder=str(home / format.name(step)), state=manifest.state, seconds=seconds)


def from_memory(
    state: State,
    home: Path,
    run: Run,
    mesh: Mesh,
    held: list[TensorShard],
    say: Say,
    earlier: Collection[str],
) -> tuple[Manifest | None, CorruptError | None]:
    """Fill what this rank holds from an in-memory checkpoint that is whole and newer than the disk's; or its damage."""
    if state.memory is None:
        return None, None
    if state.beside is not None:
        return PartReader(state.memory, state.beside, home.parent, run, mesh, say).newest(held, earlier)
    there = format.home(state.memory)
    is_newer = max(format.present(there), default=-1) > max(format.present(home), default=-1)
    if not write.number_of_first(is_newer, mesh):
        return None, None
    try:
        return restoring.newest(there, run, mesh, held, say, earlier=earlier), None
    except CorruptError as damage:
        say("warning: no in-memory checkpoint can be used; the disk's is older")
        return None, damage


def _order(run: Run) -> tuple[Any, ...]:
    """What the order of samples depends on."""
    return run.data, run.sequence, run.seed


def follow(state: State, run: Run, mesh: Mesh, say: Say) -> None:
    """A new phase with `init.optimizer_state`: the optimizer begins with its state at the end of the earlier run."""
    if not run.init.optimizer_state:
        return
    weights = describe(run.init.folder)
    home = format.home(weights.run or weights.path)
    kinds = state.optimizer.spec.state_names
    states = [holding for holding in holdings(state, run, mesh) if kind_of(holding.name) in kinds]
    manifest = restoring.newest(
        home, None, mesh, states, say, only=weights.step if weights.kind == "checkpoint" else None
    )
    if manifest is None:
        what, remedy = f"{home} holds no checkpoint to take the optimizer state from", "leave init.optimizer_state out"
        raise InputError([Problem(what, f"{remedy}, or name a run's folder", "init.optimizer_state")])
    saved = manifest.progress.step
    if weights.step not in (None, saved):  # a finished run's weights are of its last step
        what = f"the weights of {run.init.folder} are of step {weights.step}, and its newest optimizer state of {saved}"
        remedy = f"leave init.optimizer_state out, or take both from one step: init.from={run.init.folder}@{saved}"
        raise InputError([Problem(what, remedy, "init.optimizer_state")])
    state.optimizer.count.fill_(manifest.progress.updates)
    say(f"optimizer state from step {saved} of {run.init.folder}")


def progress(state: State, run: Run) -> Progress:
    """How far a run has come. Waits for the device."""
    return _progress(state, run).counted(_counters(state).tolist())


def _counters(state: State) -> Tensor:
    """What only the device knows of it, for `Progress.counted`."""
    own = [state.optimizer.count.double(), state.scale.value, state.scale.streak]
    norms = state.adascale.newest if state.adascale is not None else None
    return torch.stack([*(each.to(state.scale.value.device) for each in own), *(() if norms is None else norms)])


def _progress(state: State, run: Run) -> Progress:
    """What of it the host knows."""
    samples = state.step * run.batch + state.loader.shift
    kept = state.adascale.kept if state.adascale is not None else ()
    return Progress(
        step=state.step, samples=samples, seed=run.seed, updates=0.0, loss_scale=1.0, streak=0.0,
        adascale=tuple(kept), base=state.base,
    )  # fmt: skip


def digest_of(state: State, run: Run, mesh: Mesh) -> str:
    """The logical digest of the state as it is now, on every rank: what a save of it would carry."""
    note_base(state, run, mesh)
    return state_digest(progress(state, run), _fingerprint(holdings(state, run, mesh), mesh))


def note_base(state: State, run: Run, mesh: Mesh) -> None:
    """Let a state know the digest of what it does not train, which no checkpoint has; on every rank.

    Of a frozen copy they are all weights: what is frozen beside what is trained is the same. Load biases are the base's
    too.
    """
    held_elsewhere = [param for param in stored(run.arch) if state.reference or param not in saved(run.arch)]
    if not held_elsewhere or state.base:
        return
    owners, held = {param.name: owner_of(param, run.plan) for param in held_elsewhere}, list[TensorShard]()
    chunks = reversed(state.reference or state.chunks)
    weights = {name: weight for chunk in chunks for name, weight in chunk.named_parameters()}
    for name, weight in weights.items():
        if owners.get(name) == mesh.place["pp"]:
            region = tuple((part.start, part.stop) for part in region_of(weight))
            is_first = standing(weight, mesh)[0] == 0
            held.append(TensorShard(f"weight/{name}", tuple(weight.shape), region, local(weight.detach()), is_first))
    still = state.reference or (() if run.arch.adapter.kind == "none" else state.chunks)
    state.base = _fingerprint([*held, *_buffers(still, run, mesh)], mesh)[:32]


def _fingerprint(held: list[TensorShard], mesh: Mesh) -> str:
    """The digest of tensors of which all ranks hold parts: the same however they are cut."""
    copies, share = Copies(held, in_place=True), format.NOTHING
    copies.take()
    for each in side_by_side(lambda piece: slice_share(piece.name, piece.region, piece.bits), list(copies.pieces())):
        share = format.add(share, each)
    # Halves of words travel, whose sums over the ranks have room in an int64.
    halves = torch.tensor([[lane >> 32, lane % 2**32] for lane in share], dtype=torch.int64, device=mesh.device)
    if mesh.world > 1:
        dist.all_reduce(halves)
    total = tuple(((high << 32) + low) % format.WORD for high, low in halves.tolist())
    return format.digest_text(total)


def plan_of(manifest: Manifest) -> str:
    """The axes that the saving plan used, in words."""
    axes = ("pp", "replicate", "shard", "cp", "tp", "ep")
    used = [f"{axis}={manifest.plan[axis]}" for axis in axes if manifest.plan.get(axis, 1) != 1]
    return " ".join(used) or "one rank"


class Vote(NamedTuple):
    """What a rank says in the collective that every step has anyway, or what all have said together."""

    stop: bool = False  # save and end
    busy: bool = False  # the last save is still being written
    failed: bool = False  # the last save will not be there
    step: int = 0  # in which it was said

    def number(self, stop: bool) -> float:
        """As a number whose sum over up to 65,535 ranks still has each of the three apart."""
        return stop + self.busy * BUSY + self.failed * FAILED


BUSY, FAILED = 2.0**-16, 2.0**-32


def counted(total: float, step: int) -> Vote:
    """What at least one rank has said."""
    below, rest = total % 1.0, total % BUSY
    return Vote(stop=total >= 1.0, busy=below >= BUSY, failed=rest >= FAILED, step=step)


class Votes:
    """What the ranks have said, read so that no step waits for a device.

    On a CPU the number is there at once. On an accelerator it is read one step later, when it has long arrived; all
    ranks read the same number at the same step.
    """

    def __init__(self) -> None:
        self.earlier: tuple[ArrivingNumbers, int] | None = None

    def heard(self, total: Tensor, step: int, at_once: bool = False) -> Vote:
        """What was said in this step or the one before; `at_once`: in this step, as there is none soon after."""
        if at_once or not total.is_cuda:
            self.earlier = None
            return counted(total.item(), step)
        earlier, self.earlier = self.earlier, (ArrivingNumbers(total[None]), step)
        if earlier is None:
            return Vote()
        (said,) = earlier[0].read()
        return counted(said, earlier[1])


class Pause(NamedTuple):
    """How long a save held up training: on the host, and an update that waited on the device until it was copied."""

    host: float = 0.0
    stall: Stall | None = None

    def on_device(self) -> float:
        """Of the update. Waits for it."""
        return self.stall.seconds() if self.stall is not None else 0.0

    def seconds(self) -> float:
        """Both. Waits for that update."""
        return self.host + self.on_device()


class Save(Protocol):
    """What the loop asks of saving, in every step."""

    def vote(self, step: int) -> Vote:
        """What this rank has to say in a step that is being made."""
        ...

    def hear(self, heard: Vote) -> None:
        """Take note of what all ranks have said."""
        ...

    def hold_update(self) -> Stall | None:
        """Have the update that follows wait, on the device, for copies of what it changes."""
        ...

    def __call__(self, state: State) -> float:
        """Save the state after a step if that is due; returns the seconds that it paused the host."""
        ...


class NoSave:
    """Nothing is ever saved."""

    def vote(self, step: int) -> Vote:
        return Vote()

    def hear(self, heard: Vote) -> None:
        return None

    def hold_update(self) -> None:
        return None

    def __call__(self, state: State) -> float:
        return 0.0


@dataclass
class DueSave:
    """Saves when it is due. A save that still runs is not waited for: the next one is made at the first step after it.

    All ranks decide alike: by steps, and by what they have said to each other in the collective of each step.
    """

    run: Run
    mesh: Mesh
    saver: Saver
    say: Say
    is_offloaded: bool
    begun: int = -1  # the step that the last save is of
    postponed: int | None = None  # the step that it was due at

    def vote(self, step: int) -> Vote:
        lag = 1 if self.mesh.device.type == "cuda" else 0  # until it is heard
        is_awaited = self.postponed is None and is_due(self.run, step + lag)
        return Vote(busy=self.saver.is_busy(self._patience() if is_awaited else 0.0), failed=self.saver.has_failed())

    def _patience(self) -> float:
        return PATIENCE_SECONDS if self.saver.copies.state_bytes > SMALL_BYTES else SMALL_PATIENCE_SECONDS

    def hear(self, heard: Vote) -> None:
        if self.saver.writing is None or heard.step <= self.begun:
            return  # what was said does not know of the last save
        if heard.failed and heard.busy:
            self.saver.abandoned.set()  # whoever waits for the missing part
        elif not heard.busy:
            # The ranks ask each other once more where no device has to be waited for: there, whoever is out of step
            # with the others is found at a save, if not before.
            self.saver.settle(silent=not heard.failed and self.mesh.device.type == "cuda")

    def hold_update(self) -> Stall | None:
        return self.saver.hold_update()

    def __call__(self, state: State) -> float:
        is_last = state.stopped or state.step == self.run.steps
        if not (state.stopped or is_due(self.run, state.step) or (self.postponed is not None and not is_last)):
            return 0.0
        if self.saver.writing is not None and not is_last:
            if self.postponed is None:
                self.postponed = state.step
                self.say(f"the save of step {state.step} is postponed until after {self.saver.told()}")
            return 0.0
        seconds = self._begin(state)
        if state.stopped:
            self._finish(state)
        return seconds

    def _begin(self, state: State) -> float:
        self.postponed, self.begun = None, state.step
        self.saver.ends = state.stopped or state.step == self.run.steps
        state.optimizer.settle()
        if self.mesh.device.type != "cuda" or self.is_offloaded:
            return self.saver.save(progress(state, self.run))
        # The counters are read when they have arrived: the host waits for nothing.
        return self.saver.save(_progress(state, self.run), _counters(state))

    def _finish(self, state: State) -> None:
        """Wait for the last save of all. It is made once more if it failed for want of room that is there by now."""
        state.saved = self.saver.settle() and self.saver.is_there
        if not state.saved and write.number_of_first(self.saver.may_try_again, self.mesh):
            self._begin(state)
            state.saved = self.saver.settle() and self.saver.is_there

    def end(self, state: State) -> None:
        """Training has come to its end."""
        if self.begun == state.step == self.run.steps:
            self._finish(state)


@dataclass
class DiskAndMemorySave:
    """Saves to the disk, and more often to host memory, from where ranks that are started again have it at once."""

    disk: "DueSave"
    memory: "DueSave"
    run: Run
    spoken_of: dict[int, "DueSave"] = field(default_factory=dict)  # by the step in which it was said
    turn: int = 0

    def vote(self, step: int) -> Vote:
        """Of one of the two, in turn where both are at work: a failure of one is no reason to give up the other."""
        at_work = [each for each in (self.disk, self.memory) if each.saver.writing is not None] or [self.disk]
        self.spoken_of[step] = at_work[self.turn % len(at_work)]
        return self.spoken_of[step].vote(step)

    def hear(self, heard: Vote) -> None:
        if (subject := self.spoken_of.get(heard.step)) is None:
            return
        self.spoken_of = {step: each for step, each in self.spoken_of.items() if step > heard.step}
        self.turn += 1
        subject.hear(heard)

    def hold_update(self) -> Stall | None:
        one, other = self.disk.hold_update(), self.memory.hold_update()
        return one or other

    def __call__(self, state: State) -> float:
        seconds = self.disk(state)
        if state.stopped or state.step == self.run.steps or is_due(self.run, state.step):
            return seconds  # the disk has it, or nobody will ask
        return seconds + self.memory(state)


@contextmanager
def saving(run: Run, state: State, mesh: Mesh, folder: Path | None) -> Iterator[Save]:
    """What saves when it is due: to the disk, and to host memory where that is asked for."""
    if folder is None:
        yield NoSave()
        return
    with ExitStack() as stack:
        disk = stack.enter_context(saving_to(folder, run, state, mesh, lambda record: state.note(record)))
        if state.memory is None:
            yield disk
            return
        often = Checkpoint(every=run.faults.memory_every, keep_last=1, keep_best=False)
        as_asked = msgspec.structs.replace(run, checkpoint=often)
        memory = stack.enter_context(
            saving_to(state.memory, as_asked, state, mesh, lambda record: None, beside=state.beside)
        )
        yield DiskAndMemorySave(disk, memory, run)


@contextmanager
def saving_to(
    folder: Path,
    run: Run,
    state: State,
    mesh: Mesh,
    note: Callable[[SaveRecord], None],
    beside: range | None = None,
) -> Iterator["DueSave"]:
    """What saves there when it is due; an unfinished save is finished or removed on the way out.

    `beside`: these ranks' part alone, as the folder is their machine's.
    """
    note_base(state, run, mesh)
    held = holdings(state, run, mesh)
    # By whom states are moved that the device knows nothing of.
    is_offloaded = run.plan.optimizer_offload != "none" or run.plan.cpu_offload or run.plan.is_served
    in_place = lacks_room(held, mesh, state.say)
    kind = Saver if beside is None else partial(PartSaver, beside=beside)
    saver = kind(
        format.home(folder), run, mesh, held, state.say, in_place=in_place, begun=state.step, waits=is_offloaded,
        note=note,
    )  # fmt: skip
    if run.checkpoint.every:
        saver.prepare()
    due = DueSave(run, mesh, saver, state.say, is_offloaded)
    try:
        yield due
        due.end(state)
    except BaseException:
        saver.abandon()
        raise
    saver.close()


def lacks_room(held: list[TensorShard], mesh: Mesh, say: Say) -> bool:
    """Whether some rank's host cannot take a second copy of states that it holds already; what follows is said."""
    need, have, words = Copies(held).bytes, host_memory.free_host_bytes(), None
    if have is not None and need > have:
        words = (
            f"checkpoints are written straight from the states, and training waits for them: "
            f"a copy needs {need:,} bytes of host memory, and {have:,} are free"
        )
    words = write.first_words(words, mesh)
    if words is not None:
        say(words)
    return words is not None


def is_due(run: Run, step: int) -> bool:
    """Whether the state after this step is saved."""
    every = run.checkpoint.every
    meetings = calendar_of(run.plan, run.optim, run.steps)  # in between replicas differ
    return every > 0 and (meetings.has_come(step, every) or step == run.steps)  # from the last one a longer run goes on
