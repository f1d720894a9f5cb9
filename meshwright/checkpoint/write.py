"""Saving while training continues: a copy to host memory, then threads that hash, write, and read it again.

A step gets its name once it is on the disk. It is read again after that, and only then may older ones go; one that the
disk gives back differently loses its name. Threads write a rank's file, each byte hashed once on the way.
"""

import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import format, storage
from meshwright.checkpoint.copies import Copies, Stall
from meshwright.checkpoint.format import FORMAT, MANIFEST, Chunk, Manifest, Progress, Share, Slice, TensorDescription
from meshwright.checkpoint.state import Region, Shape, SlicePiece, TensorShard, region_shape, region_text
from meshwright.checkpoint.storage import ANOTHER, READ_BYTES, THREADS, Buffer, CorruptError, Damage, Disk, Part
from meshwright.config.run import Checkpoint, Run, digest
from meshwright.config.weights import best_step
from meshwright.parallel.device import ArrivingNumbers
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.failure import says_full
from meshwright.runtime.records import BOUNDS, SaveRecord
from meshwright.runtime.run_folder import ROOM, fewer_kept, lack_of_room
from meshwright.spec.problem import UNDECODABLE, mistake

ALIGNMENT = 8
STRIPED_BYTES = 16 * 2**20  # of a file that is worth more than one thread
Bound = Literal["disk", "hashing", "device link"]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is on disk."""

    name: str
    dtype: str
    shape: Shape
    region: Region
    begin: int
    end: int
    sha256: str


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What the seconds of writing a chunk went into; one that several threads spent at a time counts once."""

    hashing: float = 0.0
    disk: float = 0.0  # writing and flushing
    link: float = 0.0  # waiting for numbers from a device

    @property
    def bound(self) -> Bound:
        """What it would have to be faster in."""
        known: dict[Bound, float] = {"disk": self.disk, "hashing": self.hashing, "device link": self.link}
        return max(known, key=lambda name: known[name])


