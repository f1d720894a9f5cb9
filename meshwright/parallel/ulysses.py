"""Attention over a split sequence by exchange: each rank trades its slices of all heads for all slices of its heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.layers import Attend
from meshwright.parallel.attention import join, take


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Any, group: dist.ProcessGroup, attend: Attend
) -> Tensor:
    """Attention of this rank's queries to the whole sequence, by `attend` on whole sequences of heads ÷ cp heads.

    Arguments are as in `ring.ring_attention`; heads and kv_heads are multiples of cp. Each rank takes part in
    - forward: one all-to-all of b · (heads + 2 · kv_heads) · (s ÷ cp) · head_dim · itemsize bytes and one of
      b · heads · (s ÷ cp) · head_dim · itemsize;
    - backward: the same two all-to-alls, in the other order.
    Of an all-to-all's bytes a rank keeps one part in cp. Nothing overlaps.
    """
    cp = group.size()
    assert q.shape[1] % cp == 0, f"{q.shape[1]} heads over {cp} ranks"
    assert k.shape[1] % cp == 0, f"{k.shape[1]} key heads over {cp} ranks"
    out = attend(*_heads_of_all_slices(q, k, v, group), documents)
    slices = torch.stack([take(out, 2, cp, rank) for rank in range(cp)])
    return _exchanged(slices, group).movedim(0, 1).flatten(1, 2)


def _heads_of_all_slices(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of q, k and v over the whole sequence, in its order, by one exchange."""
    cp = group.size()
    shares = [x.unflatten(1, (cp, -1)) for x in (q, k, v)]
    received = _exchanged(torch.cat(shares, dim=2).movedim(1, 0), group)  # (slices of a rank, b, heads, s ÷ cp, d)
    q, k, v = join(received.unbind(), dim=2).split([share.shape[2] for share in shares], dim=1)
    return q, k, v


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of the first dimension goes to rank i, and what rank i sent becomes part i."""
    return _Exchange.apply(x, group)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return _exchanged(grad, ctx.group), None
