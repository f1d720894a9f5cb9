import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import BLOCK, in_turn, keys, locate, mixed, root, shuffled, slots


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 1000, 4096, 4097, 100_003])
def test_the_order_is_a_permutation(count):
    order = shuffled(np.arange(count), count, key=7)
    assert np.array_equal(np.sort(order), np.arange(count))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_the_order_is_a_permutation_for_any_key(count, key):
    assert len(np.unique(shuffled(np.arange(count), count, key))) == count


@pytest.mark.parametrize("count", [10**9, 10**12, 2**40 + 1, 2**62])
def test_huge_counts_need_no_memory_and_stay_in_range(count):
    indices = np.append(np.arange(9_999) * (count // 10_000), count - 1)
    places = shuffled(indices, count, key=3)
    assert places.min() >= 0
    assert places.max() < count
    assert len(np.unique(places)) == 10_000


def test_the_order_looks_random():
    count = 50_000
    order = shuffled(np.arange(count), count, key=11)
    assert (order == np.arange(count)).sum() < 10  # a random permutation has one fixed point on average
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # and two neighbours that stay neighbours
    spread = np.bincount(order[: count // 2] // (count // 10), minlength=10)
    assert np.all(np.abs(spread - 2500) < 250)  # tenths of the range in the first half: 2500 ± 35, seven sigma
    # Correlation of place and index: its deviation is 1 / sqrt(count) = 0.0045, allowed five times over.
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.0225


def test_keys_differ_between_uses_and_between_numbers():
    assert root(1, "mixture") != root(2, "mixture")
    assert root(1, "mixture") != root(1, "source 0")
    assert len(np.unique(keys(root(1, "source 0"), np.arange(10_000)))) == 10_000


def test_the_order_never_changes_between_versions():
    sources, samples = locate(np.arange(6), 1, (100, 50), (3.0, 1.0))
    # Written down from the first version: runs that were started must be able to go on.
    assert sources.tolist() == [0, 0, 1, 0, 1, 0]
    assert samples.tolist() == [68, 94, 33, 87, 9, 56]


def test_each_epoch_sees_every_sample_once_in_an_order_of_its_own():
    _, samples = locate(np.arange(300), 5, (100,), (1.0,))
    epochs = samples.reshape(3, 100)
    assert all(len(set(epoch.tolist())) == 100 for epoch in epochs)
    assert (epochs[0] == epochs[1]).sum() < 20  # one on average if the two are unrelated


def test_the_seed_decides_the_order():
    indices = np.arange(100)
    assert np.array_equal(locate(indices, 1, (100,), (1.0,))[1], locate(indices, 1, (100,), (1.0,))[1])
    assert not np.array_equal(locate(indices, 1, (100,), (1.0,))[1], locate(indices, 2, (100,), (1.0,))[1])


def test_a_sample_does_not_depend_on_what_it_is_asked_with():
    indices = np.arange(3 * BLOCK)
    counts, weights = (1000, 77, 5), (5.0, 2.0, 1.0)
    whole = locate(indices, 9, counts, weights)
    for few in (indices[::7], indices[BLOCK - 3 : BLOCK + 3], indices[-1:]):
        part = locate(few, 9, counts, weights)
        assert np.array_equal(part[0], whole[0][few])
        assert np.array_equal(part[1], whole[1][few])


@settings(deadline=None, derandomize=True, max_examples=40)
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40).map(tuple))
def test_slots_fill_a_block_and_leave_no_source_out(weights):
    share = slots(weights)
    assert share.sum() == BLOCK
    assert share.min() >= 1


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.2, 0.1), (5.0, 3.0, 1.0, 1.0)])
def test_every_block_holds_the_mixture_exactly(weights):
    sources, _ = mixed(np.arange(5 * BLOCK), 3, weights)
    for block in sources.reshape(5, BLOCK):
        share = np.bincount(block, minlength=len(weights)) / BLOCK
        assert np.all(np.abs(share - np.array(weights) / sum(weights)) < 1 / BLOCK)


def test_a_short_stretch_is_mixed_too():
    sources, _ = mixed(np.arange(1000, 1400), 3, (3.0, 1.0))
    assert 60 < (sources == 1).sum() < 140  # 100 expected, with a deviation of 8


def test_each_source_of_a_mixture_is_counted_without_holes():
    sources, ordinals = mixed(np.arange(3 * BLOCK), 3, (3.0, 2.0, 1.0))
    for source in range(3):
        mine = np.sort(ordinals[sources == source])
        assert np.array_equal(mine, np.arange(len(mine)))


def test_a_source_is_read_whole_before_any_of_it_is_read_again():
    sources, samples = locate(np.arange(BLOCK), 4, (100, 50), (3.0, 1.0))
    for source, count in enumerate((100, 50)):
        mine = samples[sources == source]
        for start in range(0, len(mine) - count, count):
            assert len(np.unique(mine[start : start + count])) == count


def test_in_turn_means_in_order_and_again():
    sources, samples = in_turn(np.arange(7), (3,), (1.0,))
    assert sources.tolist() == [0] * 7
    assert samples.tolist() == [0, 1, 2, 0, 1, 2, 0]
