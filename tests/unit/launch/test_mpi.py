"""What starts mpirun, here a script: requests to end reach the ranks at once, and their exit code comes back."""

import json
import os
import signal
import subprocess
import sys

import pytest

# As mpirun: SIGTERM is put off for ever, SIGUSR2 is passed on, and the ranks' exit code is its own.
MPIRUN = f"""#!{sys.executable}
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(10))
print("ranks", *sys.argv[1:3], flush=True)
if "--once" in sys.argv:
    sys.exit(7)
while True:
    time.sleep(60)
"""
RUN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from meshwright.launch import mpi; "
)
RUN += "mpi.UP_SECONDS = 0; sys.exit(mpi.run(sys.argv[1:]))"


@pytest.fixture
def mpirun(tmp_path):
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "mpirun"
    file.write_text(MPIRUN)
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 10), (signal.SIGUSR2, 10), (signal.SIGINT, 130)])
def test_ranks_hear_at_once_that_they_are_to_end_and_their_code_is_passed_on(mpirun, number, code):
    started = subprocess.Popen([sys.executable, "-c", RUN, mpirun], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ranks\n"
    started.send_signal(number)
    assert started.wait() == code


def test_a_second_interrupt_does_not_wait_for_the_save(mpirun):
    mpirun.write_text(MPIRUN.replace("sys.exit(10)", 'print("told", flush=True)'))
    started = subprocess.Popen([sys.executable, "-c", RUN, mpirun], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ranks\n"
    started.send_signal(signal.SIGINT)
    assert started.stdout.readline() == "told\n"
    started.send_signal(signal.SIGINT)
    assert started.wait() == 137


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_what_is_submitted_is_the_run_itself(mpirun, tmp_path, flags):
    """Its words are seen as they come, not at the end, and its exit code is no refusal."""
    mpirun.write_text(MPIRUN.replace('"--once" in sys.argv', "True"))
    around = {**os.environ, "PATH": f"{mpirun.parent}:{os.environ['PATH']}"}
    words = ["launch", "plan.replicate=2", "--on", "mpi", "--cpu", "--folder", "run", "--submit", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        cwd=tmp_path,
        env=around,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    heard = done.stderr if flags else done.stdout
    assert heard.endswith("ranks -np 2\n")
    if flags:
        assert json.loads(done.stdout)["submitted"]
    else:
        assert "starting: " in done.stdout
