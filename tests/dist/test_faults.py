"""Faults, injected into real runs: each is named, healed where it can be, and leaves the weights as they would be.

Here runs a sample; `make prove` runs them all.
"""

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import forked
import pytest
from commands import SMALL, environment, meshwright, write_text
from waiting import until

from meshwright.cost.goodput import account
from meshwright.runtime.failure import process_name
from meshwright.runtime.records import AttemptRecord, EventRecord, StepRecord, read_line
from meshwright.verify.rehearse import model_digest

RUN = (
    *SMALL,
    "steps=10",
    "data.source=my/*.txt",
    "checkpoint.every=4",
    "plan.deterministic=true",
    "eval.every=0",
    "faults.hang_seconds=4",
    "faults.compare_every=4",
)


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with a little text, a cache of its own, and an undisturbed run to compare with."""
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    done = train(folder, "reference")
    assert done.returncode == 0, done.stderr
    return folder


def train(user: Path, folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    return meshwright("train", *RUN, "--json", "--folder", folder, *words, folder=user)


def records(folder: Path):
    return [read_line(line) for line in (folder / "steps.rank0.jsonl").read_bytes().splitlines()]


def verdict(text: str) -> dict[str, str]:
    """The last verdict on the screen, by the name of its lines."""
    lines = [line.split(":", 1) for line in text.splitlines() if line.split(":")[0] in NAMES]
    return {name: rest.strip() for name, rest in lines}


NAMES = ("what", "where", "since", "cause", "do", "details")


def test_the_reference_accounts_for_every_second(user):
    spent = account(records(user / "reference"))
    summary = json.loads((user / "reference" / "summary.json").read_text())
    assert summary["attempts"] == 1
    assert summary["goodput"] + sum(summary["badput"].values()) == pytest.approx(1.0)
    assert summary["seconds"] == pytest.approx(spent.wall)
    assert spent.bad["recovery"] == spent.bad["lost work"] == 0.0
    assert not [record for record in records(user / "reference") if isinstance(record, EventRecord)]


def test_a_killed_rank_is_replaced_and_the_weights_are_the_same(user):
    done = train(user, "killed", "--inject", "kill:1:7:backward")
    assert done.returncode == 0, done.stderr
    told = verdict(done.stderr)
    assert told["what"] == "rank 1 was ended by signal SIGKILL"
    assert told["do"] == "nothing: restarting from step 4"
    begun = [record.step for record in records(user / "killed") if isinstance(record, AttemptRecord)]
    assert begun == [0, 4]
    assert model_digest(user / "killed") == model_digest(user / "reference")
    spent = account(records(user / "killed"))
    assert spent.bad["recovery"] > 0
    assert spent.bad["lost work"] > 0


HANGS = [("lock", "Python's lock"), ("skip", "left out a collective")]  # a heartbeat that stops, and one that continues


@pytest.mark.parametrize(("kind", "told"), HANGS, ids=[kind for kind, _ in HANGS])
def test_a_hang_names_the_guilty_rank_and_heals(user, kind, told):
    rank = {"lock": 0, "skip": 1}[kind]
    done = train(user, kind, "--inject", f"{kind}:{rank}:7")
    assert done.returncode == 0, done.stderr
    said = verdict(done.stderr)
    assert said["what"].startswith(f"rank {rank} ")
    assert told in said["what"]
    kept = json.loads((user / said["details"] / "verdict.json").read_text())
    assert kept["rank"] == rank
    if kind == "lock":
        assert "in forward of step 7" in said["what"]
        assert any("_hold_lock" in line for line in kept["stack"])
    assert model_digest(user / kind) == model_digest(user / "reference")


def test_sigterm_to_one_rank_saves_this_step_and_the_same_command_goes_on(user):
    first = train(user, "preempted", "--inject", "term:1:6:optimizer")
    assert first.returncode == 10, first.stderr
    assert (
        verdict(first.stderr)["what"] == "stopped by SIGTERM, checkpoint saved at step 7"
    )  # the next verdict has its wish in it
    second = train(user, "preempted")
    assert second.returncode == 0, second.stderr
    assert "resuming from step 7" in second.stderr
    assert model_digest(user / "preempted") == model_digest(user / "reference")


def test_a_gradient_that_is_not_finite_is_passed_over_and_its_batch_is_kept(user):
    done = train(user, "nan", "--inject", "nan:1:6")
    assert done.returncode == 0, done.stderr
    (event,) = [record for record in records(user / "nan") if isinstance(record, EventRecord)]
    assert (event.step, event.rank, event.what) == (6, 1, "not-finite")
    skipped = [record.step for record in records(user / "nan") if isinstance(record, StepRecord) and record.skipped]
    assert skipped == [6]
    kept = json.loads((user / "nan" / "faults" / "not-finite-step6-rank1.json").read_text())
    assert kept["samples"] == [22, 23]  # the second half of step 6's four samples, which begin at 20
    assert kept["parameter"] == "embed.weight"
    from safetensors.numpy import load_file

    assert load_file(user / "nan" / "faults" / "not-finite-step6-rank1.safetensors")["tokens"].shape == (2, 32)


def test_too_many_in_a_row_end_the_run_with_their_own_code_and_a_remedy_that_works(user):
    done = train(user, "nans", "faults.not_finite=0", "--inject", "nan:0:6")
    assert done.returncode == 13
    told = verdict(done.stderr)
    assert "not finite" in told["what"]
    assert len(told) <= 6
    words = told["do"].partition("--extend: ")[2].split()
    assert words == ["optim.lr=0.001", "--extend", "--folder", "nans"]
    again = train(user, "nans", *words)
    assert again.returncode == 0, again.stderr
    assert "resuming with optim.lr 0.002 → 0.001" in again.stderr
    assert "resuming from step 4" in again.stderr


def test_a_bit_that_flips_in_one_replica_is_found_and_no_run_goes_on_from_it(user):
    done = train(user, "flipped", "--inject", "flip:1:6")
    assert done.returncode == 14, done.stderr
    assert "embed.weight" in verdict(done.stderr)["what"]
    assert (user / "flipped" / "checkpoints" / "suspect-step-8").exists()
    again = train(user, "flipped")
    assert again.returncode == 0, again.stderr
    (event,) = [record for record in records(user / "flipped") if isinstance(record, EventRecord)]
    assert (event.step, event.rank, event.what) == (8, 1, "replicas")
    assert "rank 1 was wrong" in event.text  # of two, which only the steps made again can tell
    assert model_digest(user / "flipped") == model_digest(user / "reference")


def test_a_rank_that_computes_wrong_matmuls_is_named_and_no_run_goes_on_from_its_step(user):
    done = train(user, "matmul", "faults.check_matmuls_every=1", "--inject", "matmul:1:8")
    assert done.returncode == 14, done.stderr
    told = verdict(done.stderr)
    assert told["what"].startswith("rank 1 computes wrong matmuls: the ")
    assert told["since"].startswith("after step 7")
    assert (user / "matmul" / "checkpoints" / "suspect-step-8").exists()
    assert (user / "matmul" / "checkpoints" / "step-4").exists()


def test_restarts_that_bring_nothing_are_counted_and_end(user):
    words = ("checkpoint.every=0", "faults.restarts=0", "--inject", "kill:0:2:forward")
    done = train(user, "hopeless", *words)
    assert done.returncode == 11
    assert "faults.restarts" in verdict(done.stderr)["do"]


def test_an_error_is_told_in_six_lines_and_not_tried_again(user):
    done = train(user, "broken", "--inject", "error:1:3")
    assert done.returncode == 1
    told = verdict(done.stderr)
    assert told["what"] == "rank 1 failed: RuntimeError: injected"
    assert len(done.stderr.strip().splitlines()[-1].split(":")) >= 2
    assert len(records(user / "broken")) == 3  # one attempt, two steps


def test_a_power_cut_costs_one_interval_at_most(user):
    words = ["train", *RUN, "steps=100000", "checkpoint.every=2", "--folder", "cut"]
    launcher = forked.Program(words, user, environment(user))
    file = user / "cut" / "steps.rank0.jsonl"
    until(lambda: file.exists() and file.read_bytes().count(b"\n") > 6, "no steps were made")
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    left = f"meshwright-{process_name(launcher.pid)}-*"
    for pid in [launcher.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    launcher.communicate()
    assert len(list(Path(tempfile.gettempdir()).glob(left))) == 1
    made = [record.step for record in records(user / "cut") if isinstance(record, StepRecord)][-1]
    again = forked.Program(words, user, environment(user))
    until(lambda: file.read_bytes().count(b'"kind":"attempt"') >= 2, "it did not go on")
    again.terminate()
    said = again.communicate()
    assert again.returncode == 10, said
    begun = [record.step for record in records(user / "cut") if isinstance(record, AttemptRecord)]
    assert begun[0] == 0
    assert not list(Path(tempfile.gettempdir()).glob(left))
    assert made - begun[1] <= 3  # two steps of an interval, and one whose save was still being written
