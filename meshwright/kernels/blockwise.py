"""Blockwise quantization of optimizer states: maps from codes to values, and codes to the nearest value.

A block's elements are its scale, the largest magnitude in it, times the values that their codes stand for. int8 has
dynamic maps (Dettmers et al. 2022): decades from 1 downwards, each cut into half as many equal intervals as the one
above, whose middles are the values. The first moment's is signed, the second's is not. int4 (Li et al. 2023) has the
signed one of three decades for the first moment, and for the second the sixteenths from 1/16 to 1.

No map of a second moment has a zero: the paper's 0 is 10⁻⁷ here, the lower end of its smallest interval. A moment far
below the largest of its block would become 0, and the next update divide by ε alone; instead it is taken for larger
than it is, and the update is smaller. Only a block whose second moments are all 0 has the scale 0, and then its first
moments are 0 as well: a gradient has never been there. New states are such blocks, so the first update begins from 0.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.spec.blockwise import FORMATS, BlockFormat


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


MAPS = {
    "int8": (dynamic_map(8, signed=True), dynamic_map(8, signed=False)),
    "int4": (dynamic_map(4, signed=True), linear_map(4)),
}


@dataclass(frozen=True, slots=True)
class Codec:
    """The map of one moment, in the dtype and on the device of its scales."""

    format: BlockFormat
    values: Tensor
    middles: Tensor  # between neighbours: a value on one belongs to the lower

    def decode(self, codes: Tensor, scales: Tensor, lead: int, columns: int) -> Tensor:
        """Values of rows of codes; `lead`: columns of their first block that other ranks have."""
        codes = unpacked(codes, columns) if self.format.bits == 4 else codes
        return self.values[codes.int()] * self._of_elements(scales, lead, columns)

    def encode(self, x: Tensor, scales: Tensor, lead: int) -> Tensor:
        """The codes of rows: of every element the nearest value."""
        whole = scales.where(scales > 0, 1.0)  # zeros are the code nearest to 0
        ratio = x / self._of_elements(whole, lead, x.shape[-1])
        codes = torch.bucketize(ratio, self.middles, out_int32=True).to(torch.uint8)
        return packed(codes) if self.format.bits == 4 else codes

    def scales(self, x: Tensor, lead: int) -> Tensor:
        """The largest magnitude in every block of every row, of what is here of it."""
        block = self.format.block
        padded = F.pad(x, (lead, -(lead + x.shape[-1]) % block))
        return padded.unflatten(-1, (-1, block)).abs().amax(-1)

    def _of_elements(self, scales: Tensor, lead: int, columns: int) -> Tensor:
        return scales.repeat_interleave(self.format.block, -1)[..., lead : lead + columns]


@lru_cache(maxsize=64)
def codecs(state_dtype: str, dtype: torch.dtype, device: torch.device) -> tuple[Codec, Codec]:
    """Those of the first and of the second moment."""
    first, second = (
        Codec(
            FORMATS[state_dtype],
            torch.tensor(values, dtype=dtype, device=device),
            torch.tensor([(low + high) / 2 for low, high in pairwise(values)], dtype=dtype, device=device),
        )
        for values in MAPS[state_dtype]
    )
    return first, second


def packed(codes: Tensor) -> Tensor:
    """Two codes of a row in each byte, the earlier in its low half; a last one alone has zeros beside it."""
    even = F.pad(codes, (0, codes.shape[-1] % 2))
    return even[..., ::2] | (even[..., 1::2] << 4)


def unpacked(codes: Tensor, columns: int) -> Tensor:
    """The codes of a row's bytes, of so many columns."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :columns]
