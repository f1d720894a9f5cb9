"""Tokens on disk, seen through memory maps as one long stream; and the folder in which our own tokens are kept."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from meshwright.spec.problem import UNDECODABLE, InputError, mistake

VERSION = 1  # of our folder
SCAN = 1 << 24  # tokens looked at in one go when document ends are searched
NO_ENDS = np.zeros(0, np.int64)
SAMPLE_COLUMNS = ("record", "trained", "length")  # its number in the source, tokens trained, length before it was cut


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of tokens."""

    file: Path
    tokens: np.ndarray  # memory-mapped
    ends: np.ndarray  # int64, rising: positions after the last token of each document; empty when unknown


@dataclass(frozen=True)
class Tokens:
    """Several shards as one stream."""

    shards: tuple[Shard, ...]
    ends: np.ndarray  # of the whole stream; the last is `total`, or there are none because they are unknown
    mask: "Tokens | None" = None  # a 1 for every token that is trained; None: all are
    samples: np.ndarray | None = None  # SAMPLE_COLUMNS of every document that has a mask

    @cached_property
    def starts(self) -> list[int]:
        """Where each shard begins in the stream, and where the last one ends."""
        sizes = np.array([0, *(len(shard.tokens) for shard in self.shards)], np.int64)
        return np.cumsum(sizes).tolist()

    @property
    def total(self) -> int:
        return self.starts[-1]

    @cached_property
    def dtype(self) -> np.dtype:
        return np.result_type(*(shard.tokens.dtype for shard in self.shards))

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from a position on, across the bounds of shards."""
        return self.rows(np.array([start]), np.array([count]), count, 0)[0]

    def rows(self, starts: np.ndarray, counts: np.ndarray, width: int, fill: int) -> np.ndarray:
        """One row for each start, with as many tokens as its count says and then `fill` up to the width."""
        rows = np.full((len(starts), width), fill, self.dtype)
        for row, start, count in zip(rows, starts.tolist(), counts.tolist(), strict=True):
            number = bisect_right(self.starts, start) - 1
            while count > 0:
                offset = start - self.starts[number]
                part = self.shards[number].tokens[offset : offset + count]
                row[: len(part)] = part
                row, start, count, number = row[len(part) :], start + len(part), count - len(part), number + 1
        return rows

    def place(self, position: int) -> tuple[Path, int]:
        """The file that holds a position of the stream, and where in it."""
        number = bisect_right(self.starts, position) - 1
        return self.shards[number].file, position - self.starts[number]


def join(shards: Iterable[Shard]) -> Tokens:
    """Shards as one stream. Document ends are known only when every shard knows its own."""
    shards = tuple(shards)
    if len(shards) == 1:  # ends that are memory-mapped stay so
        return Tokens(shards, shards[0].ends)
    bare = Tokens(shards, NO_ENDS)
    if not all(len(shard.ends) for shard in shards):
        return bare
    return Tokens(
        shards, np.concatenate([shard.ends + start for shard, start in zip(shards, bare.starts, strict=False)])
    )


def scan(tokens: Tokens, end_token: int) -> np.ndarray:
    """Document ends of a stream, found by looking for the end token; what follows the last one is a document too."""
    found = [NO_ENDS]
    for shard, start in zip(tokens.shards, tokens.starts, strict=False):
        for at in range(0, len(shard.tokens), SCAN):
            block = shard.tokens[at : at + SCAN]
            found.append(np.flatnonzero(block == end_token) + (start + at + 1))
    return closed(np.concatenate(found), tokens.total)


def closed(ends: np.ndarray, total: int) -> np.ndarray:
    """Sorted ends without those of empty documents, and with the end of the stream."""
    ends = np.append(ends, total).astype(np.int64)
    return ends[np.diff(ends, prepend=0) > 0]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of ours says of itself."""

    version: int
    dtype: str
    tokens: int
    documents: int
    vocab: int
    end_token: int


