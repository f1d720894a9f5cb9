"""Slurm itself: what `meshwright launch` wrote trains, ends in time, comes back by itself and loses nothing."""

import json
import shlex
import sys
import time

import judge
import pytest
from commands import SMALL, environment, meshwright, write_text
from slurm_cluster import slurm

from meshwright.verify.rehearse import model_digest

GIVEN_UP = 3600.0  # seconds, for hangs: two minutes are usual, a crowded machine needs ten
RUN = [
    *SMALL, "name=small", "data.source=my/*.txt", "eval.every=0", "checkpoint.every=1000", "plan.deterministic=true",
    "plan.microbatch=1", "plan.replicate=2",
]  # fmt: skip
pytestmark = [pytest.mark.slow, judge.needs("slurm")]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with a little text."""
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, user):
    """Two machines of one GPU each."""
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=2, gpus=1) as here:
        here.environment.update(environment(user) | {"SLURM_CONF": here.environment["SLURM_CONF"]})
        yield here


def launch(cluster, user, *words):
    shape = ["--on", "slurm", "--cluster", "2x1xh100", "--shared", "--cpus", "1", "--json"]
    return meshwright("launch", *shape, *RUN, *words, folder=user, SLURM_CONF=cluster.environment["SLURM_CONF"])


def until(is_so, cluster):
    deadline = time.monotonic() + GIVEN_UP
    while not is_so():
        assert time.monotonic() < deadline, cluster.states()
        time.sleep(0.5)


def srun(cluster, user, *command, shape=("-N2", "-n2"), **extra):
    return cluster.run("srun", *shape, *command, cwd=user, env=cluster.environment | extra)


def train(*words):
    return [sys.executable, "-m", "meshwright", "train", *RUN, *words]


def test_a_job_is_told_its_time_saves_comes_back_and_ends_as_if_nothing_had_been(cluster, user):
    done = launch(cluster, user, "steps=460", "--folder", "told", "--out", "out", "--time", "2")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["nodes"], record["ranks_per_node"], record["submitted"]) == (2, 1, False)
    script = user / "out" / "rank.sh"
    # As if it were a long run: the limit of two minutes is told after one, and a step takes a fifth of a second.
    slow = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] && set -- --inject slow:1:1\nexec'
    script.write_text(script.read_text().replace("exec", slow).rstrip() + ' "$@"\n')
    assert cluster.run(*record["command"]).returncode == 0
    until(lambda: not cluster.states(), cluster)
    (log,) = (user / "out").glob("small-*.log")
    said = log.read_text()
    assert "stopped by SIGTERM, checkpoint saved at step" in said, said
    assert "exit code 10: queued again" in said
    assert "resuming from step" in said
    assert "done: 460 steps" in said
    reference = meshwright("train", *RUN, "steps=460", "--folder", "reference", folder=user)
    assert reference.returncode == 0, reference.stderr
    assert model_digest(user / "told") == model_digest(user / "reference") != ""


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(cluster, user):
    done = launch(cluster, user, "steps=100000", "--folder", "cancelled", "--out", "cancel", "--submit")
    assert done.returncode == 0, done.stderr
    until(lambda: (user / "cancelled" / "steps.rank0.jsonl").exists(), cluster)
    until(lambda: len((user / "cancelled" / "steps.rank0.jsonl").read_text().splitlines()) > 5, cluster)
    cluster.run("scancel", *cluster.states())
    until(lambda: not cluster.states(), cluster)
    (log,) = (user / "cancel").glob("small-*.log")
    assert "queued again" not in log.read_text().replace("not queued again", "")
    assert list((user / "cancelled" / "checkpoints").glob("step-*"))


def test_what_slurm_cannot_run_is_refused_before_it_is_asked(cluster, user):
    wrong = launch(cluster, user, "--partition", "gpus", "--out", "never", "--submit")
    assert wrong.returncode == 2
    assert "there is no partition gpus; use one of all" in wrong.stderr
    words = ["plan.replicate=4", "--cluster", "1x4xh100", "--out", "never", "--submit"]
    too_many = launch(cluster, user, *words)
    assert too_many.returncode == 2
    assert "4 GPUs of a machine are asked for, and this Slurm has machines of 1" in too_many.stderr
    assert not (user / "never").exists()
    assert not cluster.states()


def test_two_steps_of_one_allocation_do_not_meet_each_other(cluster, user):
    """Each with a shell in between, and with ranks dealt out to the machines in turn."""
    four, two = (shlex.join(train("steps=3", f"plan.replicate={ranks}", "--folder", f"of{ranks}")) for ranks in (4, 2))
    script = [
        f"srun --overlap -N2 -n4 -m cyclic bash -c {shlex.quote(four)} & first=$!",
        f"srun --overlap -N2 -n2 bash -c {shlex.quote(two)} & second=$!",
        "wait $first && wait $second",
    ]
    done = cluster.run("salloc", "-N2", "-n6", "bash", "-c", "\n".join(script), cwd=user)
    assert done.returncode == 0, done.stdout + done.stderr
    assert model_digest(user / "of4") == model_digest(user / "of2") != ""


def test_a_rank_that_is_stopped_behind_a_shell_is_seen(cluster, user):
    words = train("steps=100000", "faults.hang_seconds=2", "--inject", "hang:1:3", "--folder", "stopped")
    done = srun(cluster, user, "bash", "-c", f"{shlex.join(words)}; exit $?", shape=("-N1", "-n2"))
    assert "rank 1 is stopped (SIGSTOP or a debugger)" in done.stderr, done.stderr
    assert list((user / "stopped" / "faults").glob("hang-*/verdict.json"))


def test_a_rank_that_is_killed_is_named_and_its_end_is_kept(cluster, user):
    """Ranks are dealt out to the machines in turn: the second of the second machine is rank 3."""
    words = train("steps=100000", "plan.replicate=4", "--inject", "kill:3:3", "--folder", "killed")
    done = srun(cluster, user, *words, shape=("-N2", "-n4", "-m", "cyclic"))
    assert "rank 3 was killed: its process is gone without a word" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert list((user / "killed" / "faults").glob("killed-*/verdict.json"))
    assert done.returncode == 137


def test_a_rank_that_never_starts_is_named_and_nobody_comes_back_for_it(cluster, user):
    words = shlex.join(train("steps=3", "faults.meet_seconds=5", "--folder", "alone"))
    done = srun(cluster, user, "bash", "-c", f"[ $SLURM_PROCID = 1 ] || exec {words}")
    assert done.returncode == 2, done.stderr
    assert "rank 1 did not come within 5 s; here: rank 0 on" in done.stderr
    assert not (user / "alone").exists()


def test_a_shell_of_slurms_starts_the_ranks_that_it_is_asked_for(cluster, user):
    words = train("steps=2", "--ranks", "2", "--folder", "typed")
    done = srun(cluster, user, *words, shape=("-N1", "-n1"))
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout
    # The same with a terminal, as a person has it.
    shell = [
        *("script", "-qec"),
        shlex.join(["srun", "-N1", "-n1", "--pty", "bash", "-c", shlex.join([*words, "--fresh"])]),
    ]
    typed = cluster.run(*shell, "/dev/null", cwd=user)
    assert typed.returncode == 0, typed.stdout
    assert "on 2 ranks" in typed.stdout


@judge.needs("mpirun")
def test_mpirun_inside_a_job_says_who_is_who(cluster, user):
    """Its daemons are tasks of Slurm's; the ranks are mpirun's, and meet on the job's first machine."""
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    command = ["salloc", "-N2", "-n2", "mpirun", "-np", "2", *train("steps=2", "--folder", "mpirun")]
    done = cluster.run(*command, cwd=user, env=cluster.environment | allowed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 steps" in done.stdout
    assert "on 2 ranks" in done.stdout


def test_the_doctor_sees_both_machines_and_the_way_between_them(cluster, user):
    command = [sys.executable, "-m", "meshwright", "doctor", "--folder", "seen", "--json"]
    done = srun(cluster, user, *command, shape=("-N2", "-n3"))
    answer = json.loads(done.stdout)
    assert [one["rank"] for one in answer["ranks"]] == [0, 1, 2]
    assert len({one["node"] for one in answer["ranks"]}) == 2
    assert [bool(one["disk"]) for one in answer["ranks"]].count(True) == 2
    (link,) = answer["links"]
    assert link["bandwidth"] > 1e6
    assert done.returncode == any(one["kind"] == "problem" for one in answer["findings"])


def test_an_array_job_makes_the_tokens_that_training_finds(cluster, user):
    words = ["arch.preset=tiny", "sequence=32", "data.source=my/*.txt"]
    said = meshwright(
        "data", "prepare", *words, "--on", "slurm", "--parts", "2", "--out", "it's data", "--submit", "--json",
        folder=user, SLURM_CONF=cluster.environment["SLURM_CONF"], XDG_CACHE_HOME=str(user / "array $HOME"),
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    until(lambda: not cluster.states(), cluster)
    logs = [file.read_text() for file in (user / "it's data").glob("*.log")]
    assert len(logs) == 2, logs
    again = meshwright("data", "prepare", *words, "--json", folder=user, XDG_CACHE_HOME=str(user / "array $HOME"))
    report = json.loads(again.stdout)
    assert (report["made"], report["found"]) == (0, 1), logs
