"""Outer updates by the papers' formulas, and deltas in few bits."""

import pytest
import torch
from torch import nn

from meshwright.config.run import Optim
from meshwright.optim.outer import Codes, average, diloco, slowmo
from meshwright.spec.plan import Plan

OPTIM = Optim(outer_lr=0.7, outer_momentum=0.9)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_diloco_is_torchs_sgd_with_nesterov_momentum_on_the_mean_delta():
    anchor, momentum = [random(5, 3)], [torch.zeros(5, 3, dtype=torch.float64)]
    weight = nn.Parameter(anchor[0].clone())
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for sync in range(4):
        delta = random(5, 3, seed=sync + 1)
        weight.grad = delta.clone()
        sgd.step()
        diloco(OPTIM, anchor, momentum, [delta], rate=0.1)
        assert torch.allclose(anchor[0], weight.data, rtol=0, atol=1e-15)


def test_slowmo_without_momentum_and_with_a_rate_of_one_is_the_average():
    plain, slow = [random(4)], [random(4)]
    delta = [random(4, seed=1)]
    average(plain, [], delta, rate=0.1)
    slowmo(Optim(outer_lr=1.0, outer_momentum=0.0), slow, [torch.zeros(4, dtype=torch.float64)], delta, rate=0.1)
    assert torch.allclose(plain[0], slow[0], rtol=0, atol=1e-15)


def test_slowmo_has_its_momentum_in_units_of_the_learning_rate():
    anchor, momentum = [torch.zeros(1)], [torch.zeros(1)]
    optim = Optim(outer_lr=1.0, outer_momentum=0.5)
    slowmo(optim, anchor, momentum, [torch.ones(1)], rate=0.1)
    assert anchor[0].item() == pytest.approx(-1.0)
    slowmo(optim, anchor, momentum, [torch.zeros(1)], rate=0.01)  # what is left moves ten times less at a tenth of it
    assert anchor[0].item() == pytest.approx(-1.0 - 0.5 * 10 * 0.01)
    slowmo(optim, anchor, momentum, [torch.zeros(1)], rate=0.0)
    assert torch.isfinite(momentum[0]).all()


@pytest.mark.parametrize(("quant", "most"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_delta_is_rounded_to_half_a_step_of_its_block(quant, most, dtype):
    tensors = [
        random(3, 64).to(dtype),
        random(7).to(dtype),
        random(3, 33, seed=2).to(dtype),
        random(2, 3, 16).to(dtype),
    ]
    codes = Codes(Plan(microbatch=1, replicate=2, sync_every=2, outer_quant=quant), [nn.Parameter(t) for t in tensors])
    sent = codes.encode(tensors)
    scales = 3 * 64 // 8 + 3 + 2 * 3 * 16 // 2
    numbers = 3 * 64 + 3 * 33 + 2 * 3 * 16
    assert sent.numel() == 7 * dtype.itemsize + scales * 4 + (numbers if quant == "int8" else -(-numbers // 2))
    found = codes.decode(sent, tensors)
    assert torch.equal(found[1], tensors[1])  # a vector travels as it is
    for tensor, back, block in zip(tensors, found, (8, 0, 33, 2), strict=True):
        if block:
            step = tensor.reshape(-1, block).abs().amax(1, keepdim=True) / most
            far = (tensor - back).reshape(-1, block).abs()
            assert (far <= step * (0.5 + 1e-5)).all()  # a scale is fp32
            assert (far > 0).any()


def test_nothing_moved_is_nothing_sent():
    zeros = [torch.zeros(4, 64)]
    codes = Codes(Plan(microbatch=1, replicate=2, sync_every=2, outer_quant="int4"), [nn.Parameter(zeros[0])])
    assert torch.equal(codes.decode(codes.encode(zeros), zeros)[0], zeros[0])
