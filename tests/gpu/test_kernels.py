"""The kernels on a real GPU: the cases of the interpreter, larger ones, and FP8 codes to the bit."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))

import kernel_cases
from kernel_cases import SHAPES, STRIDES, TYPES, assert_same, draw
from kernel_pairs import (
    ACTIVATIONS,
    EPS,
    GATES,
    LAYOUTS,
    NORMS,
    gate_pair,
    norm_pair,
    rope_pair,
    row_pair,
    softmax_pair,
)  # fmt: skip

from meshwright.kernels import dispatch
from meshwright.kernels.fp8 import CAPABILITY, quantize
from meshwright.kernels.norm import rms_norm_sum

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(dispatch.triton is None, reason="needs Triton"),
    pytest.mark.skipif(dispatch.INTERPRETED, reason="the interpreter is for the CPU"),
]
LARGE = ((300, 768), (257, 4096), (33, 16384), (40000, 64))
CASES = [
    *((shape, dtype) for shape in ((5, 37), (70, 130), (2, 3, 96)) for dtype in TYPES),
    *((shape, torch.bfloat16) for shape in LARGE),
]  # each compiles kernels of its own
NEEDS_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY, reason="needs a GPU with FP8"
)


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setattr(kernel_cases, "DEVICE", "cuda")


def test_a_run_with_a_gpu_is_fused_by_itself():
    assert dispatch.settle("auto", torch.device("cuda")) == dispatch.KernelChoice("fused")
    assert dispatch.settle("auto", torch.device("cuda"), torch.float64).kind == "plain"
    assert dispatch.fused(torch.zeros(2, device="cuda"), "auto")
    assert not dispatch.fused(torch.zeros(2, device="cuda", dtype=torch.float64), "auto")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE, (3, dispatch.ROW_LIMIT), (3, dispatch.ROW_LIMIT + 5), (2, 128256)])
def test_softmax(shape, dtype):
    assert_same(*softmax_pair(shape, dtype, "dense"))


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, shape, dtype):
    assert_same(*norm_pair(kind, shape, dtype, "dense"))


@pytest.mark.parametrize(("shape", "dtype"), [*CASES, ((9, 14336), torch.bfloat16)])
@pytest.mark.parametrize("kind", GATES)
def test_gates(kind, shape, dtype):
    for activation in ACTIVATIONS:
        assert_same(*gate_pair(kind, activation, shape, dtype, "dense"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("sizes", [(7, 3, 20), (300, 8, 2048)])
@pytest.mark.parametrize("kind", ["dispatched", "combined"])
def test_rows_of_experts(kind, sizes, share, dtype):
    assert_same(*row_pair(kind, sizes, share, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "sizes"), [((6, 2), (2, 5, 24)), ((32, 8), (2, 130, 128)), ((12, 12), (3, 1, 64))])
def test_rope(layout, heads, sizes, dtype):
    assert_same(*rope_pair(layout, heads, sizes, dtype))


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_strides_will_do(dtype, strides):
    shape = (37, 210)
    assert_same(*softmax_pair(shape, dtype, strides))
    for kind in NORMS:
        assert_same(*norm_pair(kind, shape, dtype, strides))
    for kind in GATES:
        assert_same(*gate_pair(kind, "silu", shape, dtype, strides))


@NEEDS_FP8
@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (70, 130), (512, 4096), (100, 40000)])
@pytest.mark.parametrize("strides", STRIDES)
def test_fp8_codes_are_the_twins_to_the_bit(shape, strides):
    x = draw(shape, torch.bfloat16, 1, strides)
    (values, scale), (exact_values, exact_scale) = (quantize(x, kernels) for kernels in ("fused", "plain"))
    assert torch.equal(scale, exact_scale)
    assert torch.equal(values.view(torch.uint8), exact_values.view(torch.uint8))


@NEEDS_FP8
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp8_hides_nothing(bad):
    x = torch.randn(70, 130, device="cuda")
    x[1, 2] = bad
    values, scale = quantize(x, "fused")
    assert not (values.float() * scale)[1].isfinite().any()


@NEEDS_FP8
def test_the_codes_are_operands_of_an_fp8_product():
    x, weight = draw((256, 512), torch.bfloat16, 1), draw((128, 512), torch.bfloat16, 2)
    (left, left_scale), (right, right_scale) = quantize(x), quantize(weight)
    product = torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t()
    # Two operands with 3-bit mantissas, errors independent: √2 · 2⁻⁴ ÷ √3 = 5.1 % at the worst.
    assert (product.double() - exact).norm() / exact.norm() < 0.052


def test_the_same_rows_give_the_same_bits_every_time():
    x, residual, weight = (draw(shape, torch.bfloat16, 1) for shape in ((5000, 768), (5000, 768), (768,)))
    gradients = []
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        rms_norm_sum(x, residual, leaf, EPS, "fused")[0].sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
