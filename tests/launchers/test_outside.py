"""Ranks that somebody else has started, as pods, shells and schedulers do: what goes wrong before the first step."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import SMALL, environment, free_port, meshwright, write_text

from meshwright.cli import env

GIVEN_UP = 900.0  # seconds, for hangs
RUN = [*SMALL, "data.source=my/*.txt", "eval.every=0", "plan.microbatch=1"]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    return folder


def start(user, rank, *words, port, address="127.0.0.1", world=2):
    """A rank as a pod has it: nothing is said of its machine."""
    told = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "meshwright", "train", *RUN, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    own = environment(user, OMP_NUM_THREADS="1", **told)
    # Whoever runs the tests in the background may have SIGINT ignored, and children inherit that.
    return subprocess.Popen(command, cwd=user, env=own, preexec_fn=heed_interrupts, **pipes)


def heed_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for(is_there, process):
    deadline = time.monotonic() + GIVEN_UP
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 10), (signal.SIGINT, 130)])
def test_a_rank_that_waits_for_others_heeds_signals_and_leaves_nothing(user, number, code):
    rank = start(user, 0, "--folder", f"waits{code}", port=free_port())
    wait_for((user / f"waits{code}" / "meeting.key").exists, rank)
    rank.send_signal(number)
    _, said = rank.communicate(timeout=GIVEN_UP)
    assert rank.returncode == code, said
    assert "Traceback" not in said
    assert not (user / f"waits{code}" / "meeting.key").exists()


def test_a_rank_that_imports_torch_heeds_a_signal_and_leaves_nothing(user):
    rank = start(user, 0, "--folder", "imports", port=free_port(), world=1)
    wait_for(lambda: "libtorch" in Path(f"/proc/{rank.pid}/maps").read_text(), rank)
    rank.send_signal(signal.SIGTERM)
    _, said = rank.communicate(timeout=GIVEN_UP)
    assert rank.returncode == 10, said
    assert "stopped by SIGTERM before the first step" in said
    assert not (user / "imports").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_cannot_be_resolved_is_a_mistake_and_nobody_comes_back_for_it(user, rank):
    place = {"port": free_port(), "address": "no.such.host.invalid"}
    process = start(user, rank, "faults.meet_seconds=1", "--folder", "unresolved", **place)
    _, said = process.communicate(timeout=GIVEN_UP)
    assert process.returncode == 2, said
    assert "cannot be resolved" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_that_differ_all_leave_with_a_sentence(user, is_late):
    """Also where rank 0 has written its run into the folder before the other looks."""
    port, folder = free_port(), f"differ{is_late}"
    ranks = [start(user, 0, "seed=0", "--folder", folder, port=port)]
    if is_late:
        wait_for((user / folder / "meeting.key").exists, ranks[0])
    ranks.append(start(user, 1, "seed=1", "--folder", folder, port=port))
    said = [rank.communicate(timeout=GIVEN_UP)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert all("rank 1 has seed = 1, the others 0" in text for text in said), said
    assert not [text for text in said if "Traceback" in text or "C++" in text or "Exception raised" in text]


def test_a_job_that_is_queued_again_goes_on_though_its_words_say_fresh(user):
    names = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    names |= {"SLURM_STEP_NODELIST": "127.0.0.1"}
    train = ["train", *RUN, "--folder", "queued", "--fresh"]
    first = meshwright(*train, "steps=2", folder=user, **names)
    assert first.returncode == 0, first.stderr
    again = meshwright(*train, "steps=4", folder=user, SLURM_RESTART_COUNT="1", **names)
    assert again.returncode == 0, again.stderr
    assert "resuming from step 2" in again.stdout


def test_the_stop_file_ends_our_own_ranks_too(user):
    command = [sys.executable, "-m", "meshwright", "train", *RUN, "steps=100000", "--ranks", "1", "--folder", "ours"]
    launcher = subprocess.Popen(
        command, cwd=user, env=environment(user), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for((user / "ours" / "steps.rank0.jsonl").exists, launcher)
    (user / "ours" / "stop").touch()
    _, said = launcher.communicate(timeout=GIVEN_UP)
    assert launcher.returncode == 130, said
    assert "stopped by the file stop, checkpoint saved at step" in said


def test_ranks_of_one_mpiexec_have_a_port_of_their_own(user):
    """MPICH gives a job no number: ranks on one machine, also behind a shell, know it by whoever started them all."""
    look = [sys.executable, "-c", "from meshwright.cli import env; one = env.here(); print(one.port, one.job)"]
    told = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    rank = ["env", *(f"{name}={value}" for name, value in told.items())]
    ranks = [[*rank, *look], [*rank, "sh", "-c", '"$@"; true', "sh", *look]]
    start = [sys.executable, "-c", f"import subprocess; [subprocess.run(each) for each in {ranks}]"]
    jobs = [subprocess.check_output(start, env=environment(user), text=True) for _ in range(2)]
    (one, behind), (other, _) = map(str.splitlines, jobs)
    assert one == behind != other
    assert 20_000 <= int(one.split()[0]) < 32_000


def test_restarts_are_counted_by_whoever_counts_them(monkeypatch):
    assert env.attempt() == 1
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert env.attempt() == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    assert env.attempt() == 5
