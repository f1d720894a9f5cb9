"""One checkpoint out of the parts of all ranks, by files alone: every rank leaves a note, rank 0 joins them.

Ranks on several machines must see the same file system.
"""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from meshwright.checkpoint import fingerprint, manifest, steps, storage
from meshwright.checkpoint.chunk import Writing, Written
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.fingerprint import Share
from meshwright.checkpoint.manifest import FORMAT, MANIFEST, Chunk, Described, Manifest, Progress, Slice
from meshwright.checkpoint.storage import Disk

LOOK_SECONDS = 0.02
PART_BYTES = manifest.BYTES_A_CHUNK


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has written."""

    progress: Progress
    chunk: Chunk | None  # None: this rank had nothing to write
    slices: tuple[Written, ...]
    share: Share


class AbandonedError(RuntimeError):
    """Some rank will not deliver its part."""


def leave_part(disk: Disk, stump: Path, rank: int, progress: Progress, writing: Writing | None) -> None:
    """Tell rank 0 that this rank's chunk is written, flushed and read again."""
    chunk, slices, share = (None, (), fingerprint.NOTHING) if writing is None else (
        writing.chunk, writing.slices, writing.share,
    )  # fmt: skip
    part = Part(progress=progress, chunk=chunk, slices=slices, share=share)
    storage.write_whole(disk, stump / part_name(rank), msgspec.json.encode(part))


def part_name(rank: int) -> str:
    return f"part.rank{rank}.json"


def collect(stump: Path, world: int, abandoned: threading.Event) -> list[Part]:
    """The parts of all ranks, once they are there."""
    parts: list[Part] = []
    while len(parts) < world:
        name = part_name(len(parts))
        if (stump / name).exists():
            parts.append(_read_part(stump, name))
        elif abandoned.is_set():
            raise AbandonedError(f"rank {len(parts)} did not write its part")
        else:
            time.sleep(LOOK_SECONDS)
    return parts


def _read_part(stump: Path, name: str) -> Part:
    content = storage.read_small(stump, name, PART_BYTES)
    try:
        return msgspec.json.decode(content, type=Part)
    except msgspec.DecodeError as error:
        raise CorruptError([Damage(file=str(stump / name), text=f"is not a rank's note: {error}")]) from None


def joined(parts: list[Part], run: str, plan: dict[str, Any]) -> Manifest:
    """The manifest of all parts together."""
    progress = parts[0].progress
    assert all(part.progress == progress for part in parts), "all ranks save the same step"
    whole = {each.name: Described(each.name, each.dtype, each.shape) for part in parts for each in part.slices}
    tensors = tuple(whole[name] for name in sorted(whole))
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    writers = [part for part in parts if part.chunk is not None]
    total = fingerprint.NOTHING
    for part in parts:
        total = fingerprint.add(total, part.share)
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
        plan_sha256=manifest.sha256(msgspec.json.encode(plan)),
        state=manifest.state_digest(progress, fingerprint.text(total)),
        tensors=tensors,
        chunks=tuple(part.chunk for part in writers if part.chunk is not None),
        slices=tuple(sorted(slices, key=lambda each: (each.tensor, each.region))),
    )


def commit(disk: Disk, stump: Path, whole: Manifest, ranks: int) -> str:
    """Give a complete stump its name, then move the pointer; returns the sha256 in its manifest."""
    home, target = stump.parent, stump.parent / steps.name(whole.progress.step)
    content = manifest.encode(whole)
    disk.write(stump / MANIFEST, [content])
    for rank in range(ranks):
        disk.remove(stump / part_name(rank))
    disk.sync_folder(stump)
    written = manifest.read(stump)  # also checks that the slices cover every tensor exactly once
    if target.exists():  # damaged, or it would have been gone on from
        steps.discard(disk, home, whole.progress.step)
    disk.rename(stump, target)
    disk.sync_folder(home)
    if written.sha256 != manifest.read(target).sha256:
        raise CorruptError([Damage(file=str(target / MANIFEST), text="reads differently from what was just written")])
    steps.point(disk, home, whole.progress.step, written.sha256)
    return written.sha256
