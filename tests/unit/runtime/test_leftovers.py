"""Temporary folders of the dead go; those of the living, of strangers and of other machines stay."""

import os
import stat
import subprocess
import sys

import pytest

from meshwright.runtime import run_folder
from meshwright.runtime.failure import process_name
from meshwright.spec.problem import InputError

SLEEPER = [sys.executable, "-c", "input()"]


def test_the_folder_of_a_killed_launcher_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE)
    owner = process_name(process.pid)
    theirs, watched = tmp_path / f"meshwright-{owner}-a1b_c2d3", tmp_path / f"meshwright-{owner}"
    mine = tmp_path / f"{run_folder.prefix()}x"
    for folder in (theirs, watched, mine):
        folder.mkdir()
        (folder / "rank0.beat").write_bytes(b"x")
    assert run_folder.sweep(tmp_path) == []
    process.kill()
    process.wait()
    assert sorted(run_folder.sweep(tmp_path)) == sorted([theirs, watched])
    assert os.listdir(tmp_path) == [mine.name]


def test_a_number_that_another_process_has_now_does_not_keep_a_folder(tmp_path):
    host, pid, began = process_name(os.getpid()).rsplit(":", 2)
    left = tmp_path / f"meshwright-{host}:{pid}:{int(began) - 1}-x"
    left.mkdir()
    assert run_folder.sweep(tmp_path) == [left]


def test_what_is_not_surely_ours_stays(tmp_path):
    host = process_name(os.getpid()).rsplit(":", 2)[0]
    names = ["meshwright-abcdefgh", "meshwright-elsewhere:4194304:5-x", f"meshwright-{host}:x:5", "other-vm:1:5"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / f"meshwright-{host}:4194304:5").symlink_to(tmp_path / "target")
    (tmp_path / f"meshwright-{host}:4194304:6").write_text("a file")
    assert run_folder.sweep(tmp_path) == []


def test_a_temporary_folder_of_somebody_elses_is_refused(tmp_path):
    run_folder.make_own(tmp_path / "ours")
    run_folder.make_own(tmp_path / "ours")  # each rank of a machine asks
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o700
    (tmp_path / "linked").symlink_to(tmp_path / "ours")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("linked", "open"):
        with pytest.raises(InputError, match="belongs to somebody else, or others may write there"):
            run_folder.make_own(tmp_path / name)
