"""Live survivors under Slurm itself: each of its machines has a launcher of ours; one is killed, and comes back."""

import json
import os
import signal
import time
from pathlib import Path

import judge
import pytest
from commands import SMALL, environment, meshwright, with_reference
from slurm_cluster import slurm

from meshwright.runtime.records import AttemptRecord, EventRecord, StepRecord, read_line
from meshwright.verify.rehearse import model_digest

GIVEN_UP = 1800.0  # seconds, for hangs: a minute is usual
STEPS = 80
# Nothing is ever saved, so there is nothing but a peer that the state could come from.
RUN = [
    *SMALL, "name=small", f"steps={STEPS}", "batch=4", "data.source=my/*.txt", "eval.every=0", "checkpoint.every=0",
    "plan.deterministic=true", "plan.microbatch=1",
]  # fmt: skip
LIVE = ["plan.replicate=2", "plan.grad_accum=2", "faults.live=true", "faults.spares=1", "faults.meet_seconds=300"]
pytestmark = [pytest.mark.slow, judge.needs("slurm")]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    return with_reference(tmp_path_factory.mktemp("user"), *RUN, "plan.grad_accum=4", "--ranks", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, user):
    """Three machines of one GPU each: two for the plan, and one for the spare."""
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=3, gpus=1) as here:
        here.environment.update(environment(user) | {"SLURM_CONF": here.environment["SLURM_CONF"]})
        yield here


def records(folder, rank):
    file = folder / f"steps.rank{rank}.jsonl"
    return [read_line(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []


def steps(folder, rank):
    return sum(isinstance(each, StepRecord) for each in records(folder, rank))


class SlurmJob:
    """A job that is submitted, its run folder, and what its log says."""

    def __init__(self, cluster, user, name, *words, shape):
        self.cluster, self.folder, self.out = cluster, user / name, user / f"launch-{name}"
        options = ["--on", "slurm", "--cluster", shape, "--shared", "--cpus", "1", "--json", "--out", str(self.out)]
        conf = {"SLURM_CONF": cluster.environment["SLURM_CONF"]}
        done = meshwright("launch", *RUN, *words, *options, "--folder", name, folder=user, **conf)
        assert done.returncode == 0, done.stderr
        self.record = json.loads(done.stdout)
        script = self.out / "node.sh"
        script.write_text(script.read_text().rstrip() + " --inject slow:1:2\n")  # or it ends before a machine is back
        assert cluster.run(*self.record["command"]).returncode == 0

    def said(self):
        return "".join(log.read_text() for log in self.out.glob("small-*.log"))

    def until(self, is_so, is_there=True):
        deadline = time.monotonic() + GIVEN_UP
        while not is_so():
            assert not is_there or self.cluster.states(), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def until_end(self):
        self.until(lambda: not self.cluster.states(), is_there=False)
        return self.said()


def launcher_of(machine, run_folder):
    """The process that starts the ranks of a machine, as Slurm started it."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdecimal() else []
        except OSError:
            continue
        number = words[words.index("--node-rank") + 1] if "--node-rank" in words else ""
        if str(run_folder) in words and number == str(machine):
            return int(entry.name)
    raise AssertionError(f"machine {machine} has no launcher")


def test_a_machine_is_killed_and_a_spare_has_its_place_until_the_job_has_started_it_again(cluster, user):
    job = SlurmJob(cluster, user, "live", *LIVE, shape="3x1xh100")
    assert (job.record["nodes"], job.record["ranks_per_node"]) == (3, 1)
    job.until(lambda: steps(job.folder, 1) >= 5)
    os.kill(launcher_of(1, job.folder), signal.SIGKILL)
    job.until(lambda: steps(job.folder, 2) > 7)
    job.until(lambda: "machine 1 of 3, 1 rank; joining the others" in job.said())
    said = job.until_end()
    assert "exit code 137 of machine 1 (127.0.0.2): started again" in said, said
    assert f"done: {STEPS} steps" in said, said
    assert "queued again" not in said
    assert model_digest(job.folder) == model_digest(user / "reference") != ""
    assert not (job.folder / "checkpoints").exists()
    told = {each.what for each in records(job.folder, 0) if isinstance(each, EventRecord)}
    assert {"lost", "back"} <= told
    assert [each.step for each in records(job.folder, 0) if isinstance(each, StepRecord)] == [*range(1, STEPS + 1)]
    assert sum(isinstance(each, AttemptRecord) for each in records(job.folder, 0)) == 1


def test_a_machine_comes_back_to_what_the_next_ones_memory_has_and_the_job_is_told_its_time(cluster, user):
    """Without replicas: the disk has nothing until the ranks are asked to end; then the job is queued again."""
    words = ["plan.shard=2", "plan.zero=3", "plan.grad_accum=2", "faults.memory_every=3", "faults.meet_seconds=300"]
    job = SlurmJob(cluster, user, "memory", *words, shape="2x1xh100")
    job.until(lambda: steps(job.folder, 0) >= 8)
    os.kill(launcher_of(1, job.folder), signal.SIGKILL)
    job.until(lambda: "machine 1's part of step-" in job.said())
    assert not list((job.folder / "checkpoints").glob("step-*"))
    job.until(lambda: "resuming from step" in job.said())
    number = next(iter(cluster.states()))
    job.until(lambda: steps(job.folder, 0) > 15)
    cluster.run("scancel", "--signal=TERM", number)  # as --signal=TERM@ does
    said = job.until_end()
    assert "exit code 137 of machine 1 (127.0.0.2): started again" in said, said
    assert "exit code 10: queued again" in said, said
    assert f"done: {STEPS} steps" in said, said
    assert model_digest(job.folder) == model_digest(user / "reference") != ""
