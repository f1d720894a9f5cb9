"""Fused linear cross-entropy: chunked output projection and loss, so that all logits never exist at once or in fp32.

For a chunk of rows the logits are computed in the compute dtype, their sums in fp32, and the gradient is written over
them, on a GPU up to a factor per row: the hidden states are multiplied by it before the matmul that gives the
projection's gradient, and their own gradient after its matmul. A chunk leaves its loss and its part of both gradients,
which are saved for the backward, already times the weight that the loss will have.

Softcapped logits, c · tanh(logit ÷ c), are capped where they lie, and a second chunk keeps the tanh: the gradient of
what was capped is that of the capped times 1 − tanh².

Under vocabulary parallelism a rank holds a part of the entries. Before the factors are known the ranks then reduce
three values per row: the maximum, the sum of exponentials, and the target's logit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Kernels, Pointer, Values, constexpr, fused, jit, tl, triton
from meshwright.spec.plan import logit_rows

IGNORE = -100  # a target that is not predicted
# Entries of a vocabulary that matmuls want a multiple of: GPT-2's 50,257 make a step of it twice as long on an H200.
ALIGNED = 64
LAUNCH = {"block": 4096, "num_warps": 4}  # along a row; the fastest of seven on an H200
# Exponents above a row's reference before it is raised: bf16 holds exp(30) as well as 1.
REACH = 30.0
# Exponents beneath a row's sum that still count: exp(-50) of a row is negligible. That is more than REACH and the
# logarithm of a vocabulary, which a row without a raised reference may have, and less than bf16 holds beside a weight.
DEPTH = 50.0
ENDS = 256  # rows of a program that works on their ends only


def exponentials(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write each row's exponentials beneath a reference over it; return that, their sum, the target's logit or 0."""
    return _per_row(_loss_exponentials, logits, targets, first, reach=REACH, ignore=IGNORE)


def finish(
    logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor, Tensor, Tensor], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """After `exponentials`, each row's loss and factor; the target's exponential becomes its gradient.

    `sums`: this shard's references; over whole rows their maxima, the sums beneath, and the targets' logits.
    """
    losses, factors = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    _loss_finish[(triton.cdiv(len(logits), ENDS),)](
        logits, targets, *sums, weight, losses, factors, len(logits), logits.stride(0), logits.shape[1], first,
        depth=DEPTH, ignore=IGNORE, block=ENDS,
    )  # fmt: skip
    return losses, factors


def measure_rows(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's maximum, its sum of exponentials beneath it, and the target's logit, 0 where another rank has it."""
    return _per_row(_loss_measure, logits, targets, first)


def _per_row(
    kernel: Any, logits: Tensor, targets: Tensor, first: int, **kwargs: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch a kernel that finds each row's reference, sum and target logit."""
    tops, totals, chosen = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    kernel[(len(logits),)](
        logits, targets, tops, totals, chosen, logits.stride(0), logits.shape[1], first, **kwargs, **LAUNCH
    )
    return tops, totals, chosen


def write_gradient(logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Write the gradient of each row's loss times a weight over its logits; `sums`: maxima, sums of exponentials."""
    _loss_gradient[(len(logits),)](
        logits, targets, *sums, weight, logits.stride(0), logits.shape[1], first, ignore=IGNORE, **LAUNCH
    )


@jit
def _target(here: Values, entry: Values, columns: int) -> Values:
    return tl.load(here + entry, mask=(entry >= 0) & (entry < columns), other=0.0).to(tl.float32)


@jit
def _rescale(here: Values, end: Values, by: Values, block: constexpr) -> None:
    """Scale the first blocks of a row in place."""
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
        ahead = start + block + at  # loads while this block is computed
        following = tl.load(here + ahead, mask=ahead < columns, other=float("-inf"))
        highest = tl.max(x, 0)
        if highest > top + reach:  # in the first block, and hardly ever again
            by = tl.exp(top - highest)
            _rescale(here, start, by, block)
            total *= by
            top = highest
        e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))  # −∞ − (−∞) is NaN
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
    # In a shard far beneath the row only the target counts, and its value must stay within range.
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
        # A row of −∞ alone gives −∞ − (−∞): guarded, so that it adds nothing.
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


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The entries of the vocabulary whose logits a rank computes, and the reductions over the others."""

    first: int  # its first entry
    largest: int  # entries of the largest shard, so that all ranks cut rows into the same chunks
    ranks: int
    max: Callable[[Tensor], Tensor]  # elementwise, over the ranks
    sum: Callable[[Tensor], Tensor]


def whole(vocab: int) -> VocabShard:
    """The shard of a rank that has the whole vocabulary."""
    return VocabShard(first=0, largest=vocab, ranks=1, max=lambda x: x, sum=lambda x: x)


def weighted_loss(
    x: Tensor,
    projection: Tensor,
    targets: Tensor,
    weight: Tensor,
    shard: VocabShard | None = None,
    kernels: Kernels = "auto",
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T (b, s, vocab) over the targets (b, s) that are not IGNORE.

    Returned times `weight`, to be differentiated, and unweighted. The gradient of x is that of this shard's entries.
    """
    shard = shard or whole(len(projection))
    trains = torch.is_grad_enabled()  # not visible inside an autograd function
    how = _How(shard, kernels, softcap, trains)
    return _LinearCrossEntropy.apply(x.flatten(0, -2), projection, targets.flatten(), weight, how)


