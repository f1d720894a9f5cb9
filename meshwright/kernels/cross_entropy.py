"""Cross-entropy fused with the output projection: logits exist for some rows at a time, and never in fp32.

For a chunk of rows the logits are computed in the precision of the arithmetic, their maxima and sums taken in fp32, and
the gradient written over them. What leaves the chunk is its loss and its part of the gradients of the hidden states and
of the projection. Both are kept for the backward, already times the weight that the loss will have.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.choose import Pointer, constexpr, jit, tl, triton

IGNORE = -100  # a target that is not predicted
CHUNK_BYTES = 2**31  # of logits that exist at one time
ROWS = 1024  # a chunk's rows are a multiple of this: products like it


def weighed_loss(x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T (b, s, vocab) over the targets (b, s) that are not IGNORE.

    Returned times `weight`, to be differentiated, and as it is.
    """
    return _Projected.apply(x.flatten(0, -2), projection, targets.flatten(), weight)


def rows_of(vocab: int, itemsize: int) -> int:
    """Rows whose logits exist at one time."""
    return max(CHUNK_BYTES // (vocab * itemsize) // ROWS, 1) * ROWS


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = min(rows_of(len(projection), x.element_size()), len(x))
        trains = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        to_x = torch.empty_like(x) if trains else None
        to_projection = _Sum(projection, chunks=-(-len(x) // rows))
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = x[part] @ projection.t()
            softmax_gradient(logits, targets[part], losses[part], weight)
            if to_x is not None:
                torch.mm(logits, projection, out=to_x[part])
                to_projection.add(logits, x[part])
        if trains:
            ctx.save_for_backward(to_x, to_projection.value())
        total = losses.sum()
        ctx.mark_non_differentiable(total)
        return total * weight, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        scale = gradients[0]
        to_x, to_projection = ctx.saved_tensors
        for gradient in (to_x, to_projection):
            _scale[(triton.cdiv(gradient.numel(), 8192),)](gradient, scale, gradient.numel(), block=8192, num_warps=8)
        return to_x, to_projection, None, None


class _Sum:
    """The projection's gradient: of one chunk as it comes, of several added up in fp32."""

    def __init__(self, projection: Tensor, chunks: int) -> None:
        self.like, self.single = projection, chunks == 1
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        if self.single:
            self.sum = gradient.t() @ x
        elif self.sum is None:
            self.sum = torch.mm(gradient.t(), x, out_dtype=torch.float32)
        else:
            self.sum = torch.addmm(self.sum, gradient.t(), x, out_dtype=torch.float32)

    def value(self) -> Tensor:
        assert self.sum is not None, "every chunk adds its part"
        return self.sum.to(self.like.dtype)


def softmax_gradient(logits: Tensor, targets: Tensor, losses: Tensor, weight: Tensor) -> None:
    """Write each row's loss, and over its logits the loss's gradient times a weight."""
    rows, columns = logits.shape
    _cross_entropy[(rows,)](
        logits, targets, losses, weight, logits.stride(0), columns, ignore=IGNORE, block=8192, num_warps=16
    )


@jit
def _cross_entropy(
    logits: Pointer,
    targets: Pointer,
    losses: Pointer,
    weight: Pointer,
    stride: int,
    columns: int,
    ignore: constexpr,
    block: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    here = logits + row * stride
    at = tl.arange(0, block)
    if target == ignore:
        tl.store(losses + row, 0.0)
        for start in range(0, columns, block):
            tl.store(here + start + at, 0.0, mask=start + at < columns)
        return
    most = tl.full((block,), float("-inf"), tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        x = tl.load(here + start + at, mask=start + at < columns, other=float("-inf")).to(tl.float32)
        more = tl.maximum(most, x)
        # A lane that has seen nothing yet has -inf - -inf: guarded, so that it adds nothing.
        total = tl.where(more == float("-inf"), 0.0, total * tl.exp(most - more) + tl.exp(x - more))
        most = more
    top = tl.max(most, 0)
    sum_exp = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - top)), 0)
    chosen = tl.load(here + target).to(tl.float32)
    tl.store(losses + row, tl.log(sum_exp) + top - chosen)
    tl.debug_barrier()  # the target's logit is read before it is written over
    scale = tl.load(weight).to(tl.float32)
    share = scale / sum_exp
    for start in range(0, columns, block):
        inside = start + at < columns
        x = tl.load(here + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - top) * share
        p = tl.where(start + at == target, p - scale, p)
        tl.store(here + start + at, p.to(logits.dtype.element_ty), mask=inside)


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