def token_dtype(vocab: int) -> np.dtype:
    """The smallest type that our own shards use for a vocabulary."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def write(folder: Path, documents: Iterable[np.ndarray], vocab: int, end_token: int) -> int:
    """Fill an existing folder with documents, each of which already closes with the end token; returns their number."""
    dtype, ends, total = token_dtype(vocab), array("q"), 0
    with (folder / "tokens.bin").open("wb") as file:
        for document in documents:
            file.write(document.astype(dtype, copy=False).data)
            total += len(document)
            ends.append(total)
        _settle(file)
    write_ends(folder, np.frombuffer(ends, np.int64) if ends else NO_ENDS)
    meta = Meta(version=VERSION, dtype=dtype.str, tokens=total, documents=len(ends), vocab=vocab, end_token=end_token)
    (folder / "meta.json").write_bytes(msgspec.json.encode(meta))
    return len(ends)


def write_masked(
    folder: Path, samples: Iterable[tuple[np.ndarray, np.ndarray, tuple[int, int, int]]], vocab: int, end_token: int
) -> int:
    """The same for documents with a mask, each with its SAMPLE_COLUMNS."""
    columns = array("q")
    with (folder / "mask.bin").open("wb") as file:

        def documents() -> Iterator[np.ndarray]:
            for tokens, mask, row in samples:
                file.write(mask.astype(np.uint8, copy=False).data)
                columns.extend(row)
                yield tokens

        count = write(folder, documents(), vocab, end_token)
        _settle(file)
    (folder / "samples.bin").write_bytes(columns.tobytes())
    return count


def open_masked(folder: Path) -> Tokens:
    """What `write_masked` left."""
    shard = open_folder(folder)
    mask, rows = mapped(folder / "mask.bin", np.dtype("<u1")), mapped(folder / "samples.bin", np.dtype("<i8"))
    if len(mask) != len(shard.tokens) or len(rows) != len(shard.ends) * len(SAMPLE_COLUMNS):
        raise _broken(folder, "has a mask of another length than its tokens")
    masks = Tokens((Shard(folder / "mask.bin", mask, shard.ends),), shard.ends)
    return Tokens((shard,), shard.ends, masks, rows.reshape(-1, len(SAMPLE_COLUMNS)))


def open_folder(folder: Path) -> Shard:
    """A folder that `write` filled; its sizes are held against what it says of itself."""
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
        dtype = np.dtype({"<u2": "<u2", "<u4": "<u4"}[meta.dtype])
    except (OSError, KeyError, *UNDECODABLE):
        raise _broken(folder, "has no readable meta.json") from None
    if meta.version != VERSION:
        raise _broken(folder, f"was written as version {meta.version}, this is version {VERSION}")
    for name, expected in (("tokens.bin", meta.tokens * dtype.itemsize), ("ends.bin", meta.documents * 8)):
        held = (folder / name).stat().st_size if (folder / name).exists() else 0
        if held != expected:
            raise _broken(folder, f"should hold {expected} bytes of {name} and holds {held}")
    return Shard(folder / "tokens.bin", mapped(folder / "tokens.bin", dtype), open_ends(folder))


def write_ends(folder: Path, ends: np.ndarray) -> None:
    """Keep document ends in a folder."""
    with (folder / "ends.bin").open("wb") as file:
        file.write(ends.astype("<i8", copy=False).data)
        _settle(file)


def open_ends(folder: Path) -> np.ndarray:
    """The document ends kept in a folder."""
    return mapped(folder / "ends.bin", np.dtype("<i8"))


def mapped(file: Path, dtype: np.dtype, offset: int = 0, count: int | None = None) -> np.ndarray:
    """A file, or `count` entries of it, as an array that is read when it is looked at."""
    if count == 0 or file.stat().st_size <= offset:
        return np.zeros(0, dtype)  # nothing cannot be mapped
    # As a plain array: slices of np.memmap cost several times as much, and one is taken for every sample.
    return np.memmap(file, dtype, "r", offset, None if count is None else (count,)).view(np.ndarray)


def _settle(file: IO[bytes]) -> None:
    """On the disk before the folder is renamed: else a power cut could leave a ready folder of zeros."""
    file.flush()
    os.fsync(file.fileno())


def _broken(folder: Path, text: str) -> InputError:
    return mistake(f"{folder} {text}", "delete the folder; it is made again when it is needed")
