import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.shards import NO_ENDS, Shard, closed, join, open_folder, scan, token_dtype, write
from meshwright.spec.problem import InputError


def pieces(stream: np.ndarray, cuts: list[int]) -> list[Shard]:
    parts = np.split(stream, sorted(cuts))
    return [Shard(Path(f"{number}.bin"), part, NO_ENDS) for number, part in enumerate(parts)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(cuts=st.lists(st.integers(0, 50), max_size=6), start=st.integers(0, 50), count=st.integers(0, 50))
def test_shards_read_as_one_stream(cuts, start, count):
    stream = np.arange(50, dtype=np.uint16)
    tokens = join(pieces(stream, cuts))
    count = min(count, 50 - start)
    assert tokens.total == 50
    assert np.array_equal(tokens.read(start, count), stream[start : start + count])


def test_rows_are_filled_up():
    tokens = join(pieces(np.arange(20, dtype=np.uint16), [7, 11]))
    rows = tokens.rows(np.array([5, 18]), np.array([4, 2]), 4, fill=99)
    assert rows.tolist() == [[5, 6, 7, 8], [18, 19, 99, 99]]


def test_a_position_is_found_in_its_file():
    tokens = join(pieces(np.arange(20, dtype=np.uint16), [7, 11]))
    assert tokens.place(6) == (Path("0.bin"), 6)
    assert tokens.place(7) == (Path("1.bin"), 0)
    assert tokens.place(19) == (Path("2.bin"), 8)


def test_ends_of_shards_become_ends_of_the_stream():
    first = Shard(Path("a"), np.zeros(10, np.uint16), np.array([4, 10]))
    second = Shard(Path("b"), np.zeros(6, np.uint16), np.array([6]))
    assert join([first, second]).ends.tolist() == [4, 10, 16]


def test_ends_are_unknown_when_one_shard_does_not_know_them():
    first = Shard(Path("a"), np.zeros(10, np.uint16), np.array([4, 10]))
    second = Shard(Path("b"), np.zeros(6, np.uint16), NO_ENDS)
    assert len(join([first, second]).ends) == 0


def test_a_scan_finds_every_end_token_across_blocks_and_shards(monkeypatch):
    monkeypatch.setattr("meshwright.data.shards.SCAN", 4)
    stream = np.array([1, 9, 2, 3, 9, 4, 5, 6, 7, 9, 9, 8], np.uint16)
    assert scan(join(pieces(stream, [5])), end_token=9).tolist() == [2, 5, 10, 11, 12]
    assert scan(join(pieces(stream[:11], [5])), end_token=9).tolist() == [2, 5, 10, 11]


def test_closed_ends_rise_and_reach_the_end():
    assert closed(np.array([0, 3, 3, 5]), 8).tolist() == [3, 5, 8]


def documents(vocab: int) -> list[np.ndarray]:
    return [np.array([5, vocab - 1, 0]), np.array([0]), np.array([7, 0])]


@pytest.mark.parametrize(("vocab", "dtype"), [(300, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (128_256, "<u4")])
def test_a_folder_gives_back_what_was_written(tmp_path, vocab, dtype):
    assert write(tmp_path, documents(vocab), vocab, end_token=0) == 3
    shard = open_folder(tmp_path)
    assert shard.tokens.tolist() == [5, vocab - 1, 0, 0, 7, 0]
    assert shard.ends.tolist() == [3, 4, 6]
    assert shard.tokens.dtype == token_dtype(vocab) == np.dtype(dtype)
    assert isinstance(shard.tokens.base, np.memmap)
    assert json.loads((tmp_path / "meta.json").read_text())["documents"] == 3


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
def test_a_folder_that_lost_bytes_is_refused(tmp_path, name):
    write(tmp_path, documents(300), 300, end_token=0)
    held = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(held[:-2])
    with pytest.raises(InputError, match=f"{len(held)} bytes of {name} and holds {len(held) - 2}; delete the folder"):
        open_folder(tmp_path)


def test_a_folder_without_its_meta_is_refused(tmp_path):
    with pytest.raises(InputError, match="no readable meta"):
        open_folder(tmp_path)
