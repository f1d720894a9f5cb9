"""Tensors as the bytes in which they travel: cast to 16 bits, or codes of eight or four and scales of blocks.

A block's scale is its largest absolute value ÷ 127 (int4: ÷ 7), in fp32, and codes are whole numbers. Of fp8 it is
÷ 448, and codes are e4m3 numbers, whose steps are finer near zero. Vectors go as they are beside codes. Whoever
receives codes adds up what they stand for: no sum is ever made of codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.blockwise import packed, unpacked
from meshwright.spec.communication import BITS, SCALE_BYTES

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
        wide = torch.promote_types(x.dtype, torch.float32)
        plain, scales, codes = self._joined(x, 0).view(torch.uint8), list[Tensor](), list[Tensor]()
        for block in self.sizes:
            blocks = self._joined(x, block).to(wide).unflatten(1, (-1, block))
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
            wide = torch.promote_types(dtype, torch.float32)
            numbers = code.contiguous().view(FP8).float() if self.form == "fp8" else code
            rows = numbers.unflatten(1, (-1, block)).to(wide).mul_(factor.to(wide)[..., None])
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
