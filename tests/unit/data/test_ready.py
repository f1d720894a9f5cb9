import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import sources
from meshwright.data.shards import write
from meshwright.spec.problem import InputError


def write_llmc(file: Path, tokens: list[int], magic: int = 20240520, version: int = 1, promised: int | None = None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if promised is None else promised
    body = np.array(tokens, "<u4" if magic == 20240801 else "<u2")
    file.write_bytes(header.tobytes() + body.tobytes())
    return file


def write_megatron(file: Path, sequences: list[list[int]], documents: list[int], code: int = 8) -> Path:
    """The pair of files as Megatron-LM lays them out."""
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    file.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * dtype.itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents))
    rest = sizes.tobytes() + pointers.tobytes() + np.array(documents, "<i8").tobytes()
    file.with_suffix(".idx").write_bytes(head + rest)
    return file


def test_nanogpt_tokens_have_no_header(tmp_path):
    file = tmp_path / "train.bin"
    np.array([1, 2, 65_535], "<u2").tofile(file)
    assert sources.kind(file) == "nanogpt"
    assert sources.read_tokens(file, "nanogpt").tokens.tolist() == [1, 2, 65_535]


@pytest.mark.parametrize(("magic", "version", "token"), [(20240520, 1, 50_256), (20240801, 7, 128_001)])
def test_llmc_tokens_are_as_wide_as_their_header_says(tmp_path, magic, version, token):
    file = write_llmc(tmp_path / "a.bin", [token, 1, 2], magic, version)
    assert sources.kind(file) == "llmc"
    assert sources.read_tokens(file, "llmc").tokens.tolist() == [token, 1, 2]


@pytest.mark.parametrize("code", [8, 4])
def test_megatron_documents_may_have_several_sequences(tmp_path, code):
    file = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5], [6], [7, 8]], [0, 2, 3, 4], code)
    assert sources.kind(file) == "megatron"
    shard = sources.read_tokens(file, "megatron")
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shard.ends.tolist() == [5, 6, 8]


def test_our_own_folder_is_known(tmp_path):
    write(tmp_path, [np.array([1, 70_000, 0])], 70_001, end_token=0)
    assert sources.kind(tmp_path / "tokens.bin") == "folder"
    assert sources.read_tokens(tmp_path / "tokens.bin", "folder").tokens.tolist() == [1, 70_000, 0]


def broken_llmc(folder: Path) -> Path:
    return write_llmc(folder / "a.bin", [1, 2, 3], promised=5)


def strange_llmc(folder: Path) -> Path:
    return write_llmc(folder / "a.bin", [1, 2, 3], version=9)


def short_llmc(folder: Path) -> Path:
    (folder / "a.bin").write_bytes(write_llmc(folder / "a.bin", [1]).read_bytes()[:100])
    return folder / "a.bin"


def odd_nanogpt(folder: Path) -> Path:
    (folder / "a.bin").write_bytes(b"abc")
    return folder / "a.bin"


def empty(folder: Path) -> Path:
    (folder / "a.bin").touch()
    return folder / "a.bin"


def lost_index(folder: Path) -> Path:
    write_megatron(folder / "a.bin", [[1, 2]], [0, 1]).with_suffix(".idx").unlink()
    return folder / "a.bin"


def cut_index(folder: Path) -> Path:
    file = write_megatron(folder / "a.bin", [[1, 2]], [0, 1])
    file.with_suffix(".idx").write_bytes(file.with_suffix(".idx").read_bytes()[:-8])
    return file


def strange_index(folder: Path) -> Path:
    file = write_megatron(folder / "a.bin", [[1, 2]], [0, 1])
    file.with_suffix(".idx").write_bytes(b"something else of some length, no index at all")
    return file


def wild_index(folder: Path) -> Path:
    return write_megatron(folder / "a.bin", [[1, 2]], [0, 7])


def cut_megatron(folder: Path) -> Path:
    write_megatron(folder / "a.bin", [[1, 2, 3]], [0, 1]).write_bytes(b"1234")
    return folder / "a.bin"


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (broken_llmc, "llmc", "says 5 tokens, 1034 bytes with itself, and the file has 1030 bytes"),
        (strange_llmc, "llmc", "begins with 20240520, version 9"),
        (short_llmc, "llmc", "holds 100 bytes, less than its header of 1024"),
        (odd_nanogpt, "nanogpt", "holds 3 bytes, an odd number"),
        (empty, "nanogpt", "is empty"),
        (lost_index, "megatron", "a.idx is missing beside a.bin"),
        (cut_index, "megatron", "says 1 sequences, 62 bytes, and the file has 54 bytes"),
        (strange_index, "megatron", "does not begin as a Megatron index does"),
        (wild_index, "megatron", "names sequences that it does not hold"),
        (cut_megatron, "megatron", "says 6 bytes of tokens, and a.bin has 4"),
    ],
)
def test_a_header_that_disagrees_with_its_file_is_refused(tmp_path, make, kind, words):
    with pytest.raises(InputError, match=words):
        sources.read_tokens(make(tmp_path), kind)
