"""Kernels over rows of logits: each row's loss, and over the row its gradient, or that up to a factor.

A gradient needs the row's sum before its first number, so a kernel that writes it reads a row twice. The exponentials
beneath some reference need no sum: they are the gradient up to a factor of the row, except at the target, and a row is
read and written once. What the factor is for is said in cross_entropy.py.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.choose import Pointer, Values, constexpr, jit, tl, triton

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


def measure(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row the maximum, the sum of exponentials beneath it, and the target's logit: 0 where it is no entry."""
    return _three(_loss_measure, logits, targets, first)


def _three(kernel: Any, logits: Tensor, targets: Tensor, first: int, **words: float) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel finds of each row: where it measures from, a sum, the target's logit."""
    tops, totals, chosen = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    kernel[(len(logits),)](
        logits, targets, tops, totals, chosen, logits.stride(0), logits.shape[1], first, **words, **LAUNCH
    )
    return tops, totals, chosen


def write(logits: Tensor, targets: Tensor, first: int, sums: tuple[Tensor, Tensor], weight: Tensor) -> None:
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
