"""Optimizer states in bf16 on the device: every plan rounds alike, saves hold them, and they take the bytes said."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_rounding import agree, only_middle
from trials import alone, corpus_file, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.checkpoint import format as manifests
from meshwright.checkpoint.storage import CorruptError
from meshwright.config.run import Run
from meshwright.cost.layout import layout_of
from meshwright.cost.resident import host_states, states
from meshwright.parallel.mesh import local
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import digest_of, restore

KINDS = ("none", "split")
SGD = ("optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.05")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def planned(folder: Path, kind: str, plan: str, *words: str, dtype: str = "bf16") -> Run:
    fields = (f"plan.{word}" for word in plan.split(","))
    rounding = f"optim.stochastic_rounding={str(kind == 'none').lower()}"
    common = ("plan.precision=bf16", "optim.lr=1e-3", f"optim.master_weights={kind}", rounding)
    return make_run(folder, *common, f"optim.state_dtype={dtype}", *fields, *words)


def compare(folder: Path, kind: str, plans: tuple[str, ...], *words: str) -> None:
    corpus = make_corpus(planned(folder, kind, "replicate=1"), folder)
    reference = drive(planned(folder, kind, "replicate=1", *words), corpus, alone()) if dist.get_rank() == 0 else None
    for plan in plans:
        run = planned(folder, kind, plan, *words)
        trial = drive(run, corpus, mesh_of(run.plan))
        optimizer = trial.state.optimizer
        assert {state.dtype for each in optimizer.states().values() for state in each} == {torch.bfloat16}
        held = sum(state.nbytes for each in optimizer.states().values() for state in each)
        layout = layout_of(run.plan, run.optim.master_weights, "bf16", run.optim.name)
        lines = (host_states if layout.cpu_offload else states)(run.arch, run.plan, mesh_of(run.plan).place, layout)
        assert held == {line.name: line.bytes for line in lines}["moments"]
        if reference is not None:
            agree(trial, reference, plan)


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_every_axis_rounds_alike(folder, kind):
    axes = ("replicate=2", "shard=2,zero=1", "shard=2,zero=3", "tp=2", "cp=2", "pp=2,schedule=1f1b,grad_accum=4")
    compare(folder, kind, axes)
    compare(folder, kind, ("shard=2,zero=3",), *SGD)
    compare(folder, kind, ("shard=2,zero=3,cpu_offload=true",))


@world(2)
def test_a_run_goes_on_bit_by_bit_from_its_save(folder):
    run = planned(folder, "split", "shard=2,zero=3", "steps=4", "checkpoint.every=2")
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
        if mesh.rank == 0 and not again:
            only_middle(home)
            saved = manifests.read(home / "checkpoints" / "step-2")
            kinds = {tensor.name.split("/")[0]: tensor.dtype for tensor in saved.tensors if "/" in tensor.name}
            assert (kinds["first"], kinds["second"]) == ("BF16", "BF16")
        dist.barrier()
    assert losses[1] == losses[0][2:]
    assert ends[1] == ends[0]


@world(2)
def test_a_save_resumes_under_another_plan_and_not_in_another_dtype(folder):
    run = planned(folder, "split", "shard=2,zero=3", "steps=4", "checkpoint.every=2")
    mesh, corpus, home = mesh_of(run.plan), make_corpus(run, folder), folder / "run"
    state = build(run, corpus, mesh)
    list(train(run, state, mesh, home))
    state.loader.close()
    digest = digest_of(state, run, mesh)
    other = planned(folder, "split", "tp=2", "steps=4", "checkpoint.every=2")
    state = build(other, corpus, mesh_of(other.plan))
    assert restore(state, other, mesh_of(other.plan), home, lambda text: None) is not None
    assert digest_of(state, other, mesh_of(other.plan)) == digest
    assert {local(moment).dtype for moment in state.optimizer.states()["second"]} == {torch.bfloat16}
    state.loader.close()
    wide = planned(folder, "split", "shard=2,zero=3", "steps=4", "checkpoint.every=2", dtype="fp32")
    state = build(wide, corpus, mesh)
    with pytest.raises(CorruptError, match="is of another run"):
        restore(state, wide, mesh, home, lambda text: None)
    state.loader.close()
