"""Eight-bit floating point with a scale for the whole tensor or for every row, and the transposed copy beside it.

FP8 products on Hopper want both operands with the summed dimension dense. A product over tokens (the gradient of a
weight) therefore needs transposed copies of what the forward and the input gradient use as they are.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.kernels.choose import (
    ROW_LIMIT,
    Kernels,
    Pointer,
    Values,
    as_rows,
    constexpr,
    fused,
    jit,
    power,
    refusal,
    rows_each,
    tl,
    warps,
)

Scaling = Literal["tensor", "row"]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # finite codes
LEAST = 2.0**-80  # an amax below counts as this, so that a scale and its inverse are normal numbers
SIDE = 64  # rows and columns of a tile that is cast: small enough for five programs' registers
SQUARE, BROAD = (128, 128), (16, 1024)  # tiles for maxima: along both ways, and where only one number is sought
CAPABILITY = (8, 9)  # of the first GPUs with conversions to FP8


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in FP8: values · scale is the matrix; so is transposed · transposed_scale, turned."""

    values: Tensor  # (rows, cols)
    scale: Tensor  # (1, 1), or (rows, 1)
    transposed: Tensor | None  # (cols, rows)
    transposed_scale: Tensor | None  # (1, 1), or (cols, 1)


def quantize(
    x: Tensor, dtype: torch.dtype, scaling: Scaling, transposed: bool = False, kernels: Kernels = "auto"
) -> Codes:
    """A matrix as FP8 codes, the largest magnitude as the largest code; a NaN or infinity spoils all of its scale."""
    if _fits(x, kernels):
        return _quantize(as_rows(x), dtype, scaling, transposed)
    return reference(x, dtype, scaling, transposed)


def reference(x: Tensor, dtype: torch.dtype, scaling: Scaling, transposed: bool) -> Codes:
    """The codes by plain arithmetic, a pass for the maximum and one for the cast, for each copy."""
    values, scale = _cast(x, dtype, scaling)
    if not transposed:
        return Codes(values, scale, None, None)
    if scaling == "tensor":
        return Codes(values, scale, values.t().contiguous(), scale)
    return Codes(values, scale, *_cast(x.t(), dtype, scaling))


def _cast(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.numel() == 0:
        amax = wide.new_zeros((x.shape[0] if scaling == "row" else 1, 1))
    else:
        amax = wide.abs().amax(1, keepdim=True) if scaling == "row" else wide.abs().amax().reshape(1, 1)
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    largest = torch.full_like(amax, LARGEST[dtype])  # a tensor: by a number a GPU divides as if by its inverse
    return (wide * (largest / amax)).to(dtype).contiguous(), (amax / largest).to(torch.float32)


def _fits(x: Tensor, kernels: Kernels) -> bool:
    if not fused(x, kernels):
        return False
    able = True
    if x.is_cuda:
        gpu = torch.cuda.get_device_properties(x.device)
        able = (gpu.major, gpu.minor) >= CAPABILITY
    if not able and kernels == "fused":
        raise refusal("this GPU has no FP8")
    return able


def _quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling, transposed: bool) -> Codes:
    if scaling == "row" and not transposed and x.shape[1] <= ROW_LIMIT:
        return _in_one_pass(x, dtype)
    return _in_two_passes(x, dtype, scaling, transposed)


