"""Context parallelism: each rank holds an early and a late slice of every sequence; only attention communicates.

Everything but attention and routing looks at one position at a time, so a rank computes its own and nothing changes.
Ring attention passes keys and values around, attends to one rank's block of them at a time and merges the results;
Ulysses exchanges sequence slices for heads. A router, which is defined per sequence, gets the all-gathered logits,
which are small.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels.attention import PLAIN, Scoring
from meshwright.models.layers import Attend, Attention, accum_dtype, causal_attention
from meshwright.models.moe import MoELayer, Route, Routing
from meshwright.parallel.mesh import Mesh, all_to_all, gather
from meshwright.parallel.model_spec import note
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest head dimension of torch's flash kernel
CUDNN_HEAD_DIM = 128  # and of cuDNN's
PADDED = 32  # the memory-efficient kernel reads its log-sum-exp in groups of this many rows


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


def route_whole(
    logits: Tensor,
    arch: Arch,
    draw: Tensor | None,
    load_bias: Tensor | None = None,
    *,
    route: Route,
    group: dist.ProcessGroup,
) -> Routing:
    """Route whole sequences on every rank, then keep this rank's positions.

    Each rank weighs the per-sequence losses by its own positions, so that together they count every position once.
    """
    rank, ranks = group.rank(), group.size()
    whole = join(gather(logits, 1, group).chunk(ranks, 1), 1)
    with torch.no_grad():
        draws = None if draw is None else join(gather(draw, 1, group).chunk(ranks, 1), 1)
    routing = route(whole, arch, draws, load_bias)
    mine = {name: take(getattr(routing, name), 1, ranks, rank) for name in ("experts", "gates", "kept")}
    batch, positions, _ = mine["experts"].shape
    rows, slots = min(routing.rows, mine["experts"].numel()), min(routing.slots, batch * positions)
    return replace(routing, **mine, rows=rows, slots=slots)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Any,
    group: dist.ProcessGroup,
    attend: Attend,
    how: Scoring = PLAIN,
) -> Tensor:
    """Attention of this rank's queries to the whole sequence, by `attend` on whole sequences of heads ÷ cp heads.

    Arguments are as in `ring_attention`; heads and kv_heads are multiples of cp. Let widths be heads · head_dim +
    kv_heads · (head_dim + v_dim), and out heads · v_dim. Each rank takes part in
    - forward: one all-to-all of b · (s ÷ cp) · widths · itemsize bytes and one of b · (s ÷ cp) · out · itemsize;
    - backward: the same two all-to-alls, in the other order.
    Of an all-to-all's bytes a rank keeps one part in cp. Nothing overlaps.
    """
    cp, parts = group.size(), (q, k, v)
    assert q.shape[1] % cp == 0, f"{q.shape[1]} heads over {cp} ranks"
    assert k.shape[1] % cp == 0, f"{k.shape[1]} key heads over {cp} ranks"
    # This rank's heads of q, k and v over the whole sequence, in its order: (rank, b, s ÷ cp, heads · width) of each.
    shares = [x.unflatten(1, (cp, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in parts]
    received = all_to_all(torch.cat(shares, dim=3), group)
    whole = join(received.unbind(), dim=1).split([share.shape[3] for share in shares], dim=2)
    q, k, v = (x.unflatten(2, (-1, part.shape[3])).transpose(1, 2) for x, part in zip(whole, parts, strict=True))
    if how.sinks is not None:
        how = how._replace(sinks=how.sinks.chunk(cp)[group.rank()])
    out = attend(q, k, v, documents, how=how)
    slices = torch.stack([take(out, 2, cp, rank) for rank in range(cp)])
    return all_to_all(slices, group).movedim(0, 1).flatten(1, 2)


def take(x: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """A rank's positions of a tensor whose dimension `dim` is the whole sequence.

    Of 2 · cp equal slices the one at `rank` and its mirror image: a late slice attends to many keys and an early one to
    few, and every such pair has the same causal work.
    """
    assert x.shape[dim] % (2 * cp) == 0, f"{x.shape[dim]} positions in {2 * cp} slices"
    slices = x.chunk(2 * cp, dim)
    return torch.cat((slices[rank], slices[-1 - rank]), dim)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole sequence in order from each rank's positions; undoes `take`."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Queries, and the keys and values that they attend to."""

    q: Tensor  # (b, heads, rows, head_dim)
    k: Tensor  # (b, kv_heads, columns, head_dim)
    v: Tensor
    causal: bool  # rows and columns are the same positions: each sees itself and earlier ones
    same: Tensor | None  # (b or 1, rows, columns), whether of one document and in the window; None: all are
    how: Scoring = PLAIN  # its window is in `same`, and its sink is no part of a block


