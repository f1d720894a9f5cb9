"""Context parallelism: each rank holds an early and a late slice of every sequence; only attention communicates.

Everything but attention and routing looks at one position at a time, so a rank computes its own and nothing changes.
Ring attention passes keys and values around; Ulysses exchanges sequence slices for heads. A router, which is defined
per sequence, gets the all-gathered logits, which are small.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.layers import Attend, Attention, accum_dtype, causal_attention
from meshwright.models.moe import MoELayer, Route, Routing
from meshwright.parallel.block_attention import (
    AttentionBlock,
    block_attention,
    block_gradients,
    join,
    meeting,
    merge,
    take,
)
from meshwright.parallel.collectives import all_to_all, gather
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import note
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan


def split(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Put an attention over split sequences into every layer, and a router that sees whole ones."""
    if plan.cp == 1:
        return model
    group = mesh.group("cp")
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = (
                partial(ring_attention, group=group)
                if plan.cp_kind == "ring"
                else partial(ulysses_attention, group=group, attend=causal_attention)
            )
            note(module, f"context parallel, {plan.cp_kind} over cp={plan.cp}")
        elif isinstance(module, MoELayer):
            module.route = partial(route_whole, route=module.route, group=group)
    return model


def cut(plan: Plan, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """What this rank holds of a (b, sequence) tensor."""
    if plan.cp == 1:
        return lambda x: x
    return lambda x: take(x, 1, plan.cp, mesh.place["cp"])


def route_whole(logits: Tensor, arch: Arch, draw: Tensor | None, *, route: Route, group: dist.ProcessGroup) -> Routing:
    """Route whole sequences on every rank, then keep this rank's positions.

    Each rank weighs the per-sequence losses by its own positions, so that together they count every position once.
    """
    rank, ranks = group.rank(), group.size()
    whole = join(gather(logits, 1, group).chunk(ranks, 1), 1)
    with torch.no_grad():
        draws = None if draw is None else join(gather(draw, 1, group).chunk(ranks, 1), 1)
    routing = route(whole, arch, draws)
    mine = {name: take(getattr(routing, name), 1, ranks, rank) for name in ("experts", "gates", "kept")}
    return replace(routing, **mine, rows=min(routing.rows, mine["experts"].numel()))


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Any, group: dist.ProcessGroup, attend: Attend
) -> Tensor:
    """Attention of this rank's queries to the whole sequence, by `attend` on whole sequences of heads ÷ cp heads.

    Arguments are as in `ring_attention`; heads and kv_heads are multiples of cp. Each rank takes part in
    - forward: one all-to-all of b · (heads + 2 · kv_heads) · (s ÷ cp) · head_dim · itemsize bytes and one of
      b · heads · (s ÷ cp) · head_dim · itemsize;
    - backward: the same two all-to-alls, in the other order.
    Of an all-to-all's bytes a rank keeps one part in cp. Nothing overlaps.
    """
    cp = group.size()
    assert q.shape[1] % cp == 0, f"{q.shape[1]} heads over {cp} ranks"
    assert k.shape[1] % cp == 0, f"{k.shape[1]} key heads over {cp} ranks"
    # This rank's heads of q, k and v over the whole sequence, in its order.
    shares = [x.unflatten(1, (cp, -1)) for x in (q, k, v)]
    received = all_to_all(torch.cat(shares, dim=2).movedim(1, 0), group)  # (slices of a rank, b, heads, s ÷ cp, d)
    q, k, v = join(received.unbind(), dim=2).split([share.shape[2] for share in shares], dim=1)
    out = attend(q, k, v, documents)
    slices = torch.stack([take(out, 2, cp, rank) for rank in range(cp)])
    return all_to_all(slices, group).movedim(0, 1).flatten(1, 2)


