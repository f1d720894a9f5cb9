import time
from itertools import product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.simulate import StageCost, even_cost, play, render
from meshwright.spec.schedule import Schedule, actions, awaited, legal, stage_ranks

ALL = get_args(Schedule)
SHAPES = [shape for shape in product(ALL, range(1, 9), range(1, 5), range(1, 33)) if legal(*shape) is None]
shapes = st.sampled_from(SHAPES)
quarters = st.integers(1, 40).map(lambda count: count / 4)  # sums of quarters are exact, so times compare with ==
some = settings(deadline=None, max_examples=40, derandomize=True)


def played(schedule, pp, chunks, microbatches, cost=None, send_seconds=0.0):
    orders, placement = actions(schedule, pp, chunks, microbatches), stage_ranks(schedule, pp, chunks)
    return play(orders, placement, cost or even_cost(pp * chunks, chunks), send_seconds)


@st.composite
def uneven_costs(draw, stages: int) -> StageCost:
    seconds = st.lists(quarters, min_size=stages, max_size=stages).map(tuple)
    return StageCost(
        forward_seconds=draw(seconds),
        input_seconds=draw(seconds),
        weight_seconds=draw(seconds),
        activation=draw(seconds),
        kept_after_input=draw(st.sampled_from([0.0, 0.25, 1.0])),
    )


def test_two_stages_by_hand():
    timeline = played("1f1b", 2, 1, 2)
    spans = [[(str(slot.action), slot.start, slot.end) for slot in row] for row in timeline.rows]
    assert spans == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.seconds == 9
    assert timeline.busy_seconds == (6, 6)
    assert timeline.bubbles == (1 / 3, 1 / 3)
    assert timeline.bubble == 1 / 3


def test_a_send_delays_the_other_rank_and_occupies_neither():
    timeline = played("1f1b", 2, 1, 2, send_seconds=0.5)
    first, last = timeline.rows
    assert [slot.start for slot in last] == [1.5, 2.5, 4.5, 5.5]  # only its first forward had to wait
    assert [slot.start for slot in first] == [0, 1, 5, 8]
    assert timeline.busy_seconds == (6, 6)


def test_the_turn_of_a_v_sends_nothing():
    near, far = played("zbv", 1, 2, 4), played("zbv", 1, 2, 4, send_seconds=100.0)
    assert near == far


def test_a_split_backward_hands_its_gradient_on_before_its_weights_are_done():
    cost = even_cost(2)
    whole, split = played("1f1b", 2, 1, 1, cost), played("zb1p", 2, 1, 1, cost)
    assert [slot.start for slot in whole.rows[0]] == [0, 4]
    assert [slot.start for slot in split.rows[0]] == [0, 3, 4]


def test_a_heavy_last_stage_sets_the_pace():
    cost = StageCost(
        forward_seconds=(1, 1, 1, 5), input_seconds=(1, 1, 1, 5), weight_seconds=(1, 1, 1, 5), activation=(1, 1, 1, 1)
    )
    timeline = played("1f1b", 4, 1, 8, cost)
    assert timeline.rows[3][-1].end == 3 + 8 * 15  # never idle once the first microbatch has come
    assert timeline.seconds == 3 + 8 * 15 + 3 * 2  # and the last gradient's way back
    assert timeline.bubbles[0] > 4 * timeline.bubbles[3]


def test_the_peak_counts_what_forwards_take_and_backwards_give_back():
    timeline = played("1f1b", 2, 1, 3)
    assert [(peak.activation, peak.seconds) for peak in timeline.peaks] == [(2, 1), (1, 1)]


def test_stages_hold_what_they_hold():
    cost = StageCost(forward_seconds=(1, 1), input_seconds=(1, 1), weight_seconds=(1, 1), activation=(10, 3))
    assert [peak.activation for peak in played("gpipe", 2, 1, 4, cost).peaks] == [40, 12]


