"""Where states live: memory by the page, files without a name, and how they share what there is."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.optim.host_memory import PAGE, Files, InMemory, PinnedMemory, page_starts, spread
from meshwright.optim.offload import cut

DTYPES = [torch.int16, torch.bfloat16, torch.float32]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(0, 10**11))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_no_more_than_was_allowed_stays_in_memory(sizes, host_bytes):
    near = spread(sizes, host_bytes)
    assert sum(size for size, is_near in zip(sizes, near, strict=True) if is_near) <= host_bytes
    assert all(near) == (host_bytes >= sum(sizes))


def test_what_stays_in_memory_is_spread_evenly():
    assert spread([1] * 8, 4) == [False, True] * 4


def test_arrays_begin_on_pages():
    assert page_starts([1, PAGE, PAGE + 1]) == [0, PAGE, 2 * PAGE, 4 * PAGE]
    arrays = PinnedMemory(pinned=False).take([5, 3000, 7], DTYPES)
    assert [len(array) for array in arrays] == [5, 3000, 7]
    assert all(array.data_ptr() % PAGE == 0 for array in arrays)
    assert all(not array.view(torch.uint8).any() for array in arrays)


def test_pieces_cover_every_element_once_in_order():
    pieces = cut([[(0, 10), (1, 3)], [], [(2, 4)]], 4)
    spans = [(each.group, each.weight, each.begin, each.end) for each in pieces]
    assert spans == [(0, 0, 0, 4), (0, 0, 4, 8), (0, 0, 8, 10), (0, 1, 0, 3), (2, 2, 0, 4)]
    assert [each.last for each in pieces] == [False, False, False, True, True]


def test_memory_is_used_where_it_lies():
    home = InMemory(PinnedMemory(pinned=False).take([100, 100], [torch.float32] * 2))
    (first, _) = home.fetch(10, 20, [])
    first.fill_(1.0)
    assert home.arrays[0].nonzero().flatten().tolist() == list(range(10, 20))


def test_a_file_gives_back_what_it_was_given_and_has_no_name(tmp_path):
    files = Files(tmp_path)
    home = files.take(10_000, DTYPES)
    assert os.listdir(tmp_path) == []
    room = PinnedMemory(pinned=False).take([PAGE * 4] * 3, DTYPES)
    for state in home.fetch(4096, 10_000, room):
        assert len(state) == 10_000 - 4096
        assert not state.any()
        state.copy_(torch.arange(len(state)).to(state.dtype))
    home.store(4096, 10_000, room)
    for state in home.fetch(0, 4096, room):
        assert not state.any(), "a neighbour was written over"
    for array in home.arrays:  # the same through memory, as checkpoints see it
        assert torch.equal(array[4096:], torch.arange(10_000 - 4096).to(array.dtype))
    home.arrays[2][4096:].fill_(7.0)  # and what a checkpoint restores is what the next update reads
    assert (home.fetch(4096, 10_000, room)[2] == 7).all()
    files.close()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        Files(tmp_path / "nowhere")
