"""Linear layers in FP8: values use the whole range, the transpose is exact, the three matmuls are near."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STRIDES, TYPES, draw, interpreted
from torch import nn

from meshwright.kernels import fp8
from meshwright.kernels.fp8 import E4M3, LARGEST, Fp8Linear, RowwiseFp8Linear, quantize_linear, takes, transpose

SCALINGS = ("tensorwise", "rowwise")
HALF_STEP = 2.0**-4  # of three bits, relative to a normal number
FLOOR = 2.0**-10 / LARGEST  # the smallest step of the type against the largest value, for elements far below it


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(TYPES),
    st.sampled_from(STRIDES),
    st.sampled_from(SCALINGS),
)
def test_every_element_is_within_half_a_step(shape, dtype, strides, scaling):
    x = draw(shape, dtype, 1, strides)
    values, scale = quantize_linear(x, scaling)
    assert (values.dtype, values.float().abs().max().item()) == (E4M3, LARGEST)
    allowed = x.double().abs() * HALF_STEP + x.double().abs().max() * FLOOR
    assert ((values.double() * scale.double() - x.double()).abs() <= allowed * (1 + 1e-6)).all()  # scales are float32


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(scaling):
    values, scale = quantize_linear(torch.zeros(3, 5), scaling)
    assert not values.float().any()
    assert scale.isfinite().all()
    x = draw((3, 5), torch.float32, 1)
    x[1, 2] = float("inf")
    values, scale = quantize_linear(x, scaling)
    assert not (values.double() * scale.double())[1].isfinite().any()


@settings(deadline=None, max_examples=10, derandomize=True)
@given(st.tuples(st.integers(1, 70), st.integers(1, 70)), st.sampled_from(STRIDES))
def test_the_transpose_is_that_of_torch(shape, strides):
    values = quantize_linear(draw(shape, torch.float32, 1, strides), "tensorwise")[0]
    copy = transpose(values)
    assert copy.is_contiguous()
    assert torch.equal(copy.float(), values.float().t())


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_the_kernel_transposes_any_shape(shape):
    bits = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    copy = torch.zeros(shape[::-1], dtype=torch.uint8)
    side = fp8.TILE
    fp8._transpose[(-(-shape[0] // side), -(-shape[1] // side))](bits, copy, *shape, side=side)
    assert torch.equal(copy, bits.t())


@pytest.mark.parametrize("kind", [Fp8Linear, RowwiseFp8Linear])
def test_the_output_and_both_gradients_are_near_those_in_fp64(kind):
    layer = nn.Linear(64, 32, bias=True, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(draw((32, 64), torch.bfloat16, 1))
    layer.__class__ = kind
    x = draw((2, 24, 64), torch.bfloat16, 2).requires_grad_()
    y = layer(x)
    slope = draw(y.shape, torch.bfloat16, 3)
    y.backward(slope)
    inputs = [each.detach().double().requires_grad_() for each in (x, layer.weight, layer.bias)]
    exact = F.linear(*inputs)
    exact.backward(slope.double())
    pairs = [
        (y, exact),
        *((mine.grad, other.grad) for mine, other in zip((x, layer.weight), inputs, strict=False)),
    ]
    for mine, theirs in pairs:
        # Two operands with 3-bit mantissas, errors independent: √2 · 2⁻⁴ ÷ √3 = 5.1 % at the worst; bf16 adds 0.2 %.
        assert (mine.double() - theirs).norm() / theirs.norm() < 0.053


def test_only_multiples_of_sixteen_are_taken():
    assert takes(nn.Linear(32, 48))
    assert not takes(nn.Linear(40, 48))
    assert not takes(nn.Linear(32, 8))
