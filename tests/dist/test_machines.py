"""Machines whose replicas can do without each other: all of one is killed, and its command is started again."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from commands import environment, free_port, with_reference
from waiting import HANG

from meshwright.runtime.machines import FOLDER
from meshwright.runtime.records import AttemptRecord, EventRecord, StepRecord, read_line
from meshwright.verify.rehearse import model_digest

STEPS = 90
SLOW = "slow:1:2"  # sleeps behind every microbatch, or these steps would be over before a machine has started again
RUN = [
    *("arch.preset=tiny", "arch.layers=2", "sequence=16", "batch=4", f"steps={STEPS}", "eval.every=25"),
    *("eval.batches=1", "eval.sample_tokens=0", "data.source=my/*.txt", "plan.microbatch=1"),
    *("plan.deterministic=true", "checkpoint.every=0"),
]  # nothing is ever saved, so there is nothing else that the state could come from


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    return with_reference(tmp_path_factory.mktemp("user"), *RUN, "plan.grad_accum=4", "--ranks", "1")


class Launchers:
    """The command of each machine, two for the plan and a spare; all are this one, and meet at its loopback address."""

    def __init__(self, user: Path, *more: str, name: str = "run", inject: str = SLOW) -> None:
        self.user, self.folder = user, user / name
        words = ["plan.replicate=2", "plan.grad_accum=2", "faults.live=true", "faults.spares=1", *more]
        options = {"nodes": 3, "ranks-per-node": 1, "master": f"127.0.0.1:{free_port()}", "folder": name}
        shape = [f"--{option}={value}" for option, value in {**options, "inject": inject}.items()]
        self.command = ["launch", *RUN, *words, "faults.meet_seconds=300", *shape, "--node-rank"]
        self.running = {number: self.start(number) for number in range(3)}

    def start(self, number: int) -> forked.Program:
        return forked.Program([*self.command, str(number)], self.user, environment(self.user, OMP_NUM_THREADS="1"))

    def records(self, rank: int) -> list[object]:
        file = self.folder / f"steps.rank{rank}.jsonl"
        return [read_line(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []

    def steps(self, rank: int) -> int:
        return sum(isinstance(each, StepRecord) for each in self.records(rank))

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG
        while not is_so():
            assert time.monotonic() < deadline, what
            assert all(each.poll() is None for each in self.running.values()), f"a machine has ended: {what}"
            time.sleep(0.05)

    def is_ready(self, number: int) -> bool:
        """Whether a machine's replica has built its model, and waits."""
        lease = json.loads((self.folder / FOLDER / f"machine.{number}.json").read_bytes())
        return [seat["state"] for seat in lease["seats"]] == ["ready"]

    def kill(self, number: int) -> None:
        """All of a machine: ranks and fork server end with their launcher."""
        gone = self.running.pop(number)
        gone.kill()
        gone.communicate()

    def said(self) -> dict[int, str]:
        """All that each machine said, once they have ended."""
        return {number: "".join(each.communicate()) for number, each in self.running.items()}

    def end(self) -> None:
        """Leave nothing behind."""
        for each in self.running.values():
            each.kill()
            each.communicate()


@pytest.fixture(scope="module")
def launchers(user):
    machines = Launchers(user)
    yield machines
    machines.end()


def test_machines_are_killed_and_others_take_their_place_with_the_state_of_a_peer(user, launchers):
    """The first, which decides; a spare is there. It is the spare when it is back, and takes the second one's place."""
    launchers.until(lambda: launchers.steps(1) >= 5 and launchers.is_ready(2), "they train, and the spare waits")
    launchers.kill(0)
    launchers.until(lambda: launchers.steps(2) > 7, "the spare trains")
    launchers.running[0] = launchers.start(0)
    launchers.until(lambda: launchers.is_ready(0), "the first is back")
    launchers.kill(1)
    said = launchers.said()
    assert {number: each.returncode for number, each in launchers.running.items()} == {0: 0, 2: 0}, said
    assert "(rank 0) is unreachable" in said[2]
    # That of the second is in the records: a few steps that nobody slows down may be over before a launcher misses it.
    assert "joining the others" in said[0]
    assert model_digest(user / "run") == model_digest(user / "reference") != ""
    assert not (user / "run" / "checkpoints").exists()
    told = {(each.what, each.rank) for each in launchers.records(2) if isinstance(each, EventRecord)}
    assert told >= {("lost", 1), ("back", 0)}  # it was none of them yet when the first was lost
    for rank in (0, 2):
        kept = [each for each in launchers.records(rank) if isinstance(each, StepRecord)]
        assert [each.step for each in kept] == list(range(1, STEPS + 1))
        assert sum(isinstance(each, AttemptRecord) for each in launchers.records(rank)) == 1


def test_a_finished_run_is_only_shown(launchers):
    again = launchers.start(1)
    said = again.communicate()
    assert again.returncode == 0
    assert "has finished this run" in "".join(said)


def test_the_spares_machine_takes_the_place_of_one_that_computes_wrong_numbers(user):
    """The first, which decides: all begin again from what was saved before, and it watches the others to their end."""
    words = ("checkpoint.every=10", "faults.check_matmuls_every=1", "steps=30")
    machines = Launchers(user, *words, name="faulty", inject="matmul:0:14")
    try:
        said = machines.said()
    finally:
        machines.end()
    assert {number: each.returncode for number, each in machines.running.items()} == {0: 0, 1: 0, 2: 0}, said
    assert "a spare takes the place of replica 0, which is not started again" in said[1]
    steps = [each.step for each in machines.records(2) if isinstance(each, StepRecord)]
    assert steps == list(range(11, 31)), said
    assert sum(isinstance(each, AttemptRecord) for each in machines.records(0)) == 1  # never again
    assert {"matmul"} == {json.loads(file.read_text())["kind"] for file in machines.folder.glob("faults/ended-*.json")}
    plain = with_reference(user / "plain", *RUN, "steps=30", "plan.grad_accum=4", "--ranks", "1")
    assert model_digest(machines.folder) == model_digest(plain / "reference") != ""
