"""The manifest of one saved step: what is saved, where each slice lies, and the digests that everything must have.

A manifest is canonical: decoded and encoded again it is the same bytes. So nothing can hide in it that the decoder
would pass over, a key that comes twice for example. It ends with its own sha256.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwright.checkpoint import slices as regions
from meshwright.checkpoint import storage
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.slices import Region, Shape

FORMAT = "meshwright checkpoint 1"
MANIFEST = "manifest.json"
CHUNK = re.compile(r"chunk\.rank\d{1,7}\.safetensors")
ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}

# A chunk of the largest models describes some thousand slices in a few hundred bytes each. Whoever sends a larger
# manifest with few chunks is refused before a byte is read.
BYTES_A_CHUNK = 4 * 2**20
HEADER_BYTES = 100 * 10**6  # as in other readers of safetensors
SLICE_BYTES = 32 * 2**20  # no slice is larger, so that checking one takes little memory


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a run has come. Draws and the order of samples are pure functions of the seed and these numbers."""

    step: int
    samples: int  # of the order of samples, those that were used: the next step begins with this one
    seed: int
    updates: float  # steps that moved the weights; others met a gradient that was not finite
    loss_scale: float
    streak: float  # finite steps since the loss scale last moved


class Described(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor."""

    name: str
    dtype: str  # as safetensors writes it
    shape: Shape


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of slices."""

    file: str
    bytes: int
    sha256: str  # of the whole file
    header_bytes: int  # with the eight that say how long the rest of it is
    header_sha256: str


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a tensor."""

    tensor: int  # which of the manifest's
    region: Region
    chunk: int  # which of the manifest's
    begin: int  # bytes of the file
    end: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one saved step but its numbers."""

    format: str
    progress: Progress
    run: str  # the digest of the run's mathematics, which must be the same to go on
    plan: dict[str, Any]  # under which it was saved; any other may go on from it
    plan_sha256: str
    state: str  # the logical digest: the same for the same state under any plan
    tensors: tuple[Described, ...]
    chunks: tuple[Chunk, ...]
    slices: tuple[Slice, ...]
    sha256: str = ""  # of this manifest with this field empty


def state_digest(progress: Progress, fingerprint: str) -> str:
    """The logical digest of a state: all its tensors and all its counters."""
    return sha256(msgspec.json.encode((progress, fingerprint)))[:32]


def sha256(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """A manifest as the bytes of its file."""
    bare = msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))
    return msgspec.json.encode(msgspec.structs.replace(manifest, sha256=sha256(bare))) + b"\n"


def read(folder: Path) -> Manifest:
    """The manifest of a step's folder, every claim in it checked that needs no other byte to be read."""
    file = str(folder / MANIFEST)
    content = storage.read_small(folder, MANIFEST, limit_bytes(folder))
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CorruptError([Damage(file=file, text=f"is not a manifest: {error}")]) from None
    fault = next(faults(manifest, content), None)
    if fault is not None:
        raise CorruptError([Damage(file=file, text=fault)])
    return manifest


def limit_bytes(folder: Path) -> int:
    """The largest that a manifest can be beside the chunks that are there."""
    try:
        chunks = sum(CHUNK.fullmatch(entry.name) is not None for entry in folder.iterdir())
    except OSError as error:
        raise CorruptError([Damage(file=str(folder), text=f"cannot be read: {error.strerror}")]) from None
    return BYTES_A_CHUNK * (chunks + 1)


def faults(manifest: Manifest, content: bytes) -> Iterator[str]:
    """What is wrong with a decoded manifest."""
    if manifest.format != FORMAT:
        yield f"is of the format {manifest.format!r}, not {FORMAT!r}"
    if encode(manifest) != content:
        yield "is not what was written: its sha256 does not fit"
    if manifest.plan_sha256 != sha256(msgspec.json.encode(manifest.plan)):
        yield "the sha256 of its plan does not fit"
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) < len(names):
        yield "a tensor is described twice"
    for tensor in manifest.tensors:
        if tensor.dtype not in ITEMSIZE or any(length < 0 for length in tensor.shape):
            yield f"tensor {tensor.name} is of type {tensor.dtype} and shape {tensor.shape}, which no tensor is"
    yield from _chunk_faults(manifest)
    yield from _slice_faults(manifest)


def _chunk_faults(manifest: Manifest) -> Iterator[str]:
    files = [chunk.file for chunk in manifest.chunks]
    if len(set(files)) < len(files):
        yield "a chunk is listed twice"
    for chunk in manifest.chunks:
        if not CHUNK.fullmatch(chunk.file):
            yield f"places slices in {chunk.file!r}, which is not a chunk of this folder"
        if not 8 <= chunk.header_bytes <= min(chunk.bytes, HEADER_BYTES):
            yield f"{chunk.file} cannot have a header of {chunk.header_bytes} in {chunk.bytes} bytes"


def _slice_faults(manifest: Manifest) -> Iterator[str]:
    by_tensor: list[list[Region]] = [[] for _ in manifest.tensors]
    by_chunk: list[list[Slice]] = [[] for _ in manifest.chunks]
    for each in manifest.slices:
        if not (0 <= each.tensor < len(by_tensor) and 0 <= each.chunk < len(by_chunk)):
            yield "a slice is of a tensor or in a chunk that is not listed"
            return
        tensor = manifest.tensors[each.tensor]
        if each.end - each.begin != regions.size(each.region) * ITEMSIZE.get(tensor.dtype, 0):
            yield f"a slice of {tensor.name} has {each.end - each.begin} bytes, which is not its size"
        if each.end - each.begin > SLICE_BYTES:
            yield f"a slice of {tensor.name} has {each.end - each.begin} bytes, more than {SLICE_BYTES}"
        by_tensor[each.tensor].append(each.region)
        by_chunk[each.chunk].append(each)
    for chunk, held in zip(manifest.chunks, by_chunk, strict=True):
        yield from _chunk_tiling(chunk, held)
    for tensor, held in zip(manifest.tensors, by_tensor, strict=True):
        if math.prod(tensor.shape) and (fault := regions.tiling_fault(tensor.shape, held)):
            yield f"tensor {tensor.name}: {fault}"


def _chunk_tiling(chunk: Chunk, held: list[Slice]) -> Iterator[str]:
    """Slices fill a chunk from its header to its end, so that no byte of it is nobody's."""
    end = chunk.header_bytes
    for each in sorted(held, key=lambda each: each.begin):
        if each.begin != end:
            yield f"{chunk.file}: bytes {end}–{each.begin} belong to no slice, or to two"
            return
        end = each.end
    if end != chunk.bytes:
        yield f"{chunk.file}: bytes {end}–{chunk.bytes} belong to no slice"
