"""In-memory checkpoints over several machines: each has its own ranks' part, and a start puts the parts together.

No machine waits for another while training goes on: a part has its name when this machine's ranks have written it and
read it again, and the next machine is sent a copy by `runtime/neighbour.py`. The step before it stays until all ranks
have agreed that the new one is whole and copied, so that at any time some step is whole over all machines.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.checkpoint import format, write
from meshwright.checkpoint import read as restoring
from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.state import TensorShard
from meshwright.checkpoint.storage import CorruptError, Damage
from meshwright.checkpoint.write import RankCheck, RankPart, Saver, collect
from meshwright.config.run import Checkpoint, Run, digest
from meshwright.config.weights import CHECKPOINTS
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.parts import (
    KEPT,
    PART,
    READY,
    KeeperAddress,
    MachinePart,
    PartError,
    copy_note,
    decoded,
    discard_steps,
    encoded,
    fetch_file,
)
from meshwright.runtime.records import SaveRecord

Say = Callable[[str], None]
LOOK_SECONDS = 0.05


@dataclass
class PartSaver(Saver):
    """Saves this machine's part, which the first of its ranks joins, and counts a save done when its copy is."""

    beside: range = range(1)  # ranks of this machine

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joins:  # what was saved after the step that was resumed from is of another course
            discard_steps(self.home, lambda step: step > self.begun)

    @property
    def ranks(self) -> Sequence[int]:
        return self.beside

    def is_busy(self, patience: float = 0.0) -> bool:
        """Nobody is patient with the copy: a step would wait for the network."""
        return super().is_busy(patience) or self._awaits_copy()

    def told(self) -> str:
        name = format.name(self.step)
        return f"{name}, which is still being written or copied to the next machine: raise faults.memory_every"

    def settle(self, silent: bool = False) -> bool:
        """What this step makes superfluous goes once all machines have it; if one has not, all are without it."""
        was_begun = self.writing is not None
        is_there = super().settle(silent)
        if was_begun and self.joins:  # by a thread: memory is given back page by page, and no step waits for that
            self.threads.submit(self._discard, self.step, is_there)
        return is_there

    def _discard(self, step: int, is_there: bool) -> None:
        with suppress(OSError):  # what cannot be removed stays for later
            discard_steps(self.home, lambda each: each < step if is_there else each == step)

    def _awaits_copy(self) -> bool:
        if self.writing is None or not self.joins or self.has_failed():
            return False
        note = copy_note(self.home.parent)
        return note is None or note.step != self.step or note.attempt not in (self.attempt, -1)

    def _kept(self) -> Checkpoint:
        return self.run.checkpoint  # who starts the machine has looked for room; a save that finds none fails alone

    def _make_room(self) -> bool:
        return False  # what other machines may want stays

    def _join(self, stump: Path, began: float) -> SaveRecord:
        checks = write.checks_of(stump)
        parts = collect(stump, self.beside, self.abandoned, RankPart)
        damages = [each.damage for each in collect(checks, self.beside, self.abandoned, RankCheck) if each.damage]
        if damages:
            raise CorruptError([Damage(file=str(stump), text="; ".join(damages))])
        step = parts[0].progress.step
        part = MachinePart(
            step=step,
            attempt=self.attempt,
            node=self.beside[0] // len(self.beside),
            nodes=self.mesh.world // len(self.beside),
            run=digest(self.run),
            plan=msgspec.to_builtins(self.run.plan),
            notes=tuple(parts),
        )
        self.disk.write(stump / PART, [encoded(part)])
        for rank in self.beside:
            self.disk.remove(stump / write.part_name(rank))
        discard_steps(self.home, lambda each: each == step)
        self.disk.rename(stump, self.home / format.name(step))
        with suppress(OSError):
            self.disk.remove(checks)
        size = sum(each.made.chunk.bytes for each in parts if each.made is not None)
        seconds = time.perf_counter() - began
        return SaveRecord(step=step, saved=step, bytes=size, seconds=seconds, bound="disk", at=time.monotonic())


class PartKey(NamedTuple):
    """One machine's part of one save."""

    step: int
    attempt: int
    node: int


class FoundPart(NamedTuple):
    """A part in this machine's memory."""

    folder: Path
    content: bytes


