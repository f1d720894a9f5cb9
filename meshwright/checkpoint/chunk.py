"""Chunks: the slices that one rank writes, as one safetensors file. Any safetensors reader can open it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint import fingerprint, storage
from meshwright.checkpoint import slices as regions
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.fingerprint import Share
from meshwright.checkpoint.manifest import Chunk
from meshwright.checkpoint.slices import Region, Shape
from meshwright.checkpoint.storage import Disk

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice that is about to be written: its numbers are in host memory."""

    name: str
    shape: Shape  # of the whole tensor
    region: Region
    tensor: Tensor  # what is inside the region

    @property
    def dtype(self) -> str:
        return DTYPES[self.tensor.dtype]

    @property
    def bits(self) -> np.ndarray:
        """The numbers as unsigned integers."""
        whole = self.tensor.contiguous().view(INTEGERS[self.tensor.element_size()]).numpy()
        return whole.view(f"u{self.tensor.element_size()}")


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is on disk."""

    name: str
    dtype: str
    shape: Shape
    region: Region
    begin: int
    end: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Writing:
    """A chunk on disk, its slices, and what they contribute to the state's digest."""

    chunk: Chunk
    slices: tuple[Written, ...]
    share: Share


def write(disk: Disk, path: Path, pieces: Sequence[Piece], step: int) -> Writing:
    """Write a chunk, hash what is written, then read it again from the disk and hash that."""
    head = header(pieces, step)
    whole, written, share = hashlib.sha256(), [], fingerprint.NOTHING

    def blocks() -> Iterator[storage.Buffer]:
        nonlocal share
        whole.update(head)
        yield head
        begin = len(head)
        for piece in pieces:
            bits = piece.bits
            block = bits.reshape(-1).view(np.uint8).data
            whole.update(block)
            yield block
            place = {"name": piece.name, "dtype": piece.dtype, "shape": piece.shape, "region": piece.region}
            digest = hashlib.sha256(block).hexdigest()
            written.append(Written(**place, begin=begin, end=begin + len(block), sha256=digest))
            share = fingerprint.add(share, fingerprint.share(piece.name, piece.region, bits))
            begin += len(block)

    disk.write(path, blocks())
    size = written[-1].end if written else len(head)
    chunk = Chunk(path.name, size, whole.hexdigest(), len(head), hashlib.sha256(head).hexdigest())
    read_again(disk, path, chunk)
    return Writing(chunk, tuple(written), share)


def header(pieces: Sequence[Piece], step: int) -> bytes:
    """The head of a safetensors file, with its length before it and spaces up to a multiple of eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    begin = 0
    for piece in pieces:
        end = begin + piece.tensor.nbytes
        shape = regions.shape_of(piece.region)
        entries[piece.name + regions.text(piece.region)] = {
            "dtype": piece.dtype,
            "shape": shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_again(disk: Disk, path: Path, chunk: Chunk) -> None:
    """What the disk gives back must be what was given to it."""
    with storage.opened(path.parent, path.name) as descriptor:
        disk.forget_cache(descriptor)
        if storage.file_sha256(descriptor) != chunk.sha256:
            raise CorruptError([Damage(file=str(path), text="reads differently from what was just written")])
