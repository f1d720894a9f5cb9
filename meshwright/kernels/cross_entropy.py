"""Cross-entropy fused with the output projection: logits exist for some rows at a time, and never in fp32.

For a chunk of rows the logits are computed in the precision of the arithmetic, their sums taken in fp32, and the
gradient written over them, on a GPU up to a factor of each row: by it the hidden states are multiplied on the way into
the product that gives the projection's gradient, and their own gradient after its product. What leaves the chunk is
its loss and its part of both gradients. They are kept for the backward, already times the weight that the loss will
have.

A rank may hold a part of the vocabulary only. Before the factors are known the ranks then tell each other three
numbers for each row: the maximum, the sum of exponentials, and the target's logit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Kernels, Pointer, Values, constexpr, fused, jit, tl, triton

IGNORE = -100  # a target that is not predicted
LAUNCH = {"block": 4096, "num_warps": 4}  # along a row; the fastest of seven on an H200
# Exponents above a row's reference before it is moved: bf16 holds exp(30) as well as 1.
REACH = 30.0
# Exponents beneath a row's sum that still count: exp(-50) of a row is nothing beside the rest of it. That is more than
# REACH and the logarithm of a vocabulary, which a row without a moved reference may have, and less than bf16 holds
# beside a weight.
DEPTH = 50.0
ENDS = 256  # rows of a program that works on their ends only


def exponentials(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Over each row its exponentials beneath a reference; that, their sum, and the logit of the target or 0."""
    return _three(_loss_exponentials, logits, targets, first, reach=REACH, ignore=IGNORE)


