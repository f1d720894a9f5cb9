"""RMS and layer normalization over the last dimension, alone or with the addition of a residual before it."""

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.dispatch import (
    ROW_LIMIT,
    Kernels,
    Pointer,
    as_rows,
    constexpr,
    fused,
    jit,
    power,
    processors,
    refusal,
    rows_each,
    tl,
    warps,
)

# The backward holds a row's weights and their sums throughout, so it has half as many threads as others for its
# registers, and copies the next rows into shared memory meanwhile.
THREADS = 512  # of a multiprocessor
SHARED = 96 * 1024  # bytes of one program at most; two fit
# A short row is one warp's, so that no sum crosses warps: a fifth faster over rows of 768.
WARP_ROW, WARP_TILE, WARP_EACH = 1024, 2048, 32  # elements of such a row, of a program, and of a thread
BACKWARD_TILE = 1024  # elements of a program with several short rows, in the backward
MOST_WARPS = 16  # of a forward: with more, long rows wait for each other
LONG = 8192  # elements; the weights of a longer row do not fit into registers beside it, and are reloaded for each row


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """Normalization in fp32, rounded once; `centred` (layer norm) subtracts the mean first."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    z = x.to(dtype)
    if centred:
        z = z - z.mean(-1, keepdim=True)
    y = z * (z.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: Kernels = "auto") -> Tensor:
    """`x` over its root mean square, times the weight."""
    if _fits(x, kernels):
        return _Norm.apply(x, weight, None, eps, False)
    return reference(x, weight, None, eps, centred=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kernels: Kernels = "auto") -> Tensor:
    """`x` less its mean, over its standard deviation, times the weight, plus the bias."""
    if _fits(x, kernels):
        return _Norm.apply(x, weight, bias, eps, True)
    return reference(x, weight, bias, eps, centred=True)


def rms_norm_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum: the next residual."""
    if _fits(x, kernels, residual):
        return _SumNorm.apply(x, residual, weight, None, eps, False)
    total = x + residual
    return reference(total, weight, None, eps, centred=False), total


def layer_norm_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor]:
    """The layer norm of `x + residual`, and that sum: the next residual."""
    if _fits(x, kernels, residual):
        return _SumNorm.apply(x, residual, weight, bias, eps, True)
    total = x + residual
    return reference(total, weight, bias, eps, centred=True), total


def _fits(x: Tensor, kernels: Kernels, residual: Tensor | None = None) -> bool:
    """Whether to fuse: a row must stay in registers between the sum over it and its use."""
    if not fused(x, kernels, residual):
        return False
    if x.shape[-1] > ROW_LIMIT and kernels == "fused":
        raise refusal(f"a row of {x.shape[-1]} elements is longer than {ROW_LIMIT}")
    return x.shape[-1] <= ROW_LIMIT


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
        y, total = forward(x, None, (weight, bias), eps, centred)
        ctx.save_for_backward(total, weight, bias)
        ctx.eps, ctx.centred = eps, centred
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight, bias = ctx.saved_tensors
        return *backward(total, (weight, bias), (dy, None), ctx.eps, ctx.centred), None, None


class _SumNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        y, total = forward(x, residual, (weight, bias), eps, centred)
        ctx.save_for_backward(total, weight, bias)
        ctx.eps, ctx.centred = eps, centred
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight, bias = ctx.saved_tensors
        dx, dweight, dbias = backward(total, (weight, bias), (dy, dtotal), ctx.eps, ctx.centred)
        return dx, dx, dweight, dbias, None, None


Affine = tuple[Tensor, Tensor | None]  # weight and bias


