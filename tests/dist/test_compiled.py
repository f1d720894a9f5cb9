"""Compiled blocks across ranks. Compiling takes seconds, so one run shows several things."""

from pathlib import Path

import pytest
import torch
from trials import alone, corpus_file, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.check import missing
from meshwright.cost.traffic import traffic
from meshwright.parallel import compile
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.state import weights
from meshwright.verify.collectives import differences, implied, observing

pytestmark = [
    pytest.mark.skipif(any(missing(Plan(microbatch=1, compile=True))), reason="no C++ compiler"),
    # There "expected scalar type Double but found Float", from its own attention alone.
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 cannot compile float64 attention on a CPU"),
]

SMALL = ("arch.layers=2", "steps=2", "data.eval_fraction=0.0", "plan.precision=fp64")
PLAN = (*SMALL, "plan.tp=2", "plan.recompute=full", "plan.compile=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled")
    corpus_file(path)
    make_corpus(make_run(path, *SMALL), path)
    return path


@world(2)
def test_compiled_ranks_train_like_one_process_and_send_what_the_plan_implies(folder):
    run, reference = make_run(folder, *PLAN), make_run(folder, *SMALL)
    mesh = mesh_of(run.plan)
    state = build(run, make_corpus(run, Path(folder)), mesh)
    steps = train(run, state, mesh)
    first = next(steps)
    with observing() as seen:  # the second step, once everything that is made at first use is there
        second = next(steps)
    ours = dict(weights(state.chunks, run, mesh))
    state.loader.close()
    other = drive(reference, make_corpus(reference, Path(folder)), alone())
    # Fused kernels add in another order, as ranks do: 1e-16 a term, and AdamW divides small gradients by their size.
    assert [first.loss.item(), second.loss.item()] == pytest.approx(other.losses, rel=1e-12)
    for name, weight in other.weights.items():
        # Of the embedding too, which under tp reaches the first block while it is still on its way.
        assert (ours[name] - weight).norm() < 1e-12 * weight.norm(), name
    assert compile.described()[0].endswith(" 0 graph breaks"), compile.described()
    assert not differences(seen, implied(traffic(run.arch, run.plan, run.sequence, place=mesh.place), run.plan, mesh))


@world(1)
def test_blocks_that_are_computed_anew_together_share_their_kernels(folder):
    words = ("arch.layers=6", "steps=1", "data.eval_fraction=0.0", "plan.recompute=every-2", "plan.compile=true")
    run = make_run(folder, *words)
    drive(run, make_corpus(run, Path(folder)), mesh_of(run.plan))
    told = compile.described()[0]
    # The first block's input needs no gradient of its own, a second graph; three runs of two blocks add none.
    assert ", 0 graph breaks" in told
    assert int(told.split(", ")[1].split()[0]) <= 1, told


@world(1)
def test_a_validation_loss_is_computed_by_the_graphs_of_training(folder):
    words = ("arch.layers=3", "steps=3", "eval.every=2", "data.eval_fraction=0.1")
    run, plain = make_run(folder, *words, "plan.compile=true"), make_run(folder, *words)
    state = build(run, make_corpus(run, Path(folder)), mesh_of(run.plan))
    graphs, found = {}, {}
    for result in train(run, state, mesh_of(run.plan)):
        graphs[type(result).__name__, result.step] = compile.described()[0]
        found[type(result).__name__, result.step] = result.loss.item()
    state.loader.close()
    assert graphs["EvalResult", 2] == graphs["StepResult", 2] == graphs["StepResult", 3] == graphs["EvalResult", 3]
    other = drive(plain, make_corpus(plain, Path(folder)), alone())
    assert found["EvalResult", 3] == pytest.approx(other.held, rel=1e-12)
    assert not any(weight.grad is not None and weight.grad.isnan().any() for weight in state.optimizer.weights)
