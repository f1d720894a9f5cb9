"""Experts in FP8: each product is that of quantized numbers, whatever the load, and near the exact one."""

import pytest
import torch
from torch import Tensor

from meshwright.kernels.experts import grouped_matmul_fp8, quantize_along, takes_fp8, transposed
from meshwright.kernels.fp8 import E4M3

LOADS = {"fair": [8, 8, 8], "skewed": [21, 1, 2], "one expert": [0, 24, 0], "a rest": [3, 0, 4]}
# E4M3 keeps 4 bits, so a number is off by 2⁻⁴ of itself at most; over sums of 32 errors of any sign, less.
NEAR = 2.0**-4


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    rows, stack, slope = ((24, 32), (3, 48, 32), (24, 48))
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in (rows, stack, slope))


def rounded(x: Tensor, *dims: int) -> Tensor:
    """What is left of a tensor whose largest magnitude along some dims becomes E4M3's largest, by definition."""
    scale = 448 / x.double().abs().amax(dims, keepdim=True)
    return (x.double() * scale).float().to(E4M3).double() / scale


def by_row(x: Tensor, stack: Tensor, load: list[int]) -> Tensor:
    owners = [expert for expert, rows in enumerate(load) for _ in range(rows)]
    return torch.stack([stack[expert] @ x[row] for row, expert in enumerate(owners)])


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("load", LOADS)
def test_each_product_is_that_of_quantized_numbers(load, scaling):
    x, stack, slope = given()
    x, stack = x.requires_grad_(), stack.requires_grad_()
    kept = sum(LOADS[load])
    ends = torch.tensor(LOADS[load]).cumsum(0, dtype=torch.int32)
    y = grouped_matmul_fp8(x, stack, ends, scaling)
    y.backward(slope)
    over = (1, 2) if scaling == "tensorwise" else (2,)
    over_back = (1, 2) if scaling == "tensorwise" else (1,)
    assert_near(y[:kept], by_row(rounded(x.detach(), 1), rounded(stack.detach(), *over), LOADS[load]), 1e-6)
    assert_near(y[:kept], by_row(x.double(), stack.double(), LOADS[load]), NEAR)
    back = rounded(stack.detach(), *over_back).transpose(1, 2)
    assert_near(x.grad[:kept], by_row(rounded(slope, 1), back, LOADS[load]), 1e-6)
    exact = stack.detach().double().requires_grad_()
    by_row(x.detach().double(), exact, LOADS[load]).backward(slope.double()[:kept])
    assert_near(stack.grad, exact.grad, 1e-6)  # its gradient is not in FP8


def assert_near(ours: Tensor, theirs: Tensor, bound: float) -> None:
    assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm()


def test_a_row_that_is_not_finite_stays_alone():
    x, stack, _ = given()
    clean = grouped_matmul_fp8(x, stack, torch.tensor([8, 16, 24], dtype=torch.int32))
    x[5, 7] = float("nan")
    y = grouped_matmul_fp8(x, stack, torch.tensor([8, 16, 24], dtype=torch.int32))
    assert y[5].isnan().all()
    others = torch.arange(24) != 5
    assert torch.equal(y[others], clean[others])


def test_a_transposed_stack_is_its_transpose():
    values, _ = quantize_along(given()[1], 1, 2)
    assert torch.equal(transposed(values, values).float(), values.float().transpose(1, 2))
    assert transposed(values, values).stride(-1) == 1


def test_zeros_have_a_scale():
    values, scale = quantize_along(torch.zeros(2, 16), 1)
    assert values.float().eq(0).all()
    assert scale.isfinite().all()


@pytest.mark.parametrize(("capability", "taken"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_grouped_fp8_is_for_hopper_alone(monkeypatch, capability, taken):
    assert not takes_fp8(torch.device("cpu"), 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert takes_fp8(torch.device("cuda", 0), 64) == taken
    assert not takes_fp8(torch.device("cuda", 0), 64, 72)
