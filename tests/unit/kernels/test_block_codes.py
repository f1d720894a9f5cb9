"""What becomes of numbers that travel in few bits."""

import pytest
import torch

from meshwright.kernels.blockwise import BlockCodes
from meshwright.spec.communication import message_bytes

LENGTHS, BLOCKS = [5, 48, 24, 33], [0, 16, 8, 33]


def numbers(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, sum(LENGTHS), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("form", "far"),
    # Half a step of the largest of a block; half of the last bit of a number of 4, 8 or 11 bits.
    [("int8", 0.5 / 127), ("int4", 0.5 / 7), ("fp8", 2**-4), ("bf16", 2**-8), ("fp16", 2**-11)],
)
def test_rounding_is_within_half_a_step_and_the_bytes_are_those_planned(form, far):
    x, codes = numbers(), BlockCodes(form, LENGTHS, BLOCKS)
    sent = codes.encode(x)
    assert sent.shape == (3, message_bytes(form, zip(LENGTHS, BLOCKS, strict=True), 8))
    back = codes.decode(sent, x.dtype)
    begin = 0
    for length, block in zip(LENGTHS, BLOCKS, strict=True):
        part, found = (each[:, begin : begin + length] for each in (x, back))
        begin += length
        if block == 0 and form not in ("bf16", "fp16"):
            assert torch.equal(part, found)
            continue
        rows = part.unflatten(1, (-1, block or 1))
        assert ((rows - found.view_as(rows)).abs() <= rows.abs().amax(-1, keepdim=True) * far * (1 + 1e-6)).all()
    assert torch.equal(codes.decode(codes.encode(back), x.dtype), back)  # what is rounded stays


def test_a_row_is_decoded_as_it_was_alone_and_narrow_weights_come_back_narrow():
    x, codes = numbers(torch.bfloat16), BlockCodes("int8", LENGTHS, BLOCKS)
    sent = codes.encode(x)
    back = codes.decode(sent, x.dtype)
    assert back.dtype == torch.bfloat16
    assert torch.equal(codes.decode(sent[1:2], x.dtype), back[1:2])
    assert torch.equal(back[:, :5], x[:, :5])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "bf16", "fp16"])
def test_what_is_not_finite_stays_so(form, bad):
    x = numbers()
    x[1, 10] = bad
    back = BlockCodes(form, LENGTHS, BLOCKS)
    found = back.decode(back.encode(x), x.dtype)
    assert not found[1].isfinite().all()
    assert found[0].isfinite().all()


def test_zeros_are_zeros():
    codes = BlockCodes("int4", [32], [16])
    assert torch.equal(codes.decode(codes.encode(torch.zeros(1, 32)), torch.float32), torch.zeros(1, 32))
