"""Every data-parallel plan trains like one device, ragged documents included."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import Trial, alone, corpus_file, deviation, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.optim import clip
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.state import weights

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four AdamW steps.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("data")
    corpus_file(made)
    make_corpus(make_run(made), made)  # tokenised once, before the ranks ask
    return made


@functools.cache
def reference(folder: Path, words: tuple[str, ...], arch: str) -> Trial:
    """One process, once for all plans over the same mathematics."""
    run = make_run(folder, *words, "plan.replicate=1", arch=arch)
    return drive(run, make_corpus(run, folder), alone())


def compare(folder: Path, words: tuple[str, ...], plan: tuple[str, ...], arch: str = "tiny") -> None:
    """The plan against one process over the same mathematics."""
    run = make_run(folder, *words, *plan, arch=arch)
    mine = drive(run, make_corpus(run, folder), mesh_of(run.plan))
    if dist.get_rank() > 0:
        return
    theirs = reference(folder, words, arch)
    assert deviation(mine, theirs) < TOLERANCE, f"losses {mine.losses} beside {theirs.losses}"
    assert theirs.losses[-1] < theirs.losses[0]


@pytest.mark.parametrize("pack", [("data.pack=stream",), ("data.mask_documents=true",), ("data.pack=documents",)])
@pytest.mark.parametrize("plan", [("plan.replicate=2",), ("plan.replicate=2", "plan.grad_accum=2")])
@world(2)
def test_two_replicas_are_one_device(folder, pack, plan):
    compare(folder, pack, plan)


@pytest.mark.parametrize(
    "plan",
    [
        ("plan.shard=4", "plan.zero=2", "plan.grad_accum=2"),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
    ],
    ids=["zero2", "hsdp"],
)
@world(4)
def test_four_ranks_are_one_device(folder, plan):
    compare(folder, ("data.pack=documents",), plan)


@world(2)
def test_experts_replicated_are_one_device(folder):
    compare(folder, ("data.pack=documents", "arch.router=noisy_topk"), ("plan.replicate=2",), arch="tiny-moe")


@world(1)
def test_accumulation_changes_nothing(folder):
    for pack in ("stream", "documents"):
        whole = drive(make_run(folder, f"data.pack={pack}"), make_corpus(make_run(folder), folder), alone())
        for parts in (2, 8):
            run = make_run(folder, f"data.pack={pack}", f"plan.grad_accum={parts}")
            assert deviation(drive(run, make_corpus(run, folder), alone()), whole) < TOLERANCE


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@world(2)
def test_low_precision_follows_the_wide_run(folder, precision):
    words = ("data.pack=documents", "plan.replicate=2", "steps=8", "arch.layers=4")
    low = make_run(folder, *words, f"plan.precision={precision}")
    wide = make_run(folder, *words, "plan.precision=fp32")
    corpus = make_corpus(low, folder)
    mine = drive(low, corpus, mesh_of(low.plan))
    theirs = drive(wide, corpus, mesh_of(wide.plan))
    assert {weight.dtype for weight in mine.weights.values()} == {torch.float32}
    assert all(flag == 1.0 for flag in mine.finite)
    # bf16 keeps 8 bits: a loss of about 6 read to 0.4 % each, over eight steps of it.
    assert mine.losses == pytest.approx(theirs.losses, rel=2e-2)


@pytest.mark.parametrize("plan", [("plan.replicate=2",), ("plan.shard=2", "plan.zero=3")])
@world(2)
def test_an_overflow_on_one_rank_skips_the_step_on_both_and_halves_the_scale(folder, plan):
    run = make_run(folder, *plan, "plan.precision=fp16", "steps=3", "data.eval_fraction=0.0")
    mesh = mesh_of(run.plan)
    state = build(run, make_corpus(run, folder), mesh)
    (model,) = state.chunks
    before = {name: weight.clone() for name, weight in weights([model], run, mesh)}
    spoil = model.register_forward_hook(
        lambda module, arguments, logits: logits * torch.inf if mesh.rank == 1 else None
    )
    steps = train(run, state, mesh)
    first = next(steps)
    spoil.remove()
    after = dict(weights([model], run, mesh))
    assert first.finite == 0.0
    assert state.scale.value == clip.FIRST / 2
    assert state.optimizer.count == 0
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert next(steps).finite == 1.0  # and training goes on
    assert state.optimizer.count == 1
    state.loader.close()
