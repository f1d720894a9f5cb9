import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.goodput import account, first_loss_seconds, kept
from meshwright.runtime.records import AttemptRecord, EndRecord, EvalRecord, EventRecord, StepRecord


def attempt(at, step=0, session="a", began=0.0, number=1):
    return AttemptRecord(step=step, session=session, number=number, began=began, at=at)


def step(number, at, data=0.0, save=0.0, ended=0.0, compiled=0.0):
    return StepRecord(
        step=number,
        loss=1.0,
        norm=1.0,
        rate=0.1,
        tokens=1,
        seconds=1.0,
        data_seconds=data,
        memory_bytes=1,
        flops=1.0,
        save_seconds=save,
        compile_seconds=compiled,
        ended=ended,
        at=at,
    )


def test_a_clean_run_is_start_steps_and_finish():
    spent = account([attempt(3.0), step(1, 4.0, data=0.25), step(2, 6.0, save=0.5), EndRecord(step=2, at=7.0)])
    assert spent.bad == {
        "start-up": 3.0,
        "compile": 0.0,
        "data": 0.25,
        "checkpoint": 0.5,
        "eval": 0.0,
        "stall": 0.0,
        "recovery": 0.0,
        "lost work": 0.0,
        "finish": 1.0,
    }
    assert spent.good == pytest.approx(2.25)
    assert spent.wall == 7.0
    assert spent.attempts == 1


def test_steps_that_a_restart_went_back_behind_are_lost_and_the_gap_is_recovery():
    records = [
        attempt(1.0),
        step(1, 2.0),
        step(2, 3.0),
        step(3, 4.0),
        attempt(9.0, step=1, number=2),
        step(2, 10.0),
        step(3, 11.0),
    ]
    spent = account(records)
    assert spent.bad["lost work"] == 2.0
    assert spent.bad["recovery"] == 5.0
    assert spent.good == 3.0
    assert [record.at for record in kept(records)] == [2.0, 10.0, 11.0]


def test_time_between_two_sessions_is_nobodys():
    spent = account([attempt(1.0), step(1, 2.0), attempt(52.0, step=1, session="b", began=50.0), step(2, 53.0)])
    assert spent.wall == 5.0
    assert spent.bad["start-up"] == 3.0
    assert spent.bad["recovery"] == 0.0


def timed(*takes, late=2, **kinds):
    """Steps that take so long, each written down when the second after it has ended."""
    ends = [1.0 + sum(takes[: number + 1]) for number in range(len(takes))]
    written = [*ends[late:], *[ends[-1]] * late]
    pairs = enumerate(zip(ends, written, strict=True), 1)
    return [
        attempt(1.0),
        *(step(number, at, ended=end, **kinds.get(f"step{number}", {})) for number, (end, at) in pairs),
    ]


def test_what_a_save_took_counts_although_its_step_was_written_down_late():
    spent = account(timed(1.0, 1.0, 6.0, 1.0, 1.0, step3={"save": 5.0}))
    assert spent.bad["checkpoint"] == 5.0
    assert spent.good == 5.0
    assert spent.wall == 11.0


def test_a_validation_loss_takes_the_time_between_two_steps_and_no_step_does():
    steps = timed(1.0, 1.0, 1.0)
    held = EvalRecord(step=2, loss=1.0, tokens=1, seconds=5.0, began=3.0, ended=8.0, at=8.5)
    last = msgspec.structs.replace(steps[3], began=8.0, ended=9.0, at=9.5)
    spent = account([*steps[:3], held, last])
    assert (spent.bad["eval"], spent.good) == (5.0, 3.0)


def test_the_first_step_is_good_for_as_long_as_the_others_take():
    spent = account(timed(9.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert (spent.bad["compile"], spent.bad["stall"], spent.good) == (8.0, 0.0, 6.0)


def test_a_later_step_that_compiles_says_so_and_one_that_stands_still_is_a_stall():
    spent = account(timed(1.0, 1.0, 1.0, 4.0, 1.0, 6.0, 1.0, 1.4, step4={"compiled": 3.0}))
    assert (spent.bad["compile"], spent.bad["stall"]) == (3.0, 5.0)
    assert spent.good == pytest.approx(8.4)


def test_steps_too_few_to_say_what_is_usual_are_good():
    assert account(timed(9.0, 1.0, 1.0, 1.0)).good == 12.0


def test_what_the_last_save_is_waited_for_is_no_finish():
    spent = account([*timed(1.0, 1.0), EndRecord(step=2, at=9.0, save_seconds=4.0)])
    assert (spent.bad["checkpoint"], spent.bad["finish"]) == (4.0, 2.0)


def test_an_event_takes_no_time_from_the_steps_that_were_on_their_way():
    steps = timed(1.0, 1.0, 1.0, 1.0)
    steps.insert(2, EventRecord(step=1, what="spike", text="", at=4.9))
    assert account(steps).good == 4.0


def test_the_first_loss_is_that_of_the_run_not_of_the_last_attempt():
    assert first_loss_seconds([attempt(7.0, began=5.0), step(1, 9.0), attempt(20.0), step(1, 30.0)]) == 4.0


moments = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(moments, st.lists(st.sampled_from(["step", "held", "event", "again", "new"]), min_size=30, max_size=30))
def test_every_second_is_counted_once(gaps, kinds):
    now, number, session, began = 1.0, 0, "0", 0.0
    records = [attempt(now, session=session, began=began)]
    wall = 1.0
    for gap, kind in zip(gaps, kinds, strict=False):
        now += gap
        wall += gap
        if kind == "step":
            number += 1
            records.append(step(number, now, data=gap / 3, save=gap))
        elif kind == "held":
            records.append(EvalRecord(step=number, loss=1.0, tokens=1, seconds=gap, at=now))
        elif kind == "event":
            records.append(EventRecord(step=number, what="spike", text="", at=now))
        else:
            session, began = (session, began) if kind == "again" else (str(int(session) + 1), now - gap)
            number = max(number - 2, 0)
            records.append(attempt(now, step=number, session=session, began=began))
    spent = account(records)
    assert spent.wall == pytest.approx(wall)
    assert spent.goodput + sum(spent.badput.values()) == pytest.approx(1.0)
    assert min(spent.bad.values()) >= 0
