import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.calibrate import algorithm_bandwidth, bus_bandwidth, bus_share, fit, fits, fitted_seconds
from meshwright.hardware.profile import CollectiveTime

SIZES = [1024 * 4**power for power in range(9)]


def times(latency: float, bandwidth: float, kind: str = "all_reduce", ranks: int = 4) -> list[CollectiveTime]:
    return [CollectiveTime(kind=kind, ranks=ranks, bytes=size, seconds=latency + size / bandwidth) for size in SIZES]


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_latency_and_bandwidth_are_recovered_from_times_made_of_them(latency, bandwidth):
    found = fit(times(latency, bandwidth))
    small, large = SIZES[0], SIZES[-1]
    # Exact up to rounding, which the division by a small remainder makes larger.
    assert fitted_seconds(found, small) == pytest.approx(latency + small / bandwidth, rel=1e-6)
    assert fitted_seconds(found, large) == pytest.approx(latency + large / bandwidth, rel=1e-6)
    assert found.error < 1e-6


def test_one_disturbed_size_moves_little():
    rows = times(50e-6, 1e9)
    rows[2] = CollectiveTime(kind="all_reduce", ranks=4, bytes=rows[2].bytes, seconds=10 * rows[2].seconds)
    found = fit(rows)
    # Plain least squares would give this row its full say, and be out by 3 % in the latency.
    assert found.latency == pytest.approx(50e-6, rel=0.01)
    assert found.bandwidth == pytest.approx(1e9, rel=0.01)


def test_small_sizes_count_as_much_as_large_ones():
    rows = times(1e-3, 1e9)
    off = [CollectiveTime(kind=e.kind, ranks=4, bytes=e.bytes, seconds=e.seconds * 1.02) for e in rows[-2:]]
    # Two percent of 64 MiB are more than the whole latency; in relative error they are two percent.
    assert fit([*rows[:-2], *off]).latency == pytest.approx(1e-3, rel=0.02)


def test_no_time_is_below_zero():
    shrinking = [CollectiveTime(kind="send", ranks=2, bytes=size, seconds=1e-3 / size) for size in (1e3, 1e6)]
    found = fit(shrinking)
    assert found.latency >= 0
    assert found.bandwidth > 0
    steep = [CollectiveTime(kind="send", ranks=2, bytes=size, seconds=size**2) for size in (1.0, 2.0, 3.0)]
    assert fit(steep).latency == 0


def test_each_kind_among_the_same_ranks_has_its_own_fit():
    rows = [*times(1e-5, 1e9), *times(2e-5, 2e9, "all_gather"), *times(3e-5, 3e9, ranks=8)]
    found = {(each.kind, each.ranks): each.latency for each in fits(rows)}
    assert found == pytest.approx({("all_reduce", 4): 1e-5, ("all_gather", 4): 2e-5, ("all_reduce", 8): 3e-5})
    assert fits(rows[:1]) == (), "one size is no line"


def test_bandwidths_are_those_of_nccl_tests():
    rows = CollectiveTime(kind="all_reduce", ranks=8, bytes=8e9, seconds=2.0)
    assert algorithm_bandwidth(rows) == 4e9
    assert bus_bandwidth(rows) == 4e9 * 2 * 7 / 8
    assert [bus_share(kind, 8) for kind in ("all_gather", "reduce_scatter", "all_to_all")] == [7 / 8] * 3
    assert [bus_share(kind, 8) for kind in ("broadcast", "send")] == [1, 1]