@dataclass
class PartReader:
    """Puts the parts of a step together that lie in the memories of all machines. Every rank has one."""

    memory: Path
    beside: range  # ranks of this machine
    folder: Path  # of the run
    run: Run
    mesh: Mesh
    say: Say

    def newest(
        self, holdings: Sequence[TensorShard], earlier: Collection[str]
    ) -> tuple[Manifest | None, CorruptError | None]:
        """Fill what this rank holds from the newest step that is whole over all memories, and newer than the disk's.

        Returns its manifest; or damage that was met, after which what ranks hold is a mixture. Every rank must ask.
        """
        here, seen = self._found(), list[str]()
        providers = self._providers(here)
        on_disk = write.number_of_first(max(format.present(self.folder / CHECKPOINTS), default=-1), self.mesh)
        saves = sorted({(key.step, key.attempt) for key in providers if key.step > on_disk}, reverse=True)
        for step, attempt in saves:
            keys = [PartKey(step, attempt, node) for node in range(self.mesh.world // len(self.beside))]
            lost = [key.node for key in keys if key not in providers]
            if lost:
                words = f"no machine has the part of machine {', '.join(map(str, lost))}"
                self.say(f"warning: {format.name(step)} in host memory cannot be used: {words}")
            for number in range(0 if lost else max(len(providers[key]) for key in keys)):
                chosen = {key: providers[key][min(number, len(providers[key]) - 1)] for key in keys}
                lists = {key: here[key].content if self.mesh.rank == chosen[key] else b"" for key in keys}
                contents = {key: write.bytes_from(chosen[key], lists[key], self.mesh) for key in keys}
                manifest, words = self._tried(contents, here, chosen, holdings, earlier)
                words = write.first_words(words, self.mesh)
                if words is None:
                    return manifest, None
                seen.append(words)
                which = "the copies of " if number else ""
                self.say(f"warning: {which}{format.name(step)} in host memory cannot be used: {words}")
        if saves:
            instead = f"{format.name(on_disk)} on the disk" if on_disk >= 0 else "nothing on the disk"
            self.say(f"warning: no in-memory checkpoint can be used; there is {instead}")
        return None, CorruptError([Damage(file=str(self.memory), text="; ".join(seen))]) if seen else None

    def _found(self) -> dict[PartKey, FoundPart]:
        """The parts in this machine's memory: copies of the machine before, and its own; none that is damaged."""
        while not (self.memory / READY).exists():  # the keeper may still ask the next machine for them
            time.sleep(LOOK_SECONDS)
        found: dict[PartKey, FoundPart] = {}
        for home in (self.memory / KEPT / CHECKPOINTS, self.memory / CHECKPOINTS):
            for step in format.present(home):
                with suppress(OSError, PartError):
                    content = (home / format.name(step) / PART).read_bytes()
                    part = decoded(content, RankPart)
                    if part.nodes == self.mesh.world // len(self.beside) and part.step == step:
                        key = PartKey(step, part.attempt, part.node)
                        found[key] = FoundPart(home / format.name(step), content)
        return found

    def _providers(self, here: Mapping[PartKey, FoundPart]) -> dict[PartKey, list[int]]:
        """For every part that is anywhere a rank of each machine that has it, its own machine first."""
        is_first = self.mesh.rank == self.beside[0]
        said = gathered(msgspec.json.encode(list(here) if is_first else []), self.mesh)
        providers: dict[PartKey, list[int]] = {}
        for rank, content in enumerate(said):
            for key in msgspec.json.decode(content, type=list[PartKey]):
                ranks = providers.setdefault(key, [])
                ranks.insert(0 if rank // len(self.beside) == key.node else len(ranks), rank)
        return providers

    def _tried(
        self,
        contents: Mapping[PartKey, bytes],
        here: Mapping[PartKey, FoundPart],
        providers: Mapping[PartKey, int],
        holdings: Sequence[TensorShard],
        earlier: Collection[str],
    ) -> tuple[Manifest | None, str | None]:
        """Fill what this rank holds from one step, whose chunks are linked here or fetched; or why it cannot be."""
        step = next(iter(contents)).step
        view = self.memory / f".view.rank{self.mesh.rank}" / format.name(step)
        try:
            manifest = whole(contents)
            shutil.rmtree(view.parent, ignore_errors=True)  # of a rank that was killed while it read
            view.mkdir(parents=True)
            owners = {f"chunk.rank{rank}.safetensors": key for key in contents for rank in self._ranks(key.node)}
            wanted = {each.chunk for each, _ in restoring.meetings(manifest, restoring.as_saved(manifest, holdings))}
            for file in (manifest.chunks[number].file for number in sorted(wanted)):
                key = owners[file]
                machine = providers[key] // len(self.beside)
                if machine == self.beside[0] // len(self.beside):
                    os.link(here[key].folder / file, view / file)
                    continue
                where = KeeperAddress.read(self.folder, machine)
                if where is None:
                    return None, f"machine {machine} has not said where it listens"
                fetch_file(where, key.node, step, view / file)
            return restoring.tried(view, self.run, holdings, earlier, manifest)
        except (CorruptError, PartError, OSError) as error:
            return None, str(error)
        finally:
            shutil.rmtree(view.parent, ignore_errors=True)

    def _ranks(self, node: int) -> range:
        return range(node * len(self.beside), (node + 1) * len(self.beside))


def whole(contents: Mapping[PartKey, bytes]) -> Manifest:
    """The manifest of a step out of the lists of its parts, every claim in it checked."""
    where = format.name(next(iter(contents)).step)
    parts = [decoded(content, RankPart) for content in contents.values()]
    notes = [note for part in parts for note in part.notes]
    same = {(part.run, msgspec.json.encode(part.plan)) for part in parts}
    if len(same) > 1 or any(note.progress != notes[0].progress for note in notes):
        raise CorruptError([Damage(file=where, text="its parts are not of one save")])
    manifest = write.joined(notes, parts[0].run, parts[0].plan)
    return format.decoded(format.encode(manifest), where)


def gathered(content: bytes, mesh: Mesh) -> list[bytes]:
    """What every rank has to say, on every rank. It is summed: ranks that share a GPU cannot gather there."""
    if mesh.world == 1:
        return [content]
    sizes = torch.zeros(mesh.world, dtype=torch.int64, device=mesh.device)
    sizes[mesh.rank] = len(content)
    dist.all_reduce(sizes)
    lengths = [int(size) for size in sizes.tolist()]
    rows = torch.zeros(mesh.world, max(lengths), dtype=torch.uint8)
    rows[mesh.rank, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = rows.to(mesh.device)
    dist.all_reduce(rows)
    return [row.numpy().tobytes()[:length] for row, length in zip(rows.cpu(), lengths, strict=True)]
