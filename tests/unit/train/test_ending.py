"""What an error means, and with which code a rank leaves."""

import msgspec
import pytest

from meshwright.runtime.failure import Exit
from meshwright.runtime.place import ALONE, RankSpec
from meshwright.spec.problem import InputError, Problem
from meshwright.train.rank import failure_of

GONE = "pair.cc:537] Read error [10.77.0.2]:38590: Connection reset by peer. GLHF!"


def order(launcher):
    place = msgspec.structs.replace(ALONE, launcher=launcher)
    return RankSpec(run="run.toml", folder="run", cache="cache", session="s", place=place, began=0.0)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_a_rank_that_was_left_alone_can_be_resumed(launcher):
    report = failure_of(RuntimeError(GONE), order(launcher), 7, deviated=False)
    assert (report.kind, report.code) == ("killed", Exit.RESUMABLE)
    assert "Connection reset by peer" in report.what


def test_under_our_own_launcher_it_is_a_victim_and_another_rank_is_the_cause():
    assert failure_of(RuntimeError(GONE), order("meshwright"), 7, deviated=False).code == Exit.FAILED


def test_an_error_of_its_own_cannot_be_resumed():
    assert failure_of(RuntimeError("injected"), order("torchrun"), 7, deviated=False).code == Exit.FAILED


@pytest.mark.parametrize(("begun", "code"), [(False, Exit.INPUT), (True, Exit.RESUMABLE)])
def test_a_mistake_that_shows_late_still_has_its_remedy(begun, code):
    mistake = InputError([Problem("token 400 is unknown", "use the right one"), Problem("too short", "add more")])
    report = failure_of(mistake, order("meshwright"), 0, deviated=False, begun=begun)
    assert report.code == code
    assert report.what == ("rank 0 failed: " if begun else "") + "token 400 is unknown; too short"
    assert report.remedy.startswith("use the right one; add more")
