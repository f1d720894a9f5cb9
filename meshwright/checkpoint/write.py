"""Saving while training continues: a copy to host memory, then a thread that writes, hashes and reads again."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.checkpoint import format, storage
from meshwright.checkpoint.format import (
    FORMAT,
    MANIFEST,
    Chunk,
    Manifest,
    Progress,
    Share,
    Slice,
    TensorDescription,
    Written,
)
from meshwright.checkpoint.state import Copies, TensorShard
from meshwright.checkpoint.storage import CorruptError, Damage, Disk
from meshwright.config.run import Run, digest
from meshwright.config.weights import best_step
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.run_folder import ROOM, lack_of_room
from meshwright.spec.problem import mistake

Say = Callable[[str], None]
LOOK_SECONDS = 0.02
MOST_BYTES = 2000  # of a rank's message
LONG_WAIT_SECONDS = 1.0  # that a step waits for the save before it: worth a word
GRACE_SECONDS = 10.0  # for the parts of other ranks, when this one's training has failed


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written."""

    progress: Progress
    chunk: Chunk | None  # None: this rank had nothing to write
    slices: tuple[Written, ...]
    share: Share


class AbandonedError(RuntimeError):
    """Some rank will not deliver its part."""


FAILURES = (OSError, CorruptError, AbandonedError)  # of a save: training continues


def part_name(rank: int) -> str:
    return f"part.rank{rank}.json"


def collect(stump: Path, world: int, abandoned: threading.Event) -> list[RankPart]:
    """The parts of all ranks, once they are there."""
    parts: list[RankPart] = []
    while len(parts) < world:
        name = part_name(len(parts))
        if (stump / name).exists():
            content = storage.read_small(stump, name, format.BYTES_A_CHUNK)
            try:
                parts.append(msgspec.json.decode(content, type=RankPart))
            except msgspec.DecodeError as error:
                raise CorruptError([Damage(file=str(stump / name), text=f"is not a rank's note: {error}")]) from None
        elif abandoned.is_set():
            raise AbandonedError(f"rank {len(parts)} did not write its part")
        else:
            time.sleep(LOOK_SECONDS)
    return parts


def joined(parts: list[RankPart], run: str, plan: dict[str, Any]) -> Manifest:
    """The manifest of all parts together."""
    progress = parts[0].progress
    assert all(part.progress == progress for part in parts), "all ranks save the same step"
    whole = {each.name: TensorDescription(each.name, each.dtype, each.shape) for part in parts for each in part.slices}
    tensors = tuple(whole[name] for name in sorted(whole))
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    writers = [part for part in parts if part.chunk is not None]
    total = format.NOTHING
    for part in parts:
        total = format.add(total, part.share)
    slices = [
        Slice(numbers[each.name], each.region, number, each.begin, each.end, each.sha256)
        for number, part in enumerate(writers)
        for each in part.slices
    ]
    return Manifest(
        format=FORMAT,
        progress=progress,
        run=run,
        plan=plan,
        plan_sha256=format.sha256(msgspec.json.encode(plan)),
        state=format.state_digest(progress, format.digest_text(total)),
        tensors=tensors,
        chunks=tuple(part.chunk for part in writers if part.chunk is not None),
        slices=tuple(sorted(slices, key=lambda each: (each.tensor, each.region))),
    )


def commit(disk: Disk, stump: Path, whole: Manifest, ranks: int) -> str:
    """Give a complete stump its name, then move the pointer; returns the sha256 in its manifest."""
    home, target = stump.parent, stump.parent / format.name(whole.progress.step)
    content = format.encode(whole)
    disk.write(stump / MANIFEST, [content])
    for rank in range(ranks):
        disk.remove(stump / part_name(rank))
    disk.sync_folder(stump)
    written = format.read(stump)  # also checks that the slices cover every tensor exactly once
    if target.exists():  # damaged, or it would have been resumed from
        format.discard(disk, home, whole.progress.step)
    disk.rename(stump, target)
    disk.sync_folder(home)
    if written.sha256 != format.read(target).sha256:
        raise CorruptError([Damage(file=str(target / MANIFEST), text="reads differently from what was just written")])
    format.point(disk, home, whole.progress.step, written.sha256)
    return written.sha256


def number_of_first(number: int, mesh: Mesh) -> int:
    """Rank 0's number, on every rank."""
    if mesh.world == 1:
        return number
    agreed = torch.tensor(number, dtype=torch.int64, device=mesh.device)
    dist.broadcast(agreed, src=0)
    return int(agreed.item())


