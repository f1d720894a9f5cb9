"""FP8 linear layers on a real GPU: both layouts to the bit, every combination near float64, and what is saved."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))

import kernel_cases
from kernel_cases import STRIDES, draw
from trials import make_corpus, make_run

from meshwright.kernels.fp8 import (
    CAPABILITY,
    FORMATS,
    Fp8Linear,
    _matmul,
    cast,
    cast_both,
    cast_transposed,
    frozen_product,
    scale_of,
)
from meshwright.kernels.quantized import FrozenPart, decode, encode
from meshwright.parallel import mesh as meshes
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY, reason="needs a GPU with FP8"
)
# As on a CPU: two mantissas of 3 bits, or of 2 and 3; sums in 14 bits add less than a thousandth.
ALLOWED = {"e4m3": 0.053, "e5m2": 0.083}
MIB = 2**20


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setattr(kernel_cases, "DEVICE", "cuda")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_frozen_weight_is_turned_to_the_bit_and_multiplied_near_float64(scaling):
    parts = tuple(part.cuda() for part in encode("fp8", draw((256, 512), torch.float32, 1).cpu()))
    one = torch.ones((), device="cuda")
    assert torch.equal(bits(cast_transposed(parts[0].view(FORMATS["e4m3"]), one, one)), parts[0].t())
    weight = decode(FrozenPart("fp8", 0), parts, torch.float64)
    x = draw((64, 512), torch.bfloat16, 2).requires_grad_()
    y = frozen_product(x, *parts, scaling=scaling, accumulate="fast", grad_format="e4m3", sharing=None)
    slope = draw(y.shape, torch.bfloat16, 3)
    y.backward(slope)
    for mine, exact in ((y, x.detach().double() @ weight.T), (x.grad, slope.double() @ weight)):
        assert (mine.double() - exact).norm() / exact.norm() < ALLOWED["e4m3"]


@pytest.mark.parametrize("dtype", FORMATS.values())
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 48), (130, 257), (1000, 4096), (8192, 1024)])
def test_both_layouts_are_the_twins_to_the_bit(shape, strides, dtype):
    x = draw(shape, torch.bfloat16, 1, strides)
    scale = scale_of(x, "tensorwise", dtype)
    values, turned = cast_both(x, scale, dtype)
    expected = cast(x, scale, dtype)
    assert torch.equal(bits(values), bits(expected.contiguous()))
    assert torch.equal(bits(turned), bits(expected).t())
    if dtype == FORMATS["e4m3"]:
        assert torch.equal(bits(cast_transposed(x, scale, scale)), bits(turned))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FORMATS.values())
def test_the_kernel_hides_nothing(dtype, bad):
    x = draw((70, 130), torch.bfloat16, 1)
    x[1, 2] = bad
    values, turned = cast_both(x, scale_of(x, "tensorwise", dtype), dtype)
    assert not values.float()[1, 2].isfinite()
    assert not turned.float()[2, 1].isfinite()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad_format", FORMATS)
@pytest.mark.parametrize("accumulate", ["fast", "exact"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_output_and_gradients_are_near_those_in_fp64(scaling, accumulate, grad_format, compiled):
    layer = Fp8Linear(512, 768, bias=False, dtype=torch.bfloat16, device="cuda")
    layer.scaling, layer.accumulate, layer.grad_format = scaling, accumulate, grad_format
    x = draw((4, 128, 512), torch.bfloat16, 2).requires_grad_()
    slope = draw((4, 128, 768), torch.bfloat16, 3)
    torch.compiler.reset()
    y = (torch.compile(layer) if compiled else layer)(x)
    y.backward(slope)
    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, layer.weight))
    exact = F.linear(exact_x, exact_weight)
    exact.backward(slope.double())
    for mine, theirs, format in (
        (y, exact, "e4m3"),
        (x.grad, exact_x.grad, grad_format),
        (layer.weight.grad, exact_weight.grad, grad_format),
    ):
        assert (mine.double() - theirs).norm() / theirs.norm() < ALLOWED[format]


def test_exact_accumulation_is_nearer():
    """Of a long sum of positive numbers, against the exact product of the same FP8 numbers."""
    a, b = (draw((256, 65536), torch.bfloat16, seed).abs().to(FORMATS["e4m3"]) for seed in (1, 2))
    one, exact = torch.ones((), device="cuda"), a.double() @ b.double().t()
    fast, slow = ((_matmul((a, one), (b, one), torch.float32, fast) - exact).abs().mean() for fast in (True, False))
    assert slow < fast


@pytest.mark.parametrize("compiled", [False, True])
def test_a_byte_of_the_input_is_saved_and_nothing_of_the_weight(compiled):
    layer = Fp8Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cuda")

    def two(x: torch.Tensor) -> torch.Tensor:
        return layer(torch.tanh(x))  # whose own backward saves its result

    x = torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.compiler.reset()
    call = torch.compile(two) if compiled else two
    for _ in range(2):  # the second is measured: nothing is compiled or built
        y = None  # let go before it is counted
        before = torch.cuda.memory_allocated()
        y = call(x)
        held = torch.cuda.memory_allocated() - before - y.numel() * 2
        y.sum().backward()
    tanh, codes = x.numel() * 2, x.numel()
    assert tanh <= held <= tanh + codes + MIB


@pytest.mark.parametrize("accumulate", ["fast", "exact"])
@pytest.mark.parametrize("grad_format", FORMATS)
def test_the_loss_falls(folder, accumulate, grad_format):
    how = (f"plan.fp8_accumulate={accumulate}", f"plan.fp8_grad={grad_format}")
    run = make_run(folder, "plan.precision=fp8", *how, "steps=20", "sequence=32")
    mesh = meshes.make(run.plan, torch.device("cuda", 0))
    state = build(run, make_corpus(run, folder), mesh)
    losses = [result.loss.item() for result in train(run, state, mesh) if isinstance(result, StepResult)]
    state.loader.close()
    assert losses[-1] < losses[0] - 0.5
