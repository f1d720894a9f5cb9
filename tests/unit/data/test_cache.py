import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG, until

from meshwright.data import prepare
from meshwright.data.prepare import fingerprint, once
from meshwright.spec.problem import InputError

# Fills a folder slowly, and appends one line to a log for each time that it does.
WORKER = """
import sys, time
from pathlib import Path
from meshwright.data.prepare import once

def make(folder):
    (folder / "half").write_text("half")
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    (folder / "whole").write_text("whole")

print((once(Path(sys.argv[1]), make, lambda text: print(text, flush=True)) / "whole").read_text())
"""


def worker(folder: Path) -> subprocess.Popen[str]:
    """Makes a folder, and says so in a log; it is not done before there is a file `go`."""
    command = [sys.executable, "-c", WORKER, *(str(folder / name) for name in ("made", "log", "go"))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def silent(_: str) -> None: ...


def fill(folder: Path) -> None:
    (folder / "whole").write_text("whole")


def test_one_of_many_processes_works_and_all_find_it_ready(tmp_path):
    first = worker(tmp_path)
    until((tmp_path / "log").exists, "nobody works")
    others = [worker(tmp_path) for _ in range(3)]
    assert [other.stdout.readline().startswith("waiting") for other in others if other.stdout] == [True] * 3
    (tmp_path / "go").touch()
    assert [each.communicate(timeout=HANG)[0].splitlines()[-1] for each in (first, *others)] == ["whole"] * 4
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_killed_writer_leaves_nothing_that_looks_ready(tmp_path):
    killed = worker(tmp_path)
    until((tmp_path / "log").exists, "nobody works")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=HANG)
    assert not (tmp_path / "made").exists()
    assert once(tmp_path / "made", fill, silent) == tmp_path / "made"
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["whole"]
    assert list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part")) == []


def test_an_error_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        once(tmp_path / "made", fail, silent)
    assert [file.name for file in tmp_path.iterdir()] == [".made.lock"]


def test_a_ready_folder_is_not_made_again(tmp_path):
    def fail(_: Path) -> None:
        raise AssertionError("made again")

    once(tmp_path / "made", fill, silent)
    assert once(tmp_path / "made", fail, silent) == tmp_path / "made"


def test_without_locks_the_first_to_finish_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "fcntl", None)

    def overtaken(folder: Path) -> None:
        fill(folder)
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").write_text("theirs")

    once(tmp_path / "made", overtaken, silent)
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["theirs"]
    assert list(tmp_path.glob(".*.part")) == []


def test_small_files_are_known_by_content_and_large_ones_by_name_size_and_time(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("same")
    second.write_text("same")
    assert fingerprint([first]) == fingerprint([second])
    second.write_text("other")
    assert fingerprint([first]) != fingerprint([second])
    assert fingerprint([first, second]) != fingerprint([second, first])
    monkeypatch.setattr(prepare, "SMALL", 3)
    before = fingerprint([first])
    assert before == fingerprint([first])
    assert before != fingerprint([second])
    os.utime(first, ns=(1, 1))
    assert fingerprint([first]) != before


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file cannot be written: it is a file; set XDG_CACHE_HOME"):
        once(tmp_path / "file" / "name", Path.touch, print)


def test_what_is_there_needs_no_place_to_write(tmp_path, monkeypatch):
    (tmp_path / "name").mkdir()
    monkeypatch.setattr(prepare, "require_folder", None)
    assert once(tmp_path / "name", Path.touch, print) == tmp_path / "name"
