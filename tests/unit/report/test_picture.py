import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.report.plan_charts import ChartEntry, Point, StackedBar, between, front, ticks


def test_the_front_is_what_nothing_beats_in_both():
    points = [
        Point(label="small", gib=10, seconds=9),
        Point(label="beaten", gib=20, seconds=10),
        Point(label="fast", gib=30, seconds=5),
        Point(label="as fast, larger", gib=40, seconds=5),
    ]
    assert [point.label for point in front(points) if point.front] == ["small", "fast"]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=20))
def test_every_point_is_on_the_front_or_beaten_by_one_that_is(values):
    points = front(Point(label=str(n), gib=gib, seconds=seconds) for n, (gib, seconds) in enumerate(values))
    best = [point for point in points if point.front]
    for point in points:
        beaten = any(other.gib <= point.gib and other.seconds <= point.seconds for other in best if other != point)
        assert point.front != beaten


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.floats(1e-6, 1e9), st.floats(0, 0.99), st.integers(2, 10))
def test_ticks_are_few_evenly_apart_and_within(high, share, most):
    low = high * share
    found = ticks(high, low, most)
    assert 1 <= len(found) <= most + 1
    slip = high * 1e-6  # round numbers are products of floats
    assert all(low - slip <= tick <= high + slip for tick in found)
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-4) for step in steps)


def test_equal_seconds_still_span_something():
    low, high = between([Point(label="one", gib=1, seconds=5.0)])
    assert low < 5.0 < high


def test_a_whole_is_the_sum_of_its_parts():
    whole = StackedBar(
        title="", unit="s", entries=tuple(ChartEntry(name="x", value=value) for value in (2.0, 1.5, -0.5))
    )
    assert whole.total == 3.0
