"""Weights in bf16 alone: every plan rounds alike, and a save holds all there is."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import Trial, alone, corpus_file, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.checkpoint import format as manifests
from meshwright.config.run import Run
from meshwright.parallel.mesh import local
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import digest_of, restore

KINDS = ("none", "split")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def planned(folder: Path, kind: str, plan: str, *words: str) -> Run:
    fields = (f"plan.{word}" for word in plan.split(","))
    return make_run(
        folder,
        "plan.precision=bf16",
        "optim.lr=1e-3",
        f"optim.master_weights={kind}",
        f"optim.stochastic_rounding={str(kind == 'none').lower()}",
        *fields,
        *words,
    )


def agree(trial: Trial, reference: Trial, plan: str) -> None:
    """A plan rounds as one process does."""
    # Products of bf16 numbers, summed in another order: a unit of bf16 here and there, 4e-3, over many tokens.
    assert trial.losses == pytest.approx(reference.losses, rel=2e-3), plan
    same = [trial.weights[name].eq(reference.weights[name]).float().mean() for name in trial.weights]
    # Draws of one's own would leave the two neighbours of a number to chance: after four steps below a half.
    assert not same or torch.stack(same).mean() > 0.75, plan


def compare(folder: Path, kind: str, plans: tuple[str, ...]) -> None:
    corpus = make_corpus(planned(folder, kind, "replicate=1"), folder)
    reference = drive(planned(folder, kind, "replicate=1"), corpus, alone()) if dist.get_rank() == 0 else None
    for plan in plans:
        run = planned(folder, kind, plan)
        trial = drive(run, corpus, mesh_of(run.plan))
        assert {local(weight).dtype for chunk in trial.state.chunks for weight in chunk.parameters()} == {
            torch.bfloat16
        }
        if reference is not None:
            agree(trial, reference, plan)


@pytest.mark.parametrize("kind", KINDS)
@world(1)
def test_accumulation_rounds_alike(folder, kind):
    compare(folder, kind, ("grad_accum=2", "bf16_params=false"))


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_every_axis_rounds_alike(folder, kind):
    axes = ("replicate=2", "shard=2,zero=1", "shard=2,zero=3", "tp=2", "cp=2", "pp=2,schedule=1f1b,grad_accum=4")
    compare(folder, kind, axes)


@pytest.mark.parametrize("kind", KINDS)
@world(4)
def test_axes_together_round_alike(folder, kind):
    compare(folder, kind, ("shard=2,zero=3,tp=2",))


def only_middle(home: Path) -> None:
    """A run folder as it was when the step in the middle had been saved."""
    place = home / "checkpoints"
    shutil.rmtree(place / "step-4")
    (place / "latest").write_text(f"step-2\n{manifests.read(place / 'step-2').sha256}\n")


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_a_run_goes_on_bit_by_bit_from_its_save(folder, kind):
    run = planned(folder, kind, "shard=2,zero=3", "steps=4", "checkpoint.every=2")
    mesh, corpus, home = mesh_of(run.plan), make_corpus(run, folder), folder / "run"
    ends, losses = [], []
    for again in (False, True):
        state = build(run, corpus, mesh)
        if again:
            assert restore(state, run, mesh, home, lambda text: None) is not None
        found = [each for each in train(run, state, mesh, home) if isinstance(each, StepResult)]
        losses.append([each.loss.item() for each in found])
        ends.append(digest_of(state, run, mesh))
        state.loader.close()
        assert all(("low" in held) is (kind == "split") for held in state.optimizer.held().values())
        if mesh.rank == 0 and not again:
            only_middle(home)
        dist.barrier()
    assert losses[1] == losses[0][2:]
    assert ends[1] == ends[0]
