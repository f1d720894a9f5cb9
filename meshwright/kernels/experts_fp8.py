"""FP8 grouped matmuls of experts: the output and the input's gradient in E4M3, the gradient of weights in bf16.

A row of activations or gradients has a scale of its own, as torch's grouped FP8 matmul asks for. Weights have one for
each expert (`tensorwise`), so that the backward only transposes what the forward quantized, or for each row of what is
multiplied (`rowwise`). The gradient of weights sums over rows: in FP8 an expert's rows would have to be contiguous
along the sum and padded to a multiple of 16, which costs a transposed copy of all rows and of all gradients.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.experts import by_segment
from meshwright.kernels.fp8 import LARGEST, LEAST_LINEAR, MULTIPLE, Accumulate, Scaling, cast, cast_transposed
from meshwright.kernels.split_backward import Half, in_halves

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
