"""Blockwise quantization of optimizer states: maps from codes to values, and codes to the nearest value.

A block's elements are its scale, the largest magnitude in it, times the values that their codes stand for. int8 has
dynamic maps (Dettmers et al. 2022): decades from 1 downwards, each cut into half as many equal intervals as the one
above, whose middles are the values. The first moment's is signed, the second's is not. int4 (Li et al. 2023) has the
signed one of three decades for the first moment, and for the second the sixteenths from 1/16 to 1. fp8 has the numbers
of e4m3, and codes are their bytes; its scale is the largest magnitude ÷ 448, so that bytes times scales are the state.

No map of a second moment has a zero: the paper's 0 is 10⁻⁷ here, the lower end of its smallest interval. A moment far
below the largest of its block would become 0, and the next update divide by ε alone; instead it is taken for larger
than it is, and the update is smaller. Only a block whose second moments are all 0 has the scale 0, and then its first
moments are 0 as well: a gradient has never been there. New states are such blocks, so the first update begins from 0.
e4m3's lowest is 2⁻⁹ of 448, 4·10⁻⁶ of the largest: MS-AMP (Peng et al. 2023) has one scale for a whole tensor, whose
second moments lie further apart than that, and keeps them in fp16. Its −0 is never written: zero has one code.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

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
