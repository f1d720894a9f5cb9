"""Linear layers in FP8: values use the whole range, the transpose is exact, the three matmuls are near."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STRIDES, TYPES, draw, interpreted
from torch import nn

from meshwright.kernels import fp8
from meshwright.kernels.fp8 import (
    E4M3,
    FORMATS,
    LARGEST,
    LARGEST_OF,
    ROWS_ON_CPUS,
    Fp8Linear,
    cast,
    cast_both,
    cast_transposed,
    frozen_product,
    quantize_linear,
    scale_of,
    takes,
)
from meshwright.kernels.quantized import FrozenPart, decode, encode, floats

SCALINGS = ("tensorwise", "rowwise")
HALF_STEP = {E4M3: 2.0**-4, torch.float8_e5m2: 2.0**-3}  # of three bits, or two, relative to a normal number
# Half the smallest step of the type against its largest value, for elements far below it.
FLOOR = {E4M3: 2.0**-10 / LARGEST, torch.float8_e5m2: 2.0**-17 / LARGEST_OF[torch.float8_e5m2]}


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(TYPES),
    st.sampled_from(STRIDES),
    st.sampled_from(SCALINGS),
    st.sampled_from(list(FORMATS.values())),
)
def test_every_element_is_within_half_a_step(shape, dtype, strides, scaling, format):
    x = draw(shape, dtype, 1, strides)
    values, scale = quantize_linear(x, scaling, format)
    assert (values.dtype, values.float().abs().max().item()) == (format, LARGEST_OF[format])
    allowed = x.double().abs() * HALF_STEP[format] + x.double().abs().max() * FLOOR[format]
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
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), st.sampled_from(STRIDES), st.sampled_from(list(FORMATS.values()))
)
def test_both_layouts_are_the_cast_and_its_transpose(shape, strides, dtype):
    x = draw(shape, torch.bfloat16, 1, strides)
    scale = scale_of(x, "tensorwise", dtype)
    values, turned = cast_both(x, scale, dtype)
    assert values.is_contiguous()
    assert turned.is_contiguous()
    assert torch.equal(values.float(), cast(x, scale, dtype).float())
    assert torch.equal(turned.float(), values.float().t())
    if dtype == E4M3:
        assert torch.equal(cast_transposed(x, scale, scale).float(), turned.float())


@interpreted
@settings(deadline=None, max_examples=12, derandomize=True, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from(STRIDES),
    st.sampled_from(list(FORMATS.values())),
    st.booleans(),
)
def test_the_kernel_casts_any_shape_to_both_layouts_as_its_twin_does(shape, strides, dtype, both):
    # Numbers that need no rounding, which Triton's interpreter does in another way; a GPU's is held in tests/gpu.
    x = draw(shape, torch.bfloat16, 1, strides)
    x.copy_((x + x.sign()).to(dtype)).mul_(4)  # normal numbers of the format, times a power of two
    scale = torch.tensor(0.25)
    values, turned = torch.zeros(shape, dtype=dtype), torch.zeros(shape[::-1], dtype=dtype)
    fp8._launch(x, scale, values if both else None, turned)
    expected = cast(x, scale, dtype).float()
    assert torch.equal(turned.float(), expected.t())
    assert torch.equal(values.float(), expected if both else torch.zeros(shape))


@interpreted
def test_the_kernel_turns_numbers_that_are_fp8_already():
    held = torch.cat([torch.arange(8, 127), torch.arange(136, 255)])  # all that are normal
    codes = held.to(torch.uint8).repeat(3)[: 17 * 42].view(17, 42)
    turned = torch.zeros(42, 17, dtype=E4M3)
    fp8._launch(codes.view(E4M3), torch.ones(()), None, turned)
    assert torch.equal(turned.view(torch.uint8), codes.t())


def layer_of(scaling="tensorwise", accumulate="fast", grad_format="e4m3", input_stays=False) -> Fp8Linear:
    layer = Fp8Linear(64, 32, bias=True, dtype=torch.bfloat16)
    layer.scaling, layer.accumulate, layer.grad_format = scaling, accumulate, grad_format
    layer.input_stays = input_stays
    with torch.no_grad():
        layer.weight.copy_(draw((32, 64), torch.bfloat16, 1))
    return layer


# Two operands with 3-bit mantissas, errors independent: √2 · 2⁻⁴ ÷ √3 = 5.1 % at the worst; bf16 adds 0.2 %. One of
# them with a 2-bit mantissa: √(2⁻⁶ + 2⁻⁸) ÷ √3 = 8.1 %.
ALLOWED = {"e4m3": 0.053, "e5m2": 0.083}


@pytest.mark.parametrize("input_stays", [False, True])
@pytest.mark.parametrize("grad_format", FORMATS)
@pytest.mark.parametrize("accumulate", ["fast", "exact"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_output_and_both_gradients_are_near_those_in_fp64(scaling, accumulate, grad_format, input_stays):
    layer = layer_of(scaling, accumulate, grad_format, input_stays)
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
    for (mine, theirs), allowed in zip(pairs, (ALLOWED["e4m3"], *[ALLOWED[grad_format]] * 2), strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < allowed


def test_the_input_in_either_form_gives_the_same_bits():
    found = []
    for input_stays in (False, True):
        layer, x = layer_of(input_stays=input_stays), draw((24, 64), torch.bfloat16, 2).requires_grad_()
        layer(x).backward(draw((24, 32), torch.bfloat16, 3))
        found.append((x.grad, layer.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def matmuls(monkeypatch, **how) -> list[tuple[torch.dtype, torch.dtype, bool]]:
    """The formats of both operands and the accumulation of output, input gradient and weight gradient."""
    seen, scaled = [], torch._scaled_mm

    def noted(a, b, **options):
        seen.append((a.dtype, b.dtype, options["use_fast_accum"]))
        return scaled(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    x = draw((32, 64), torch.bfloat16, 2).requires_grad_()
    layer_of(**how)(x).backward(draw((32, 32), torch.bfloat16, 3))
    return seen


@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_matmul_has_the_format_and_the_accumulation_that_are_set(scaling, monkeypatch):
    if scaling == "rowwise" and not ROWS_ON_CPUS:
        pytest.skip("this torch has no such matmul on a CPU")
    e5m2 = torch.float8_e5m2
    assert matmuls(monkeypatch, scaling=scaling) == [(E4M3, E4M3, True)] * 3
    as_torchao = matmuls(monkeypatch, scaling=scaling, accumulate="exact", grad_format="e5m2")
    assert as_torchao == [(E4M3, E4M3, True), (e5m2, E4M3, False), (e5m2, E4M3, False)]


def test_nothing_of_a_weight_is_saved_beside_itself():
    layer, x, saved = layer_of(), draw((32, 64), torch.bfloat16, 2).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        layer(x)
    sizes = sorted((each.numel() * each.itemsize for each in saved if each is not layer.weight), reverse=True)
    assert sizes[0] == x.numel()  # a byte each
    assert all(size == 4 for size in sizes[1:])  # scales
    assert any(each is layer.weight for each in saved)


HOW = {"accumulate": "fast", "grad_format": "e4m3", "sharing": None}


@pytest.mark.parametrize("grad_format", FORMATS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_weight_is_multiplied_as_it_is_held(scaling, grad_format, monkeypatch):
    """In two matmuls of FP8 numbers, near those of the decoded weight, which is exact: one operand is rounded."""
    weight = draw((32, 64), torch.float32, 1) * torch.logspace(-3, 3, 32)[:, None]  # rows of very different sizes
    parts = encode("fp8", weight)
    exact = decode(FrozenPart("fp8", 0), parts, torch.float64)
    x = draw((2, 24, 64), torch.bfloat16, 2).requires_grad_()
    seen, scaled = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: seen.append((a.dtype, b.dtype)) or scaled(a, b, **how))
    y = frozen_product(x, *parts, scaling=scaling, **HOW | {"grad_format": grad_format})
    slope = draw(y.shape, torch.bfloat16, 3)
    y.backward(slope)
    if scaling == "tensorwise" or ROWS_ON_CPUS:
        assert seen == [(E4M3, E4M3), (FORMATS[grad_format], E4M3)]
    allowed = {"e4m3": 2.0**-4 / 3**0.5, "e5m2": 2.0**-3 / 3**0.5}  # a step of one operand, evenly spread; and bf16
    wide = x.detach().double() @ exact.T
    errors = (y.detach().double() - wide).norm(dim=(0, 1)) / wide.norm(dim=(0, 1))
    assert (errors < allowed["e4m3"] + 0.004).all()  # of every row by itself, as each has a scale
    back = slope.double() @ exact
    assert (x.grad.double() - back).norm() / back.norm() < allowed[grad_format] + 0.004


@pytest.mark.parametrize("scaling", SCALINGS)
def test_in_float64_a_frozen_weight_s_products_are_exact(scaling):
    parts = encode("fp8", draw((32, 64), torch.float32, 1))
    exact = decode(FrozenPart("fp8", 0), parts, torch.float64)
    x = draw((24, 64), torch.float64, 2).requires_grad_()
    y = frozen_product(x, *parts, scaling=scaling, **HOW)
    values, scale = quantize_linear(x.detach(), scaling)
    expected = (values.double() * scale) @ exact.T
    assert (y - expected).abs().max() < 1e-6 * expected.abs().max()  # a scale times a code is rounded to fp32, or not
    slope = draw(y.shape, torch.float64, 3)
    y.backward(slope)
    values, scale = quantize_linear(slope * floats(parts[1]), scaling)
    expected = (values.double() * scale) @ parts[0].view(E4M3).double()
    assert (x.grad - expected).abs().max() < 1e-12 * expected.abs().max()


def test_nothing_of_the_input_is_saved_for_a_frozen_weight():
    parts, saved = encode("fp8", draw((32, 64), torch.float32, 1)), []
    x = draw((32, 64), torch.bfloat16, 2).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        frozen_product(x, *parts, scaling="tensorwise", **HOW)
    assert [each.data_ptr() for each in saved] == [each.data_ptr() for each in parts]


def test_only_multiples_of_sixteen_are_taken():
    assert takes(nn.Linear(32, 48))
    assert not takes(nn.Linear(40, 48))
    assert not takes(nn.Linear(32, 8))
