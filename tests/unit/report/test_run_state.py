import fcntl
import os
import platform

import msgspec
import pytest

from meshwright.report.run_data import LOCKS, Owner, StandingEvidence, duration, owner, standing
from meshwright.runtime.failure import Failure

TOLD = StandingEvidence(
    finished=False, owner=None, silent_seconds=9.0, patience=120.0, said_end=False, made_all=False, failure=None
)
HERE = Owner(process=7, host="vm", since="noon", holds=True)


def of(**changes):
    return standing(msgspec.structs.replace(TOLD, **changes))


def test_a_summary_is_the_end():
    assert of(finished=True).state == "done"


def test_who_holds_the_folder_goes_on_however_long_it_is_silent():
    found = of(owner=HERE, silent_seconds=9000.0)
    assert found.state == "going"
    assert found.words == "still running: last record 2.5 h ago, process 7 on vm"
    assert of(owner=HERE, silent_seconds=None).words.startswith("still running: no record yet")
    assert of(owner=msgspec.structs.replace(HERE, holds=False), silent_seconds=0.1).state == "ended"


def test_whom_nobody_can_ask_is_judged_by_its_last_record():
    away = msgspec.structs.replace(HERE, holds=None)
    assert of(owner=away).state == "going"
    assert of(owner=away, silent_seconds=121.0).state == "ended"
    assert of(owner=None, said_end=True).state == "ended"


def test_what_ended_a_run_is_said_as_far_as_anybody_wrote_it_down():
    long_ago = {"silent_seconds": 7200.0}
    failed = Failure(kind="error", code=1, what="rank 3 failed", remedy="see the log")
    assert of(failure=failed, **long_ago).words == "stopped early: rank 3 failed, 2.0 h ago"
    assert of(failure=failed, **long_ago).remedy == "see the log"
    assert of(**long_ago).remedy.endswith("it starts over, since no checkpoint was saved")
    assert of(saved=(8,), **long_ago).remedy.endswith("to resume from step 8")
    assert "stopped by SIGTERM, checkpoint saved at step 8" in of(said_end=True, saved=(4, 8), **long_ago).words
    assert "stopped by SIGTERM, no checkpoint saved" in of(said_end=True, **long_ago).words
    assert "without a failure report" in of(**long_ago).words
    assert "before its summary" in of(made_all=True, **long_ago).words
    assert "no step was made" in of(silent_seconds=None).words


@pytest.mark.skipif(not LOCKS.exists(), reason="this system does not list its locks")
def test_a_lock_is_seen_without_being_touched(tmp_path):
    lock = tmp_path / "lock"
    lock.write_text(f"process {os.getpid()} on {platform.node()} since 2026-11-15 17:00:00")
    assert owner(lock) == Owner(process=os.getpid(), host=platform.node(), since="2026-11-15 17:00:00", holds=False)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert owner(lock).holds is True
    lock.write_text("process 1 on elsewhere since noon")
    assert owner(lock).holds is None


def test_a_lock_that_says_nothing_is_nobodys(tmp_path):
    assert owner(tmp_path / "lock") is None
    (tmp_path / "lock").write_bytes(b"\xff\x00")
    assert owner(tmp_path / "lock") is None


def test_times_are_told_in_the_unit_that_fits():
    assert [duration(each) for each in (0.0123, 5.0, 90.0, 7200.0, 172800.0)] == [
        "12.3 ms",
        "5.0 s",
        "1.5 min",
        "2.0 h",
        "2.0 days",
    ]
