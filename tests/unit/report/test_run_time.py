import pytest
from folders import attempt, step
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.goodput import account
from meshwright.report import run_summary
from meshwright.runtime.failure import Failure
from meshwright.runtime.records import EndRecord, EventRecord

KILLED = [
    attempt(101.0),
    *(step(n, 101.0 + n) for n in range(1, 7)),
    attempt(110.0, step=4, number=2),
    *(step(n, 106.0 + n, save_seconds=0.25 * (n == 8)) for n in range(5, 9)),
    EndRecord(step=8, at=114.5),
]


def test_shares_add_up_and_goodput_comes_first():
    parts = run_summary.parts(account(KILLED))
    assert parts[0].name == "goodput"
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    assert {part.name: part.seconds for part in parts}["lost work"] == 2.0
    assert run_summary.parts(account([])) == ()


@given(st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=12))
def test_percentages_on_the_screen_add_up_to_a_hundred(seconds):
    shown = run_summary.in_tenths([each / sum(seconds) for each in seconds])
    assert sum(round(each * 10) for each in shown) == 1000
    assert all(abs(each - 100 * part / sum(seconds)) < 0.11 for each, part in zip(shown, seconds, strict=True))


def test_an_attempt_says_where_it_began_what_it_lost_and_what_ended_it():
    first, second = run_summary.attempts(KILLED, {})
    assert (first.first_step, first.last_step, first.lost) == (0, 6, 2)
    assert (first.session, first.number, first.at, first.seconds) == (1, 1, 1.0, 6.0)
    assert first.ended == run_summary.LOST
    assert (second.first_step, second.last_step, second.lost, second.ended) == (4, 8, 0, "")


def test_the_supervisors_words_about_a_hang_are_told():
    told = Failure(kind="hang", code=11, what="rank 1 hangs in forward of step 7")
    assert run_summary.attempts(KILLED, {"vm:7:1-1": told})[0].ended == told.what


def test_another_session_is_another_number():
    stopped = [attempt(101.0), step(1, 102.0), EndRecord(step=1, at=102.5)]
    silent = [attempt(7.0, step=1, session="vm:8:1", began=5.0), step(2, 8.0)]
    third = [attempt(9.0, step=1, session="vm:9:1", began=8.5)]
    found = run_summary.attempts([*stopped, *silent, *third], {})
    assert [each.session for each in found] == [1, 2, 3]
    assert found[0].ended == "stopped by SIGTERM"
    assert found[1].ended.startswith("ended without a failure report")
    assert [each.lost for each in found] == [0, 1, 0]


def test_events_have_their_step_and_their_time():
    event = EventRecord(step=1, what="spike", text="loss 9 is high", at=103.5)
    (found,) = run_summary.happened([attempt(101.0), step(1, 103.0), event])
    assert (found.step, found.at, found.session, found.what) == (1, 3.5, 1, "spike")
    assert run_summary.happened([event])[0].at == 0.0  # of an older version, which recorded no starts


def test_saves_are_counted_with_the_time_that_steps_stood_still():
    found = run_summary.saves(KILLED, (4, 8))
    assert (found.count, found.seconds, found.longest, found.newest) == (1, 0.25, 0.25, 8)
    assert run_summary.saves([], ()).newest is None
