"""Norms: the twin is torch's, the kernel is the twin, sums and gradients of weights too."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import SHAPES, STRIDES, TYPES, assert_same, draw, interpreted
from kernel_pairs import EPS, NORMS, norm_pair

from meshwright.kernels import dispatch
from meshwright.kernels.norm import layer_norm, rms_norm, rms_norm_sum
from meshwright.spec.problem import InputError


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_plain_twins_are_torchs(dtype):
    x, weight, bias = (draw(shape, dtype, seed) for seed, shape in enumerate(((6, 40), (40,), (40,))))
    torch.testing.assert_close(rms_norm(x, weight, EPS, "plain"), F.rms_norm(x, (40,), weight, EPS))
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS, "plain"), F.layer_norm(x, (40,), weight, bias, EPS))


def test_the_residual_is_added_before_the_norm_and_handed_on():
    x, residual, weight = draw((4, 8), torch.float32, 1), draw((4, 8), torch.float32, 2), draw((8,), torch.float32, 3)
    y, total = rms_norm_sum(x, residual, weight, EPS, "plain")
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight, EPS, "plain"))


def test_no_rows_are_no_trouble():
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, EPS).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(8))


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])  # a norm over one element has no slope: all that is left is rounding
@pytest.mark.parametrize("kind", NORMS)
def test_the_kernel_is_its_twin(kind, shape, dtype):
    assert_same(*norm_pair(kind, shape, dtype, "dense"))


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(NORMS),
    st.tuples(st.integers(1, 20), st.integers(3, 200)),
    st.sampled_from(TYPES),
    st.sampled_from(STRIDES),
)
def test_any_shape_and_strides_will_do(kind, shape, dtype, strides):
    assert_same(*norm_pair(kind, shape, dtype, strides))


@interpreted
@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_be_left_unused(used):
    gradients = []
    for kernels in ("fused", "plain"):
        x, residual, weight = (draw(shape, torch.float32, 1).requires_grad_() for shape in ((5, 8), (5, 8), (8,)))
        rms_norm_sum(x, residual, weight, EPS, kernels)[used].square().sum().backward()
        gradients.append((x.grad, residual.grad))
    torch.testing.assert_close(*gradients)


@interpreted
def test_a_row_beyond_the_registers_is_plain_unless_the_kernel_was_demanded():
    x, weight = torch.randn(1, dispatch.ROW_LIMIT + 1), torch.ones(dispatch.ROW_LIMIT + 1)
    with pytest.raises(InputError, match="32769 elements is longer than 32768"):
        rms_norm(x, weight, EPS, "fused")
    assert rms_norm(x, weight, EPS, "auto").shape == x.shape