def test_an_input_gradient_frees_what_the_weight_gradients_do_not_need():
    def last_peak(kept: float) -> float:
        ones = (1.0,) * 4
        cost = StageCost(
            forward_seconds=ones, input_seconds=ones, weight_seconds=ones, activation=ones, kept_after_input=kept
        )
        return played("zb1p", 4, 1, 8, cost).peaks[3].activation

    # The last rank keeps three weight gradients back while the next forward runs.
    assert last_peak(1.0) == 4
    assert last_peak(0.5) == 1 + 3 * 0.5
    assert last_peak(0.0) == 1


@some
@given(shapes, st.data())
def test_an_action_starts_the_moment_its_rank_and_its_message_are_there(shape, data):
    schedule, pp, chunks, _ = shape
    send = data.draw(quarters)
    timeline = played(*shape, data.draw(uneven_costs(pp * chunks)), send)
    placement = stage_ranks(schedule, pp, chunks)
    ends = {
        (slot.action.kind, slot.action.stage, slot.action.microbatch): slot.end for row in timeline.rows for slot in row
    }
    for rank, row in enumerate(timeline.rows):
        free = 0.0
        for slot in row:
            arrived = 0.0
            if message := awaited(slot.action, pp * chunks - 1):
                _, stage, microbatch = message
                ended = ends.get(message) or ends["B", stage, microbatch]
                arrived = ended + (send if placement[stage] != rank else 0.0)
            assert slot.start == max(free, arrived)
            free = slot.end


@some
@given(shapes, st.data())
def test_no_work_is_lost_or_made(shape, data):
    schedule, pp, chunks, microbatches = shape
    cost = data.draw(uneven_costs(pp * chunks))
    timeline = played(*shape, cost)
    work = [0.0] * pp
    for stage, rank in enumerate(stage_ranks(schedule, pp, chunks)):
        work[rank] += microbatches * (
            cost.forward_seconds[stage] + cost.input_seconds[stage] + cost.weight_seconds[stage]
        )
    assert list(timeline.busy_seconds) == work
    journey = sum(cost.forward_seconds) + sum(cost.input_seconds)  # of one microbatch, there and back
    assert timeline.seconds >= max(*work, journey)
    assert timeline.bubble == pytest.approx(1 - sum(work) / (pp * timeline.seconds), abs=1e-12)  # rounded differently


@some
@given(shapes, st.data())
def test_the_peak_is_the_most_that_is_held_at_the_start_of_any_forward(shape, data):
    cost = data.draw(uneven_costs(shape[1] * shape[2]))
    timeline = played(*shape, cost)
    for row, peak in zip(timeline.rows, timeline.peaks, strict=True):
        held = {}  # activation of each stage and microbatch, written down anew at every action
        most = 0.0
        for slot in row:
            share = {"F": 1.0, "B": 0.0, "I": cost.kept_after_input, "W": 0.0}[slot.action.kind]
            held[slot.action.stage, slot.action.microbatch] = share * cost.activation[slot.action.stage]
            most = max(most, sum(held.values()))
        assert peak.activation == most
        assert peak.seconds in {slot.start for slot in row if slot.action.kind == "F"}


@some
@given(shapes, quarters)
def test_slower_sends_never_shorten_a_step(shape, send):
    assert played(*shape).seconds <= played(*shape, send_seconds=send).seconds


def _elapsed(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def test_the_picture_shows_time_from_left_to_right():
    assert render(played("1f1b", 2, 1, 2), columns=30) == [
        "rank 0  F0-F1-······B0----···B1----  33.3% idle, 2 held",
        "rank 1  ···F0-B0----F1-B1----······  33.3% idle, 1 held",
    ]


def test_the_picture_names_stages_where_ranks_hold_several():
    first, last = render(played("zbv", 2, 2, 1), columns=80)
    assert first.startswith("rank 0  0F0-----········")
    assert last.startswith("rank 1  ········1F0-----2F0-----················2I0-----")


def test_a_crowded_picture_keeps_to_its_columns():
    for line in render(played("1f1b", 4, 1, 200), columns=80):
        picture = line.split()[2]
        assert len(picture) == 80
        assert set(picture) <= set("FB-·")
