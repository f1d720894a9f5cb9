"""A backward in two halves: the gradients of an input and of a weight as two nodes of autograd's graph.

Zero-bubble schedules go back through a stage for its input, and later for its weights (Qi et al. 2023). Autograd leaves
out the nodes that nobody asked for, but a Python function runs as a whole: one that returns both gradients would make
both in each of the two passes. Here a value has a node for each half below the one that it leaves, to which that hands
its own gradient.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Half(NamedTuple):
    """What makes the gradient of one tensor from that of the value."""

    of: Tensor
    gradient: Callable[..., Tensor]  # from the value's gradient and what was saved
    saved: tuple[Tensor, ...] = ()  # activations; of weights a function may hold detached ones


def in_halves(value: Tensor, *halves: Half) -> Tensor:
    """A value that was made without a graph, with the gradients of the tensors that it is of."""
    parts = [_Half.apply(half.of, value.shape, value.dtype, half) for half in halves]
    if _begins_at_functions():
        return _Joined.apply((value,), *parts)
    for part in parts:  # zeros: a pass over the value each
        value = value + part
    return value


@cache
def _begins_at_functions() -> bool:
    """Whether a backward can begin at a Python function's node, where both halves part. Torch 2.11's cannot."""
    value = torch.zeros((), requires_grad=True)
    node = cast(Any, _Joined.apply((value.detach(),), value).grad_fn)
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


class _Half(torch.autograd.Function):
    """One element, seen as the whole value: its gradient is the value's."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, shape: torch.Size, dtype: torch.dtype, half: Half) -> Tensor:
        ctx.gradient = half.gradient
        ctx.save_for_backward(*half.saved)
        return of.new_zeros((), dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(gradients[0], *ctx.saved_tensors), None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: tuple[Tensor], *halves: Tensor) -> Tensor:  # in a tuple: it is no input of the graph
        ctx.halves = len(halves)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients * ctx.halves