Forward = Callable[[AttentionBlock], tuple[Tensor, Tensor]]
Gradients = Callable[[AttentionBlock, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def meeting(rank: int, owner: int, held: int) -> tuple[slice, slice, bool]:
    """Which of a rank's `held` queries see which of an owner's keys, and whether the block itself is causal.

    Of four pairs of slices those in the future are masked; what remains is one rectangle, full but for own keys.
    """
    early, late, both = slice(0, held // 2), slice(held // 2, held), slice(0, held)
    if owner == rank:
        return both, both, True
    return (both, early, False) if owner < rank else (late, both, False)


def block_attention(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Attention to one block alone, and its log-sum-exp, (b, heads, rows), by which blocks are merged.

    A row that is masked everywhere has a negligible sum and a finite output.
    """
    return _kernel(block)[0](block)


def block_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one block, given output and log-sum-exp over *all* blocks."""
    return _kernel(block)[1](block, out, lse, grad)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge one block's output into a running one, in place: both are averages, weighted by their sums."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp()[..., None]).add_(more * (more_lse - total).exp()[..., None])
    lse.copy_(total)


def plain(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """The reference of `block_attention`; materializes the block's scores."""
    scores, v = _scores(block)[0], block.v.to(accum_dtype(block.v))
    lse = scores.logsumexp(-1)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # a row masked everywhere: -inf less -inf would be NaN
    out = (scores - finite[..., None]).exp() @ v
    rows = block.q.shape[2]
    return _unfold(out, rows), _unfold(lse, rows)


def plain_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `block_gradients`; grouped query heads sum into their key head."""
    q, out, lse, grad = (_fold(x.to(accum_dtype(x)), block.k.shape[1]) for x in (block.q, out, lse, grad))
    k, v = block.k.to(accum_dtype(block.k)), block.v.to(accum_dtype(block.v))
    scores, steepness = _scores(block)
    weights = (scores - lse[..., None]).exp()
    slope = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * _scale(block)
    slope = slope if steepness is None else slope * steepness
    return _unfold(slope @ k, block.q.shape[2]), slope.mT @ q, weights.mT @ grad


def flash(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by torch's flash kernel, which materializes no scores."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        block.q, block.k, block.v, 0.0, block.causal, scale=block.how.scale
    )
    return out, lse


def flash_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by torch's flash kernel."""
    q, k, v = block.q, block.k, block.v
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.causal, seed, seed,
        scale=block.how.scale,
    )  # fmt: skip


def cudnn(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by cuDNN, on an H200 twice as fast as torch's flash kernel."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        block.q, block.k, block.v, None, True, 0.0, block.causal, scale=block.how.scale
    )
    return out, lse[..., 0]


def cudnn_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by cuDNN."""
    q, k, v = block.q, block.k, block.v
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    sizes = (None, None, q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, *sizes, 0.0, block.causal,
        scale=block.how.scale,
    )  # fmt: skip


def efficient(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by torch's memory-efficient kernel, which takes masks and fp32 but no grouped heads."""
    k, v = (_repeated(x, block.q.shape[1]) for x in (block.k, block.v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        block.q, k, v, _bias(block), True, 0.0, block.causal, scale=block.how.scale
    )
    return out, lse[..., : block.q.shape[2]]


def efficient_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by torch's memory-efficient kernel."""
    k, v = (_repeated(x, block.q.shape[1]) for x in (block.k, block.v))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes this layout and does not ask
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % PADDED), value=torch.inf).contiguous()  # heads' rows aligned
    seed = torch.empty((), dtype=torch.int64, device=k.device)  # of dropout, which there is none of
    wanted = [True, True, True, False]  # no gradient of the bias
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, block.q, k, v, _bias(block), out, lse, seed, seed, 0.0, wanted, block.causal, scale=block.how.scale
    )
    dk, dv = (x.unflatten(1, (block.k.shape[1], -1)).sum(2, dtype=accum_dtype(x)) for x in (dk, dv))
    return dq, dk, dv


def _kernel(block: AttentionBlock) -> tuple[Forward, Gradients]:
    """The fastest kernels that take a block."""
    q, columns = block.q, block.k.shape[2]
    head_dim, v_dim = q.shape[3], block.v.shape[3]
    unusual = block.how.softcap > 0 or v_dim != head_dim  # softcapped, or latent attention: by all scores of a block
    if not q.is_cuda or head_dim % 8 != 0 or q.dtype not in (*HALF, torch.float32) or unusual:
        return plain, plain_gradients
    if q.dtype in HALF and block.same is None and head_dim <= FLASH_HEAD_DIM:
        hopper = torch.cuda.get_device_capability(q.device) >= (9, 0)
        # cuDNN's gradients are summed in any order, and no setting of ours changes that.
        by_cudnn = hopper and head_dim <= CUDNN_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()
        return (cudnn, cudnn_gradients) if by_cudnn else (flash, flash_gradients)
    if columns % 8 == 0:  # the rows of a bias begin at multiples of 16 bytes
        return efficient, efficient_gradients
    return plain, plain_gradients


def _scale(block: AttentionBlock) -> float:
    return block.how.scale or block.q.shape[3] ** -0.5


def _scores(block: AttentionBlock) -> tuple[Tensor, Tensor | None]:
    """Scaled dot products of queries and keys, minus infinity where masked, (b, kv_heads, group · rows, columns).

    Of softcapped ones also how steep they still are: 1 − tanh².
    """
    q, k = _fold(block.q.to(accum_dtype(block.q)), block.k.shape[1]), block.k.to(accum_dtype(block.k))
    scores, steepness = (q @ k.mT) * _scale(block), None
    if block.how.softcap:
        bent = (scores / block.how.softcap).tanh()
        scores, steepness = block.how.softcap * bent, 1 - bent.square()
    rows = block.q.shape[2]
    grouped = scores.unflatten(2, (-1, rows))  # (b, kv_heads, group, rows, columns)
    if block.same is not None:
        grouped = grouped.masked_fill(~block.same[:, None, None], -torch.inf)
    if block.causal:
        seen = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).tril()
        grouped = grouped.masked_fill(~seen, -torch.inf)
    return grouped.flatten(2, 3), steepness


def _bias(block: AttentionBlock) -> Tensor | None:
    """The document mask as a bias on the scores: very low, yet finite, as a row may be masked everywhere."""
    if block.same is None:
        return None
    lowest = torch.finfo(block.q.dtype).min / 2
    bias = torch.zeros_like(block.same, dtype=block.q.dtype).masked_fill_(~block.same, lowest)
    return bias[:, None].expand(len(block.q), block.q.shape[1], -1, -1)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """(b, heads, rows, …) as (b, kv_heads, group · rows, …): the queries of a key's group as rows of one matrix."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _unfold(x: Tensor, rows: int) -> Tensor:
    """Undoes `_fold`."""
    return x.unflatten(2, (-1, rows)).flatten(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


Arrival = Callable[[], Tensor]  # waits for a message and gives it


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place among those that share a sequence, and how it passes a tensor on."""

    rank: int
    size: int
    exchange: Callable[[Tensor], Arrival]  # starts sending to the next rank; what comes from the previous is alike


@dataclass(frozen=True, slots=True)
class Keys:
    """A rank's keys and values in the order of `take`, and all ranks' documents."""

    k: Tensor  # (b, kv_heads, s ÷ cp, head_dim)
    v: Tensor  # (b, kv_heads, s ÷ cp, v_dim)
    documents: Tensor | None  # (b, s)
    how: Scoring = PLAIN


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: dist.ProcessGroup, how: Scoring = PLAIN
) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, within documents where these are given.

    q is (b, heads, s ÷ cp, head_dim), k and v are (b, kv_heads, s ÷ cp, head_dim), documents (b, s). Let kv be
    b · kv_heads · (s ÷ cp) · (head_dim + v_dim). Each rank sends to the next
    - forward: cp − 1 messages of kv · itemsize bytes;
    - backward: the same again, and cp − 1 of kv · max(itemsize, 4) bytes, which return the gradients of k and v.
    Messages overlap with the computation of a block, but for the last of the backward.
    """
    # Gloo cannot send from a GPU, so there each exchange is an all-gather: cp times the bytes.
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    exchange = _gather if q.is_cuda and backends.get("cuda") == "gloo" else _send
    ring = Ring(rank=group.rank(), size=group.size(), exchange=partial(exchange, group=group))
    return _RingAttention.apply(q, k, v, how.sinks, documents, how._replace(sinks=None), ring)


def ring_forward(q: Tensor, keys: Keys, ring: Ring) -> tuple[Tensor, Tensor]:
    """This rank's output and its log-sum-exp, both in fp32."""
    # By token, as the projection that reads it wants it.
    batch, heads, rows, _ = q.shape
    out = torch.zeros(batch, rows, heads, keys.v.shape[3], dtype=accum_dtype(q), device=q.device).transpose(1, 2)
    # Nothing is summed yet. The own block comes first, and there every row sees itself, so the sum is finite from then.
    lse = torch.full_like(out[..., 0], -torch.inf)
    for owner, theirs in _visits(keys, ring):
        block, mine, _ = _met(q, keys, owner, theirs, ring)
        more, more_lse = block_attention(block)
        merge(out[:, :, mine], lse[:, :, mine], more, more_lse)
    return out, lse


