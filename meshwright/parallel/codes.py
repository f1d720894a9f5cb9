"""Saved numbers in fewer bits: eight for a floating-point number (not exact), one for a truth value (exact)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.choose import Kernels
from meshwright.kernels.quantize import LEAST, quantize
from meshwright.models.layers import wide

Kind = Literal["fp8", "int8", "bits", "whole"]

GROUP = 128  # neighbouring numbers that share a scale: four bytes of it are 3 % of their codes
LARGEST = 127.0  # code of int8, both ways alike
BYTE = 8  # truth values


@dataclass(frozen=True, slots=True)
class Coded:
    """A flat tensor as codes, and what it takes to read them."""

    kind: Kind
    parts: tuple[Tensor, ...]
    length: int
    dtype: torch.dtype


@torch.no_grad()
def encode(flat: Tensor, kind: Kind, kernels: Kernels = "auto") -> Coded:
    """A flat tensor in the codes of a kind. A NaN or an infinity spoils its group, and is found by the step's norm."""
    if kind == "fp8":
        codes = quantize(_grouped(flat, GROUP), torch.float8_e4m3fn, "row", kernels=kernels)
        parts = (codes.values, codes.scale)
    elif kind == "int8":
        parts = _int8(_grouped(flat, GROUP))
    elif kind == "bits":
        parts = (_packed(flat),)
    else:
        parts = (flat,)
    return Coded(kind, parts, len(flat), flat.dtype)


@torch.no_grad()
def decode(coded: Coded, parts: tuple[Tensor, ...]) -> Tensor:
    """The flat tensor again, from its parts wherever they have been meanwhile."""
    if coded.kind == "whole":
        return parts[0]
    if coded.kind == "bits":
        return _unpacked(parts[0])[: coded.length]
    codes, scale = parts
    scale = scale.to(torch.promote_types(coded.dtype, torch.float32))
    numbers = codes * scale if coded.kind == "int8" else codes.to(scale.dtype).mul_(scale)  # fp8 has no arithmetic
    return numbers.to(coded.dtype).flatten()[: coded.length]


def _grouped(flat: Tensor, group: int) -> Tensor:
    """Rows of neighbours, the last one filled up with zeros."""
    lacking = -len(flat) % group
    return (F.pad(flat, (0, lacking)) if lacking else flat).view(-1, group)


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    least, most = torch.aminmax(rows, dim=1, keepdim=True)
    amax = torch.maximum(-least, most).to(wide(rows))
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    # The scale is wide and has dims, so the product is wide without a wide copy of the rows.
    return (rows * (LARGEST / amax)).round_().to(torch.int8), (amax / LARGEST).to(torch.float32)


def _packed(flat: Tensor) -> Tensor:
    rows = _grouped(flat.to(torch.uint8), BYTE)
    packed = torch.zeros(len(rows), dtype=torch.uint8, device=flat.device)
    for bit in range(BYTE):
        packed |= rows[:, bit] << bit
    return packed


def _unpacked(packed: Tensor) -> Tensor:
    bits = torch.arange(BYTE, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> bits) & 1).to(torch.bool).flatten()
