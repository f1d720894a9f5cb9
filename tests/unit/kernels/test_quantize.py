"""FP8: the reference uses the whole range, the kernel gives its values, transposed copies are the matrix."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STRIDES, TYPES, draw, interpreted

from meshwright.kernels import dispatch
from meshwright.kernels.fp8 import LARGEST, QuantizedTensor, quantize

# Half a step of the mantissa (3 bits and 2), relative to a normal number.
ROUNDING = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
# The smallest step of the type against the largest value, for elements far below it.
FLOOR = {torch.float8_e4m3fn: 2.0**-10 / 448, torch.float8_e5m2: 2.0**-17 / 57344}
CARRY = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 4}  # values of one exponent
SCALINGS = ("tensorwise", "rowwise")


def restored(values, scale):
    return values.double() * scale.double()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("source", [*TYPES, torch.float64])
def test_every_element_is_within_half_a_step(source, dtype, scaling):
    x = draw((20, 33), source, 1)
    quantized = quantize(x, dtype, scaling, transposed=True, kernels="plain")
    assert quantized.transposed is not None
    assert quantized.transposed.is_contiguous()
    for there in (
        restored(quantized.values, quantized.scale),
        restored(quantized.transposed, quantized.transposed_scale).t(),
    ):
        allowed = x.double().abs() * ROUNDING[dtype] + x.double().abs().max() * FLOOR[dtype]
        assert ((there - x.double()).abs() <= allowed * (1 + 1e-6)).all()  # scales are rounded to float32


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_magnitude_is_the_largest_code(dtype):
    x = draw((9, 40), torch.float32, 1)
    assert quantize(x, dtype, "tensorwise").values.float().abs().max() == LARGEST[dtype]
    rows = quantize(x, dtype, "rowwise").values.float().abs().amax(1)
    assert torch.equal(rows, torch.full((9,), LARGEST[dtype]))


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fused", marks=interpreted)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_stay_zeros(scaling, kernels):
    quantized = quantize(torch.zeros(3, 5), torch.float8_e4m3fn, scaling, transposed=True, kernels=kernels)
    assert torch.equal(quantized.values.float(), torch.zeros(3, 5))
    assert quantized.scale.isfinite().all()


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fused", marks=interpreted)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_is_not_hidden(scaling, transposed, bad, kernels):
    x = torch.randn(3, 5)
    x[1, 2] = bad
    quantized = quantize(x, torch.float8_e4m3fn, scaling, transposed, kernels)
    assert not restored(quantized.values, quantized.scale)[1].isfinite().any()
    if transposed:
        assert not restored(quantized.transposed, quantized.transposed_scale)[2].isfinite().any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_is_quantized_too(shape):
    quantized = quantize(torch.empty(shape), torch.float8_e4m3fn, "rowwise", transposed=True)
    assert quantized.transposed is not None
    assert (quantized.values.shape, quantized.transposed.shape) == (shape, shape[::-1])


def assert_same_values(ours: QuantizedTensor, theirs: QuantizedTensor, dtype: torch.dtype) -> None:
    assert torch.equal(ours.scale, theirs.scale)
    assert_same_bytes(ours.values, theirs.values, dtype)
    assert (ours.transposed is None) == (theirs.transposed is None)
    if ours.transposed is not None:
        assert torch.equal(ours.transposed_scale, theirs.transposed_scale)
        assert_same_bytes(ours.transposed, theirs.transposed, dtype)


def assert_same_bytes(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    """The same bytes; Triton's interpreter rounds ties up and subnormals down, and drops the carry to an exponent."""
    mine, exact = ours.view(torch.uint8).int(), theirs.view(torch.uint8).int()
    excused = ((mine - exact).abs() == 1) | ((exact % CARRY[dtype] == 0) & (mine == exact - CARRY[dtype]))
    excused &= dispatch.INTERPRETED
    assert torch.equal(mine[~excused], exact[~excused])


@interpreted
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (70, 130), (3, 1100)])
def test_the_kernel_is_its_twin(shape, transposed, scaling, dtype):
    x = draw(shape, torch.bfloat16, 1)
    assert_same_values(*(quantize(x, dtype, scaling, transposed, kernels) for kernels in ("fused", "plain")), dtype)


@interpreted
def test_a_row_beyond_the_registers_is_cast_in_tiles(monkeypatch):
    monkeypatch.setattr("meshwright.kernels.fp8.ROW_LIMIT", 100)
    x = draw((2, 150), torch.bfloat16, 1)
    ours, theirs = (quantize(x, torch.float8_e4m3fn, "rowwise", kernels=kernels) for kernels in ("fused", "plain"))
    assert_same_values(ours, theirs, torch.float8_e4m3fn)


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 80), st.integers(1, 80)),
    st.sampled_from(TYPES),
    st.sampled_from(STRIDES),
    st.sampled_from(sorted(LARGEST, key=str)),
    st.sampled_from(SCALINGS),
    st.booleans(),
)
def test_any_shape_and_strides_will_do(shape, source, strides, dtype, scaling, transposed):
    x = draw(shape, source, 1, strides)
    assert_same_values(*(quantize(x, dtype, scaling, transposed, kernels) for kernels in ("fused", "plain")), dtype)
