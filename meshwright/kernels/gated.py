"""Activations of a feed-forward layer: alone, or times a second projection."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.dispatch import Kernels, Pointer, Values, as_rows, constexpr, fused, jit, power, tl, warps

Activation = Literal["silu", "gelu", "gelu_tanh"]
BLOCK = 2048  # elements of a program: with three tensors at hand, 8 from each for every thread


def reference(x: Tensor, activation: Activation) -> Tensor:
    """The activation in fp32, not rounded yet."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate(x: Tensor, activation: Activation, kernels: Kernels = "auto") -> Tensor:
    """silu, gelu or its tanh form of every element."""
    return _Gated.apply(x, None, activation) if fused(x, kernels) else reference(x, activation).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu", kernels: Kernels = "auto") -> Tensor:
    """activation(gate) · up; with silu this is SwiGLU."""
    if fused(gate, kernels, up):
        return _Gated.apply(gate, up, activation)
    return (reference(gate, activation) * up).to(up.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _launch(_forward, [gate, up, y], activation)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = None if up is None else torch.empty_like(dgate)
        _launch(_backward, [gate, up, dy, dgate, dup], ctx.activation)
        return dgate, dup, None


def _launch(kernel: Any, tensors: Sequence[Tensor | None], activation: Activation) -> None:
    """Start one program for every block of every row; where all tensors are dense their elements are one row.

    Then every program but the last has a full block.
    """
    dense = all(x is None or x.is_contiguous() for x in tensors)
    tensors = [x if x is None else x.view(1, -1) if dense else as_rows(x) for x in tensors]
    rows, cols = next(x.shape for x in tensors if x is not None)
    block = min(BLOCK, power(cols))
    parts = -(-cols // block)
    strides = [0 if x is None else x.stride(0) for x in tensors]
    kernel[(rows * parts,)](
        *tensors, cols, parts, *strides, activation=activation, block=block, num_warps=warps(block, each_thread=8)
    )


@jit
def _forward(
    gate: Pointer, up: Pointer, y: Pointer, cols: int, parts: int, gate_row: int, up_row: int, y_row: int,
    activation: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) // parts).to(tl.int64)
    col = (tl.program_id(0) % parts).to(tl.int64) * block + tl.arange(0, block)
    inside = col < cols
    value, _ = _activation(tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32), activation)
    if up is not None:
        value *= tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_row + col, value, mask=inside)


@jit
def _backward(
    gate: Pointer, up: Pointer, dy: Pointer, dgate: Pointer, dup: Pointer, cols: int, parts: int,
    gate_row: int, up_row: int, dy_row: int, dgate_row: int, dup_row: int, activation: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) // parts).to(tl.int64)
    col = (tl.program_id(0) % parts).to(tl.int64) * block + tl.arange(0, block)
    inside = col < cols
    slope = tl.load(dy + row * dy_row + col, mask=inside, other=0.0).to(tl.float32)
    value, steep = _activation(tl.load(gate + row * gate_row + col, mask=inside, other=0.0).to(tl.float32), activation)
    if up is not None:
        tl.store(dup + row * dup_row + col, slope * value, mask=inside)
        slope *= tl.load(up + row * up_row + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(dgate + row * dgate_row + col, slope * steep, mask=inside)


@jit
def _activation(x: Values, activation: constexpr) -> Values:
    """The activation and its derivative; the compiler drops what is not used."""
    if activation == "silu":
        part = tl.sigmoid(x)
        value = x * part
        steep = part + value * (1.0 - part)
    elif activation == "gelu":
        part = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 ÷ √2
        value = x * part
        steep = part + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 ÷ √(2π)
    else:
        # ½ (1 + tanh u) is sigmoid(2u), which loses nothing near zero; u = √(2/π) (x + 0.044715 x³)
        part = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * part
        steep = part + value * (1.0 - part) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return value, steep