def first_words(text: str | None, mesh: Mesh) -> str | None:
    """The words of the first rank that has any, on every rank; None when all are silent. Every rank must ask."""
    if mesh.world == 1:
        return text
    speaker = torch.tensor(mesh.world if text is None else mesh.rank, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(speaker, dist.ReduceOp.MIN)
    rank = int(speaker.item())
    if rank == mesh.world:
        return None
    words = torch.zeros(MOST_BYTES, dtype=torch.uint8, device=mesh.device)
    if rank == mesh.rank:
        mine = (text or "").encode()[:MOST_BYTES]
        words[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(mesh.device) if mine else 0
    dist.broadcast(words, src=rank)
    return f"rank {rank}: " + bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")


@dataclass
class Saver:
    """Saves the state of a run at some of its steps. Every rank has one, and all are asked at the same steps."""

    home: Path
    run: Run
    mesh: Mesh
    holdings: Sequence[TensorShard]
    say: Say
    disk: Disk = field(default_factory=Disk)
    in_place: bool = False  # write from where the state lies, and wait: a copy of it would not fit in host memory
    begun: float = math.inf  # the step that was resumed from: those after it could not be used

    def __post_init__(self) -> None:
        lack = lack_of_room(self.run, self.home.parent, self.disk.free_bytes(self.home))
        if words := first_words(lack, self.mesh):
            raise mistake(words, ROOM, "checkpoint")
        if self.mesh.rank == 0:
            format.sweep(self.disk, self.home)  # before the others know the name of this attempt's stumps
        self.unusable = {step for step in format.present(self.home) if step > self.begun}
        self.attempt = number_of_first(secrets.randbits(32), self.mesh)
        self.copies = Copies(self.holdings, in_place=self.in_place)
        self.threads = ThreadPoolExecutor(2, "save")
        self.abandoned = threading.Event()
        self.writing: Future[None] | None = None  # this rank's part
        self.joining: Future[None] | None = None  # rank 0: the whole
        self.step = -1  # the last one that was begun
        self.warned = False  # that saves come too fast

    def save(self, progress: Progress) -> float:
        """Begin to save; returns the seconds that it paused training."""
        began = time.perf_counter()
        self.settle()
        waited = time.perf_counter() - began
        if waited > LONG_WAIT_SECONDS and not self.warned:
            self.warned = True
            self.say(
                f"warning: step {progress.step} waited {waited:.1f} s for {format.name(self.step)} to reach the disk, "
                f"which is slower than saves come; raise checkpoint.every"
            )
        self.copies.take()
        self.step = progress.step
        stump = self.home / f".{format.name(progress.step)}.{self.attempt:08x}.partial"
        self.writing = self.threads.submit(self._write, stump, progress)
        if self.mesh.rank == 0:
            self.joining = self.threads.submit(self._join, stump)
        if self.in_place or not self.run.checkpoint.asynchronous:
            self.settle()
        return time.perf_counter() - began

    def settle(self) -> bool:
        """Wait until the last save is committed or given up, on all ranks alike; whether it is there."""
        if self.writing is None:
            return True
        words = first_words(_failure(self.writing), self.mesh)
        if words is not None:
            self.abandoned.set()
        joined = first_words(_failure(self.joining) if self.joining else None, self.mesh)
        self.writing = self.joining = None
        self.abandoned.clear()
        words = words or joined
        if words is not None:
            self.say(
                f"warning: {format.name(self.step)} was not saved ({words}); training continues, and the newest good "
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
        """This rank's part; its note tells rank 0 that the chunk is written, flushed and read again."""
        rank, pieces = self.mesh.rank, list(self.copies.pieces())
        self.disk.make_folder(stump)
        file = stump / f"chunk.rank{rank}.safetensors"
        try:
            nothing = (None, (), format.NOTHING)
            chunk, slices, share = format.write(self.disk, file, pieces, progress.step) if pieces else nothing
            note = msgspec.json.encode(RankPart(progress=progress, chunk=chunk, slices=slices, share=share))
            storage.write_whole(self.disk, stump / part_name(rank), note)
        except OSError:
            file.unlink(missing_ok=True)  # at once: on a full disk others need the room
            raise

    def _join(self, stump: Path) -> None:
        """Rank 0: the whole, once all parts are there; then what it makes superfluous goes."""
        try:
            parts = collect(stump, self.mesh.world, self.abandoned)
            whole = joined(parts, digest(self.run), msgspec.to_builtins(self.run.plan))
            commit(self.disk, stump, whole, self.mesh.world)
        except FAILURES:
            self.disk.remove(stump)
            raise
        with suppress(OSError):  # what cannot be removed stays for later
            self._retire(whole.progress.step)

    def _retire(self, written: int) -> None:
        """Remove what a save makes superfluous. One that cannot be used is not counted among those that are kept."""
        setting = self.run.checkpoint
        self.unusable.discard(written)
        sound = [step for step in format.present(self.home) if step not in self.unusable]
        best = best_step(self.home.parent, sound) if setting.keep_best else None
        passed = [step for step in self.unusable if step < written] if len(sound) >= setting.keep_last else []
        for step in [*format.superfluous(sound, setting, best), *passed]:
            format.discard(self.disk, self.home, step)
            self.unusable.discard(step)


def _failure(future: Future[None]) -> str | None:
    """Wait; why it failed, None if it did not."""
    try:
        future.result()
    except FAILURES as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return None
