"""A saved step on disk: chunks of slices in safetensors files, a manifest, and the pointer to the newest step.

The manifest says where each slice lies and has the digests that everything must have. It is canonical: decoded and
encoded again it is the same bytes. So nothing can hide in it that the decoder would pass over, a key that comes twice
for example. It ends with its own sha256. The logical digest of a state is a sum over its elements, each weighed by a
hash of its name and index: the same under every plan, and every rank adds its own part.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from meshwright.checkpoint import storage
from meshwright.checkpoint.state import (
    SLICE_BYTES,
    STATE_DTYPES,
    Region,
    Shape,
    region_size,
    tiling_fault,
)
from meshwright.checkpoint.storage import CorruptError, Damage, Disk
from meshwright.config.run import Checkpoint
from meshwright.config.weights import CHECKPOINTS, MANIFEST
from meshwright.config.weights import STEP as STEP
from meshwright.config.weights import present as present
from meshwright.config.weights import step_name as name
from meshwright.spec.problem import UNDECODABLE

FORMAT = "meshwright checkpoint 2"
WHOLE_FILE = "meshwright checkpoint 1"  # of a chunk it has the sha256 of the file, not of the digests of its parts
FORMATS = (FORMAT, WHOLE_FILE)
LATEST = "latest"
CHUNK = re.compile(r"chunk\.rank\d{1,7}\.safetensors")
POINTER = re.compile(rb"step-(0|[1-9]\d{0,17})\n([0-9a-f]{64})\n")
POINTER_BYTES = 200
ITEMSIZE = {name: dtype.itemsize for name, dtype in STATE_DTYPES.items()}

# A chunk of the largest models describes some thousand slices in a few hundred bytes each. Whoever sends a larger
# manifest with few chunks is refused before a byte is read.
BYTES_A_CHUNK = 4 * 2**20
HEADER_BYTES = 100 * 10**6  # as in other readers of safetensors

# The logical digest: two sums modulo 2⁶⁴, whose weights are those of splitmix64 (Steele, Lea and Flood 2014).
LANES = 2
WORD = 2**64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
LAST_SHIFT = np.uint64(31)
Share = tuple[int, ...]  # one number a lane
NOTHING: Share = (0,) * LANES
BLOCK_ELEMENTS = 2**18  # 2 MiB as they are summed
_ONE = np.ones(1, dtype=np.uint64)


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far a run has come. Draws and the order of samples are pure functions of the seed and these numbers."""

    step: int
    samples: int  # of the order of samples, those that were used: the next step begins with this one
    seed: int
    updates: float  # steps that moved the weights; others met a gradient that was not finite
    loss_scale: float
    streak: float  # finite steps since the loss scale last moved
    adascale: tuple[float, ...] = ()  # its averages, and the norms of the newest step
    base: str = ""  # the digest of weights that are frozen, which are not saved; none are: ""

    def counted(self, counters: Sequence[float]) -> "Progress":
        """With what a device has counted: updates, the loss scale, its streak, and AdaScale's newest norms, if any."""
        updates, loss_scale, streak, *norms = counters
        adascale = (*self.adascale, *norms)
        return msgspec.structs.replace(self, updates=updates, loss_scale=loss_scale, streak=streak, adascale=adascale)


class TensorDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole tensor."""

    name: str
    dtype: str  # as safetensors writes it
    shape: Shape


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of slices."""

    file: str
    bytes: int
    sha256: str  # of the digests of its parts, see `tree_sha256`
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
    run: str  # the digest of the run's mathematics, which must be the same to resume
    plan: dict[str, Any]  # under which it was saved; any other may resume from it
    plan_sha256: str
    state: str  # the logical digest: the same for the same state under any plan
    tensors: tuple[TensorDescription, ...]
    chunks: tuple[Chunk, ...]
    slices: tuple[Slice, ...]
    sha256: str = ""  # of this manifest with this field empty


