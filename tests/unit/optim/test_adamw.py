import pytest
import torch
from torch import nn

from meshwright.config.run import Optim
from meshwright.optim.clip import GradStats, square_norm
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.plan import Plan

FIXED = Plan(microbatch=1, deterministic=True)


def grad_stats(factor=1.0, finite=1.0):
    def number(value):
        return torch.tensor(value, dtype=torch.float64)

    return GradStats(loss=number(0.0), norm=number(1.0), finite=number(finite), factor=number(factor))


def weights(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, dtype=dtype)), nn.Parameter(torch.randn(7, dtype=dtype))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs_adamw_with_decay_on_matrices_only(dtype, deterministic):
    ours, theirs = weights(dtype), weights(dtype)
    optim = Optim(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    mine = ResidentOptimizer(optim, ours, Plan(microbatch=1, deterministic=deterministic))
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, lr=1.0)
    for step in range(5):
        rate, factor = 0.1 / (step + 1), 0.5
        for one, other in zip(ours, theirs, strict=True):
            gradient = torch.randn_like(one)
            one.grad, other.grad = gradient.clone(), gradient * factor
        torchs.param_groups[0]["lr"] = torchs.param_groups[1]["lr"] = rate
        torchs.step()
        mine.step(rate, grad_stats(factor))
    for one, other in zip(ours, theirs, strict=True):
        # The same formula in another order of operations: a few units in the last place.
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype is torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_weight_without_a_gradient_rests_as_torchs_does(deterministic):
    ours, theirs = weights(torch.float64), weights(torch.float64)
    mine = ResidentOptimizer(Optim(weight_decay=0.3), ours, Plan(microbatch=1, deterministic=deterministic))
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, lr=0.1)
    # Which weights have a gradient, and whether it is finite: a step that nobody makes counts for nobody.
    for used, finite in [((0, 1), True), ((1,), True), ((1,), False), ((), True), ((0, 1), True), ((0,), True)]:
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = torch.randn_like(one) if index in used else None
            other.grad = None if one.grad is None else one.grad.clone()
        mine.step(0.1, grad_stats(finite=float(finite)))
        if finite:
            torchs.step()
    assert mine.missed == [2, 2]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)  # as above


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(deterministic):
    ours = weights(torch.float32)
    optimizer = ResidentOptimizer(Optim(), ours, Plan(microbatch=1, deterministic=deterministic))
    before = [weight.detach().clone() for weight in ours]
    for weight in ours:
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step(0.1, grad_stats(factor=0.0, finite=0.0))
    assert all(torch.equal(weight, old) for weight, old in zip(ours, before, strict=True))
    assert all(moment.eq(0).all() for index in range(len(ours)) for moment in optimizer.states_of(index))
    assert optimizer.count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_when_deterministic_a_part_moves_as_it_does_in_the_whole(dtype, rows):
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(23, 7, dtype=dtype))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(rows)]
    one, several = ResidentOptimizer(Optim(), [whole], FIXED), ResidentOptimizer(Optim(), parts, FIXED)
    for _ in range(10):
        whole.grad = torch.randn_like(whole)
        for part, gradient in zip(parts, whole.grad.split(rows), strict=True):
            part.grad = gradient.clone()
        one.step(0.1, grad_stats(0.3))
        several.step(0.1, grad_stats(0.3))
    for mine, theirs in (
        (parts, [whole]),
        *((several.states()[kind], one.states()[kind]) for kind in ("first", "second")),
    ):
        assert torch.equal(torch.cat([part.detach() for part in mine]), theirs[0].detach())


def test_the_square_norm_is_summed_wide():
    beyond_fp16 = square_norm([torch.full((10,), 300.0, dtype=torch.float16)])
    assert beyond_fp16.item() == pytest.approx(900_000, rel=1e-6)
    torch.testing.assert_close(square_norm([torch.ones(3), 2 * torch.ones(2, 2)]), torch.tensor(19.0).double())