def finish(
    logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor, Tensor, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """After `exponentials`, each row's loss and factor; the target's exponential becomes its gradient too.

    `sums`: this part's references; of the whole rows the maxima of these, the sums beneath, and the targets' logits.
    """
    losses, factors = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    _loss_finish[(triton.cdiv(len(logits), ENDS),)](
        logits, targets, *sums, weight, losses, factors, len(logits), logits.stride(0), logits.shape[1], first,
        depth=DEPTH, ignore=IGNORE, block=ENDS,
    )  # fmt: skip
    return losses, factors


def measure_rows(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the maximum, the sum of exponentials beneath it, and the target's logit: 0 where it is no entry."""
    return _three(_loss_measure, logits, targets, first)


def _three(kernel: Any, logits: Tensor, targets: Tensor, first: int, **words: float) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel finds of each row: where it measures from, a sum, the target's logit."""
    tops, totals, chosen = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    kernel[(len(logits),)](
        logits, targets, tops, totals, chosen, logits.stride(0), logits.shape[1], first, **words, **LAUNCH
    )
    return tops, totals, chosen


def write_gradient(logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Over each row's logits the gradient of its loss, times a weight; `sums`: maxima, sums of exponentials."""
    _loss_gradient[(len(logits),)](
        logits, targets, *sums, weight, logits.stride(0), logits.shape[1], first, ignore=IGNORE, **LAUNCH
    )


@jit
def _target(here: Values, entry: Values, columns: int) -> Values:
    return tl.load(here + entry, mask=(entry >= 0) & (entry < columns), other=0.0).to(tl.float32)


@jit
def _scaled(here: Values, end: Values, by: Values, block: constexpr) -> None:
    """What was written over the first blocks of a row, times a number."""
    tl.debug_barrier()
    for start in range(0, end, block):
        at = here + start + tl.arange(0, block)
        tl.store(at, (tl.load(at).to(tl.float32) * by).to(here.dtype.element_ty))
    tl.debug_barrier()


@jit
def _clear(here: Values, columns: int, block: constexpr) -> None:
    at = tl.arange(0, block)
    for start in range(0, columns, block):
        tl.store(here + start + at, 0.0, mask=start + at < columns)


@jit
def _loss_exponentials(
    logits: Pointer, targets: Pointer, tops: Pointer, totals: Pointer, chosen: Pointer,
    stride: int, columns: int, first: int, reach: constexpr, ignore: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    here = logits + row * stride
    if target == ignore:
        tl.store(tops + row, 0.0)
        tl.store(totals + row, 1.0)
        tl.store(chosen + row, 0.0)
        _clear(here, columns, block)
        return
    tl.store(chosen + row, _target(here, target - first, columns))
    tl.debug_barrier()  # the target's logit is read before it is written over
    at = tl.arange(0, block)
    top = float("-inf")
    total = tl.zeros((block,), tl.float32)
    following = tl.load(here + at, mask=at < columns, other=float("-inf"))
    for start in range(0, columns, block):
        x = following.to(tl.float32)
        ahead = start + block + at  # on its way while this block is at work
        following = tl.load(here + ahead, mask=ahead < columns, other=float("-inf"))
        highest = tl.max(x, 0)
        if highest > top + reach:  # in the first block, and hardly ever again
            by = tl.exp(top - highest)
            _scaled(here, start, by, block)
            total *= by
            top = highest
        e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))  # −∞ − (−∞) is no number
        total += e
        tl.store(here + start + at, e.to(here.dtype.element_ty), mask=start + at < columns)
    tl.store(tops + row, top)
    tl.store(totals + row, tl.sum(total, 0))


@jit
def _loss_finish(
    logits: Pointer, targets: Pointer, tops: Pointer, highest: Pointer, totals: Pointer, chosen: Pointer,
    weight: Pointer, losses: Pointer, factors: Pointer, rows: int, stride: int, columns: int, first: int,
    depth: constexpr, ignore: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < rows
    target = tl.load(targets + row, mask=inside, other=ignore)
    top = tl.load(highest + row, mask=inside, other=0.0)
    size = tl.log(tl.load(totals + row, mask=inside, other=1.0))
    # How far the reference is beneath the whole row's sum, and above its maximum. Differences first: logits are large.
    # Of a part far beneath the row nothing counts but the target, whose number must stay within range.
    beneath = tl.maximum(tl.load(tops + row, mask=inside, other=0.0) - top - size, -depth)
    above = beneath + size
    logit = tl.load(chosen + row, mask=inside, other=0.0) - top
    predicted = target != ignore
    scale = tl.load(weight).to(tl.float32)
    tl.store(losses + row, tl.where(predicted, size - logit, 0.0), mask=inside)
    tl.store(factors + row, tl.where(predicted, scale * tl.exp(beneath), 0.0), mask=inside)
    entry = target - first
    mine = inside & predicted & (entry >= 0) & (entry < columns)
    slope = tl.exp(logit - above) - tl.exp(-beneath)
    tl.store(logits + row * stride + entry, slope.to(logits.dtype.element_ty), mask=mine)


@jit
def _loss_measure(
    logits: Pointer, targets: Pointer, tops: Pointer, totals: Pointer, chosen: Pointer,
    stride: int, columns: int, first: int, block: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    at = tl.arange(0, block)
    top, total = float("-inf"), 0.0
    for start in range(0, columns, block):
        x = tl.load(here + start + at, mask=start + at < columns, other=float("-inf")).to(tl.float32)
        more = tl.maximum(top, tl.max(x, 0))
        # Of nothing but −∞, −∞ − (−∞): guarded, so that it adds nothing.
        total = tl.where(more == float("-inf"), 0.0, total * tl.exp(top - more) + tl.sum(tl.exp(x - more), 0))
        top = more
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(chosen + row, _target(here, tl.load(targets + row) - first, columns))


@jit
def _loss_gradient(
    logits: Pointer, targets: Pointer, tops: Pointer, totals: Pointer, weight: Pointer,
    stride: int, columns: int, first: int, ignore: constexpr, block: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    here = logits + row * stride
    if target == ignore:
        _clear(here, columns, block)
        return
    scale = tl.load(weight).to(tl.float32)
    top, share = tl.load(tops + row), scale / tl.load(totals + row)
    at = tl.arange(0, block)
    for start in range(0, columns, block):
        inside = start + at < columns
        x = tl.load(here + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - top) * share
        p = tl.where(start + at == target - first, p - scale, p)
        tl.store(here + start + at, p.to(here.dtype.element_ty), mask=inside)


CHUNK_BYTES = 2**31  # of logits that exist at one time
ROWS = 1024  # a chunk's rows are a multiple of this: products like it


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The entries of the vocabulary whose logits a rank computes, and how it learns of the others'."""

    first: int  # its first entry
    largest: int  # entries of the largest part: by it all ranks cut rows into the same chunks
    ranks: int
    highest: Callable[[Tensor], Tensor]  # maxima over the ranks, number by number
    added: Callable[[Tensor], Tensor]  # sums over the ranks


def whole(vocab: int) -> VocabShard:
    """The part of a rank that has it all."""
    return VocabShard(first=0, largest=vocab, ranks=1, highest=lambda x: x, added=lambda x: x)


def weighed_loss(
    x: Tensor,
    projection: Tensor,
    targets: Tensor,
    weight: Tensor,
    part: VocabShard | None = None,
    kernels: Kernels = "auto",
) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T (b, s, vocab) over the targets (b, s) that are not IGNORE.

    Returned times `weight`, to be differentiated, and as it is. Of a part, the gradient of x is that part's share.
    """
    part = part or whole(len(projection))
    trains = torch.is_grad_enabled()  # which autograd's functions are not told
    return _Projected.apply(x.flatten(0, -2), projection, targets.flatten(), weight, part, kernels, trains)


def rows_of(vocab: int, itemsize: int) -> int:
    """Rows whose logits exist at one time."""
    return max(CHUNK_BYTES // (vocab * itemsize) // ROWS, 1) * ROWS


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projection: Tensor,
        targets: Tensor,
        weight: Tensor,
        part: VocabShard,
        kernels: Kernels,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.kernels = kernels
        rows = min(rows_of(part.largest, x.element_size()), len(x))
        trains = trains and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        to_x = torch.empty_like(x) if trains else None
        to_projection = _Sum(projection, chunks=-(-len(x) // rows))
        losses = torch.empty(len(x), dtype=_wide(x), device=x.device)
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            logits = x[chunk] @ projection.t()
            losses[chunk], factors = softmax_gradient(logits, targets[chunk], weight, part, kernels)
            if to_x is not None:
                entering, leaving = x[chunk], torch.mm(logits, projection, out=to_x[chunk])
                if factors is not None:  # wide ones: each number is rounded once
                    entering = torch.mul(entering, factors, out=torch.empty_like(entering))
                    leaving.mul_(factors)
                to_projection.add(logits, entering)
            del logits  # before the next chunk's are made
        if trains:
            ctx.save_for_backward(to_x, to_projection.value())
        total = losses.sum()
        ctx.mark_non_differentiable(total)
        return total * weight.to(total.dtype), total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_projection = (scaled(kept, gradients[0], ctx.kernels) for kept in ctx.saved_tensors)
        return to_x, to_projection, None, None, None, None, None


class _Sum:
    """The projection's gradient: of one chunk as it comes, of several added up in fp32."""

    def __init__(self, projection: Tensor, chunks: int) -> None:
        self.like, self.single = projection, chunks == 1
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        if self.single:
            self.sum = gradient.t() @ x
        elif not (x.is_cuda and x.element_size() < 4):  # only a GPU's products of narrow numbers can be wide
            more = (gradient.t() @ x).to(_wide(x))
            self.sum = more if self.sum is None else self.sum.add_(more)
        elif self.sum is None:
            self.sum = torch.mm(gradient.t(), x, out_dtype=torch.float32)
        else:
            self.sum = torch.addmm(self.sum, gradient.t(), x, out_dtype=torch.float32)

    def value(self) -> Tensor:
        assert self.sum is not None, "every chunk adds its part"
        return self.sum.to(self.like.dtype)


def softmax_gradient(
    logits: Tensor, targets: Tensor, weight: Tensor, part: VocabShard, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss; over its logits the loss's gradient times a weight is written, up to its factor (rows, 1).

    Where there are no factors, it is written as it is.
    """
    runs = fused(logits, kernels)
    once = runs and logits.dtype != torch.float16  # which holds no exponentials of any size
    measure = exponentials if once else measure_rows if runs else measured
    top, total, chosen = measure(logits, targets, part.first)
    highest = part.highest(top.clone())
    total = part.added(total * (top - highest).exp()) if part.ranks > 1 else total
    chosen = part.added(chosen)
    if once:
        sums = top, highest, total, chosen
        losses, factors = finish(logits, targets, part.first, sums, weight)
        return losses, factors[:, None]
    (write_gradient if runs else write)(logits, targets, part.first, (highest, total), weight)
    return (total.log() + highest - chosen).where(targets != IGNORE, 0.0), None


def measured(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the maximum, the sum of exponentials beneath it, and the target's logit: 0 where it is no entry."""
    wide = logits.to(_wide(logits))
    if logits.numel() == 0:  # of a vocabulary with fewer entries than ranks
        nothing = wide.new_zeros(len(wide))
        return nothing - float("inf"), nothing, nothing.clone()
    top = wide.amax(1)
    entry, mine = _entries(logits, targets, first)
    return top, (wide - top[:, None]).exp().sum(1), wide.gather(1, entry)[:, 0].where(mine, 0.0)


def write(logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Over each row's logits the gradient of its loss, times a weight; `sums`: maxima, sums of exponentials."""
    if logits.numel() == 0:
        return
    highest, total = sums
    weight = weight.to(total.dtype)
    gradient = (logits.to(total.dtype) - highest[:, None]).exp() * (weight / total)[:, None]
    entry, mine = _entries(logits, targets, first)
    gradient.scatter_add_(1, entry, (-weight).where(mine, 0.0)[:, None])
    logits.copy_(gradient.where((targets != IGNORE)[:, None], 0.0))


def _entries(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The column of each row's target, some column where it is not here, and whether it is."""
    entry = targets - first
    return entry.clamp(0, logits.shape[1] - 1)[:, None], (entry >= 0) & (entry < logits.shape[1])


def scaled(gradient: Tensor, scale: Tensor, kernels: Kernels = "auto") -> Tensor:
    """A kept gradient times the loss's own, in place."""
    if not fused(gradient, kernels):
        return gradient.mul_(scale)
    _scale[(triton.cdiv(gradient.numel(), 8192),)](gradient, scale, gradient.numel(), block=8192, num_warps=8)
    return gradient


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@jit
def _scale(values: Pointer, scale: Pointer, count: int, block: constexpr) -> None:
    """Multiply in place; a scale of one, which a loss that is differentiated itself has, costs nothing."""
    by = tl.load(scale).to(tl.float32)
    if by == 1.0:
        return
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(values + at, mask=inside).to(tl.float32)
    tl.store(values + at, (x * by).to(values.dtype.element_ty), mask=inside)
