"""Weights in few bits: NF4 as its paper has it, element by element, and bitsandbytes' codes where it is installed."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_cases import interpreted
from torch import Tensor

from meshwright.kernels.quantized import NF4, FrozenPart, decode, encode
from meshwright.spec.quantized import Held, parts

torch.manual_seed(3)
MATRIX = torch.randn(70, 448) * 0.02  # 490 scales: a group of 256, and one that is shorter


def levels() -> Tensor:
    """The dynamic 8-bit data type as its paper says it: a sign, zeros for the decade, then a linear fraction."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = [0.1 + 0.9 * step / 2**decade for step in range(2**decade + 1)]
        middles = [(edges[step] + edges[step + 1]) / 2 * 10.0 ** (decade - 6) for step in range(2**decade)]
        found += [sign * middle for middle in middles for sign in (1, -1)]
    return torch.tensor(sorted(found), dtype=torch.float64)


def test_codes_are_the_nearest_of_the_paper_s():
    codes, absmax, scales = encode("nf4", MATRIX)
    flat, table = MATRIX.double().view(-1, 64), torch.tensor(NF4, dtype=torch.float64)
    largest = flat.abs().amax(1)
    found = torch.stack((codes >> 4, codes & 15), -1).view(-1, 64).long()
    away = (flat / largest[:, None] - table[found]).abs()
    nearest = (flat[..., None] / largest[:, None, None] - table).abs().amin(-1)
    # Codes are chosen in fp32, whose rounding may take the other of two that are as near.
    assert (away - nearest).max() < 1e-6
    floats, mean = scales.view(torch.float32)[:-1].double(), scales.view(torch.float32)[-1].double()
    assert abs(mean - largest.mean()) < 1e-7 * mean
    centred = list((largest - mean).split(256))
    assert torch.allclose(floats, torch.stack([part.abs().max() for part in centred]), rtol=1e-5)
    ratios = torch.cat([part / scale for part, scale in zip(centred, floats, strict=True)])
    away = (ratios - levels()[absmax.flatten().long()]).abs()
    assert (away - (ratios[:, None] - levels()).abs().amin(-1)).max() < 1e-5
    whole = decode(FrozenPart("nf4", 7), (codes, absmax, scales), torch.float64)
    expected = table[found] * (levels()[absmax.flatten().long()] * floats.repeat_interleave(256)[:490] + mean)[:, None]
    assert torch.allclose(whole, expected.view_as(whole), rtol=1e-5, atol=1e-9)  # in fp32 beside float64
    assert (whole - MATRIX).norm() < 0.1 * MATRIX.norm()


@pytest.mark.parametrize("held", ["nf4", "fp8"])
def test_a_part_is_decoded_as_in_the_whole_and_takes_the_bytes_it_is_said_to(held: Held):
    made = encode(held, MATRIX)
    assert [tuple(each.shape) for each in made] == [shape for _, shape, _ in parts(held, MATRIX.shape, False)]
    assert all(each.dtype is torch.uint8 for each in made)
    whole = decode(FrozenPart(held, 7), made, torch.bfloat16)
    codes, *others = made
    if held == "nf4":
        bits = 8 * sum(math.prod(shape) for _, shape, _ in parts("nf4", (4096, 4096), False)) / 4096**2
        assert bits == pytest.approx(4.127, abs=1e-3)  # §3 of the paper
        absmax, scales = others
        rows = decode(FrozenPart(held, 7, row=20), (codes[20:], absmax[20:], scales), torch.bfloat16)
        columns = decode(FrozenPart(held, 7, block=3), (codes[:, 96:160], absmax[:, 3:5], scales), torch.bfloat16)
        assert torch.equal(columns, whole[:, 192:320])
    else:
        rows = decode(FrozenPart(held, 7, row=20), (codes[20:], others[0][80:]), torch.bfloat16)
        assert (whole.float() - MATRIX).norm() < 0.04 * MATRIX.norm()  # three bits of fraction
    assert torch.equal(rows, whole[20:])


@pytest.mark.parametrize("held", ["nf4", "fp8"])
def test_each_matrix_of_a_stack_is_encoded_and_decoded_by_itself(held: Held):
    stack = torch.stack([MATRIX, 3 * MATRIX.flip(0), MATRIX * 0])
    made = encode(held, stack)
    assert [tuple(each.shape) for each in made] == [shape for _, shape, _ in parts(held, stack.shape, False)]
    whole = decode(FrozenPart(held, 7), made, torch.float32)
    for number, matrix in enumerate(stack):
        each = encode(held, matrix)
        assert all(torch.equal(part[number], alone) for part, alone in zip(made, each, strict=True))
        assert torch.equal(whole[number], decode(FrozenPart(held, 7), each, torch.float32))
    if held == "nf4":
        part = tuple(each[1:, 20:] for each in made[:2])  # rows from 20 on of the last two experts
        later = decode(FrozenPart(held, 7, row=20), (*part, made[2][1:]), torch.float32)
        assert torch.equal(later, whole[1:, 20:])


def test_codes_are_those_of_bitsandbytes():
    theirs = pytest.importorskip("bitsandbytes.functional")
    for dtype in (torch.float32, torch.bfloat16):
        codes, absmax, scales = encode("nf4", MATRIX.to(dtype))
        packed, state = theirs.quantize_4bit(MATRIX.to(dtype), compress_statistics=True, quant_type="nf4")
        assert torch.equal(codes.flatten(), packed.flatten())
        # On a CPU bitsandbytes takes a neighbour of the nearest level now and then.
        assert (absmax.flatten().int() - state.absmax.int()).abs().max() <= 1
        assert (absmax.flatten() != state.absmax).float().mean() < 0.02
        second = torch.cat((state.state2.absmax, state.offset[None]))
        assert torch.allclose(scales.view(torch.float32), second, rtol=1e-5)


@interpreted
def test_one_kernel_decodes_nf4_to_the_same_bits():
    codes, absmax, scales = encode("nf4", MATRIX)
    stack = tuple(torch.stack(pair) for pair in zip((codes, absmax, scales), encode("nf4", 3 * MATRIX), strict=True))
    cases = (
        (FrozenPart("nf4", 7), (codes, absmax, scales)),
        (FrozenPart("nf4", 7, row=20), (codes[20:], absmax[20:], scales)),
        (FrozenPart("nf4", 7, block=3), (codes[:, 96:160], absmax[:, 3:5], scales)),
        (FrozenPart("nf4", 7), stack),
    )
    for how, held in cases:
        fused = replace(how, is_fused=True)
        assert torch.equal(decode(fused, held, torch.float32), decode(how, held, torch.float32))
        # The interpreter cuts bf16 off where a GPU rounds: a step of it away.
        assert torch.allclose(decode(fused, held, torch.bfloat16), decode(how, held, torch.bfloat16), rtol=2**-7)
