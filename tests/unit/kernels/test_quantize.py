"""FP8 rows: the reference uses the whole range, the kernel gives its values."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STRIDES, TYPES, draw, interpreted

from meshwright.kernels import dispatch
from meshwright.kernels.fp8 import E4M3, LARGEST, quantize

ROUNDING = 2.0**-4  # half a step of the mantissa's 3 bits, relative to a normal number
FLOOR = 2.0**-10 / LARGEST  # the smallest step of the type against the largest value, for elements far below it
CARRY = 8  # values of one exponent


def restored(values, scale):
    return values.double() * scale.double()


@pytest.mark.parametrize("source", [*TYPES, torch.float64])
def test_every_element_is_within_half_a_step(source):
    x = draw((20, 33), source, 1)
    allowed = x.double().abs() * ROUNDING + x.double().abs().max() * FLOOR
    there = restored(*quantize(x, "plain"))
    assert ((there - x.double()).abs() <= allowed * (1 + 1e-6)).all()  # scales are rounded to float32


def test_the_largest_magnitude_is_the_largest_code():
    values, _ = quantize(draw((9, 40), torch.float32, 1))
    assert values.dtype == E4M3
    assert torch.equal(values.float().abs().amax(1), torch.full((9,), LARGEST))


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fused", marks=interpreted)])
def test_zeros_stay_zeros(kernels):
    values, scale = quantize(torch.zeros(3, 5), kernels)
    assert torch.equal(values.float(), torch.zeros(3, 5))
    assert scale.isfinite().all()


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fused", marks=interpreted)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad, kernels):
    x = torch.randn(3, 5)
    x[1, 2] = bad
    assert not restored(*quantize(x, kernels))[1].isfinite().any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_is_quantized_too(shape):
    values, scale = quantize(torch.empty(shape))
    assert (values.shape, scale.shape) == (shape, (shape[0], 1))


def assert_same_values(x: torch.Tensor) -> None:
    """The same bytes; Triton's interpreter rounds ties up and subnormals down, and drops the carry to an exponent."""
    (values, scale), (exact_values, exact_scale) = (quantize(x, kernels) for kernels in ("fused", "plain"))
    assert torch.equal(scale, exact_scale)
    mine, exact = values.view(torch.uint8).int(), exact_values.view(torch.uint8).int()
    excused = ((mine - exact).abs() == 1) | ((exact % CARRY == 0) & (mine == exact - CARRY))
    excused &= dispatch.INTERPRETED
    assert torch.equal(mine[~excused], exact[~excused])


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (70, 130), (3, 1100)])
def test_the_kernel_is_its_twin(shape):
    assert_same_values(draw(shape, torch.bfloat16, 1))


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.tuples(st.integers(1, 80), st.integers(1, 80)), st.sampled_from(TYPES), st.sampled_from(STRIDES))
def test_any_shape_and_strides_will_do(shape, source, strides):
    assert_same_values(draw(shape, source, 1, strides))
