"""FP8: linear layers whose three matmuls (output, input and weight gradient) run in it, and a quantization kernel.

Scaling is dynamic: every matmul has scales of its own operands, without a history of maxima. In linear layers finding
and applying scales is plain arithmetic, which the compiler fuses with what comes before; transposing quantized values
is a kernel, as the compiler's own write columns slowly. `quantize` is one kernel, for saved activations: rows in E4M3.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.kernels.dispatch import (
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
    triton,
    warps,
)

Scaling = Literal["tensorwise", "rowwise"]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of its finite values
LEAST = 2.0**-80  # `quantize` takes an amax below for this, so that a scale and its inverse are normal floats
LEAST_LINEAR = 1e-12  # and so does `quantize_linear`
MULTIPLE = 16  # both dimensions of an FP8 matmul's operands are multiples of it
TILE = 128  # rows and columns of a tile that is transposed
CAPABILITY = (8, 9)  # of the first GPUs with conversions to FP8


def takes(linear: nn.Linear) -> bool:
    """Whether a layer's shape suits FP8 matmuls."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


class Fp8Linear(nn.Linear):
    """A linear layer in FP8 with one scale for each tensor."""

    scaling: Scaling = "tensorwise"

    def forward(self, input: Tensor) -> Tensor:
        """The matmul in FP8, the bias in the precision of the input."""
        y = _Fp8Linear.apply(input.flatten(0, -2), self.weight, self.scaling).unflatten(0, input.shape[:-1])
        return y if self.bias is None else y + self.bias


class RowwiseFp8Linear(Fp8Linear):
    """A linear layer in FP8 with a scale for each row of both operands: more accurate, and slower."""

    scaling: Scaling = "rowwise"


def quantize_linear(x: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """A matrix in E4M3 and its inverse scales, as an FP8 matmul takes them.

    Not by `quantize`, which divides where this multiplies by an inverse, and has another least amax: of random
    matrices in bf16, 43 % of the scales and 0.05 % of the values come out otherwise.
    """
    amax = x.abs().amax() if scaling == "tensorwise" else x.abs().amax(dim=1, keepdim=True)
    scale = LARGEST / amax.float().clamp(min=LEAST_LINEAR)
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3), scale.reciprocal()


def _quantize_transposed(x: Tensor, scaling: Scaling, known: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The transposed matrix in E4M3: tensorwise the known values transposed, rowwise with scales of its own rows."""
    if known is not None:
        return transpose(known[0]), known[1]
    return quantize_linear(x.t().contiguous(), scaling)


def _matmul(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a @ b.T of quantized matrices, both with the summed dimension contiguous."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=dtype, use_fast_accum=True)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        x_fp8, weight_fp8 = quantize_linear(x, scaling), quantize_linear(weight, scaling)
        saved = (*x_fp8, *weight_fp8) if scaling == "tensorwise" else (x, weight)
        ctx.save_for_backward(*saved)
        return _matmul(x_fp8, weight_fp8, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient, scaling, saved = gradients[0], ctx.scaling, ctx.saved_tensors
        x_fp8, weight_fp8 = (saved[:2], saved[2:]) if scaling == "tensorwise" else (None, None)
        g = quantize_linear(gradient, scaling)
        dx = _matmul(g, _quantize_transposed(saved[-1], scaling, weight_fp8), gradient.dtype)
        g_transposed = _quantize_transposed(gradient, scaling, g if scaling == "tensorwise" else None)
        dweight = _matmul(g_transposed, _quantize_transposed(saved[0], scaling, x_fp8), gradient.dtype)
        return dx, dweight, None


@torch.library.custom_op("meshwright::transpose_fp8", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    """The transpose of an FP8 matrix, contiguous."""
    bits = x.contiguous().view(torch.uint8)
    if triton is None or not x.is_cuda:
        # A clone, as the transposed view of a single row is contiguous already.
        return bits.t().clone(memory_format=torch.contiguous_format).view(x.dtype)
    rows, columns = x.shape
    y = torch.empty(columns, rows, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    _transpose[grid](bits, y, rows, columns, side=TILE, num_warps=8)
    return y.view(x.dtype)


@transpose.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


@jit
def _transpose(x: Pointer, y: Pointer, rows: int, columns: int, side: constexpr) -> None:
    i = tl.program_id(0) * side + tl.arange(0, side)
    j = tl.program_id(1) * side + tl.arange(0, side)
    tile = tl.load(
        x + i[:, None].to(tl.int64) * columns + j[None, :], mask=(i[:, None] < rows) & (j[None, :] < columns)
    )
    tl.store(
        y + j[:, None].to(tl.int64) * rows + i[None, :],
        tl.trans(tile),
        mask=(j[:, None] < columns) & (i[None, :] < rows),
    )


def quantize(x: Tensor, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """A matrix in E4M3 and the scale of each row, (rows, 1), by which its largest magnitude is the largest value.

    A NaN or an infinity spoils its row.
    """
    if not _fits(x, kernels):
        return reference(x)
    x = as_rows(x)
    rows, cols = x.shape
    values = torch.empty((rows, cols), dtype=E4M3, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = power(cols)
    each = rows_each(block, rows)
    _cast_rows[(-(-rows // each),)](
        x, values, scale, rows, cols, x.stride(0),
        largest=LARGEST, least=LEAST, each=each, block=block, num_warps=warps(each * block),
    )  # fmt: skip
    return values, scale


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantization by plain arithmetic: a pass for the maxima and one for the cast."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    amax = x.abs().amax(1, keepdim=True) if x.numel() else x.new_zeros((x.shape[0], 1))
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    largest = torch.full_like(amax, LARGEST)  # a tensor: by a scalar a GPU divides as if by its inverse
    return (x * (largest / amax)).to(E4M3).contiguous(), (amax / largest).to(torch.float32)


def _fits(x: Tensor, kernels: Kernels) -> bool:
    if not fused(x, kernels):
        return False
    able = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= CAPABILITY
    if not able and kernels == "fused":
        raise refusal("this GPU has no FP8")
    return able and x.shape[1] <= ROW_LIMIT


@jit
def _bits(x: Values) -> Values:
    """Magnitudes as integers: they sort like the floats, and a NaN is above them all instead of being passed over."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@jit
def _amax(bits: Values, least: constexpr) -> Values:
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < least, least, amax)


@jit
def _inverse(amax: Values, largest: constexpr) -> Values:
    return tl.div_rn(amax * 0.0 + largest, amax)  # rounded as the reference rounds it; a NaN stays


@jit
def _cast_rows(
    x: Pointer, values: Pointer, scale: Pointer,
    rows: int, cols: int, x_row: int, largest: constexpr, least: constexpr, each: constexpr, block: constexpr,
) -> None:  # fmt: skip
    rows_here = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)
    row = rows_here[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    loaded = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    amax = _amax(tl.max(_bits(loaded), axis=1), least)
    tl.store(scale + rows_here, tl.div_rn(amax, largest), mask=rows_here < rows)
    quantized = loaded * _inverse(amax, largest)[:, None]
    tl.store(values + row * cols + col, quantized.to(values.dtype.element_ty), mask=inside)