def aligned(projection: Tensor) -> Tensor:
    """The projection with rows of zeros up to a multiple of ALIGNED entries, which add nothing to either gradient."""
    short = -len(projection) % ALIGNED
    return torch.nn.functional.pad(projection, (0, 0, 0, short)) if short else projection


@dataclass(frozen=True, slots=True)
class _How:
    """What the loss is told beside its tensors."""

    shard: VocabShard
    kernels: Kernels
    softcap: float
    trains: bool


def cap(logits: Tensor, softcap: float) -> Tensor | None:
    """Cap logits where they lie; returns their tanh, None where nothing is capped."""
    if not softcap:
        return None
    bent = logits.div_(softcap).tanh_().clone()
    logits.mul_(softcap)
    return bent


def uncap(gradient: Tensor, bent: Tensor | None) -> None:
    """Make the gradient of capped logits that of what was capped, where it lies."""
    if bent is not None:
        torch.ops.aten.tanh_backward.grad_input(gradient, bent, grad_input=gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projection: Tensor,
        targets: Tensor,
        weight: Tensor,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        shard, kernels, trains = how.shard, how.kernels, how.trains
        ctx.kernels = kernels
        rows = min(logit_rows(shard.largest, x.element_size(), is_frozen=not ctx.needs_input_grad[1]), len(x))
        trains = trains and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        dx = torch.empty_like(x) if trains else None
        padded = aligned(projection) if x.is_cuda else projection
        # A frozen projection has none.
        dprojection = _GradientSum(projection, chunks=-(-len(x) // rows)) if ctx.needs_input_grad[1] else None
        losses = torch.empty(len(x), dtype=_fp32_or_wider(x), device=x.device)
        for start in range(0, len(x), rows):
            chunk = slice(start, start + rows)
            logits = x[chunk] @ padded.t()
            bent, own = cap(logits, how.softcap), logits[:, : len(projection)]
            losses[chunk], factors = softmax_gradient(own, targets[chunk], weight, shard, kernels)
            if dx is not None:
                uncap(logits, bent)
                entering, leaving = x[chunk], torch.mm(logits, padded, out=dx[chunk])
                if factors is not None:  # in fp32: each element is rounded once
                    entering = torch.mul(entering, factors, out=torch.empty_like(entering))
                    leaving.mul_(factors)
                if dprojection is not None:
                    dprojection.add(logits, entering)
            del logits, own, bent  # before the next chunk's are made
        if trains:
            ctx.save_for_backward(dx, *(() if dprojection is None else (dprojection.value(),)))
        total = losses.sum()
        ctx.mark_non_differentiable(total)
        return total * weight.to(total.dtype), total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, *dprojection = (scaled(saved, gradients[0], ctx.kernels) for saved in ctx.saved_tensors)
        return dx, dprojection[0] if dprojection else None, None, None, None


class _GradientSum:
    """The projection's gradient: that of a single chunk, or of several summed in fp32."""

    def __init__(self, projection: Tensor, chunks: int) -> None:
        self.like, self.single = projection, chunks == 1
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        if self.single:
            self.sum = gradient.t() @ x
        elif not (x.is_cuda and x.element_size() < 4):  # only a GPU's low-precision matmuls can return fp32
            more = (gradient.t() @ x).to(_fp32_or_wider(x))
            self.sum = more if self.sum is None else self.sum.add_(more)
        elif self.sum is None:
            self.sum = torch.mm(gradient.t(), x, out_dtype=torch.float32)
        else:
            self.sum = torch.addmm(self.sum, gradient.t(), x, out_dtype=torch.float32)

    def value(self) -> Tensor:
        assert self.sum is not None, "every chunk adds its gradient"
        return self.sum[: len(self.like)].to(self.like.dtype)


def softmax_gradient(
    logits: Tensor, targets: Tensor, weight: Tensor, shard: VocabShard, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss; the loss's gradient times a weight is written over its logits, up to a factor (rows, 1).

    Without factors, the gradient itself is written.
    """
    runs = fused(logits, kernels)
    once = runs and logits.dtype != torch.float16  # whose range holds no exponentials of any size
    measure = exponentials if once else measure_rows if runs else measured
    top, total, chosen = measure(logits, targets, shard.first)
    highest = shard.max(top.clone())
    total = shard.sum(total * (top - highest).exp()) if shard.ranks > 1 else total
    chosen = shard.sum(chosen)
    if once:
        sums = top, highest, total, chosen
        losses, factors = finish(logits, targets, shard.first, sums, weight)
        return losses, factors[:, None]
    (write_gradient if runs else write)(logits, targets, shard.first, (highest, total), weight)
    return (total.log() + highest - chosen).where(targets != IGNORE, 0.0), None


def measured(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """`measure_rows` by plain arithmetic."""
    x = logits.to(_fp32_or_wider(logits))
    if logits.numel() == 0:  # a vocabulary with fewer entries than ranks
        nothing = x.new_zeros(len(x))
        return nothing - float("inf"), nothing, nothing.clone()
    top = x.amax(1)
    entry, mine = _entries(logits, targets, first)
    return top, (x - top[:, None]).exp().sum(1), x.gather(1, entry)[:, 0].where(mine, 0.0)


def write(logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Write the gradient of each row's loss times a weight over its logits; `sums`: maxima, sums of exponentials."""
    if logits.numel() == 0:
        return
    highest, total = sums
    weight = weight.to(total.dtype)
    gradient = (logits.to(total.dtype) - highest[:, None]).exp() * (weight / total)[:, None]
    entry, mine = _entries(logits, targets, first)
    gradient.scatter_add_(1, entry, (-weight).where(mine, 0.0)[:, None])
    logits.copy_(gradient.where((targets != IGNORE)[:, None], 0.0))


def _entries(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The column of each row's target, any column where another rank has it, and whether it is here."""
    entry = targets - first
    return entry.clamp(0, logits.shape[1] - 1)[:, None], (entry >= 0) & (entry < logits.shape[1])


def scaled(gradient: Tensor, scale: Tensor, kernels: Kernels = "auto") -> Tensor:
    """Multiply a saved gradient by the loss's own, in place."""
    if not fused(gradient, kernels):
        return gradient.mul_(scale)
    _scale[(triton.cdiv(gradient.numel(), 8192),)](gradient, scale, gradient.numel(), block=8192, num_warps=8)
    return gradient


def _fp32_or_wider(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@jit
def _scale(values: Pointer, scale: Pointer, count: int, block: constexpr) -> None:
    """Multiply in place; a scale of one, that of a loss differentiated itself, costs nothing."""
    by = tl.load(scale).to(tl.float32)
    if by == 1.0:
        return
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(values + at, mask=inside).to(tl.float32)
    tl.store(values + at, (x * by).to(values.dtype.element_ty), mask=inside)
