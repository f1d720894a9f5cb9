import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint import format, state

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def cut(draw):
    """A shape, and the tensor cut into a grid, as plans do."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    parts = [sorted(draw(st.sets(st.integers(1, 8), max_size=2))) for _ in shape]
    grid = [()]
    for length, inner in zip(shape, parts, strict=True):
        edges = [0, *(edge for edge in inner if edge < length), length]
        grid = [(*region, pair) for region in grid for pair in itertools.pairwise(edges)]
    return tuple(shape), grid


@given(cut(), st.integers(1, 64))
@QUICK
def test_pieces_tile_their_region_and_keep_their_size(case, limit):
    shape, grid = case
    pieces = [piece for region in grid for piece in state.region_pieces(region, 4, limit)]
    assert state.tiling_fault(shape, pieces) is None
    assert all(state.region_size(piece) * 4 <= max(limit, 4) for piece in pieces)


@given(cut())
@QUICK
def test_a_hole_and_an_overlap_are_faults(case):
    shape, grid = case
    assert state.tiling_fault(shape, grid) is None
    assert state.tiling_fault(shape, grid[1:]) == "a part of it is in no slice"
    assert state.tiling_fault(shape, [*grid, grid[0]]) == "slices overlap"
    outside = tuple((begin, end + shape[0]) for begin, end in grid[0])
    assert state.tiling_fault(shape, [outside]) == "a slice reaches outside"


@given(cut(), cut())
@QUICK
def test_what_two_grids_share_covers_each_once(one, other):
    shape = tuple(min(left, right) for left, right in zip(one[0], other[0], strict=False))
    mine = [region[: len(shape)] for region in one[1]]
    theirs = [region[: len(shape)] for region in other[1]]
    whole = tuple((0, length) for length in shape)
    times = np.zeros(shape, dtype=int)
    for left in {state.overlap(region, whole) for region in mine} - {None}:
        for right in {state.overlap(region, whole) for region in theirs} - {None}:
            both = state.overlap(left, right)
            if both is not None:
                times[state.inside(both, whole)] += 1
    assert (times == 1).all()


@pytest.mark.parametrize("copies", [1, 2, 7])
def test_equal_holders_share_the_writing(copies):
    sizes = [(7 * number) % 50 + 1 for number in range(200)]
    chosen = state.writers(sizes, copies)
    loads = [sum(size for size, writer in zip(sizes, chosen, strict=True) if writer == each) for each in range(copies)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@given(cut(), st.integers(0, 2**32))
@QUICK
def test_a_fingerprint_does_not_depend_on_the_cut(case, seed):
    shape, grid = case
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    whole = format.slice_share("w", tuple((0, length) for length in shape), bits)
    total = format.NOTHING
    for region in grid:
        inside = tuple(slice(begin, end) for begin, end in region)
        total = format.add(total, format.slice_share("w", region, bits[inside]))
    assert total == whole


@given(st.integers(0, 31), st.integers(0, 5), st.integers(0, 3))
@QUICK
def test_a_fingerprint_sees_every_flipped_bit_another_name_and_another_place(bit, row, column):
    bits = np.arange(24, dtype=np.uint32).reshape(6, 4)
    region = ((0, 6), (0, 4))
    whole = format.slice_share("w", region, bits)
    flipped = bits.copy()
    flipped[row, column] ^= np.uint32(1 << bit)
    assert all(left != right for left, right in zip(format.slice_share("w", region, flipped), whole, strict=True))
    assert format.slice_share("v", region, bits) != whole
    assert format.slice_share("w", region, np.roll(bits, 1, axis=0)) != whole
    assert format.slice_share("w", region, bits[:, ::-1].copy()) != whole


def test_an_empty_region_has_no_pieces():
    assert list(state.region_pieces(((3, 3), (0, 4)), 4, 100)) == []
    assert state.region_size(()) == math.prod(()) == 1
