"""Muon's two kernels move momentum and weights as float64 does, or not at all where a gradient is not finite."""

import pytest
import torch
from kernel_cases import STEP, TYPES, assert_near, draw, interpreted
from torch import Tensor

from meshwright.kernels.muon import BLOCK, MuonStep, accumulate, accumulate_fused, move_fused, moved
from meshwright.optim.master_weights import join, split

SHARE, STAYS, BY = 0.95, 0.999, 0.02
SHAPES = ((1, 1), (5, 37), (3, BLOCK), (64, 80))


def step(factor: float = 0.5, finite: float = 1.0) -> MuonStep:
    return MuonStep(SHARE, torch.tensor(factor, dtype=torch.float64), torch.tensor(finite, dtype=torch.float64))


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_and_what_is_to_be_orthogonalized(shape, dtype):
    gradient, momentum, room = draw(shape, dtype, 1, "turned"), draw(shape, torch.float32, 2), draw(shape, dtype, 3)
    wide, there = momentum.double(), room.double()
    accumulate(gradient.double(), wide, there, step())
    alone = momentum.clone()
    accumulate_fused(gradient, alone, None, step().scalars(), SHARE)
    accumulate_fused(gradient, momentum, room, step().scalars(), SHARE)
    assert torch.equal(alone, momentum)
    assert_near(momentum, wide, STEP[torch.float32])
    assert_near(room, there, STEP[dtype])


def expected(weight: Tensor, made: Tensor) -> Tensor:
    return moved(weight.double(), made, STAYS, BY, torch.ones(()))


@interpreted
@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_their_copies(shape, copy):
    weight, made = draw(shape, torch.float32, 1), draw(shape, torch.bfloat16, 2)
    beside = None if copy is None else torch.zeros_like(weight, dtype=copy)
    exact = expected(weight, made)
    move_fused(weight, beside, made, STAYS, BY, step().scalars())
    assert_near(weight, exact, STEP[torch.float32])
    if beside is not None:
        assert_near(beside, exact, STEP[beside.dtype])


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_split_weights(shape):
    whole, made = draw(shape, torch.float32, 1), draw(shape, torch.bfloat16, 2)
    high, low = split(whole)
    exact = expected(whole, made)
    move_fused(high, low, made, STAYS, BY, step().scalars())
    assert_near(join(high, low), exact, STEP[torch.float32])


@interpreted
def test_nothing_moves_when_a_gradient_is_not_finite():
    weight, momentum, made = draw((5, 7), torch.float32, 1), draw((5, 7), torch.float32, 2), draw((5, 7), TYPES[1], 3)
    before = weight.clone(), momentum.clone()
    off = step(finite=0.0)
    accumulate_fused(torch.full((5, 7), torch.nan), momentum, made, off.scalars(), SHARE)
    move_fused(weight, None, made, STAYS, BY, off.scalars())
    assert torch.equal(weight, before[0])
    assert torch.equal(momentum, before[1])


def test_nor_by_plain_operations():
    weight, momentum = draw((5, 7), torch.float32, 1), draw((5, 7), torch.float32, 2)
    before = momentum.clone()
    off = step(finite=0.0)
    accumulate(torch.full((5, 7), torch.nan), momentum, torch.empty(5, 7), off)
    assert torch.equal(momentum, before)
    assert torch.equal(moved(weight, torch.full((5, 7), torch.nan), STAYS, BY, off.finite), weight)
