"""Blockwise attention for context parallelism: the positions of each rank, attention to one block, merging blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.models.layers import accum_dtype

HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest head dimension of torch's flash kernel
CUDNN_HEAD_DIM = 128  # and of cuDNN's
PADDED = 32  # the memory-efficient kernel reads its log-sum-exp in groups of this many rows


def balanced(sequence: int, cp: int, rank: int) -> Tensor:
    """A rank's positions: of 2 · cp equal slices the one at `rank` and its mirror image, an early and a late one.

    A late slice attends to many keys and an early one to few; every such pair has the same causal work.
    """
    return take(torch.arange(sequence), 0, cp, rank)


def take(x: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """A rank's positions of a tensor whose dimension `dim` is the whole sequence."""
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
    same: Tensor | None  # (b, rows, columns), whether two positions are of one document; None: all are


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
    attend, _ = _kernel(block)
    return attend(block)


def block_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one block, given output and log-sum-exp over *all* blocks."""
    _, gradients = _kernel(block)
    return gradients(block, out, lse, grad)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge one block's output into a running one, in place: both are averages, weighted by their sums."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp()[..., None]).add_(more * (more_lse - total).exp()[..., None])
    lse.copy_(total)


def plain(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """The reference of `block_attention`; materializes the block's scores."""
    scores, v = _scores(block), block.v.to(accum_dtype(block.v))
    lse = scores.logsumexp(-1)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # a row masked everywhere: -inf less -inf would be NaN
    out = (scores - finite[..., None]).exp() @ v
    rows = block.q.shape[2]
    return _unfold(out, rows), _unfold(lse, rows)


def plain_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `block_gradients`; grouped query heads sum into their key head."""
    q, out, lse, grad = (_fold(x.to(accum_dtype(x)), block.k.shape[1]) for x in (block.q, out, lse, grad))
    k, v = block.k.to(accum_dtype(block.k)), block.v.to(accum_dtype(block.v))
    weights = (_scores(block) - lse[..., None]).exp()
    slope = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * _scale(block)
    return _unfold(slope @ k, block.q.shape[2]), slope.mT @ q, weights.mT @ grad


def flash(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by torch's flash kernel, which materializes no scores."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(block.q, block.k, block.v, 0.0, block.causal)
    return out, lse


def flash_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by torch's flash kernel."""
    q, k, v = block.q, block.k, block.v
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.causal, seed, seed
    )


def cudnn(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by cuDNN, on an H200 twice as fast as torch's flash kernel."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        block.q, block.k, block.v, None, True, 0.0, block.causal
    )
    return out, lse[..., 0]


def cudnn_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by cuDNN."""
    q, k, v = block.q, block.k, block.v
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    sizes = (None, None, q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, *sizes, 0.0, block.causal
    )


def efficient(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """`block_attention` by torch's memory-efficient kernel, which takes masks and fp32 but no grouped heads."""
    k, v = (_repeated(x, block.q.shape[1]) for x in (block.k, block.v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        block.q, k, v, _bias(block), True, 0.0, block.causal
    )
    return out, lse[..., : block.q.shape[2]]


def efficient_gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` by torch's memory-efficient kernel."""
    k, v = (_repeated(x, block.q.shape[1]) for x in (block.k, block.v))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes this layout and does not ask
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % PADDED), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=k.device)  # of dropout, which there is none of
    wanted = [True, True, True, False]  # no gradient of the bias
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, block.q, k, v, _bias(block), out, lse, seed, seed, 0.0, wanted, block.causal
    )
    dk, dv = (x.unflatten(1, (block.k.shape[1], -1)).sum(2, dtype=accum_dtype(x)) for x in (dk, dv))
    return dq, dk, dv


def _kernel(block: AttentionBlock) -> tuple[Forward, Gradients]:
    """The fastest kernels that take a block."""
    q, columns = block.q, block.k.shape[2]
    head_dim = q.shape[3]
    if not q.is_cuda or head_dim % 8 != 0 or q.dtype not in (*HALF, torch.float32):
        return plain, plain_gradients
    if q.dtype in HALF and block.same is None and head_dim <= FLASH_HEAD_DIM:
        return (cudnn, cudnn_gradients) if _cudnn_can(q) else (flash, flash_gradients)
    if columns % 8 == 0:  # the rows of a bias begin at multiples of 16 bytes
        return efficient, efficient_gradients
    return plain, plain_gradients


def _cudnn_can(q: Tensor) -> bool:
    hopper = torch.cuda.get_device_capability(q.device) >= (9, 0)
    # Its gradients are summed in any order, and no setting of ours changes that.
    return hopper and q.shape[3] <= CUDNN_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()


def _scale(block: AttentionBlock) -> float:
    return block.q.shape[3] ** -0.5


def _scores(block: AttentionBlock) -> Tensor:
    """Scaled dot products of queries and keys, minus infinity where masked, (b, kv_heads, group · rows, columns)."""
    q, k = _fold(block.q.to(accum_dtype(block.q)), block.k.shape[1]), block.k.to(accum_dtype(block.k))
    scores = (q @ k.mT) * _scale(block)
    rows = block.q.shape[2]
    grouped = scores.unflatten(2, (-1, rows))  # (b, kv_heads, group, rows, columns)
    if block.same is not None:
        grouped = grouped.masked_fill(~block.same[:, None, None], -torch.inf)
    if block.causal:
        seen = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).tril()
        grouped = grouped.masked_fill(~seen, -torch.inf)
    return grouped.flatten(2, 3)


def _bias(block: AttentionBlock) -> Tensor | None:
    """The document mask as a bias on the scores: very low, yet finite, as a row may be masked everywhere."""
    if block.same is None:
        return None
    lowest = torch.finfo(block.q.dtype).min / 2
    bias = torch.zeros_like(block.same, dtype=block.q.dtype).masked_fill_(~block.same, lowest)
    return bias[:, None].expand(-1, block.q.shape[1], -1, -1)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """(b, heads, rows, …) as (b, kv_heads, group · rows, …): the queries of a key's group as rows of one matrix."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _unfold(x: Tensor, rows: int) -> Tensor:
    """Undoes `_fold`."""
    return x.unflatten(2, (-1, rows)).flatten(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