def forward(x: Tensor, residual: Tensor | None, affine: Affine, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """The normalized tensor, and its input: `x` itself where there is no residual, else the sum."""
    weight, bias = affine
    rows, beside = as_rows(x), None if residual is None else as_rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    count, cols = rows.shape
    block = power(cols)
    one_warp = block <= WARP_ROW
    each = rows_each(block, count, WARP_TILE) if one_warp else rows_each(block, count)
    _forward[(-(-count // each),)](
        rows, beside, weight.contiguous(), None if bias is None else bias.contiguous(),
        y, None if residual is None else total, count, cols, rows.stride(0),
        0 if beside is None else beside.stride(0), eps,
        centred=centred, each=each, block=block,
        num_warps=warps(each * block, WARP_EACH) if one_warp else min(MOST_WARPS, warps(each * block)),
    )  # fmt: skip
    return y, total


def backward(
    total: Tensor, affine: Affine, slopes: tuple[Tensor, Tensor | None], eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of what was normalized, of the weight and of the bias.

    A fixed number of programs walk over the rows, each with a sum of its own for the weight; the sums are added at the
    end. So every row is read once, and the order of addition is the same in every run.
    """
    weight, bias = affine
    rows, dy = as_rows(total), as_rows(slopes[0])
    dtotal = None if slopes[1] is None else as_rows(slopes[1])
    count, cols = rows.shape
    block = power(cols)
    each = rows_each(block, count, BACKWARD_TILE)
    width = warps(each * block, WARP_EACH) if block <= WARP_ROW else warps(each * block)
    programs = min(-(-count // each), processors(rows) * max(1, THREADS // (32 * width)))
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    tile = each * block * rows.element_size() * (2 if dtotal is None else 3)
    sums = torch.empty((1 if bias is None else 2, programs, cols), dtype=torch.float32, device=total.device)
    _backward[(programs,)](
        rows, weight.contiguous(), dy, dtotal, dx, sums[0], None if bias is None else sums[1],
        count, cols, rows.stride(0), dy.stride(0), 0 if dtotal is None else dtotal.stride(0), eps, programs,
        centred=centred, each=each, block=block, reload=block > LONG,
        stages=1 if block > LONG else min(3, 1 + SHARED // tile), num_warps=width,  # tiles in flight, this one too
    )  # fmt: skip
    whole = sums.sum(1)
    return dx, whole[0].to(weight.dtype), None if bias is None else whole[1].to(bias.dtype)


@jit
def _forward(
    x: Pointer, residual: Pointer, weight: Pointer, bias: Pointer, y: Pointer, total: Pointer,
    rows: int, cols: int, x_row: int, residual_row: int, eps: float,
    centred: constexpr, each: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    scale = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_row + col, mask=inside, other=0.0)
    if residual is not None:
        beside = tl.load(residual + row * residual_row + col, mask=inside, other=0.0)
        # The sum is rounded before it is normalized, as it is where addition and norm are two operations.
        values = (values.to(tl.float32) + beside.to(tl.float32)).to(values.dtype)
        tl.store(total + row * cols + col, values, mask=inside)
    z = values.to(tl.float32)
    if centred:
        z = tl.where(col < cols, z - tl.sum(z, axis=1)[:, None] / cols, 0.0)
    out = z * tl.rsqrt(tl.sum(z * z, axis=1)[:, None] / cols + eps) * scale
    if bias is not None:
        out += tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)
    tl.store(y + row * cols + col, out, mask=inside)


@jit
def _backward(
    total: Pointer, weight: Pointer, dy: Pointer, dtotal: Pointer, dx: Pointer, dweight: Pointer, dbias: Pointer,
    rows: int, cols: int, total_row: int, dy_row: int, dtotal_row: int, eps: float, programs: int,
    centred: constexpr, each: constexpr, block: constexpr, reload: constexpr, stages: constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, block)[None, :]
    scale = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((each, block), tl.float32)
    bias_sum = tl.zeros((each, block), tl.float32)
    for first in tl.range(program * each, rows, programs * each, num_stages=stages):
        row = (first + tl.arange(0, each))[:, None].to(tl.int64)
        inside = (row < rows) & (col < cols)
        z = tl.load(total + row * total_row + col, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(dy + row * dy_row + col, mask=inside, other=0.0).to(tl.float32)
        if reload:
            scale = tl.load(weight + col, mask=col < cols, other=0.0).to(tl.float32)
        through = slope  # replaced where the sum is used beside its norm; loaded early, like the others
        if dtotal is not None:
            through = tl.load(dtotal + row * dtotal_row + col, mask=inside, other=0.0).to(tl.float32)
        if centred:
            z = tl.where(col < cols, z - tl.sum(z, axis=1)[:, None] / cols, 0.0)
        steep = tl.rsqrt(tl.sum(z * z, axis=1)[:, None] / cols + eps)
        normal = z * steep
        weight_sum += slope * normal
        if dbias is not None:
            bias_sum += slope
        slope *= scale
        out = slope - normal * (tl.sum(slope * normal, axis=1)[:, None] / cols)
        if centred:
            out -= tl.sum(slope, axis=1)[:, None] / cols
        out *= steep
        if dtotal is not None:
            out += through
        tl.store(dx + row * cols + col, out, mask=inside)
    place = program * cols + tl.arange(0, block)
    exists = tl.arange(0, block) < cols
    tl.store(dweight + place, tl.sum(weight_sum, axis=0), mask=exists)
    if dbias is not None:
        tl.store(dbias + place, tl.sum(bias_sum, axis=0), mask=exists)
