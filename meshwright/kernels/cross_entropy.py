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

from meshwright.kernels import logits as over_logits
from meshwright.kernels.choose import Kernels, Pointer, constexpr, fused, jit, tl, triton
from meshwright.kernels.logits import IGNORE

CHUNK_BYTES = 2**31  # of logits that exist at one time
ROWS = 1024  # a chunk's rows are a multiple of this: products like it


@dataclass(frozen=True, slots=True)
class Part:
    """The entries of the vocabulary whose logits a rank computes, and how it learns of the others'."""

    first: int  # its first entry
    largest: int  # entries of the largest part: by it all ranks cut rows into the same chunks
    ranks: int
    highest: Callable[[Tensor], Tensor]  # maxima over the ranks, number by number
    added: Callable[[Tensor], Tensor]  # sums over the ranks


def whole(vocab: int) -> Part:
    """The part of a rank that has it all."""
    return Part(first=0, largest=vocab, ranks=1, highest=lambda x: x, added=lambda x: x)


def weighed_loss(
    x: Tensor,
    projection: Tensor,
    targets: Tensor,
    weight: Tensor,
    part: Part | None = None,
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
        part: Part,
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
    logits: Tensor, targets: Tensor, weight: Tensor, part: Part, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss; over its logits the loss's gradient times a weight is written, up to its factor (rows, 1).

    Where there are no factors, it is written as it is.
    """
    runs = fused(logits, kernels)
    once = runs and logits.dtype != torch.float16  # which holds no exponentials of any size
    measure = over_logits.exponentials if once else over_logits.measure if runs else measured
    top, total, chosen = measure(logits, targets, part.first)
    highest = part.highest(top.clone())
    total = part.added(total * (top - highest).exp()) if part.ranks > 1 else total
    chosen = part.added(chosen)
    if once:
        sums = top, highest, total, chosen
        losses, factors = over_logits.finish(logits, targets, part.first, sums, weight)
        return losses, factors[:, None]
    (over_logits.write if runs else write)(logits, targets, part.first, (highest, total), weight)
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
