"""Blockwise quantization: of optimizer states, and of tensors for their way to other ranks.

**States** are codes of a map to values, each the nearest. A block's elements are its scale, the largest magnitude in
it, times the values that their codes stand for. int8 has dynamic maps (Dettmers et al. 2022): decades from 1
downwards, each cut into half as many equal intervals as the one above, whose middles are the values. The first
moment's is signed, the second's is not. int4 (Li et al. 2023) has the signed one of three decades for the first
moment, and for the second the sixteenths from 1/16 to 1. fp8 has the numbers of e4m3, and codes are their bytes; its
scale is the largest magnitude ÷ 448, so that bytes times scales are the state.

No map of a second moment has a zero: the paper's 0 is 10⁻⁷ here, the lower end of its smallest interval. A moment far
below the largest of its block would become 0, and the next update divide by ε alone; instead it is taken for larger
than it is, and the update is smaller. Only a block whose second moments are all 0 has the scale 0, and then its first
moments are 0 as well: a gradient has never been there. New states are such blocks, so the first update begins from 0.
e4m3's lowest is 2⁻⁹ of 448, 4·10⁻⁶ of the largest: MS-AMP (Peng et al. 2023) has one scale for a whole tensor, whose
second moments lie further apart than that, and keeps them in fp16. Its −0 is never written: zero has one code.

**Tensors that travel** are bytes: cast to 16 bits, or codes of eight or four and scales of blocks. A block's scale is
its largest absolute value ÷ 127 (int4: ÷ 7), in fp32, and codes are whole numbers. Of fp8 it is ÷ 448, and codes are
e4m3 numbers, whose steps are finer near zero. Vectors go as they are beside codes. Whoever receives codes adds up what
they stand for: no sum is ever made of codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.spec.communication import BITS, SCALE_BYTES
from meshwright.spec.quantized import FORMATS, BlockFormat


def dynamic_map(bits: int, *, signed: bool) -> list[float]:
    """The values of a dynamic map in ascending order; the largest is 1."""
    decades = bits - 1
    positive = []
    for decade in range(decades):
        intervals = 2 ** (decade + (not signed))
        middles = ((0.1 + 0.9 * (number + 0.5) / intervals) for number in range(intervals))
        positive += [10.0 ** (decade + 1 - decades) * middle for middle in middles]
    lowest = 0.0 if signed else 10.0**-decades
    negative = [-value for value in reversed(positive)] if signed else []
    return [*negative, lowest, *positive, 1.0]


def linear_map(bits: int) -> list[float]:
    """Equal steps up to 1, without 0."""
    return [(number + 1) / 2**bits for number in range(2**bits)]


def e4m3_map(*, signed: bool) -> list[float]:
    """The finite numbers of e4m3 in ascending order: four bits of exponent, three of mantissa; the largest is 448."""
    positive = [number / 8 * 2.0**-6 for number in range(1, 8)]
    positive += [(1 + number / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for number in range(8)]
    positive.pop()  # its place has NaN
    return [*(-value for value in reversed(positive)), 0.0, *positive] if signed else positive


MAPS = {
    "int8": (dynamic_map(8, signed=True), dynamic_map(8, signed=False)),
    "int4": (dynamic_map(4, signed=True), linear_map(4)),
    "fp8": (e4m3_map(signed=True), e4m3_map(signed=False)),
}
HELD_AS = {"fp8": torch.float8_e4m3fn}  # the dtype of codes; of others uint8
NEGATIVE = 128  # e4m3's bit of the sign


def codes_of_values(state_dtype: str, moment: int) -> list[int]:
    """The codes of a map's values, in their order: e4m3's bytes, in others the numbers from 0."""
    count = len(MAPS[state_dtype][moment])
    if state_dtype != "fp8":
        return list(range(count))
    if moment == 1:
        return list(range(1, count + 1))
    half = count // 2
    return [*(NEGATIVE + number for number in range(half, 0, -1)), *range(half + 1)]


def values_by_code(state_dtype: str, moment: int) -> list[float]:
    """What every code stands for; 0 for bytes that are never written."""
    found = [0.0] * 2 ** FORMATS[state_dtype].bits
    for code, value in zip(codes_of_values(state_dtype, moment), MAPS[state_dtype][moment], strict=True):
        found[code] = value
    return found


@dataclass(frozen=True, slots=True)
class Codec:
    """The map of one moment, in the dtype and on the device of its scales."""

    format: BlockFormat
    values: Tensor  # by code
    middles: Tensor  # between neighbours: a value on one belongs to the lower
    largest: float  # of the values
    codes: Tensor | None  # of the values in ascending order, where that is not their order

    def decode(self, codes: Tensor, scales: Tensor, lead: int, columns: int) -> Tensor:
        """Values of rows of codes; `lead`: columns of their first block that other ranks have."""
        codes = unpacked(codes, columns) if self.format.bits == 4 else codes
        return self.values[codes.int()] * self._of_elements(scales, lead, columns)

    def encode(self, x: Tensor, scales: Tensor, lead: int) -> Tensor:
        """The codes of rows: of every element the nearest value."""
        whole = scales.where(scales > 0, 1.0)  # zeros are the code nearest to 0
        ratio = x / self._of_elements(whole, lead, x.shape[-1])
        codes = torch.bucketize(ratio, self.middles, out_int32=True)
        codes = codes.to(torch.uint8) if self.codes is None else self.codes[codes]
        return packed(codes) if self.format.bits == 4 else codes

    def scales(self, x: Tensor, lead: int) -> Tensor:
        """The largest magnitude in every block of every row, of what is here of it, over the largest value."""
        block = self.format.block
        padded = F.pad(x, (lead, -(lead + x.shape[-1]) % block))
        return padded.unflatten(-1, (-1, block)).abs().amax(-1) / self.largest

    def _of_elements(self, scales: Tensor, lead: int, columns: int) -> Tensor:
        return scales.repeat_interleave(self.format.block, -1)[..., lead : lead + columns]


@lru_cache(maxsize=64)
def codecs(state_dtype: str, dtype: torch.dtype, device: torch.device) -> tuple[Codec, Codec]:
    """Those of the first and of the second moment."""

    def codec(moment: int) -> Codec:
        values, codes = MAPS[state_dtype][moment], codes_of_values(state_dtype, moment)
        ascending = codes == list(range(len(values)))
        return Codec(
            FORMATS[state_dtype],
            torch.tensor(values_by_code(state_dtype, moment), dtype=dtype, device=device),
            torch.tensor([(low + high) / 2 for low, high in pairwise(values)], dtype=dtype, device=device),
            values[-1],
            None if ascending else torch.tensor(codes, dtype=torch.uint8, device=device),
        )

    return codec(0), codec(1)


def packed(codes: Tensor) -> Tensor:
    """Two codes of a row in each byte, the earlier in its low half; a last one alone has zeros beside it."""
    even = F.pad(codes, (0, codes.shape[-1] % 2))
    return even[..., ::2] | (even[..., 1::2] << 4)


def unpacked(codes: Tensor, columns: int) -> Tensor:
    """The codes of a row's bytes, of so many columns."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :columns]


