"""Saving while training goes on: a copy to host memory, then a thread that writes, hashes and reads again."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from meshwright.checkpoint import agree, chunk, join, steps
from meshwright.checkpoint.corrupt import CorruptError
from meshwright.checkpoint.holding import Copies, Holding
from meshwright.checkpoint.manifest import ITEMSIZE, Progress
from meshwright.checkpoint.storage import Disk
from meshwright.parallel.mesh import Mesh
from meshwright.spec.check import InputError, Problem
from meshwright.spec.params import count
from meshwright.spec.run import Run, digest

Say = Callable[[str], None]
LONG_WAIT_SECONDS = 1.0  # that a step waits for the save before it: worth a word
GRACE_SECONDS = 10.0  # for the parts of other ranks, when this one's training has failed
FAILURES = (OSError, CorruptError, join.AbandonedError)  # of a save: training goes on


@dataclass
class Saver:
    """Saves the state of a run at some of its steps. Every rank has one, and all are asked at the same steps."""

    home: Path
    run: Run
    mesh: Mesh
    holdings: Sequence[Holding]
    say: Say
    disk: Disk = field(default_factory=Disk)
    in_place: bool = False  # write from where the state lies, and wait: a copy of it would not fit in host memory

    def __post_init__(self) -> None:
        if words := agree.first_words(lack_of_room(self.run, self.home, self.disk), self.mesh):
            remedy = "free some space, lower checkpoint.keep_last, or set checkpoint.every=0"
            raise InputError([Problem(words, remedy, "checkpoint")])
        if self.mesh.rank == 0:
            steps.sweep(self.disk, self.home)  # before the others know the name of this attempt's stumps
        self.attempt = agree.number_of_first(secrets.randbits(32), self.mesh)
        self.copies = Copies(self.holdings, in_place=self.in_place)
        self.threads = ThreadPoolExecutor(2, "save")
        self.abandoned = threading.Event()
        self.writing: Future[None] | None = None  # this rank's part
        self.joining: Future[None] | None = None  # rank 0: the whole
        self.step = -1  # the last one that was begun
        self.told = False  # that saves come too fast

    def save(self, progress: Progress) -> float:
        """Begin to save; returns the seconds that training stood still for it."""
        began = time.perf_counter()
        self.settle()
        self._tell_of_waiting(progress.step, time.perf_counter() - began)
        self.copies.take()
        self.step = progress.step
        stump = self.home / f".{steps.name(progress.step)}.{self.attempt:08x}.partial"
        self.writing = self.threads.submit(self._write, stump, progress)
        if self.mesh.rank == 0:
            self.joining = self.threads.submit(self._join, stump)
        if self.in_place or not self.run.checkpoint.asynchronous:
            self.settle()
        return time.perf_counter() - began

    def _tell_of_waiting(self, step: int, seconds: float) -> None:
        """Saves that come faster than the disk takes them hold training up, unlike others: said once."""
        if seconds > LONG_WAIT_SECONDS and not self.told:
            self.told = True
            self.say(
                f"warning: step {step} waited {seconds:.1f} s for {steps.name(self.step)} to reach the disk, which is "
                f"slower than saves come; raise checkpoint.every"
            )

    def settle(self) -> bool:
        """Wait until the last save is committed or given up, on all ranks alike; whether it is there."""
        if self.writing is None:
            return True
        words = agree.first_words(_failure(self.writing), self.mesh)
        if words is not None:
            self.abandoned.set()
        joined = agree.first_words(_failure(self.joining) if self.joining else None, self.mesh)
        self.writing = self.joining = None
        self.abandoned.clear()
        words = words or joined
        if words is not None:
            self.say(
                f"warning: {steps.name(self.step)} was not saved ({words}); training goes on, and the newest good "
                f"step in {self.home} stays"
            )
        return words is None

    def close(self) -> None:
        """Finish what was begun, after the last step."""
        self.settle()
        self.threads.shutdown()

    def abandon(self) -> None:
        """Finish or remove what was begun, when this rank's training has failed; the others may be gone."""
        wait([future for future in (self.writing, self.joining) if future is not None], GRACE_SECONDS)
        self.abandoned.set()
        self.threads.shutdown()

    def _write(self, stump: Path, progress: Progress) -> None:
        """This rank's part."""
        rank, pieces = self.mesh.rank, list(self.copies.pieces())
        self.disk.make_folder(stump)
        file = stump / f"chunk.rank{rank}.safetensors"
        try:
            writing = chunk.write(self.disk, file, pieces, progress.step) if pieces else None
            join.leave_part(self.disk, stump, rank, progress, writing)
        except OSError:
            file.unlink(missing_ok=True)  # at once: on a full disk others need the room
            raise

    def _join(self, stump: Path) -> None:
        """Rank 0: the whole, once all parts are there; then what it makes superfluous goes."""
        try:
            parts = join.collect(stump, self.mesh.world, self.abandoned)
            whole = join.joined(parts, digest(self.run), msgspec.to_builtins(self.run.plan))
            join.commit(self.disk, stump, whole, self.mesh.world)
        except FAILURES:
            self.disk.remove(stump)
            raise
        steps.thin(self.disk, self.home, self.run.checkpoint)


def _failure(future: Future[None]) -> str | None:
    """Wait; why it failed, None if it did not."""
    try:
        future.result()
    except FAILURES as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return None


def state_bytes(run: Run) -> int:
    """One saved step: every weight and both of its moments."""
    width = ITEMSIZE["F64" if run.plan.precision == "fp64" else "F32"]
    return 3 * count(run.arch) * width


def lack_of_room(run: Run, home: Path, disk: Disk) -> str | None:
    """Why the disk cannot take the steps that will be kept, and one more while it is written; None if it can."""
    every, kept = run.checkpoint.every, run.checkpoint.keep_last + 1
    times = min(run.steps // every, kept) if every else 1
    times = max(times - len(steps.present(home)), min(times, 1))
    need, have = times * state_bytes(run), disk.free_bytes(home)
    if need <= have:
        return None
    return f"checkpoints need {need:,} bytes ({times} of {state_bytes(run):,}), and {home} has {have:,} free"
