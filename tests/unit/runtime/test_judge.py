"""Who hangs, from what was seen: no process is started here."""

import msgspec
import pytest

from meshwright.runtime.heartbeat import BUSY, FIRST_SECONDS, LATE_SECONDS, Beat, HangDetector, RankStatus, crossed

LIMIT = 5.0
LOOK = 0.5


def rank(number, **beat):
    beat = {"pid": 100 + number, "step": 9, "steps_here": 9, "phase": "forward", "counts": (50,), **beat}
    return RankStatus(rank=number, beat=Beat(**beat), now=0.0)


def watch(judge, ranks, seconds, start=100.0, cpu_share=0.0):
    """Look at ranks that stay as they are; their hearts beat unless they were given a last tick of their own."""
    for number in range(int(seconds / LOOK) + 1):
        now = start + number * LOOK
        seen = [
            msgspec.structs.replace(
                one,
                now=now,
                cpu_seconds=cpu_share * now,
                beat=msgspec.structs.replace(one.beat, tick=one.beat.tick or now, moved=one.beat.moved or start),
            )
            for one in ranks
        ]
        if found := judge.look(seen, now):
            return found, now - start
    return None, seconds


def judge(world=2):
    return HangDetector(LIMIT, world)


def test_the_rank_that_does_not_wait_is_guilty_and_not_the_one_that_waits_for_it():
    found, seconds = watch(judge(), [rank(0, waiting=True), rank(1)], 20)
    assert found is not None
    assert found.ranks == (1,)
    assert LIMIT < seconds <= LIMIT + 2 * LOOK


def test_a_stopped_process_is_guilty_though_it_last_said_that_it_waits():
    stopped = msgspec.structs.replace(rank(1, waiting=True, tick=100.0), state="T")
    found, _ = watch(judge(), [rank(0, waiting=True), stopped], 20)
    assert found is not None
    assert found.ranks == (1,)
    assert "stopped" in found.reason


def test_a_heart_that_stops_in_a_living_process_means_pythons_lock():
    found, _ = watch(judge(), [rank(0, waiting=True), rank(1, tick=100.0)], 20)
    assert found is not None
    assert found.ranks == (1,)
    assert "lock" in found.reason


def test_a_rank_that_computes_may_be_still_for_longer():
    found, _ = watch(judge(), [rank(0, waiting=True), rank(1)], LIMIT * BUSY - 1, cpu_share=0.9)
    assert found is None
    found, _ = watch(judge(), [rank(0, waiting=True), rank(1)], LIMIT * BUSY + 2, cpu_share=0.9)
    assert found is not None


def test_the_first_steps_of_a_process_may_take_long():
    young = [rank(0, waiting=True, steps_here=0), rank(1, steps_here=1)]
    assert watch(judge(), young, FIRST_SECONDS - 1)[0] is None
    assert watch(judge(), young, FIRST_SECONDS + 2)[0] is not None


@pytest.mark.parametrize("phase", ["save", "start", "compile", "end", "eval"])
def test_a_save_of_twenty_seconds_is_no_hang(phase):
    assert watch(judge(), [rank(0, waiting=True), rank(1, phase=phase)], 20)[0] is None


def test_limits_are_learnt_from_stillness_that_ended():
    patient = judge()
    watch(patient, [rank(0, waiting=True), rank(1, moved=100.0)], 4)  # almost a hang
    watch(patient, [rank(0, waiting=True), rank(1, moved=104.5)], 0, start=104.5)  # but it moved
    found, seconds = watch(patient, [rank(0, waiting=True), rank(1, moved=104.5)], 40, start=104.5)
    assert found is not None
    assert seconds > 3 * LIMIT


def test_a_machine_that_slept_accuses_nobody():
    ranks = [rank(0, waiting=True, moved=100.0, tick=101.0), rank(1, moved=100.0, tick=101.0)]
    one = judge()
    assert watch(one, ranks, 1)[0] is None
    assert watch(one, ranks, 1, start=101.5 + 3600)[0] is None
    assert LATE_SECONDS > LOOK  # or the test would test nothing


def test_everybody_waiting_here_is_no_accusation_when_there_are_ranks_elsewhere():
    waiting = [rank(0, waiting=True), rank(1, waiting=True)]
    assert watch(judge(world=4), waiting, 30)[0] is None
    assert watch(judge(world=2), waiting, 30)[0] is not None


def test_who_finished_a_step_that_another_still_waits_in_left_a_collective_out():
    assert crossed([rank(0, waiting=True, step=9), rank(1, waiting=True, step=10)])[0] == (1,)


def test_who_waits_where_nobody_ever_did_is_in_the_wrong_collective():
    assert crossed([rank(0, waiting=True), rank(1, waiting=True), rank(2, waiting=True, novel=True)])[0] == (2,)


def test_who_is_further_on_with_no_more_collectives_behind_it_left_one_out():
    ranks = [
        rank(0, waiting=True, phase="backward", counts=(50,)),
        rank(1, waiting=True, phase="optimizer", counts=(50,)),
    ]
    assert crossed(ranks)[0] == (1,)


def test_without_evidence_all_are_named():
    assert crossed([rank(0, waiting=True), rank(1, waiting=True)])[0] == (0, 1)