NIBBLE = 4  # bits
FP8, LARGEST = torch.float8_e4m3fn, 448.0
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def codes_of(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes of blocks, which are the last dim, and each block's scale."""
    most = 2 ** (bits - 1) - 1
    scales = (rows.abs().amax(-1) / most).float()
    divisor = torch.where(scales > 0, scales, 1.0).to(rows.dtype)[..., None]
    return (rows / divisor).round().clamp(-most, most).to(torch.int8), scales


def fp8_codes_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in FP8: e4m3 numbers, as the bytes that they are."""
    scales = (rows.abs().amax(-1) / LARGEST).float()
    divisor = torch.where(scales > 0, scales, 1.0).to(rows.dtype)[..., None]
    # The cast goes by fp32 from any width; what lies beyond the format's largest would become NaN.
    codes = (rows / divisor).clamp(-LARGEST, LARGEST).float().to(FP8)
    return codes.view(torch.int8), scales


def as_bytes(codes: Tensor, bits: int) -> Tensor:
    """Codes as bytes: two of four bits in one, the last of a row alone where they are odd."""
    return codes.view(torch.uint8) if bits > NIBBLE else packed((codes + 8).to(torch.uint8))  # 1 to 15


def as_codes(content: Tensor, bits: int, count: int) -> Tensor:
    """The codes of rows of bytes, so many of each."""
    return content.view(torch.int8) if bits > NIBBLE else unpacked(content, count).to(torch.int8) - 8


def _seen_as(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as wider numbers: in memory of their own, since in a message they may begin anywhere."""
    if content.shape[1] == 0:
        return content.to(dtype)
    return content.clone(memory_format=torch.contiguous_format).view(dtype)


class BlockCodes:
    """How several tensors, side by side in the rows of one, travel: a row of bytes for each rank that gets one."""

    def __init__(self, form: str, lengths: Sequence[int], blocks: Sequence[int]) -> None:
        """`lengths`: elements of each tensor in a row; `blocks`: of those that share a scale, 0: sent as they are."""
        self.form, self.lengths, self.blocks = form, list(lengths), list(blocks)
        self.bits = BITS.get(form, 0)
        self.sizes = sorted({block for block in blocks if block})

    def encode(self, x: Tensor) -> Tensor:
        """Bytes of every row: vectors as they are, then all scales, then all codes."""
        if cast := CASTS.get(self.form):
            return x.to(cast).view(torch.uint8)
        accum = torch.promote_types(x.dtype, torch.float32)
        plain, scales, codes = self._joined(x, 0).view(torch.uint8), list[Tensor](), list[Tensor]()
        for block in self.sizes:
            blocks = self._joined(x, block).to(accum).unflatten(1, (-1, block))
            code, scale = fp8_codes_of(blocks) if self.form == "fp8" else codes_of(blocks, self.bits)
            scales.append(scale.view(torch.uint8))
            codes.append(code.flatten(1))
        return torch.cat([plain, *scales, as_bytes(torch.cat(codes, 1), self.bits)] if codes else [plain], 1)

    def decode(self, content: Tensor, dtype: torch.dtype) -> Tensor:
        """What rows of bytes stand for."""
        if cast := CASTS.get(self.form):
            return content.view(cast).to(dtype)
        counts = {block: self._count(block) for block in (0, *self.sizes)}
        lengths = [counts[0] * dtype.itemsize, *(counts[block] // block * SCALE_BYTES for block in self.sizes)]
        plain, *scales, codes = content.split([*lengths, content.shape[1] - sum(lengths)], 1)
        whole = as_codes(codes.contiguous(), self.bits, sum(counts.values()) - counts[0])
        joined = {0: _seen_as(plain, dtype)}
        for block, scale, code in zip(
            self.sizes, scales, whole.split([counts[block] for block in self.sizes], 1), strict=True
        ):
            factor = _seen_as(scale, torch.float32)
            accum = torch.promote_types(dtype, torch.float32)
            numbers = code.contiguous().view(FP8).float() if self.form == "fp8" else code
            rows = numbers.unflatten(1, (-1, block)).to(accum).mul_(factor.to(accum)[..., None])
            joined[block] = rows.flatten(1).to(dtype)
        if len({*self.blocks}) == 1:  # they are in their order
            return joined[self.blocks[0]]
        parts = {
            block: iter(tensor.split([length for length, kind in self._tensors() if kind == block], 1))
            for block, tensor in joined.items()
        }
        return torch.cat([next(parts[block]) for block in self.blocks], 1)

    def _tensors(self) -> list[tuple[int, int]]:
        return list(zip(self.lengths, self.blocks, strict=True))

    def _count(self, block: int) -> int:
        return sum(length for length, kind in self._tensors() if kind == block)

    def _joined(self, x: Tensor, block: int) -> Tensor:
        """Those of one kind, side by side."""
        if all(kind == block for kind in self.blocks):
            return x.contiguous()
        parts = zip(x.split(self.lengths, 1), self.blocks, strict=True)
        found = [part for part, kind in parts if kind == block]
        return torch.cat(found, 1) if found else x.new_empty(len(x), 0)
