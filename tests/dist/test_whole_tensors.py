"""Optimizers of whole tensors under every axis: as one device, states and traffic too, through checkpoints."""

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import (
    CPU,
    alone,
    corpus_file,
    deviation,
    digest_before_the_cut,
    drive,
    made,
    make_corpus,
    make_run,
    mesh_of,
)
from worlds import world

from meshwright.cost.layout import layout_of, states
from meshwright.cost.traffic import traffic
from meshwright.spec.optimizers import OPTIMIZERS, description_of
from meshwright.spec.params import params
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, holdings, restore
from meshwright.verify.collectives import differences, implied, observing

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates.
TOLERANCE = 1e-12
WHOLE = [name for name, spec in OPTIMIZERS.items() if spec.whole]
OPTIONS = {
    "muon": ((),),
    "adafactor": ((), ("optim.relative_step=true", "optim.beta1=0.9", "optim.lr=5e-2")),
}
CASES = [(f"optim.name={name}", "data.pack=documents", *words) for name in WHOLE for words in OPTIONS[name]]
TWO = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1"),
    ("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3"),
    ("plan.tp=2",),
    ("plan.cp=2", "plan.zero=3"),
    ("plan.pp=2", "plan.grad_accum=4"),
)
FOUR = (
    ("plan.pp=2", "plan.grad_accum=4", "plan.shard=2", "plan.zero=3"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2"),
    ("plan.replicate=2", "plan.shard=2", "plan.zero=3"),
)
EXPERTS = (
    ("plan.shard=4", "plan.zero=2", "plan.ep=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2"),
    ("plan.shard=4", "plan.zero=3"),
    ("plan.tp=2", "plan.replicate=2"),
)
ODD = ("arch.vocab=259", "arch.hidden=72", "arch.ffn=90", "arch.heads=4", "arch.kv_heads=2")  # shards are padded


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def whole_states(state, run, mesh) -> dict[str, torch.Tensor]:
    """Every state of every weight, put together from the ranks that write it."""
    spec, found = state.optimizer.spec, {}
    for param in params(run.arch):
        for kept in spec.states_of(param.name, len(param.shape)):
            found[f"{kept.name}/{param.name}"] = torch.zeros(kept.shape_beside(param.shape), dtype=torch.float64)
    for held in holdings(state, run, mesh):
        if held.writes and held.name in found:
            found[held.name][tuple(slice(*part) for part in held.region)] = held.tensor
    for whole in found.values() if mesh.world > 1 else ():
        dist.all_reduce(whole)
    return found


def compare(folder: Path, case: tuple[str, ...], plans: tuple[tuple[str, ...], ...], arch: str = "tiny") -> None:
    """Plans beside one process over the same mathematics: losses, weights and states."""
    corpus = make_corpus(make_run(folder, *case, arch=arch), folder)
    reference = make_run(folder, *case, "plan.replicate=1", arch=arch)
    one = drive(reference, corpus, alone()) if dist.get_rank() == 0 else None
    theirs = whole_states(one.state, reference, alone()) if one is not None else {}
    for plan in plans:
        run = make_run(folder, *case, *plan, arch=arch)
        mesh = mesh_of(run.plan)
        mine = drive(run, corpus, mesh)
        ours = whole_states(mine.state, run, mesh)
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, f"{run.plan}: losses {mine.losses} beside {one.losses}"
            assert one.losses[-1] < one.losses[0]
            assert ours.keys() == theirs.keys()
            far = {name: ((ours[name] - state).norm() / state.norm()).item() for name, state in theirs.items()}
            assert max(far.values()) < TOLERANCE, f"{run.plan}: {max(far, key=far.__getitem__)}"


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(2)
def test_two_ranks_are_one_device(folder, case):
    compare(folder, case, TWO)
    compare(folder, (*case, *ODD), (("plan.shard=2", "plan.zero=3"), ("plan.tp=2",)))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(4)
def test_four_ranks_are_one_device(folder, case):
    compare(folder, case, FOUR)
    compare(folder, (*case, *ODD), (("plan.shard=4", "plan.zero=3"),))
    compare(folder, case, EXPERTS, arch="tiny-moe")


def surprises(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Where a real step sends or holds something else than the planner says."""
    run = make_run(folder, "arch.layers=2", "steps=2", "data.eval_fraction=0.0", *words)
    mesh = mesh_of(run.plan)
    state = build(run, make_corpus(run, folder), mesh)
    steps = train(run, state, mesh)
    next(steps)
    with observing() as seen:
        next(steps)
    state.loader.close()
    name = description_of(run.optim)
    planned = implied(traffic(run.arch, run.plan, run.sequence, place=mesh.place, optimizer=name), run.plan, mesh)
    found = [text for text in differences(seen, planned) if run.plan.ep == 1 or "all_to_all" not in text]
    layout = layout_of(run.plan, run.optim.master_weights, run.optim.state_dtype, name)
    said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}["moments"]
    held = sum(tensor.nbytes for tensor in chain.from_iterable(state.optimizer.states().values()))
    if said != held:
        found.append(f"{held} bytes of states, said {said}")
    return [f"{run.plan}: {text}" for text in found]


BF16 = ("plan.precision=bf16",)
MOE = ("arch.preset=tiny-moe",)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(4)
def test_four_ranks_send_and_hold_what_the_planner_says(folder, case):
    plans = (
        *((*plan, *words) for plan, words in zip(FOUR, (BF16, ODD, ()), strict=True)),
        ("plan.shard=4", "plan.zero=3", *ODD, *BF16),
        ("plan.cp=2", "plan.shard=2", "plan.zero=1", *ODD),
        ("plan.tp=4", "plan.precision=fp32", "arch.kv_heads=8"),
        *((*plan, *MOE, *BF16) for plan in EXPERTS),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.ep=2", "plan.grad_accum=4", *MOE),
    )
    assert not [text for words in plans for text in surprises(folder, (*case, "arch.layers=2", *words))]


SAVED = ("steps=6", "checkpoint.every=2", "plan.precision=fp64")
RESUMED = (("plan.tp=2",), ("plan.pp=2", "plan.grad_accum=4"), ("plan.replicate=2",))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(2)
def test_a_checkpoint_resumes_under_another_plan(folder, case):
    words = (*case, *SAVED, *ODD)
    run, mesh, state = made(make_run(folder, *words, "plan.shard=2", "plan.zero=3"), folder, CPU)
    digest = digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    for plan in RESUMED:
        run, mesh, state = made(make_run(folder, *words, *plan), folder, CPU)
        restored = restore(state, run, mesh, folder / "run", lambda text: None)
        assert restored is not None
        assert (restored.step, digest_of(state, run, mesh)) == (4, digest)
        assert all(tensor.any() for tensor in chain.from_iterable(state.optimizer.states().values()))
        state.loader.close()