class Digested(Protocol):
    """Something with a digest: a slice that is listed, or one that was just written."""

    @property
    def sha256(self) -> str: ...


def tree_sha256(header_sha256: str, slices: Iterable[Digested]) -> str:
    """The sha256 of a chunk as a tree: over the digests of its header and its slices, in the order of the file.

    Its leaves are hashed side by side, each byte once.
    """
    return sha256("".join([header_sha256, *(each.sha256 for each in slices)]).encode())


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
    return decoded(storage.read_small(folder, MANIFEST, limit_bytes(folder)), str(folder / MANIFEST))


def decoded(content: bytes, file: str) -> Manifest:
    """The same of a manifest's bytes; `file` is where they are from."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (*UNDECODABLE, RecursionError, OverflowError) as error:
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
    if manifest.format not in FORMATS:
        yield f"is of the format {manifest.format!r}, not {FORMAT!r}"
    if encode(manifest) != content:
        yield "checksum mismatch (sha256): is not what was written"
    if manifest.plan_sha256 != sha256(msgspec.json.encode(manifest.plan)):
        yield "checksum mismatch (sha256) of its plan"
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
        if each.end - each.begin != region_size(each.region) * ITEMSIZE.get(tensor.dtype, 0):
            yield f"a slice of {tensor.name} has {each.end - each.begin} bytes, which is not its size"
        if each.end - each.begin > SLICE_BYTES:
            yield f"a slice of {tensor.name} has {each.end - each.begin} bytes, more than {SLICE_BYTES}"
        by_tensor[each.tensor].append(each.region)
        by_chunk[each.chunk].append(each)
    for chunk, held in zip(manifest.chunks, by_chunk, strict=True):
        held.sort(key=lambda each: each.begin)
        yield from _chunk_tiling(chunk, held)
        if manifest.format == FORMAT and chunk.sha256 != tree_sha256(chunk.header_sha256, held):
            yield f"{chunk.file}: checksum mismatch (sha256) of the digests of its slices"
    for tensor, held in zip(manifest.tensors, by_tensor, strict=True):
        if math.prod(tensor.shape) and (fault := tiling_fault(tensor.shape, held)):
            yield f"tensor {tensor.name}: {fault}"


def _chunk_tiling(chunk: Chunk, held: list[Slice]) -> Iterator[str]:
    """Slices fill a chunk from its header to its end, so that no byte of it is nobody's."""
    end = chunk.header_bytes
    for each in held:
        if each.begin != end:
            yield f"{chunk.file}: bytes {end}–{each.begin} belong to no slice, or to two"
            return
        end = each.end
    if end != chunk.bytes:
        yield f"{chunk.file}: bytes {end}–{chunk.bytes} belong to no slice"


def slice_share(name: str, region: Region, bits: np.ndarray) -> Share:
    """What a slice contributes; bits are its elements as unsigned integers, in the shape of the region."""
    # An element's weight is the product of one odd number a dim: as good here, and a pass costs one product each.
    dims = region or ((0, 1),)
    weights = [[_weights(f"{name}/{lane}/{dim}", *dims[dim]) for dim in range(len(region))] for lane in range(LANES)]
    rows = _row_sums(bits.reshape(-1, dims[-1][1] - dims[-1][0]), [each[-1] if each else _ONE for each in weights])
    lanes = []
    for lane, total in enumerate(rows):
        total = total.reshape([end - begin for begin, end in region[:-1]])
        for factors in reversed(weights[lane][:-1]):
            total = total @ factors
        lanes.append(int(total) * int(_weights(f"{name}/{lane}", 0, 1)[0]) % WORD)
    return tuple(lanes)


