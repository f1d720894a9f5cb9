"""Softmax over the last dimension: one read and one write of every element, instead of eight.

Attention and the loss have fused kernels of their own, so no run uses this one: it is the smallest example of fusion,
with its bytes counted.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.kernels.dispatch import (
    ROW_LIMIT,
    TILE,
    Kernels,
    Pointer,
    as_rows,
    constexpr,
    fused,
    jit,
    power,
    rows_each,
    stride_step,
    tl,
    warps,
)

SHORT_TILE = 2048  # elements of a program with several short rows


def reference(x: Tensor) -> Tensor:
    """Softmax as five operations, each of which reads and writes memory."""
    if x.numel() == 0:
        return x.clone()  # nothing has no maximum
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = z - z.amax(-1, keepdim=True)  # the largest exponent is 0, so nothing overflows
    numerator = shifted.exp()
    return (numerator / numerator.sum(-1, keepdim=True)).to(x.dtype)


def softmax(x: Tensor, kernels: Kernels = "auto") -> Tensor:
    """Softmax over the last dimension, fused where it can be."""
    return _Softmax.apply(x) if fused(x, kernels) else reference(x)


def bytes_moved(kind: Literal["plain", "fused"], rows: int, cols: int, itemsize: int) -> int:
    """Bytes that a forward reads and writes in device memory, with no cache between operations.

    Plain, by operation: maximum (read MN, write M), difference (MN + M, MN), exponential (MN, MN), sum (MN, M),
    quotient (MN + M, MN): 8MN + 4M elements. Fused: 2MN; a row beyond the registers is read a second time.
    """
    if kind == "plain":
        return (8 * rows * cols + 4 * rows) * itemsize
    passes = 2 if cols <= ROW_LIMIT else 3
    return passes * rows * cols * itemsize


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = as_rows(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(_forward, _forward_long, (rows, y), (rows.stride(0),), rows)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        rows = as_rows(dy)
        dx = torch.empty_like(y)
        _launch(_backward, _backward_long, (y, rows, dx), (rows.stride(0),), rows)
        return dx


def _launch(short: Any, long: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], rows: Tensor) -> None:
    """Start the kernel for rows that fit into registers, or the one that walks along a row."""
    count, cols = rows.shape
    if cols > ROW_LIMIT:
        long[(count,)](*tensors, cols, *strides, block=TILE, num_warps=warps(TILE))
        return
    block, by = power(cols), stride_step(cols, *strides)
    each = rows_each(block, count, SHORT_TILE)
    sizes = [size // by for size in (cols, *strides)]
    short[(-(-count // each),)](*tensors, count, *sizes, by=by, each=each, block=block, num_warps=warps(each * block))


@jit
def _forward(
    x: Pointer, y: Pointer, rows: int, cols: int, x_row: int, by: constexpr, each: constexpr, block: constexpr
) -> None:
    cols, x_row = cols * by, x_row * by
    row = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    # Rows beyond the last are zeros, not −∞, whose differences would be no numbers.
    values = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(col < cols, values, float("-inf"))
    numerator = tl.exp(values - tl.max(values, axis=1)[:, None])
    tl.store(y + row * cols + col, numerator / tl.sum(numerator, axis=1)[:, None], mask=inside)


@jit
def _backward(
    y: Pointer, dy: Pointer, dx: Pointer, rows: int, cols: int, dy_row: int,
    by: constexpr, each: constexpr, block: constexpr,
) -> None:  # fmt: skip
    cols, dy_row = cols * by, dy_row * by
    row = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    values = tl.load(y + row * cols + col, mask=inside, other=0.0).to(tl.float32)
    slopes = tl.load(dy + row * dy_row + col, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values * slopes, axis=1)[:, None]
    tl.store(dx + row * cols + col, values * (slopes - mean), mask=inside)


@jit
def _forward_long(x: Pointer, y: Pointer, cols: int, x_row: int, block: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    highest = tl.full((block,), float("-inf"), tl.float32)  # of each lane, with the sum that belongs to it
    total = tl.zeros((block,), tl.float32)
    for start in tl.range(0, cols, block):
        col = start + lane
        values = tl.load(x + row * x_row + col, mask=col < cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, values)
        calm = tl.where(higher == float("-inf"), 0.0, higher)  # −∞ − (−∞) is no number
        total = total * tl.exp(highest - calm) + tl.exp(values - calm)
        highest = higher
    top = tl.max(highest, axis=0)
    total = tl.sum(total * tl.exp(highest - top), axis=0)
    for start in tl.range(0, cols, block):
        col = start + lane
        values = tl.load(x + row * x_row + col, mask=col < cols, other=0.0).to(tl.float32)
        tl.store(y + row * cols + col, tl.exp(values - top) / total, mask=col < cols)


@jit
def _backward_long(y: Pointer, dy: Pointer, dx: Pointer, cols: int, dy_row: int, block: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    mean = tl.zeros((block,), tl.float32)
    for start in tl.range(0, cols, block):
        col = start + lane
        values = tl.load(y + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        mean += values * tl.load(dy + row * dy_row + col, mask=col < cols, other=0.0).to(tl.float32)
    whole = tl.sum(mean, axis=0)
    for start in tl.range(0, cols, block):
        col = start + lane
        values = tl.load(y + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        slopes = tl.load(dy + row * dy_row + col, mask=col < cols, other=0.0).to(tl.float32)
        tl.store(dx + row * cols + col, values * (slopes - whole), mask=col < cols)
