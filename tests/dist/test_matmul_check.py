"""Checks of matmuls under every kind of plan: a rank's own products are seen, and only the rank that errs is named."""

import random
from pathlib import Path

import pytest
import torch.distributed as dist
from test_data_parallel import folder  # noqa: F401
from trials import CPU, GPT, made, make_run
from worlds import world

from meshwright.config.run import Run
from meshwright.parallel.mesh import Mesh
from meshwright.train import matmul_check
from meshwright.train.inject import FaultyMatmuls
from meshwright.train.loop import StepResult, train
from meshwright.train.matmul_check import Checked, Flip, MatmulCheck, Matmuls
from meshwright.train.state import State

STEPS = 4
ALL = {"output", "input gradient", "weight gradient"}
PLANS = {
    "tp": ("plan.tp=2", *GPT),
    "shard": ("plan.shard=2", "plan.zero=3", "plan.recompute=full", "plan.grad_accum=2"),
    "replicate": ("plan.replicate=2", "plan.precision=bf16", "plan.recompute=selective"),
    "cp": ("plan.cp=2", "plan.recompute=every-2"),
    "pp": ("plan.pp=2", "plan.schedule=1f1b", "plan.grad_accum=2"),
    "zero-bubble": ("plan.pp=2", "plan.schedule=zb1p", "plan.grad_accum=2", "arch.layers=4"),
    "experts": ("plan.shard=2", "plan.zero=2", "plan.ep=2"),
}


def checked(run: Run, mesh: Mesh, state: State) -> tuple[list[Checked], list[float]]:
    """All that was checked, and the losses."""
    check, found, losses = MatmulCheck(run, state, mesh, mesh.rank), list[Checked](), list[float]()
    for result in train(run, state, mesh):
        if isinstance(result, StepResult):
            check.passed(result.step)
            found += check.pending
            check.pending.clear()
            losses.append(result.loss.item())
    check.disarm()
    state.loader.close()
    return found, losses


def run_of(folder: Path, name: str, *words: str) -> Run:  # noqa: F811
    arch = "tiny-moe" if name == "experts" else "tiny"
    return make_run(folder, *PLANS[name], f"steps={STEPS}", "faults.check_matmuls_every=1", *words, arch=arch)


@pytest.mark.parametrize("name", PLANS)
@world(2)
def test_every_plans_matmuls_agree_with_their_checksums(folder, name):  # noqa: F811
    run, mesh, state = made(run_of(folder, name), folder, CPU)
    found, losses = checked(run, mesh, state)
    assert len(found) == STEPS
    assert {product.partition(" of ")[0] for each in found for product in each.products} == ALL
    assert all(0 < each.scores[:, 0].max().item() < 1 for each in found)
    if name == "tp":  # the check leaves the arithmetic alone, to the last bit
        run, mesh, state = made(run_of(folder, name, "faults.check_matmuls_every=0"), folder, CPU)
        assert checked(run, mesh, state) == ([], losses)


@world(2)
def test_a_passing_flip_is_heard_of_on_every_rank(folder):  # noqa: F811
    run, mesh, state = made(run_of(folder, "replicate"), folder, CPU)
    check = MatmulCheck(run, state, mesh, mesh.rank)
    check.disarm()
    if mesh.rank == 1:
        check.untold.append(Flip(3, "output of blocks.0.mlp.up", 9.0, persists=False))
    assert check.others(4) == []
    assert check.others(5) == ([(1, 3)] if mesh.rank == 0 else [])
    assert check.others(10) == []
    state.loader.close()


@pytest.mark.parametrize("name", ["tp", "shard"])
@world(2)
def test_the_rank_whose_device_errs_is_the_one_whose_check_finds_it(folder, name):  # noqa: F811
    run, mesh, state = made(run_of(folder, name), folder, CPU)
    faulty = FaultyMatmuls(1.0 if dist.get_rank() == 1 else 0.0, random.Random(0), bit=8)
    original = matmul_check.multiply
    matmul_check.multiply = lambda product, a: faulty.multiply(original, product, a)
    try:
        with Matmuls(faulty.take):
            found, _ = checked(run, mesh, state)
    finally:
        matmul_check.multiply = original
    worst = [each.scores.max().item() for each in found]
    assert min(worst) > 1 if mesh.rank == 1 else max(worst) < 1, worst