def _row_sums(bits: np.ndarray, weights: Sequence[np.ndarray]) -> np.ndarray:
    """The weighed sum of each row, once for each lane's weights.

    A block of rows is widened to 64 bits at a time, into memory that the processor's cache still holds when it is
    summed: three times as fast as widening all of it, and nothing here holds up other threads of Python.
    """
    count, width = bits.shape
    rows = max(BLOCK_ELEMENTS // max(width, 1), 1)
    sums = np.empty((len(weights), count), dtype=np.uint64)
    wide = np.empty((min(rows, count), width), dtype=np.uint64)
    for begin in range(0, count, rows):
        block = wide[: min(rows, count - begin)]
        np.copyto(block, bits[begin : begin + rows])
        for lane, factors in enumerate(weights):
            np.einsum("ij,j->i", block, factors, out=sums[lane, begin : begin + rows])
    return sums


def add(one: Share, other: Share) -> Share:
    """Two contributions together."""
    return tuple((left + right) % WORD for left, right in zip(one, other, strict=True))


def digest_text(total: Share) -> str:
    """A sum of contributions as hexadecimal digits."""
    return "".join(f"{lane:016x}" for lane in total)


def _weights(key: str, begin: int, end: int) -> np.ndarray:
    """Odd numbers, each a pure function of the key and its index."""
    start = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    state = np.arange(begin, end, dtype=np.uint64) * GOLDEN + start
    for shift, factor in MIX:
        state = (state ^ (state >> shift)) * factor
    return (state ^ (state >> LAST_SHIFT)) | np.uint64(1)


def home(folder: Path) -> Path:
    """Where a run keeps its steps; a link in its place is refused, so that nothing is written elsewhere."""
    path = folder / CHECKPOINTS
    if path.is_symlink():
        raise CorruptError([Damage(file=str(path), text="is a link, and a run writes only inside its own folder")])
    return path


def point(disk: Disk, home: Path, step: int, digest: str) -> None:
    """Have `latest` name a step and, on a second line, the sha256 in its manifest."""
    storage.write_whole(disk, home / LATEST, f"{name(step)}\n{digest}\n".encode())


def pointed(home: Path) -> tuple[int, str] | None:
    """The step that `latest` names, and its manifest's sha256; None where nothing was ever saved."""
    if not (home / LATEST).exists() and not (home / LATEST).is_symlink():
        return None
    found = POINTER.fullmatch(storage.read_small(home, LATEST, POINTER_BYTES))
    if found is None:
        text = "does not name a step and the sha256 of its manifest"
        raise CorruptError([Damage(file=str(home / LATEST), text=text)])
    return int(found[1]), found[2].decode()


def pointer_fault(home: Path, newest: int, digest: str) -> Damage | None:
    """What `latest` says that is not so, given the newest step that is whole."""
    file = str(home / LATEST)
    try:
        found = pointed(home)
    except CorruptError as error:
        return error.damages[0]
    if found is None:
        return Damage(file=file, text=f"is missing, though {name(newest)} is whole")
    if found[0] != newest:
        return Damage(file=file, text=f"points to {name(found[0])}; the newest whole step is {name(newest)}")
    if found[1] != digest:
        return Damage(file=file, text=f"names another {MANIFEST} of {name(newest)}")
    return None


def superfluous(steps: list[int], setting: Checkpoint, best: int | None = None) -> list[int]:
    """Which steps may go once the newest of them is known to be good.

    Of each multiple of `keep_every` the first step from there on stays: a save may have been postponed past it.
    """
    spaced = setting.keep_every or math.inf
    earlier = dict(zip(steps, [0, *steps], strict=False))
    others = [step for step in steps[: -setting.keep_last] if step != best]
    return [step for step in others if step // spaced == earlier[step] // spaced]


def discard(disk: Disk, home: Path, step: int) -> None:
    """Remove a step so that at no time a part of it stands under its name."""
    hidden = home / f".{name(step)}.old"
    disk.remove(hidden)
    disk.rename(home / name(step), hidden)
    disk.remove(hidden)


def sweep(disk: Disk, home: Path) -> None:
    """Remove what saves that were cut short have left."""
    if home.is_dir():
        for entry in list(home.iterdir()):
            if entry.name.startswith(".") and entry.name.endswith((".partial", ".old")):
                disk.remove(entry)