Arrival = Callable[[], Tensor]  # waits for a message and gives it


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place among those that share a sequence, and how it passes a tensor on."""

    rank: int
    size: int
    exchange: Callable[[Tensor], Arrival]  # starts sending to the next rank; what comes from the previous is alike


@dataclass(frozen=True, slots=True)
class Keys:
    """A rank's keys and values in the order of `block_attention.balanced`, and all ranks' documents."""

    k: Tensor  # (b, kv_heads, s ÷ cp, head_dim)
    v: Tensor
    documents: Tensor | None  # (b, s)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, within documents where these are given.

    q is (b, heads, s ÷ cp, head_dim), k and v are (b, kv_heads, s ÷ cp, head_dim), documents (b, s). Let kv be
    2 · b · kv_heads · (s ÷ cp) · head_dim. Each rank sends to the next
    - forward: cp − 1 messages of kv · itemsize bytes;
    - backward: the same again, and cp − 1 of kv · max(itemsize, 4) bytes, which return the gradients of k and v.
    Messages overlap with the computation of a block, but for the last of the backward.
    """
    # Gloo cannot send from a GPU, so there each exchange is an all-gather: cp times the bytes.
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    exchange = _gather if q.is_cuda and backends.get("cuda") == "gloo" else _send
    ring = Ring(rank=group.rank(), size=group.size(), exchange=partial(exchange, group=group))
    return _RingAttention.apply(q, k, v, documents, ring)


def ring_forward(q: Tensor, keys: Keys, ring: Ring) -> tuple[Tensor, Tensor]:
    """This rank's output and its log-sum-exp, both in fp32."""
    out = torch.zeros_like(q, dtype=accum_dtype(q))
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
    """Gradients of this rank's q, k and v in fp32; other ranks' contributions to k and v come round the ring."""
    dq = torch.zeros_like(q, dtype=accum_dtype(q))
    own = torch.zeros(2, *keys.k.shape, dtype=accum_dtype(q), device=q.device)
    arrival: Arrival = partial(torch.zeros_like, own)  # the first rank that keys visit begins their sum
    for owner, theirs in _visits(keys, ring):
        block, rows, columns = _met(q, keys, owner, theirs, ring)
        parts = block_gradients(block, out[:, :, rows], lse[:, :, rows], grad[:, :, rows])
        sums = own if owner == ring.rank else arrival()
        dq[:, :, rows] += parts[0]
        sums[0, :, :, columns] += parts[1]
        sums[1, :, :, columns] += parts[2]
        if owner != ring.rank:
            arrival = ring.exchange(sums)
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
    """Every rank's keys and values, stacked, with their owner, its own first; the next are received meanwhile."""
    message = torch.stack((own.k, own.v))
    for step in range(ring.size - 1):
        arrival = ring.exchange(message)
        yield (ring.rank - step) % ring.size, message
        message = arrival()
    yield (ring.rank + 1) % ring.size, message


def _met(q: Tensor, keys: Keys, owner: int, theirs: Tensor, ring: Ring) -> tuple[AttentionBlock, slice, slice]:
    """This rank's queries and the keys and values of an owner that they see, and which of either these are."""
    rows, columns, causal = meeting(ring.rank, owner, q.shape[2])
    k, v = theirs[..., columns, :]
    same = None
    if keys.documents is not None:
        mine, others = (take(keys.documents, 1, ring.size, rank) for rank in (ring.rank, owner))
        same = mine[:, rows, None] == others[:, None, columns]
    return AttentionBlock(q[:, :, rows], k, v, causal, same), rows, columns


def _send(message: Tensor, group: dist.ProcessGroup) -> Arrival:
    received = torch.empty_like(message)
    rank, size = group.rank(), group.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return partial(arrived, works, received)


def _gather(message: Tensor, group: dist.ProcessGroup) -> Arrival:
    received = [torch.empty_like(message) for _ in range(group.size())]
    work = dist.all_gather(received, message, group=group, async_op=True)
    assert work is not None
    return partial(arrived, [work], received[group.rank() - 1])


def arrived(works: Sequence[dist.Work], received: Tensor) -> Tensor:
    """A message, once it is there: where a rank waits for its neighbour."""
    for work in works:
        work.wait()
    return received