def ring_backward(
    q: Tensor, keys: Keys, out: Tensor, lse: Tensor, grad: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v in fp32; other ranks' contributions to k and v come round the ring."""
    dq = torch.zeros_like(q, dtype=accum_dtype(q))
    head_dim = keys.k.shape[3]
    own = torch.zeros_like(torch.cat((keys.k, keys.v), dim=-1), dtype=accum_dtype(q))
    arrival: Arrival = partial(torch.zeros_like, own)  # the first rank that keys visit begins their sum
    for owner, theirs in _visits(keys, ring):
        block, rows, columns = _met(q, keys, owner, theirs, ring)
        parts = block_gradients(block, out[:, :, rows], lse[:, :, rows], grad[:, :, rows])
        sums = own if owner == ring.rank else arrival()
        dq[:, :, rows] += parts[0]
        sums[:, :, columns, :head_dim] += parts[1]
        sums[:, :, columns, head_dim:] += parts[2]
        if owner != ring.rank:
            arrival = ring.exchange(sums)
    dk, dv = (own + arrival()).split([head_dim, own.shape[3] - head_dim], dim=-1)
    return dq, dk, dv


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        how: Scoring,
        ring: Ring,
    ) -> Tensor:
        out, lse = ring_forward(q, Keys(k, v, documents, how), ring)
        if sinks is not None:  # one more block, of one key whose value is zero
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * (lse - total).exp()[..., None], total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, documents, out, lse)
        ctx.how, ctx.ring = how, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sinks, documents, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        parts = ring_backward(q, Keys(k, v, documents, ctx.how), out, lse, grad, ctx.ring)
        dq, dk, dv = (part.to(q.dtype) for part in parts)
        d_sinks = None
        if sinks is not None:
            upcast = out.to(lse.dtype)
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()
            d_sinks = -(share * (upcast * grad).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None, None


def _visits(own: Keys, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values, joined, with their owner, its own first; the next are received meanwhile."""
    message = torch.cat((own.k, own.v), dim=-1)
    for step in range(ring.size - 1):
        arrival = ring.exchange(message)
        yield (ring.rank - step) % ring.size, message
        message = arrival()
    yield (ring.rank + 1) % ring.size, message


def _met(q: Tensor, keys: Keys, owner: int, theirs: Tensor, ring: Ring) -> tuple[AttentionBlock, slice, slice]:
    """This rank's queries and the keys and values of an owner that they see, and which of either these are."""
    rows, columns, causal = meeting(ring.rank, owner, q.shape[2])
    head_dim = keys.k.shape[3]
    k, v = theirs[:, :, columns].split([head_dim, theirs.shape[3] - head_dim], dim=-1)
    same = None
    if keys.documents is not None:
        mine, others = (take(keys.documents, 1, ring.size, rank) for rank in (ring.rank, owner))
        same = mine[:, rows, None] == others[:, None, columns]
    length = q.shape[2] * ring.size
    if 0 < keys.how.window < length:
        place = torch.arange(length, device=q.device)[None]
        mine, others = (take(place, 1, ring.size, rank) for rank in (ring.rank, owner))
        near = mine[:, rows, None] - others[:, None, columns] < keys.how.window
        same = near if same is None else same & near
    return AttentionBlock(q[:, :, rows], k, v, causal, same, keys.how), rows, columns


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
