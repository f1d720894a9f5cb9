"""Differentiable collectives: all-gather and reduce-scatter are each other's gradient, an all-to-all is its own."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# torch 2.13 renamed both, and warns at every use of the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, joined along a dim; going back, gradients are summed and each rank gets its part."""
    return _Gather.apply(x, dim, group)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, of which each gets its part along a dim; going back, the parts are joined."""
    return _Scatter.apply(x, dim, group)


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts along a dim, in the order of ranks; not differentiable."""
    first = x.movedim(dim, 0).contiguous()
    whole = first.new_empty(first.shape[0] * group.size(), *first.shape[1:])
    all_gather(whole, first, group=group)
    return whole.movedim(0, dim)


def sum_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along a dim of the sum over all ranks; not differentiable."""
    first = x.movedim(dim, 0).contiguous()
    part = first.new_empty(first.shape[0] // group.size(), *first.shape[1:])
    reduce_scatter(part, first, group=group)
    return part.movedim(0, dim)


def all_to_all(
    x: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """What each rank sends of dim 0, in the order of ranks: equal parts, or `sent` rows to and `received` from each.

    Going back, gradients go the same way back.
    """
    return _AllToAll.apply(x, group, sent, received)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return join(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_parts(grads[0], ctx.dim, ctx.group), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return sum_parts(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return join(grads[0], ctx.dim, ctx.group), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        arrived = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None