def _in_one_pass(x: Tensor, dtype: torch.dtype) -> Codes:
    """A scale a row needs that row alone: it is read once."""
    rows, cols = x.shape
    values = torch.empty((rows, cols), dtype=dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = power(cols)
    each = rows_each(block, rows)
    _cast_rows[(-(-rows // each),)](
        x, values, scale, rows, cols, x.stride(0),
        largest=LARGEST[dtype], least=LEAST, each=each, block=block, num_warps=warps(each * block),
    )  # fmt: skip
    return Codes(values, scale, None, None)


def _in_two_passes(x: Tensor, dtype: torch.dtype, scaling: Scaling, transposed: bool) -> Codes:
    """Tiles: the first pass finds every maximum, the second casts and writes both copies."""
    rows, cols = x.shape
    across, down = (rows, cols) if scaling == "row" else (1, 0)
    amax = torch.zeros(across + (down if transposed else 0), dtype=torch.int32, device=x.device)
    scale = torch.empty(amax.shape, dtype=torch.float32, device=x.device)
    values = torch.empty((rows, cols), dtype=dtype, device=x.device)
    turned = torch.empty((cols, rows), dtype=dtype, device=x.device) if transposed else None
    by_row = scaling == "row"
    kinds = {"by_row": by_row, "by_column": by_row and transposed}
    high, broad = SQUARE if by_row else BROAD
    _maxima[(-(-rows // high) * -(-cols // broad),)](
        x, amax, rows, cols, x.stride(0), high=high, broad=broad, **kinds, num_warps=8
    )
    _cast_tiles[(-(-rows // SIDE) * -(-cols // SIDE),)](
        x, amax, values, turned, scale, rows, cols, x.stride(0),
        largest=LARGEST[dtype], least=LEAST, side=SIDE, **kinds, num_warps=4,
    )  # fmt: skip
    if not transposed:
        return Codes(values, scale[:, None], None, None)
    first = scale[:across, None]
    return Codes(values, first, turned, scale[across:, None] if by_row else first)


@jit
def _bits(x: Values) -> Values:
    """Magnitudes as integers: they sort like the numbers, and a NaN is above them all instead of being passed over."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@jit
def _amax(bits: Values, least: constexpr) -> Values:
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < least, least, amax)


@jit
def _inverse(amax: Values, largest: constexpr) -> Values:
    return tl.div_rn(amax * 0.0 + largest, amax)  # rounded as the plain twin rounds it; a NaN stays


@jit
def _cast_rows(
    x: Pointer, values: Pointer, scale: Pointer,
    rows: int, cols: int, x_row: int, largest: constexpr, least: constexpr, each: constexpr, block: constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)
    row = number[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    wide = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    amax = _amax(tl.max(_bits(wide), axis=1), least)
    tl.store(scale + number, tl.div_rn(amax, largest), mask=number < rows)
    codes = wide * _inverse(amax, largest)[:, None]
    tl.store(values + row * cols + col, codes.to(values.dtype.element_ty), mask=inside)


@jit
def _maxima(
    x: Pointer, amax: Pointer, rows: int, cols: int, x_row: int,
    by_row: constexpr, by_column: constexpr, high: constexpr, broad: constexpr,
) -> None:  # fmt: skip
    parts = tl.cdiv(cols, broad)
    row = (tl.program_id(0) // parts).to(tl.int64) * high + tl.arange(0, high)
    col = (tl.program_id(0) % parts) * broad + tl.arange(0, broad)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    bits = _bits(tl.load(x + row[:, None] * x_row + col[None, :], mask=inside, other=0.0))
    if by_row:
        tl.atomic_max(amax + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    else:
        tl.atomic_max(amax, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    if by_column:
        tl.atomic_max(amax + rows + col, tl.max(bits, axis=0), mask=col < cols, sem="relaxed")


@jit
def _cast_tiles(
    x: Pointer, amax: Pointer, values: Pointer, turned: Pointer, scale: Pointer,
    rows: int, cols: int, x_row: int,
    largest: constexpr, least: constexpr, by_row: constexpr, by_column: constexpr, side: constexpr,
) -> None:  # fmt: skip
    parts = tl.cdiv(cols, side)
    row = (tl.program_id(0) // parts).to(tl.int64) * side + tl.arange(0, side)
    col = (tl.program_id(0) % parts).to(tl.int64) * side + tl.arange(0, side)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    wide = tl.load(x + row[:, None] * x_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if by_row:
        across = _amax(tl.load(amax + row, mask=row < rows, other=0), least)
        tl.store(scale + row, tl.div_rn(across, largest), mask=(row < rows) & (tl.program_id(0) % parts == 0))
        codes = (wide * _inverse(across, largest)[:, None]).to(values.dtype.element_ty)
    else:
        whole = _amax(tl.load(amax), least)
        tl.store(scale, tl.div_rn(whole, largest))  # by every program, the same number
        codes = (wide * _inverse(whole, largest)).to(values.dtype.element_ty)
    tl.store(values + row[:, None] * cols + col[None, :], codes, mask=inside)
    if by_column:
        down = _amax(tl.load(amax + rows + col, mask=col < cols, other=0), least)
        tl.store(scale + rows + col, tl.div_rn(down, largest), mask=(col < cols) & (tl.program_id(0) < parts))
        codes = (wide * _inverse(down, largest)[None, :]).to(values.dtype.element_ty)
    if turned is not None:
        # Turned in registers first, so that neighbouring threads write neighbouring bytes.
        tl.store(turned + col[:, None] * rows + row[None, :], tl.trans(codes), mask=tl.trans(inside))
