"""When a run saves, what of it, and what it resumes from."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.checkpoint import format, write
from meshwright.checkpoint import read as restoring
from meshwright.checkpoint.format import Manifest, Progress, state_digest
from meshwright.checkpoint.state import Copies, TensorShard, writers
from meshwright.checkpoint.write import Saver
from meshwright.config.run import Run, digests
from meshwright.config.weights import describe
from meshwright.optim import host_memory
from meshwright.optim.interface import learning_rate
from meshwright.parallel import precision
from meshwright.parallel.mesh import DENSE, EXPERT, Mesh, region_of
from meshwright.runtime import run_folder
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.problem import InputError, Problem
from meshwright.train.state import State, owner_of

Say = Callable[[str], None]
Save = Callable[[State], float]  # asked after every step; returns the seconds that it paused training


def holdings(state: State, run: Run, mesh: Mesh) -> list[TensorShard]:
    """Every part that this rank has, and whether it is the one to write it."""
    owners = {param.name: owner_of(param, run.plan) for param in params(run.arch)}
    state.optimizer.settle()
    held, seen, found = state.optimizer.held(), set[str](), list[TensorShard]()
    for name, weight in (pair for chunk in state.chunks for pair in chunk.named_parameters()):
        # A tied embedding may be on two stages, which hold the same numbers: the first has it to write.
        mine = owners[name] == mesh.place["pp"] and name not in seen
        seen.add(name)
        copy, copies = standing(weight, mesh)
        region = tuple((part.start, part.stop) for part in region_of(weight))
        for kind, tensor in held[id(weight)].items():
            writes = mine and chosen(run.arch, copies, tuple(held[id(weight)]))[f"{kind}/{name}"] == copy
            found.append(TensorShard(f"{kind}/{name}", tuple(weight.shape), region, tensor, writes))
    return found


@cache
def chosen(arch: Arch, copies: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Which of its equal holders writes each tensor, of so many."""
    sizes = {f"{kind}/{param.name}": param.numel for param in params(arch) for kind in kinds}
    return dict(zip(sizes, writers(list(sizes.values()), copies), strict=True))


def standing(weight: Tensor | nn.Parameter, mesh: Mesh) -> tuple[int, int]:
    """This rank's number among those of its stage that hold the same part of a weight, and how many they are."""
    if not isinstance(weight, DTensor):
        return mesh.rank, mesh.world
    names = weight.device_mesh.mesh_dim_names or ()
    axes_of = zip(names, weight.placements, strict=True)
    cut = {name for name, placement in axes_of if not isinstance(placement, Replicate)}
    grid, axes = (mesh.expert, EXPERT) if "ep" in names else (mesh.dense, DENSE)
    place = grid.get_coordinate()
    assert place is not None, "every rank is in the grid"
    copy, copies = 0, 1
    for axis, number, length in zip(axes, place, grid.shape, strict=True):
        if axis != "pp" and axis not in cut:
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
    earlier = run_folder.earlier(folder)
    manifest = restoring.newest(home, run, mesh, holdings(state, run, mesh), say, earlier=earlier.keys())
    if manifest is None:
        follow(state, run, mesh, say)
        return None
    precision.refresh(state.chunks)
    # Samples and draws need no more than these counters: they follow from the seed and the step.
    saved = manifest.progress
    step = state.step = saved.step
    state.optimizer.count.fill_(saved.updates)
    state.scale.value.fill_(saved.loss_scale)
    state.scale.streak.fill_(saved.streak)
    seconds = time.perf_counter() - began
    say(f"resuming from step {step} ({format.name(step)}, saved under {plan_of(manifest)}): read in {seconds:.1f} s")
    before = run if manifest.run in digests(run) else earlier[manifest.run]
    sample = saved.samples if _order(before) == _order(run) else 0
    state.loader.start_at(sample, step)
    if before is not run:
        old = learning_rate(before.optim, min(step, before.steps - 1), before.steps)
        rate = f"learning rate {old:.3g} → {learning_rate(run.optim, step, run.steps):.3g} ({run.steps} steps in total)"
        where = f"at sample {sample:,}" if sample else "at the first sample of its new order"
        say(f"from here on: {rate}, data {where}")
    return Restored(step=step, folder=str(home / format.name(step)), state=manifest.state, seconds=seconds)


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
    states = [holding for holding in holdings(state, run, mesh) if holding.name.partition("/")[0] in kinds]
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
    return Progress(
        step=state.step,
        samples=state.step * run.batch + state.loader.shift,
        seed=run.seed,
        updates=state.optimizer.count.item(),
        loss_scale=state.scale.value.item(),
        streak=state.scale.streak.item(),
    )


def digest_of(state: State, run: Run, mesh: Mesh) -> str:
    """The logical digest of the state as it is now, on every rank: what a save of it would carry."""
    copies, share = Copies(holdings(state, run, mesh)), format.NOTHING
    copies.take()
    for piece in copies.pieces():
        share = format.add(share, format.slice_share(piece.name, piece.region, piece.bits))
    # Halves of words travel, whose sums over the ranks have room in an int64.
    halves = torch.tensor([[lane >> 32, lane % 2**32] for lane in share], dtype=torch.int64, device=mesh.device)
    if mesh.world > 1:
        dist.all_reduce(halves)
    total = tuple(((high << 32) + low) % format.WORD for high, low in halves.tolist())
    return state_digest(progress(state, run), format.digest_text(total))


def plan_of(manifest: Manifest) -> str:
    """The axes that the saving plan used, in words."""
    axes = ("pp", "replicate", "shard", "cp", "tp", "ep")
    used = [f"{axis}={manifest.plan[axis]}" for axis in axes if manifest.plan.get(axis, 1) != 1]
    return " ".join(used) or "one rank"


@contextmanager
def saving(run: Run, state: State, mesh: Mesh, folder: Path | None) -> Iterator[Save]:
    """A function that saves when it is due; an unfinished save is finished or removed on the way out."""
    if folder is None:
        yield lambda state: 0.0
        return
    held = holdings(state, run, mesh)
    is_offloaded = run.plan.optimizer_offload != "none" or run.plan.cpu_offload
    in_place = is_offloaded and lacks_room(held, mesh, state.say)
    saver = Saver(format.home(folder), run, mesh, held, state.say, in_place=in_place, begun=state.step)

    def save(state: State) -> float:
        if not (state.stopped or is_due(run, state.step)):
            return 0.0
        seconds = saver.save(progress(state, run))
        if state.stopped:
            state.saved = saver.settle()
        return seconds

    try:
        yield save
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
    return every > 0 and (step % every == 0 or step == run.steps)  # from the last one a longer run goes on


class Stops:
    """The agreed wish to stop, read so that no step waits for a device.

    On a CPU the number is there at once. On an accelerator it is read one step later, when it has long arrived; all
    ranks read the same number at the same step.
    """

    def __init__(self) -> None:
        self.earlier: tuple[Tensor, torch.cuda.Event] | None = None

    def agreed(self, asked: Tensor) -> bool:
        """Whether any rank was asked, as of this step or the one before."""
        if not asked.is_cuda:
            return asked.item() > 0
        host = torch.empty(asked.shape, dtype=asked.dtype, pin_memory=True)
        host.copy_(asked, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        earlier, self.earlier = self.earlier, (host, ready)
        if earlier is None:
            return False
        earlier[1].synchronize()
        return earlier[0].item() > 0
