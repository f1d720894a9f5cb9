"""One rank's file of a saved step: threads write it, each byte hashed once on the way; then it is read again."""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from meshwright.checkpoint import format, storage
from meshwright.checkpoint.format import Chunk, Share
from meshwright.checkpoint.state import Region, Shape, SlicePiece, region_shape, region_text
from meshwright.checkpoint.storage import ANOTHER, READ_BYTES, THREADS, Buffer, CorruptError, Damage, Disk, Part

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
