"""Idle time and held activations of pipeline schedules: the closed forms of the papers, and the figures they give.

Everywhere forward, input gradient and weight gradient take one second a chunk, and sending takes none.
"""

from itertools import product

import pytest

from meshwright.cost.simulate import Timeline, even_cost, play
from meshwright.spec.schedule import actions, default_chunks, legal, stage_ranks

EXACT = 1e-12  # whole seconds add up exactly; a division and a mean are rounded
GRID = list(product(range(1, 9), range(1, 4), (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 24, 29)))  # pp, chunks, microbatches


def played(schedule: str, pp: int, chunks: int, microbatches: int) -> Timeline:
    orders = actions(schedule, pp, chunks, microbatches)
    return play(orders, stage_ranks(schedule, pp, chunks), even_cost(pp * chunks, chunks))


def peaks(schedule: str, pp: int, chunks: int, microbatches: int) -> list[float]:
    return [peak.activation for peak in played(schedule, pp, chunks, microbatches).peaks]


def holds(schedule: str, idle, least: int = 1) -> int:
    """Checks a closed form for the bubble on the grid, from `least` microbatches a rank; how often it was checked."""
    shapes = [(pp, chunks, m) for pp, chunks, m in GRID if m >= least * pp and not legal(schedule, pp, chunks, m)]
    for shape in shapes:
        assert played(schedule, *shape).bubble == pytest.approx(idle(*shape), abs=EXACT), shape
    return len(shapes)


def test_naive_works_on_one_rank_at_a_time():
    assert holds("naive", lambda pp, chunks, m: 1 - 1 / pp, least=0) > 50


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_alike(schedule):
    assert holds(schedule, lambda pp, chunks, m: (pp - 1) / (m + pp - 1), least=0) > 50


@pytest.mark.parametrize("schedule", ["interleaved", "looped"])
def test_chunks_divide_the_bubble(schedule):
    assert holds(schedule, lambda pp, chunks, m: (pp - 1) / (chunks * m + pp - 1)) > 50


@pytest.mark.parametrize(("schedule", "least"), [("zb1p", 1), ("zbv", 2), ("dualpipev", 2)])
def test_zero_bubble_schedules_idle_only_until_the_first_microbatch_comes(schedule, least):
    # The last rank cannot begin before pp - 1 forwards have run, so no schedule of these placements can do better.
    assert holds(schedule, lambda pp, chunks, m: (pp - 1) / (3 * chunks * m + pp - 1), least) > 50


@pytest.mark.parametrize(
    ("schedule", "percent"),
    [
        ("gpipe", (27.3, 15.8, 17.9)),
        ("1f1b", (27.3, 15.8, 17.9)),
        ("looped", (15.8, 8.6, 9.9)),
        ("interleaved", (15.8, 8.6, 9.9)),
        ("zb1p", (5.9, 3.0, 3.5)),
        ("zbv", (5.9, 3.0, 3.5)),
        ("dualpipev", (5.9, 3.0, 3.5)),
    ],
)
def test_well_known_figures(schedule, percent):
    chunks = default_chunks(schedule)
    bubbles = [played(schedule, pp, chunks, microbatches).bubble for pp, microbatches in ((4, 8), (4, 16), (8, 32))]
    assert tuple(round(100 * bubble, 1) for bubble in bubbles) == percent


# Held activations, in units of those of all layers of one rank for one microbatch.
def test_naive_holds_one_microbatch():
    assert peaks("naive", 4, 1, 8) == [1, 1, 1, 1]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("looped", 2)])
def test_all_forwards_first_hold_every_microbatch(schedule, chunks):
    assert peaks(schedule, 4, chunks, 8) == [8, 8, 8, 8]


@pytest.mark.parametrize(("pp", "microbatches"), [(4, 8), (4, 2), (8, 32), (1, 3)])
def test_1f1b_holds_a_microbatch_for_itself_and_each_rank_behind(pp, microbatches):
    assert peaks("1f1b", pp, 1, microbatches) == [min(microbatches, pp - rank) for rank in range(pp)]


def test_interleaved_holds_more_than_1f1b():
    assert peaks("interleaved", 4, 2, 8) == [5.5, 4.5, 3.5, 2.5]
    assert peaks("interleaved", 4, 4, 8) == [4.75, 4.25, 3.75, 3.25]  # (3 rounds of 4 + 2 a rank behind + 1) ÷ 4


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb1p", 1), ("zb1p", 2), ("zb1p", 4), ("zbv", 2)])
def test_zero_bubble_schedules_hold_as_many_microbatches_as_ranks(schedule, chunks, pp):
    assert peaks(schedule, pp, chunks, 4 * pp) == [pp] * pp


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dualpipev_holds_half_a_microbatch_more(pp):
    assert peaks("dualpipev", pp, 2, 4 * pp) == [pp + 0.5] * pp
