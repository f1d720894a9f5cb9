"""Rows of a mixture of experts: sorted by expert, multiplied by grouped matmuls, and summed back to their tokens.

On a GPU nothing here asks the device how many rows an expert has: the host never waits, and compiled graphs never
change with the load.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    tl,
    warps,
)

ALIGNED = 16  # bytes that a row of a grouped matmul's operands must be a multiple of


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The assignments of a batch sorted by expert, as rows; dropped ones come last or not at all."""

    assignment: Tensor  # (T,) the assignment of each row, counted over tokens and their k choices
    token: Tensor  # (T,) the token of each row
    row: Tensor  # (tokens, k) the row of each assignment
    kept: Tensor  # (tokens, k)
    counts: Tensor  # (experts,) rows of each expert


def takes_grouped(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch has a grouped matmul for rows of these widths; elsewhere it has a loop that waits for sizes."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and dtype is torch.bfloat16 and all(width * dtype.itemsize % ALIGNED == 0 for width in widths)


def grouped_matmul(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Rows (T, in) sorted by expert times their expert's matrix of a stack (experts, out, in).

    `ends` (experts,) int32 has the row after each expert's last; what comes out past all of them is undefined.
    """
    return F.grouped_mm(x, stack.transpose(1, 2), offs=ends) if x.is_cuda else by_segment(x, stack, ends)


def by_segment(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """The plain twin: a matmul for each expert's rows, whose sizes the host asks for; zeros past the last."""
    stops = ends.tolist()
    segments = [x[a:b] @ matrix.T for a, b, matrix in zip([0, *stops], stops, stack.unbind(), strict=False)]
    return torch.cat([*segments, x.new_zeros(len(x) - stops[-1], stack.shape[1])])


def low_rank_matmul(x: Tensor, down: Tensor, up: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert times A (experts, rank, in) and then B (experts, out, rank) of their expert."""
    down, up = widened(down, up)
    return grouped_matmul(grouped_matmul(x, down, ends), up, ends)


def low_rank_by_segment(x: Tensor, down: Tensor, up: Tensor, ends: Tensor) -> Tensor:
    """The plain twin."""
    return by_segment(by_segment(x, down, ends), up, ends)


def widened(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """A and B with a rank that a grouped matmul takes, filled up with zeros where it is not one."""
    more = -down.shape[1] % (ALIGNED // down.element_size())
    return (F.pad(down, (0, 0, 0, more)), F.pad(up, (0, more))) if more else (down, up)


def dispatch_rows(tokens: Tensor, order: Dispatch, kernels: Kernels = "auto") -> Tensor:
    """A copy of a token (tokens, hidden) for each of its rows, (T, hidden)."""
    return _Dispatch.apply(tokens, order.token, order.row, order.kept, _fits(tokens, kernels))


def combine_rows(rows: Tensor, gates: Tensor, order: Dispatch, kernels: Kernels = "auto") -> Tensor:
    """The sum of each token's kept rows (T, hidden) times their gates (tokens, k), (tokens, hidden)."""
    if _fits(rows, kernels):
        return _Combine.apply(rows, gates, order.row, order.kept)
    weighted = rows * gates.flatten()[order.assignment][:, None]
    return _Sum.apply(weighted, order.token, order.row, order.kept).to(rows.dtype)


def dispatch_twice(tokens: Tensor, order: Dispatch) -> tuple[Tensor, Tensor]:
    """`dispatch_rows` for two readers: their gradients are added where they are summed, and never stored as a sum."""
    return _DispatchTwice.apply(tokens, order.token, order.row, order.kept)


def row_gates(gates: Tensor, order: Dispatch) -> Tensor:
    """The gate (tokens, k) of each row, (T,)."""
    return _RowGates.apply(gates, order.assignment, order.row, order.kept)


def sum_to_tokens(rows: Tensor, order: Dispatch) -> Tensor:
    """The sum of each token's kept rows (T, hidden), (tokens, hidden); what other rows hold does not matter."""
    return _Sum.apply(rows, order.token, order.row, order.kept).to(rows.dtype)


def _fits(x: Tensor, kernels: Kernels) -> bool:
    return x.shape[1] <= ROW_LIMIT and fused(x, kernels)


def sum_rows(rows: Tensor, places: Tensor, kept: Tensor, *beside: Tensor) -> Tensor:
    """The sum of each token's rows, in fp32 or more, and of the same rows of tensors beside them."""
    # Choice by choice, in a fixed order: atomic additions have none, and the last bits would differ from run to run.
    total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    for place, held in zip(places.unbind(1), kept.unbind(1), strict=True):
        for each in (rows, *beside):
            total = total + torch.where(held[:, None], each[place], 0)
    return total


class _Dispatch(torch.autograd.Function):
    """A copy of a token for each of its rows: the transpose of `_Sum`.

    Each is the other's gradient, so neither direction needs atomics.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, row: Tensor, kept: Tensor, by_kernel: bool) -> Tensor:
        ctx.save_for_backward(row, kept)
        ctx.by_kernel = by_kernel
        return tokens[token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        row, kept = ctx.saved_tensors
        total = _summed(grads[0], None, row, kept) if ctx.by_kernel else sum_rows(grads[0], row, kept)
        return total.to(grads[0].dtype), None, None, None, None


class _DispatchTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, row: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row, kept)
        return tokens[token], tokens[token]  # the compiler, for which this is, makes one of the two

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        row, kept = ctx.saved_tensors
        first, second = grads
        return sum_rows(first, row, kept, second).to(first.dtype), None, None, None


class _RowGates(torch.autograd.Function):
    """A permutation of the gates, less the dropped ones: no two rows meet, so its gradient needs no atomics either."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, assignment: Tensor, row: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(row, kept)
        return gates.flatten()[assignment]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        row, kept = ctx.saved_tensors
        return torch.where(kept, grads[0][row], 0), None, None, None


class _Sum(torch.autograd.Function):
    """The sum of each token's rows: the transpose of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, row: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return sum_rows(rows, row, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return grads[0][token], None, None, None


class _Combine(torch.autograd.Function):
    """The sum of each token's rows times their gates, in one pass each way: no product of the two is ever stored."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, row: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates, row, kept)
        return _summed(rows, gates, row, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gates, row, kept = ctx.saved_tensors
        dy = as_rows(grads[0])
        drows, dgates = torch.empty_like(rows), torch.empty_like(gates)  # no expert reads rows that were not kept
        tokens, choices = row.shape
        block = power(rows.shape[1])
        _spread_kernel[(tokens,)](
            rows, gates, row, kept, dy, drows, dgates, rows.shape[1], dy.stride(0),
            choices=choices, block=block, num_warps=warps(block),
        )  # fmt: skip
        return drows, dgates, None, None


def _summed(rows: Tensor, gates: Tensor | None, places: Tensor, kept: Tensor) -> Tensor:
    """By the kernel: rows, times their gates if given, summed in fp32 and rounded once."""
    rows = rows.contiguous()
    (tokens, choices), cols = places.shape, rows.shape[1]
    y = rows.new_empty(tokens, cols)
    block = power(cols)
    _sum_kernel[(tokens,)](rows, gates, places, kept, y, cols, choices=choices, block=block, num_warps=warps(block))
    return y


@jit
def _sum_kernel(
    rows: Pointer, gates: Pointer, places: Pointer, kept: Pointer, y: Pointer, cols: int,
    choices: constexpr, block: constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for choice in tl.static_range(choices):
        at = token * choices + choice
        inside = (col < cols) & tl.load(kept + at)
        value = tl.load(rows + tl.load(places + at) * cols + col, mask=inside, other=0.0).to(tl.float32)
        if gates is not None:
            value *= tl.load(gates + at)
        total += value
    tl.store(y + token * cols + col, total, mask=col < cols)


@jit
def _spread_kernel(
    rows: Pointer, gates: Pointer, places: Pointer, kept: Pointer, dy: Pointer, drows: Pointer, dgates: Pointer,
    cols: int, dy_row: int, choices: constexpr, block: constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, block)
    slope = tl.load(dy + token * dy_row + col, mask=col < cols, other=0.0).to(tl.float32)
    for choice in tl.static_range(choices):
        at = token * choices + choice
        inside = (col < cols) & tl.load(kept + at)
        row = tl.load(places + at) * cols + col
        value = tl.load(rows + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(dgates + at, tl.sum(value * slope))
        tl.store(drows + row, slope * tl.load(gates + at), mask=inside)
