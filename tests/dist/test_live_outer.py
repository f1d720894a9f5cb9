"""Replicas that sync rarely and can do without one that is lost: equal to a process that leaves the same one out."""

import pytest
import torch
from commands import meshwright
from safetensors.torch import load_file
from trials import corpus_file, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.runtime.records import EventRecord, StepRecord, read_line
from meshwright.verify.lossy import Replica, Sync, _replica, alone

TOLERANCE = 1e-12  # float64 sums in another order, through a few updates of the weights and of the replicas' mean
WORDS = (
    *("arch.layers=2", "steps=48", "sequence=16", "batch=12", "data.eval_fraction=0.0", "plan.replicate=3"),
    *(
        "plan.microbatch=1",
        "plan.grad_accum=4",
        "plan.sync_every=3",
        "plan.outer=diloco",
        "faults.live=true",
        "checkpoint.every=0",
        "optim.lr=1e-3",  # at 1e-2 these many steps multiply rounding beyond the tolerance, or not, as it happens
    ),
)
LOST = 1  # the replica that is killed, while it makes the fifth step
SLOW = "slow:0:5"  # sleeps behind every microbatch, or these steps would be over before a process has started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    corpus_file(folder)
    make_corpus(run := make_run(folder, *WORDS), folder)  # tokenised once, before the ranks ask
    words = [f"{key}={value}" for key, value in {"data.source": run.data.source, "eval.sample_tokens": 0}.items()]
    numbers = ("arch.preset=tiny", "plan.precision=fp64", "optim.warmup=0", "eval.every=0")
    done = meshwright(
        "train", *numbers, *words, *WORDS, "--ranks", "3", "--inject", f"kill:{LOST}:5:forward,{SLOW}",
        "--folder", "run", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def told(folder, rank):
    return [read_line(line) for line in (folder / "run" / f"steps.rank{rank}.jsonl").open("rb")]


def given(to: Replica, giver: Replica) -> None:
    """What one that comes back has from a peer, beside the weights."""
    ours, theirs = to.state.optimizer, giver.state.optimizer
    for kind, tensors in theirs.states().items():
        torch._foreach_copy_(ours.states()[kind], tensors)
    ours.count.copy_(theirs.count)


@world(1)
def test_a_lost_worker_is_left_out_of_the_next_outer_step(folder):
    run = make_run(folder, *WORDS)
    events = [record for record in told(folder, 0) if isinstance(record, EventRecord)]
    # Both are noted where the others sync; how long a process takes to start decides at which sync it is back.
    lost, back = (next(each.step for each in events if each.what == what) for what in ("lost", "back"))
    assert 6 == lost <= back < run.steps
    mesh, corpus = mesh_of(alone(run, run.batch).plan), make_corpus(run, folder)
    replicas = [_replica(run, corpus, mesh, number) for number in range(3)]
    outer, losses = Sync(run, replicas[0].weights), list[list[float]]()
    for step in range(1, run.steps + 1):
        losses.append([replica.step().loss.item() for replica in replicas])
        present = [number for number in range(3) if number != LOST or not lost <= step <= back]
        outer.after(step, [replicas[number].weights for number in present])
        if step == back:
            given(replicas[LOST], replicas[0])
            for name, weight in replicas[LOST].weights.items():
                weight.copy_(replicas[0].weights[name])
    for number in range(3):
        measured = {each.step: each.loss for each in told(folder, number) if isinstance(each, StepRecord)}
        assert sorted(measured) == list(range(1, run.steps + 1))
        own = [step for step in measured if number != LOST or not lost - 3 < step <= back]
        assert max(abs(measured[step] / losses[step - 1][number] - 1) for step in own) <= TOLERANCE
    kept = load_file(folder / "run" / "model" / "model.safetensors")
    for name, weight in replicas[0].weights.items():
        assert (kept[name] - weight).abs().max() <= TOLERANCE * weight.abs().max()
    for replica in replicas:
        replica.state.loader.close()
