"""Open MPI itself: what `meshwright launch` wrote trains, has time to save, and leaves a log that people can read."""

import re
import signal
import subprocess
import sys
import time

import judge
import pytest
from commands import SMALL, environment, meshwright, write_text

GIVEN_UP = 900.0  # seconds, for hangs
RUN = [*SMALL, "name=small", "data.source=my/*.txt", "eval.every=0", "plan.microbatch=1", "plan.replicate=2"]
AROUND = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
pytestmark = [pytest.mark.slow, judge.needs("mpirun")]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    return folder


def start(user, *words, name):
    """The script that was written for a run; nobody says where to meet."""
    out = user / f"launch-{name}"
    done = meshwright("launch", *RUN, *words, "--on", "mpi", "--cpu", "--folder", name, "--out", str(out), folder=user)
    assert done.returncode == 0, done.stderr
    log = open(user / f"{name}.log", "w")  # noqa: SIM115 - the process has it
    return subprocess.Popen([out / "mpirun.sh"], cwd=user, env=environment(user, **AROUND), stdout=log, stderr=log)


def said(user, name):
    return (user / f"{name}.log").read_text()


def wait_for(user, name, pattern):
    deadline = time.monotonic() + GIVEN_UP
    while not re.search(pattern, said(user, name), re.MULTILINE):
        assert time.monotonic() < deadline, said(user, name)
        time.sleep(0.1)


def test_two_jobs_of_one_machine_do_not_meet_and_a_request_to_end_is_given_the_time_to_save(user):
    first = start(user, "steps=100000", "log.every=5", name="first")
    second = start(user, "steps=3", name="second")
    assert second.wait(GIVEN_UP) == 0, said(user, "second")
    assert "done: 3 steps" in said(user, "second")
    wait_for(user, "first", r"^step 5/")
    first.send_signal(signal.SIGTERM)
    assert first.wait(GIVEN_UP) == 10
    assert "stopped by SIGTERM, checkpoint saved at step" in said(user, "first"), said(user, "first")
    assert "\x1b" not in said(user, "first") + said(user, "second")  # mpirun's terminals are logs


def test_the_stop_file_ends_a_run_which_goes_on_when_it_is_started_again(user):
    running = start(user, "steps=100000", "log.every=5", name="stopped")
    wait_for(user, "stopped", r"^step 5/")
    (user / "stopped" / "stop").touch()
    assert running.wait(GIVEN_UP) == 130, said(user, "stopped")
    assert "stopped by the file stop, checkpoint saved at step" in said(user, "stopped")
    again = start(user, "steps=100000", "log.every=5", name="stopped")
    wait_for(user, "stopped", r"^resuming from step")
    (user / "stopped" / "stop").touch()
    assert again.wait(GIVEN_UP) == 130, said(user, "stopped")


def test_ranks_whose_folders_differ_are_refused_before_anything_begins(user):
    words = [sys.executable, "-m", "meshwright", "train", *RUN]
    pair = ["mpirun", "-np", "1", *words, "--folder", "here", ":", "-np", "1", *words, "--folder", "there"]
    around = environment(user, **AROUND)
    done = subprocess.run(pair, cwd=user, env=around, capture_output=True, text=True, timeout=GIVEN_UP, check=False)
    assert done.returncode == 2, done.stderr
    assert "rank 1 on" in done.stderr
    assert "does not see the run folder of rank 0" in done.stderr
    assert not (user / "here").exists()
