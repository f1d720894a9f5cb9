"""Tokens that other tools wrote: nanoGPT, llm.c (and modded-nanogpt) and Megatron. Headers are held against sizes."""

import struct
from pathlib import Path
from typing import Literal

import numpy as np

from meshwright.data.mistake import mistake
from meshwright.data.shards import NO_ENDS, Shard, closed, mapped, open_folder

ReadyKind = Literal["nanogpt", "llmc", "megatron", "folder"]  # folder: our own

LLMC_HEADER = 1024  # bytes: 256 int32
LLMC_DTYPE = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # (magic, version); 7 is Llama 3's
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
MEGATRON_DTYPE = {3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}


def kind(file: Path) -> ReadyKind:
    """Who wrote a .bin file, by what lies beside it and how it begins."""
    if file.name == "tokens.bin" and (file.parent / "meta.json").exists():
        return "folder"
    if file.with_suffix(".idx").exists():
        return "megatron"
    with file.open("rb") as stream:
        head = stream.read(8)
    known = len(head) == 8 and struct.unpack("<2i", head)[0] in {magic for magic, _ in LLMC_DTYPE}
    return "llmc" if known else "nanogpt"


def read(file: Path, kind: ReadyKind) -> Shard:
    """One ready shard, or an InputError that says what is wrong with it."""
    if not file.stat().st_size:
        raise mistake(f"{file} is empty", "write it again, or leave it out")
    match kind:
        case "folder":
            return open_folder(file.parent)
        case "nanogpt":
            return _nanogpt(file)
        case "llmc":
            return _llmc(file)
        case "megatron":
            return _megatron(file)


def _nanogpt(file: Path) -> Shard:
    size = file.stat().st_size
    if size % 2:
        raise mistake(f"{file} holds {size} bytes, an odd number, and its tokens have 2 bytes each", "write it again")
    return Shard(file, mapped(file, np.dtype("<u2")), NO_ENDS)


def _llmc(file: Path) -> Shard:
    size = file.stat().st_size
    if size < LLMC_HEADER:
        raise mistake(f"{file} holds {size} bytes, less than its header of {LLMC_HEADER}", "fetch or write it again")
    magic, version, count = np.fromfile(file, "<i4", 3).tolist()
    dtype = LLMC_DTYPE.get((magic, version))
    if dtype is None:
        raise mistake(
            f"{file} begins with {magic}, version {version}, which no known llm.c shard does",
            'write it again, or set data.format = "nanogpt" if it has no header',
        )
    promised = LLMC_HEADER + count * dtype.itemsize
    if size != promised:
        raise mistake(
            f"{file} promises {count} tokens, {promised} bytes with its header, and holds {size} bytes",
            "fetch or write it again",
        )
    return Shard(file, mapped(file, dtype, LLMC_HEADER), NO_ENDS)


def _megatron(file: Path) -> Shard:
    index = file.with_suffix(".idx")
    if not index.exists():
        raise mistake(f"{index} is missing beside {file.name}", "copy the .idx file that was written with it")
    dtype, sizes, documents = _index(index)
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    held, promised = file.stat().st_size, int(bounds[-1]) * dtype.itemsize
    if held != promised:
        text = f"{index} promises {promised} bytes of tokens and {file.name} holds {held}"
        raise mistake(text, "copy both files again")
    if np.any(np.diff(documents, prepend=0, append=len(sizes)) < 0):
        raise mistake(f"{index} names sequences that it does not hold", "copy both files again")
    return Shard(file, mapped(file, dtype), closed(bounds[documents], int(bounds[-1])))


def _index(index: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Type of the tokens, size of every sequence, the sequence at which each document begins."""
    start = MEGATRON_HEADER.size
    with index.open("rb") as stream:
        head = stream.read(start)
    if len(head) < start or not head.startswith(MEGATRON_MAGIC):
        raise mistake(f"{index} does not begin as a Megatron index does", "copy both files again")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_DTYPE:
        raise mistake(
            f"{index} is version {version} with tokens of type {code}, not version 1 with integers", "write it again"
        )
    promised, held = start + sequences * 12 + documents * 8, index.stat().st_size
    if promised != held:
        raise mistake(
            f"{index} promises {sequences} sequences, {promised} bytes, and holds {held} bytes", "copy both files again"
        )
    sizes = mapped(index, np.dtype("<i4"), start, sequences)
    # Between the two lie the byte positions of the sequences, which follow from the sizes.
    return MEGATRON_DTYPE[code], sizes, mapped(index, np.dtype("<i8"), start + sequences * 12, documents)