class ChunkWritten(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that is on the disk, what its slices contribute to the state's digest, and what took the time."""

    chunk: Chunk
    slices: tuple[Written, ...]
    share: Share
    timing: Timing


def write(disk: Disk, path: Path, pieces: Sequence[SlicePiece], step: int) -> ChunkWritten:
    """Write a chunk and flush it to the disk."""
    head = header(pieces, step)
    begins = list(accumulate((piece.tensor.nbytes for piece in pieces), initial=len(head)))
    threads = THREADS if begins[-1] > STRIPED_BYTES else 1
    makers = [_Maker(piece, begin) for piece, begin in zip(pieces, begins, strict=False)]
    parts: list[Part] = [(0, [head]), *((maker.begin, maker) for maker in makers)]
    began = time.perf_counter()
    disk.write_parts(path, parts, threads)
    seconds = time.perf_counter() - began
    hashing = sum(maker.hashing for maker in makers) / threads
    link = sum(maker.link for maker in makers) / threads
    slices = tuple(maker.written() for maker in makers)
    share = format.NOTHING
    for maker in makers:
        share = format.add(share, maker.share)
    whole = format.tree_sha256(format.sha256(head), slices)
    chunk = Chunk(path.name, begins[-1], whole, len(head), format.sha256(head))
    timing = Timing(hashing=hashing, link=link, disk=max(seconds - hashing - link, 0.0))
    return ChunkWritten(chunk=chunk, slices=slices, share=share, timing=timing)


@dataclass
class _Maker:
    """The content of one slice in blocks; while the disk's thread iterates, each block is hashed once it is written."""

    piece: SlicePiece
    begin: int
    sha256: str = ""
    share: Share = format.NOTHING
    hashing: float = 0.0
    link: float = 0.0

    def __iter__(self) -> Iterator[Buffer]:
        began = time.perf_counter()
        bits = self.piece.bits
        self.link = time.perf_counter() - began
        content, whole = bits.reshape(-1).view(np.uint8).data, hashlib.sha256()
        for first in range(0, len(content), READ_BYTES):
            block = content[first : first + READ_BYTES]
            yield block
            with self._counted():  # what was just copied is still in the processor's cache
                whole.update(block)
        with self._counted():
            self.sha256 = whole.hexdigest()
            self.share = format.slice_share(self.piece.name, self.piece.region, bits)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.hashing += time.perf_counter() - began

    def written(self) -> Written:
        piece, end = self.piece, self.begin + self.piece.tensor.nbytes
        place = {"name": piece.name, "dtype": piece.dtype, "shape": piece.shape, "region": piece.region}
        return Written(**place, begin=self.begin, end=end, sha256=self.sha256)


class AbandonedError(RuntimeError):
    """Some rank will not deliver its part."""


def read_again(disk: Disk, descriptor: int, path: Path, made: ChunkWritten, abandoned: threading.Event) -> None:
    """Have the disk give back what was written, and hash that; AbandonedError if nobody waits for it any more."""
    chunk = made.chunk
    disk.forget_cache(descriptor)
    head = ("", 0, chunk.header_bytes, chunk.header_sha256)
    slices = ((each.name + region_text(each.region), each.begin, each.end, each.sha256) for each in made.slices)

    def check(part: tuple[str, int, int, str]) -> None:
        tensor, begin, end, digest = part
        if abandoned.is_set():
            raise AbandonedError(f"{path} was not read again")
        if storage.range_sha256(descriptor, begin, end) != digest:
            raise CorruptError([Damage(file=str(path), text=ANOTHER, tensor=tensor, begin=begin, end=end)])

    storage.side_by_side(check, [head, *slices], THREADS if chunk.bytes > STRIPED_BYTES else 1)


def header(pieces: Sequence[SlicePiece], step: int) -> bytes:
    """The head of a safetensors file, with its length before it and spaces up to a multiple of eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    begin = 0
    for piece in pieces:
        end = begin + piece.tensor.nbytes
        entry = {"dtype": piece.dtype, "shape": region_shape(piece.region), "data_offsets": (begin, end)}
        entries[piece.name + region_text(piece.region)] = entry
        begin = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


Say = Callable[[str], None]
LOOK_SECONDS = 0.02
MOST_BYTES = 2000  # of a rank's message
LONG_WAIT_SECONDS = 1.0  # that a step waits for the save before it: worth a word
GRACE_SECONDS = 10.0  # for the parts of other ranks, when this one's training has failed


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written."""

    progress: Progress
    made: ChunkWritten | None  # None: this rank had nothing to write


class RankCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found when it read its part again."""

    damage: str = ""


Note = TypeVar("Note", RankPart, RankCheck)
FAILURES = (OSError, CorruptError, AbandonedError)  # of a save: training continues


def part_name(rank: int) -> str:
    return f"part.rank{rank}.json"


def collect(stump: Path, ranks: Sequence[int], abandoned: threading.Event, kind: type[Note]) -> list[Note]:
    """The notes of some ranks, once they are there."""
    parts: list[Note] = []
    while len(parts) < len(ranks):
        name = part_name(ranks[len(parts)])
        if (stump / name).exists():
            content = storage.read_small(stump, name, format.BYTES_A_CHUNK)
            try:
                parts.append(msgspec.json.decode(content, type=kind))
            except UNDECODABLE as error:
                raise CorruptError([Damage(file=str(stump / name), text=f"is not a rank's note: {error}")]) from None
        elif abandoned.is_set():
            raise AbandonedError(f"rank {ranks[len(parts)]} did not write its part")
        else:
            time.sleep(LOOK_SECONDS)
    return parts


def joined(parts: list[RankPart], run: str, plan: dict[str, Any]) -> Manifest:
    """The manifest of all parts together."""
    progress = parts[0].progress
    assert all(part.progress == progress for part in parts), "all ranks save the same step"
    writers = [part.made for part in parts if part.made is not None]
    written = [each for made in writers for each in made.slices]
    whole = {each.name: TensorDescription(each.name, each.dtype, each.shape) for each in written}
    tensors = tuple(whole[name] for name in sorted(whole))
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    total = format.NOTHING
    for made in writers:
        total = format.add(total, made.share)
    slices = [
        Slice(numbers[each.name], each.region, number, each.begin, each.end, each.sha256)
        for number, made in enumerate(writers)
        for each in made.slices
    ]
    return Manifest(
        format=FORMAT,
        progress=progress,
        run=run,
        plan=plan,
        plan_sha256=format.sha256(msgspec.json.encode(plan)),
        state=format.state_digest(progress, format.digest_text(total)),
        tensors=tensors,
        chunks=tuple(made.chunk for made in writers),
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
        raise CorruptError([Damage(file=str(target / MANIFEST), text=ANOTHER)])
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
    words = bytes_from(rank, (text or "").encode()[:MOST_BYTES], mesh)
    return f"rank {rank}: " + words.decode(errors="replace")


def bytes_from(rank: int, content: bytes, mesh: Mesh) -> bytes:
    """What one rank has to say, on every rank; of the others' content nothing is read."""
    if mesh.world == 1:
        return content
    size = torch.tensor(len(content), dtype=torch.int64, device=mesh.device)
    dist.broadcast(size, src=rank)
    room = torch.zeros(int(size.item()), dtype=torch.uint8, device=mesh.device)
    if not room.numel():
        return b""
    if rank == mesh.rank:
        room.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(room, src=rank)
    return room.cpu().numpy().tobytes()


def withdraw(disk: Disk, home: Path, step: int) -> None:
    """Take a step's name away, and have `latest` name the one before it."""
    format.discard(disk, home, step)
    for earlier in reversed(format.present(home)):
        with suppress(CorruptError):
            format.point(disk, home, earlier, format.read(home / format.name(earlier)).sha256)
            return
    disk.remove(home / format.LATEST)


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
    waits: bool = False  # for copies from a device: others than the caller's next update may change what they are of
    note: Callable[[SaveRecord], None] = lambda record: None  # rank 0: where each save is recorded

    @property
    def ranks(self) -> Sequence[int]:
        """Whose parts are joined, by the first of them."""
        return range(self.mesh.world)

    @property
    def joins(self) -> bool:
        return self.mesh.rank == self.ranks[0]

    def __post_init__(self) -> None:
        self.setting = self._kept()
        if self.joins:
            format.sweep(self.disk, self.home)  # before the others know the name of this attempt's stumps
        self.unusable = {step for step in format.present(self.home) if step > self.begun}
        self.attempt = number_of_first(secrets.randbits(32), self.mesh)
        self.copies = Copies(self.holdings, in_place=self.in_place)
        self.threads = ThreadPoolExecutor(2, "save")
        self.abandoned = threading.Event()
        self.writing: Future[None] | None = None  # this rank's part
        self.joining: Future[SaveRecord] | None = None  # rank 0: the whole
        self.step = -1  # the last one that was begun
        self.stump: Path | None = None  # where that one is written
        self.pause = 0.0  # seconds that it paused training
        self.last: SaveRecord | None = None  # the newest save that is whole; rank 0 has it
        self.warned = False  # that saves come too fast
        self.ends = False  # the run has no step after the last one that was begun
        self.is_there = True  # the last save that was waited for
        self.may_try_again = False  # the first: where it is not there, there is room for it by now

    def _kept(self) -> Checkpoint:
        """Which steps are kept: those that were asked for, or one at a time where the disk has no room for more."""
        free = self.disk.free_bytes(self.home)
        if words := first_words(lack_of_room(self.run, self.home.parent, free), self.mesh):
            raise mistake(words, ROOM, "checkpoint")
        if words := first_words(fewer_kept(self.run, self.home.parent, free), self.mesh):
            self.say(words)
            return msgspec.structs.replace(self.run.checkpoint, keep_last=1, keep_every=0, keep_best=False)
        return self.run.checkpoint

    def prepare(self) -> None:
        """Make the memory for copies, in the background, so that the first save need not wait for it."""
        self.copies.prepare()

    def is_busy(self, patience: float = 0.0) -> bool:
        """Whether this rank's part of the last save is still on its way, after so many seconds."""
        return bool(wait(self._futures(), patience).not_done)

    def has_failed(self) -> bool:
        """Whether this rank knows already that the last save will not be there."""
        return any(future.done() and future.exception() is not None for future in self._futures())

    def save(self, progress: Progress, counters: Tensor | None = None) -> float:
        """Begin to save; returns the seconds that it paused training. Waits for the save before, if there is one.

        `counters` are those of `Progress.counted` where they are still on a device; of progress, these
        are then not read.
        """
        began = time.perf_counter()
        if self.is_busy():
            self.settle()
            waited = time.perf_counter() - began
            if waited > LONG_WAIT_SECONDS and not self.warned:
                self.warned = True
                self.say(f"warning: step {progress.step} waited {waited:.1f} s for {self.told()}")
        else:
            self.settle()
        self.copies.take()
        if self.waits:
            self.copies.wait()
        if self.copies.memory.refused and self.step < 0:
            refused = f"{self.copies.memory.refused:,} bytes of host memory that checkpoints are copied to"
            self.say(f"warning: the driver would not pin {refused}: saves hold up training for longer; raise ulimit -l")
        self.step = progress.step
        self.stump = stump = self.home / f".{format.name(progress.step)}.{self.attempt:08x}.partial"
        arriving = None if counters is None else ArrivingNumbers(counters, sleeps=True)
        self.writing = self.threads.submit(self._write, stump, progress, arriving)
        if self.joins:
            self.joining = self.threads.submit(self._join, stump, time.perf_counter())
        if self.in_place or not self.run.checkpoint.asynchronous:
            self.settle()
        self.pause = time.perf_counter() - began
        return self.pause

    def hold_update(self) -> Stall | None:
        """Have the next update wait, on the device, until what it changes is copied."""
        return self.copies.hold_update()

    def told(self) -> str:
        """That the last save takes longer than the steps until the next, and why; for the end of a sentence."""
        last, name = self.last, format.name(self.step)
        if last is None:
            return f"{name}, which is still being written: slower than saves come; raise checkpoint.every"
        rate = f"{last.bytes / last.seconds / 1e9:.2f} GB/s, bound by {BOUNDS[last.bound]}"
        return f"{name}, written at {rate}: slower than saves come; raise checkpoint.every"

    def settle(self, silent: bool = False) -> bool:
        """Wait until the last save is there or given up, on all ranks alike; whether it is there.

        `silent`: all ranks have agreed already that it is.
        """
        if self.writing is None:
            return True
        words = None if silent else self._agreed_failure(self.writing)
        if words is None and self.joining is not None:
            self.last = msgspec.structs.replace(self.joining.result(), pause=self.pause + self.copies.stall_seconds())
            self.note(self.last)
        self.writing = self.joining = None
        self.abandoned.clear()
        self.is_there, self.may_try_again = words is None, False
        if words is not None:
            goes_on = "" if self.ends else "training continues, and "
            self.say(
                f"warning: {format.name(self.step)} was not saved ({words}); {goes_on}the newest good "
                f"step in {self.home} stays"
            )
            if self.joins and says_full(words):
                self.may_try_again = self._make_room()
        return self.is_there

    def _agreed_failure(self, writing: Future[None]) -> str | None:
        """Wait until no rank is at work on the last save; why it is not there. Who was only given up is no cause."""
        mine = _failure(writing)
        words = first_words(None if isinstance(mine, AbandonedError) else _words(mine), self.mesh)
        if words is not None:
            self.abandoned.set()
        theirs = _failure(self.joining) if self.joining is not None else None
        joined = first_words(_words(theirs or mine), self.mesh)
        if joined is not None:
            self._clear()
        return words or joined

    def _clear(self) -> None:
        """The first: remove what a save that failed has left. Before, others may be at work in there."""
        if self.joins and self.stump is not None:
            with suppress(OSError):
                self.disk.remove(self.stump)
                self.disk.remove(checks_of(self.stump))

    def _make_room(self) -> bool:
        """The first, after a save that the disk had no room for: let go of earlier steps, if that is what it takes.

        Of those that are kept by their number alone, the oldest first; the newest that is good stays. Whether there is
        room for another by now.
        """
        setting, gone = msgspec.structs.replace(self.setting, keep_last=1), list[str]()
        sound = [step for step in format.present(self.home) if step not in self.unusable]
        best = best_step(self.home.parent, sound) if setting.keep_best else None
        going = format.superfluous(sound, setting, best)
        with suppress(OSError):
            sizes = {step: folder_bytes(self.home / format.name(step)) for step in sound}
            needed = max(sizes.values(), default=0)
            if self.disk.free_bytes(self.home) + sum(sizes[step] for step in going) >= needed:
                while going and self.disk.free_bytes(self.home) < needed:
                    format.discard(self.disk, self.home, step := going.pop(0))
                    gone.append(format.name(step))
            if gone:
                were = "was" if len(gone) == 1 else "were"
                self.say(f"to make room for the next save, {' and '.join(gone)} {were} removed")
            return bool(sizes) and self.disk.free_bytes(self.home) >= needed
        return False

    def close(self) -> None:
        """Finish what was begun, after the last step."""
        self.settle()
        self.threads.shutdown()
        self.copies.memory.close()

    def abandon(self) -> None:
        """Finish or remove what was begun, when this rank's training has failed; the others may be gone."""
        wait(self._futures(), GRACE_SECONDS)
        self.abandoned.set()
        self.threads.shutdown()
        self._clear()
        self.copies.memory.close()

    def _futures(self) -> list[Future[Any]]:
        return [future for future in (self.writing, self.joining) if future is not None]

    def _write(self, stump: Path, progress: Progress, counters: ArrivingNumbers | None) -> None:
        """This rank's part. A note tells rank 0 that it is on the disk; another, later, that it was read again."""
        rank, pieces = self.mesh.rank, list(self.copies.pieces())
        self.disk.make_folder(stump)
        file = stump / f"chunk.rank{rank}.safetensors"
        with ExitStack() as stack:
            try:
                made = write(self.disk, file, pieces, progress.step) if pieces else None
                descriptor = -1
                if made is not None:  # open from here on: the stump has another name as soon as all parts are there
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, descriptor)
                done = progress if counters is None else progress.counted(counters.read())
                note = msgspec.json.encode(RankPart(progress=done, made=made))
                storage.write_whole(self.disk, stump / part_name(rank), note, is_passing=True)  # `commit` flushes names
            except OSError:
                file.unlink(missing_ok=True)  # at once: on a full disk others need the room
                raise
            self._check(checks_of(stump), descriptor, file, made)

    def _check(self, checks: Path, descriptor: int, file: Path, made: ChunkWritten | None) -> None:
        self.disk.make_folder(checks)
        check, failure = RankCheck(), None
        try:
            if made is not None:
                read_again(self.disk, descriptor, file, made, self.abandoned)
        except (OSError, CorruptError) as error:  # not one that was given up: what was not read again may be good
            check, failure = RankCheck(damage=str(error)), error
        note = checks / part_name(self.mesh.rank)
        storage.write_whole(self.disk, note, msgspec.json.encode(check), is_passing=True)
        if failure is not None:
            raise failure

    def _join(self, stump: Path, began: float) -> SaveRecord:
        """Rank 0: the whole, once all parts are there; when all are read again, what it makes superfluous goes."""
        ranks, checks = self.ranks, checks_of(stump)
        parts = collect(stump, ranks, self.abandoned, RankPart)
        whole = joined(parts, digest(self.run), msgspec.to_builtins(self.run.plan))
        commit(self.disk, stump, whole, len(ranks))
        record = recorded(whole, parts, time.perf_counter() - began)
        damages = [each.damage for each in collect(checks, ranks, self.abandoned, RankCheck) if each.damage]
        if damages:
            withdraw(self.disk, self.home, whole.progress.step)
            raise CorruptError([Damage(file=str(self.home / format.name(self.step)), text="; ".join(damages))])
        with suppress(OSError):  # what cannot be removed stays for later
            self.disk.remove(checks)
            self._retire(whole.progress.step)
        return record

    def _retire(self, written: int) -> None:
        """Remove what a save makes superfluous. One that cannot be used is not counted among those that are kept."""
        setting = self.setting
        self.unusable.discard(written)
        sound = [step for step in format.present(self.home) if step not in self.unusable]
        best = best_step(self.home.parent, sound) if setting.keep_best else None
        passed = [step for step in self.unusable if step < written] if len(sound) >= setting.keep_last else []
        for step in [*format.superfluous(sound, setting, best), *passed]:
            format.discard(self.disk, self.home, step)
            self.unusable.discard(step)


def folder_bytes(folder: Path) -> int:
    """The files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def checks_of(stump: Path) -> Path:
    """Where the ranks say what they found when they read a step again; swept like a stump."""
    return stump.with_name(stump.name.removesuffix(".partial") + ".checked.partial")


def recorded(whole: Manifest, parts: Sequence[RankPart], seconds: float) -> SaveRecord:
    """How fast a step was written, until it had its name, and what kept the slowest rank."""
    slowest = max((part.made.timing for part in parts if part.made is not None), key=_seconds, default=Timing())
    size = sum(chunk.bytes for chunk in whole.chunks)
    step = whole.progress.step
    return SaveRecord(step=step, saved=step, bytes=size, seconds=seconds, bound=slowest.bound, at=time.monotonic())


def _seconds(timing: Timing) -> float:
    return timing.disk + timing.hashing + timing.link


def _failure(future: "Future[None] | Future[SaveRecord]") -> Exception | None:
    """Wait; why it failed, None if it did not."""
    try:
        future.result()
    except FAILURES as error:
        return error
    return None


def _words(error: Exception | None) -> str | None:
    if error is None:
        return None
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
