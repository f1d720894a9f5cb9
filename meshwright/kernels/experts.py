"""Rows of a mixture of experts: sorted by expert, multiplied by grouped matmuls, and summed back to their tokens.

On a GPU nothing here asks the device how many rows an expert has: the host never waits, and compiled graphs never
change with the load.

In FP8 the output and the input's gradient are made in E4M3, the gradient of weights in bf16. A row of activations or
gradients has a scale of its own, as torch's grouped FP8 matmul asks for. Weights have one for each expert
(`tensorwise`), so that the backward only transposes what the forward quantized, or for each row of what is multiplied
(`rowwise`). The gradient of weights sums over rows: in FP8 an expert's rows would have to be contiguous along the sum
and padded to a multiple of 16, which costs a transposed copy of all rows and of all gradients.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.dispatch import ROW_LIMIT, Kernels, Pointer, as_rows, constexpr, fused, jit, power, tl, warps
from meshwright.kernels.fp8 import (
    LARGEST,
    LEAST_LINEAR,
    MULTIPLE,
    Accumulate,
    Half,
    Scaling,
    cast,
    cast_transposed,
    in_halves,
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


CAPABILITY = (9, 0)  # of the only GPUs for which torch has a grouped FP8 matmul with scales of rows: not of Blackwell


def takes_fp8(device: torch.device, *widths: int) -> bool:
    """Whether torch has a grouped FP8 matmul for rows of these widths."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY
    return hopper and all(width % MULTIPLE == 0 for width in widths)


def grouped_matmul_fp8(
    x: Tensor,
    stack: Tensor,
    ends: Tensor,
    scaling: Scaling = "tensorwise",
    accumulate: Accumulate = "fast",
    splits: bool = False,
) -> Tensor:
    """As `grouped_matmul`, in FP8: rows (T, in) sorted by expert times their expert's matrix of (experts, out, in).

    `splits`: its backward runs for the input, and later for the weights.
    """
    if not splits:
        return _Fp8Grouped.apply(x, stack, ends, scaling, accumulate)
    fast = accumulate == "fast"
    with torch.no_grad():
        y = _output(x, stack, ends, scaling)
        x_saved, held = x.detach(), stack.detach()
    for_input = partial(_input_gradient, stack=held, scaling=scaling, fast=fast)
    return in_halves(y, Half(x, for_input, (ends,)), Half(stack, weight_gradient, (x_saved, ends)))


def _output(x: Tensor, stack: Tensor, ends: Tensor, scaling: Scaling) -> Tensor:
    matrices = quantize_along(stack, 1, 2) if scaling == "tensorwise" else quantize_along(stack, 2)
    return scaled_matmul(quantize_along(x, 1), matrices, ends, x.dtype)


def _input_gradient(gradient: Tensor, ends: Tensor, stack: Tensor, scaling: Scaling, fast: bool) -> Tensor:
    values, scales = quantize_along(stack, 1, 2) if scaling == "tensorwise" else quantize_along(stack, 1)
    rows, row_scales = quantize_along(gradient, 1)
    matrices = transposed(values, row_scales), scales.transpose(1, 2)
    return scaled_matmul((rows, row_scales), matrices, ends, gradient.dtype, fast)


def quantize_along(x: Tensor, *dims: int) -> tuple[Tensor, Tensor]:
    """E4M3 numbers with a scale for all elements along some dims, and the inverse scales, which keep these dims."""
    scale = LARGEST / x.abs().amax(dims, keepdim=True).float().clamp(min=LEAST_LINEAR)
    return cast(x, scale), scale.reciprocal()


def transposed(values: Tensor, after: Tensor) -> Tensor:
    """A stack (experts, out, in) as (experts, in, out), the last dim contiguous: one transposition of all experts.

    As a cast of what is FP8 already, by a scale of one; `after` keeps it in the backward.
    """
    experts, out, width = values.shape
    one = torch.ones((), device=values.device)
    whole = cast_transposed(values.reshape(experts * out, width), one, after)
    return whole.view(width, experts, out).transpose(0, 1)


def scaled_matmul(
    x: tuple[Tensor, Tensor], stack: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype, fast: bool = True
) -> Tensor:
    """Quantized rows (T, in) times quantized matrices (experts, out, in), and their inverse scales."""
    (rows, row_scales), (matrices, scales) = x, stack
    if not rows.is_cuda:
        return by_segment(rows.float() * row_scales, matrices.float() * scales, ends).to(dtype)
    each = scales[..., 0].expand(-1, matrices.shape[1]).contiguous()  # (experts, out)
    return torch._scaled_grouped_mm(
        rows, matrices.transpose(1, 2), row_scales[:, 0].contiguous(), each, offs=ends, out_dtype=dtype,
        use_fast_accum=fast,
    )  # fmt: skip


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, ends: Tensor, scaling: Scaling, accumulate: Accumulate) -> Tensor:
        ctx.scaling, ctx.fast = scaling, accumulate == "fast"
        # The quantized stack is half as large as the stack, which lives on anyway: it is quantized again, not saved.
        ctx.save_for_backward(x, stack, ends)
        return _output(x, stack, ends, scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, stack, ends = ctx.saved_tensors
        gradient = grads[0].contiguous()
        dx = _input_gradient(gradient, ends, stack, ctx.scaling, ctx.fast)
        return dx, weight_gradient(gradient, x, ends), None, None, None


@torch.library.custom_op("meshwright::expert_weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the matrices (experts, out, in), from those of their rows (T, out) and the rows (T, in).

    An operator of its own, as the compiler would make the transposed gradient where nothing else reads it as it is; the
    grouped matmul wants an expert's rows, which may be any number, not to be contiguous.
    """
    if x.is_cuda:
        return F.grouped_mm(gradient.t(), x, offs=ends)
    return torch.stack([gradient[a:b].T @ x[a:b] for a, b in pairwise([0, *ends.tolist()])])


@weight_gradient.register_fake
def _(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), gradient.shape[1], x.shape[1])
