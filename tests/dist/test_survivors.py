"""Replicas that go on without one that is lost: `faults.live`, from outside."""

import hashlib
import json
import math

import pytest
from commands import meshwright

from meshwright.runtime.records import AttemptRecord, EventRecord, StepRecord, read_line

WORDS = (
    *(
        "arch.preset=tiny",
        "arch.layers=2",
        "sequence=32",
        "batch=8",
        "steps=30",
        "eval.batches=1",
        "eval.every=4",
        "eval.sample_tokens=0",
    ),
    *("data.source=my/*.txt", "plan.microbatch=1"),
)
# Each rank is killed once, in another phase: a save is rank 0's, whose replica leads. None is killed before half of
# the replicas are there again.
KILLS = "kill:3:3:forward,kill:1:5:backward,kill:2:7:collective,kill:0:9:save"


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my").mkdir()
    lines = [f"line {line}: the quick brown fox jumps over {line * line} lazy dogs" for line in range(1200)]
    (folder / "my" / "text.txt").write_text("\n".join(lines))
    return folder


def train(user, name, *words):
    done = meshwright("train", *WORDS, *words, "--json", "--folder", name, folder=user)
    assert done.returncode == 0, done.stderr
    (user / name / "said.txt").write_text(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def records(user, name, rank=0):
    return [read_line(line) for line in (user / name / f"steps.rank{rank}.jsonl").open("rb")]


def losses(user, name, rank=0):
    return [record.loss for record in records(user, name, rank) if isinstance(record, StepRecord)]


def model(user, name):
    return hashlib.sha256((user / name / "model" / "model.safetensors").read_bytes()).hexdigest()


def processes(user, name, rank):
    words = (user / name / "logs" / f"rank{rank}.txt").read_text().splitlines()
    return [line for line in words if line.startswith("attempt")]


@pytest.fixture(scope="module")
def undisturbed(user):
    """One rank, in deterministic mode: what every plan of as many global microbatches gives."""
    words = ("plan.grad_accum=8", "plan.deterministic=true", "checkpoint.every=0", "--ranks", "1")
    return train(user, "undisturbed", *words)


def test_killed_in_every_phase_no_bit_differs_and_no_step_is_lost(user, undisturbed):
    words = ("plan.replicate=4", "plan.grad_accum=2", "plan.deterministic=true", "checkpoint.every=2")
    summary = train(user, "phases", *words, "faults.live=true", "--ranks", "4", "--inject", KILLS)
    assert model(user, "phases") == model(user, "undisturbed")
    assert summary["validation_loss"] == undisturbed["validation_loss"]
    for rank in range(4):
        assert losses(user, "phases", rank) == losses(user, "undisturbed")  # every step once, on every rank's record
        assert len(processes(user, "phases", rank)) == 2  # each was killed once, and by nobody else
    told = [record for record in records(user, "phases") if isinstance(record, EventRecord)]
    assert {record.rank for record in told if record.what == "lost"} >= {1, 2, 3}
    # Rank 0 speaks: when it is back it says so itself, and what it missed.
    (own,) = [record.text for record in told if (record.what, record.rank) == ("back", 0)]
    said = (user / "phases" / "said.txt").read_text()
    assert own in said
    assert "replica 0 (rank 0) was lost" in said
    assert len([record for record in records(user, "phases") if isinstance(record, AttemptRecord)]) == 1


def test_a_replica_of_shards_comes_back_whole_with_the_state_of_a_peer(user, undisturbed):
    """Nothing is ever saved here, so there is nothing else that the state could come from."""
    words = ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.grad_accum=2", "plan.deterministic=true")
    kills = "kill:3:3:optimizer,kill:0:6:eval"
    train(user, "shards", *words, "checkpoint.every=0", "faults.live=true", "--ranks", "4", "--inject", kills)
    assert model(user, "shards") == model(user, "undisturbed")
    assert losses(user, "shards") == losses(user, "undisturbed")
    assert [len(processes(user, "shards", rank)) for rank in range(4)] == [2, 2, 2, 2]
    assert not (user / "shards" / "checkpoints").exists()


def test_a_spare_takes_the_place_of_a_lost_replica_and_of_a_faulty_one(user, undisturbed):
    """One is killed; later another computes wrong matmuls, and all go back to what was saved before, without it."""
    words = ("plan.replicate=2", "plan.grad_accum=4", "plan.deterministic=true", "checkpoint.every=2")
    live = ("faults.live=true", "faults.spares=1", "faults.check_matmuls_every=1", "--ranks", "2")
    train(user, "spares", *words, *live, "--inject", "kill:1:4:backward,matmul:0:14")
    assert model(user, "spares") == model(user, "undisturbed")
    kept = {record.step: record.loss for record in records(user, "spares", 2) if isinstance(record, StepRecord)}
    assert list(kept.values()) == losses(user, "undisturbed")  # steps that were made again count as at last
    told = [record.text for record in records(user, "spares") if isinstance(record, EventRecord)]
    assert any("spare 2 (rank 2) has taken a place" in text for text in told)
    assert len(processes(user, "spares", 0)) == 1  # never again
    ended = [json.loads(file.read_text()) for file in (user / "spares" / "faults").glob("ended-*.json")]
    assert {each["kind"] for each in ended} == {"killed", "matmul"}


def test_healthy_ranks_go_on_beside_tensor_parallelism(user, undisturbed):
    words = ("plan.replicate=2", "plan.tp=2", "plan.grad_accum=4", "checkpoint.every=0", "steps=8")
    train(user, "tensor", *words, "faults.live=true", "--ranks", "4", "--inject", "kill:3:3:backward")
    plain = ("plan.grad_accum=8", "checkpoint.every=0", "steps=8", "--ranks", "1")
    train(user, "plain", *plain)
    assert [len(processes(user, "tensor", rank)) for rank in range(2)] == [1, 1]
    # Sums of tensor parallelism are in another order: 1e-4 is a hundred times their rounding in fp32.
    pairs = zip(losses(user, "tensor"), losses(user, "plain"), strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs)
