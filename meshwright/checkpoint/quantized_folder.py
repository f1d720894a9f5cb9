"""Quantized folders of Hugging Face, read as bf16: MXFP4 (gpt-oss) and FP8 in blocks of 128 × 128 (DeepSeek-V3, Kimi).

Only what is trained is read: a folder that is written again is bf16, and says so.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.model_folder import Reader
from meshwright.spec.problem import InputError, Problem

FP8_BLOCK = 128  # rows and columns that share a scale
MXFP4_BYTES = 16  # of a group, whose 32 numbers share one
MXFP4_DIMS = 4  # experts, rows, groups, bytes
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
# The numbers of E2M1 by their four bits; two in a byte, the low half first.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127  # of a scale that is an exponent


def dequantized_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Bytes (experts, rows, groups, 16) and exponents (experts, rows, groups) as (experts, columns, rows) in bf16.

    Every value is exact: two bits times a power of two.
    """
    table = torch.tensor(E2M1, dtype=torch.float32)
    pairs = torch.stack((table[(blocks & 0xF).long()], table[(blocks >> 4).long()]), dim=-1)
    values = torch.ldexp(pairs.flatten(-2), (scales.to(torch.int32) - E8M0_BIAS)[..., None])
    return values.flatten(-2).mT.to(torch.bfloat16)


def dequantized_fp8(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """A matrix times the scale of each block, in fp32, rounded to bf16; the last blocks may be cut short."""
    rows, columns = weight.shape
    scale = scale_inv.to(torch.float32).repeat_interleave(FP8_BLOCK, 0)[:rows]
    return (weight.to(torch.float32) * scale.repeat_interleave(FP8_BLOCK, 1)[:, :columns]).to(torch.bfloat16)


class QuantizedReader(Reader):
    """The tensors of a quantized folder as if they were stored in bf16."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if problems := [*self._unmatched()]:
            raise InputError(problems)

    def _unmatched(self) -> Iterator[Problem]:
        """Codes without scales, scales without codes, and those that are not of each other's shapes."""
        shapes = {name: head[1] for name, head in self._heads.items()}
        for name, shape in sorted(shapes.items()):
            partner, is_right = name, True
            if name.endswith(BLOCKS):
                partner = name.removesuffix(BLOCKS) + SCALES
                is_right = shapes.get(partner) == shape[:-1] and len(shape) == MXFP4_DIMS
            elif name.endswith(SCALES):
                partner = name.removesuffix(SCALES) + BLOCKS
                is_right = shapes.get(partner) == (*shape, MXFP4_BYTES)
            elif name.endswith(SCALE):
                partner = name.removesuffix(SCALE)
                is_right = shape == tuple(-(-size // FP8_BLOCK) for size in shapes.get(partner, ()))
            if not is_right:
                other = f"{partner} {shapes[partner]}" if partner in shapes else f"{partner}, which is missing"
                what = f"{name} {shape} of {self.folder} does not belong to {other}"
                yield Problem(what, "copy the folder again, or bring one that is not quantized")

    @property
    def names(self) -> frozenset[str]:
        packed = {name.removesuffix(BLOCKS) for name in self._heads if name.endswith(BLOCKS)}
        plain = {name for name in self._heads if not name.endswith((BLOCKS, SCALES, SCALE))}
        return frozenset(packed | plain)

    def shape(self, name: str) -> tuple[int, ...]:
        if name + BLOCKS not in self._heads:
            return super().shape(name)
        experts, rows, groups, size = super().shape(name + BLOCKS)
        return experts, groups * size * 2, rows

    def dtype(self, name: str) -> torch.dtype | None:
        is_quantized = name + BLOCKS in self._heads or name + SCALE in self._heads
        return torch.bfloat16 if is_quantized else super().dtype(name)

    def load(self, name: str) -> Tensor:
        if name + BLOCKS in self._heads:
            return dequantized_mxfp4(super().load(name + BLOCKS), super().load(name + SCALES))
        if name + SCALE in self._heads:
            return dequantized_fp8(super().load(name), super().load(name + SCALE))
        return super().load(name)
