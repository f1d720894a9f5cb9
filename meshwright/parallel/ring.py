"""Attention over a split sequence by a ring: queries stay, keys and values travel from rank to rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.models.layers import wide
from meshwright.parallel.attention import Block, block_attention, block_gradients, meeting, merge, take

Arrival = Callable[[], Tensor]  # waits for a message and gives it


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place among those that share a sequence, and how it passes a tensor on."""

    rank: int
    size: int
    exchange: Callable[[Tensor], Arrival]  # starts sending to the next rank; what comes from the previous is alike


@dataclass(frozen=True, slots=True)
class Keys:
    """What is attended to: a rank's keys and values in the order of `attention.balanced`, and all ranks' documents."""

    k: Tensor  # (b, kv_heads, s ÷ cp, head_dim)
    v: Tensor
    documents: Tensor | None  # (b, s)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, within documents where they are told.

    q is (b, heads, s ÷ cp, head_dim), k and v are (b, kv_heads, s ÷ cp, head_dim), documents (b, s). Let kv be
    2 · b · kv_heads · (s ÷ cp) · head_dim. Each rank sends to the next
    - forward: cp − 1 messages of kv · itemsize bytes;
    - backward: the same again, and cp − 1 of kv · max(itemsize, 4) bytes, by which gradients of k and v go home.
    A message travels while a block is computed, but for the last of the backward.
    """
    return _RingAttention.apply(q, k, v, documents, ring_of(group, q.device))


def ring_of(group: dist.ProcessGroup, device: torch.device) -> Ring:
    """The ring of a group; Gloo cannot send from a GPU, so there each exchange is an all-gather: cp times the bytes."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    pass_on = _gather if device.type == "cuda" and backends.get("cuda") == "gloo" else _send
    return Ring(rank=group.rank(), size=group.size(), exchange=lambda message: pass_on(message, group))


def ring_forward(q: Tensor, keys: Keys, ring: Ring) -> tuple[Tensor, Tensor]:
    """This rank's output and its log-sum-exp, both wide."""
    out = torch.zeros_like(q, dtype=wide(q))
    # Nothing is summed yet. The own block comes first, and there every row sees itself, so the sum is finite from then.
    lse = torch.full_like(out[..., 0], -torch.inf)
    for owner, theirs in _visits(keys, ring):
        block, rows, _ = _met(q, keys, owner, theirs, ring)
        more, more_lse = block_attention(block)
        merge(out[:, :, rows], lse[:, :, rows], more, more_lse)
    return out, lse


def ring_backward(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v, wide; what other ranks' queries add to k and v comes round the ring."""
    dq = torch.zeros_like(q, dtype=wide(q))
    own = torch.zeros(2, *keys.k.shape, dtype=wide(q), device=q.device)
    arrival: Arrival = partial(torch.zeros_like, own)  # the first rank that keys visit begins their sum
    for owner, theirs in _visits(keys, ring):
        block, rows, columns = _met(q, keys, owner, theirs, ring)
        parts = block_gradients(block, out[:, :, rows], lse[:, :, rows], grad[:, :, rows])
        passing = own if owner == ring.rank else arrival()
        dq[:, :, rows] += parts[0]
        passing[0, :, :, columns] += parts[1]
        passing[1, :, :, columns] += parts[2]
        if owner != ring.rank:
            arrival = ring.exchange(passing)
    dk, dv = own + arrival()
    return dq, dk, dv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
        out, lse = ring_forward(q, Keys(k, v, documents), ring)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, documents, out, lse = ctx.saved_tensors
        parts = ring_backward(q, Keys(k, v, documents), out, lse, grads[0].contiguous(), ctx.ring)
        dq, dk, dv = (part.to(q.dtype) for part in parts)
        return dq, dk, dv, None, None


def _visits(own: Keys, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values, stacked, with their owner, the own first; the next are on their way meanwhile."""
    message = torch.stack((own.k, own.v))
    for step in range(ring.size - 1):
        arrival = ring.exchange(message)
        yield (ring.rank - step) % ring.size, message
        message = arrival()
    yield (ring.rank + 1) % ring.size, message


def _met(q: Tensor, keys: Keys, owner: int, theirs: Tensor, ring: Ring) -> tuple[Block, slice, slice]:
    """This rank's queries and the keys and values of an owner that they see, and which of either these are."""
    rows, columns, causal = meeting(ring.rank, owner, q.shape[2])
    k, v = theirs[..., columns, :]
    same = None
    if keys.documents is not None:
        mine, others = (take(keys.documents, 1, ring.size, rank) for rank in (ring.rank, owner))
        same = mine[:, rows, None] == others[:, None, columns]
    return Block(q[:, :, rows], k, v, causal, same), rows, columns


def _send(message: Tensor, group: dist.ProcessGroup) -> Arrival:
    received = torch.empty_like(message)
    rank, size = group.rank(), group.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )

    def arrival() -> Tensor:
        for work in works:
            work.wait()
        return received

    return arrival


def _gather(message: Tensor, group: dist.ProcessGroup) -> Arrival:
    received = [torch.empty_like(message) for _ in range(group.size())]
    work = dist.all_gather(received, message, group=group, async_op=True)

    def arrival() -> Tensor:
        assert work is not None
        work.wait()
        return received[group.rank() - 1]

    return arrival
