import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import HANG, until

from meshwright.runtime import devices
from meshwright.runtime import ranks as local
from meshwright.runtime.ranks import Crew, Ranks


def forked(work):
    """A child that does some work and ends with what it returns."""
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return pid


def wait(ranks):
    until(lambda: None not in ranks.poll().values(), "a rank does not end")
    return list(ranks.codes.values())


def test_exit_codes_are_told_and_signals_are_below_zero():
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(Ranks(dict(enumerate([forked(lambda: 0), forked(lambda: 10), forked(die)])))) == [0, 10, -9]


def test_ending_leaves_nobody():
    pids = [forked(lambda: time.sleep(HANG) or 0) for _ in range(2)]
    os.kill(pids[1], signal.SIGSTOP)  # a stopped process too
    ranks = Ranks(dict(enumerate(pids)))
    assert ranks.poll() == {0: None, 1: None}
    ranks.end()
    assert ranks.codes == {0: -9, 1: -9}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_signal_goes_to_those_who_are_left():
    ranks = Ranks({0: forked(lambda: 0), 1: forked(lambda: time.sleep(HANG) or 0)})
    until(lambda: ranks.poll()[0] is not None, "a rank does not end")
    ranks.signal(signal.SIGTERM)
    assert wait(ranks) == [0, -15]


def test_cores_are_shared():
    assert int(local.defaults(1)["OMP_NUM_THREADS"]) >= int(local.defaults(64)["OMP_NUM_THREADS"]) == 1


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("4,2", 4), ("0", 1), ("many", 1)])
def test_threads_are_as_the_user_says(text, count):
    assert local.threads({**local.defaults(2), "OMP_NUM_THREADS": text}) == count
    assert local.threads(local.defaults(10_000)) == 1


def test_ranks_of_one_machine_speak_on_the_loopback_only():
    assert local.defaults(2)["GLOO_SOCKET_IFNAME"].startswith("lo")


@pytest.mark.parametrize(("visible", "count"), [("0,3", 2), ("", 0), ("-1", 0)])
def test_visible_gpus_are_counted_without_torch(visible, count, tmp_path):
    assert devices.gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
    assert devices.gpu_names({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == ["GPU"] * count


def test_gpus_have_the_names_that_their_driver_gives(tmp_path):
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert devices.gpu_names({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ["NVIDIA H200"]


def test_the_tail_of_a_log_that_is_not_there_is_empty(tmp_path):
    assert local.tail(tmp_path / "none") == ""
    (tmp_path / "some").write_text("one\ntwo\nthree\n")
    assert local.tail(tmp_path / "some", 2) == "two\nthree"


def interrupt(place):
    """Ctrl-C, as it reaches every process of a terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def test_a_crew_leaves_an_interruption_to_who_has_it():
    crew = Crew(interrupt, 1)
    try:
        crew.run((), HANG)
    finally:
        crew.close()


LOOK = """
import re, signal
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from meshwright.runtime import ranks
ranks.start_server()
status = Path(f"/proc/{_forkserver._forkserver_pid}/status").read_text()
(blocked,) = re.findall(r"^SigBlk:\\t(\\w+)$", status, re.MULTILINE)
assert int(blocked, 16) & 1 << signal.SIGINT - 1
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def test_ctrl_c_does_not_reach_the_process_that_ranks_are_forked_from():
    """While it imports it would answer with a stack, between what its parent says. A new one, for this may be old."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
