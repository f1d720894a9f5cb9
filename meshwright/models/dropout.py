"""Dropout keyed by token index: what is dropped is a function of (seed, module, token, element) alone.

So every plan drops the same elements, whatever part of a batch, of a sequence or of the layers a rank holds, and a
recomputed block drops them again. No mask is saved: the backward draws it again, from (b, s) integers.

    y = x · keep / (1 − p)      keep = hash(seed, module, token, element) ≥ p
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.models.init import GOLDEN, key, logical_shift, mixed, signed

Drop = Callable[[Tensor, Tensor | None], Tensor]  # hidden states (b, s, hidden) and the index (b, s) of their tokens
TOKEN_MIX = signed(0xBF58476D1CE4E5B9)  # splitmix64's first multiplier
ELEMENT = signed(0x9E3779B1, 32)  # 2³² ÷ the golden ratio: neighbouring elements are far apart
MIX, LAST_SHIFT = ((16, 0x85EBCA6B), (13, 0xC2B2AE35)), 16  # murmur3's finalizer
BITS = 24  # of a draw


def dropout(p: float) -> Drop:
    """The dropout of an architecture at one place; without any, the identity."""
    return Dropout(p) if p else keep_all


def keep_all(x: Tensor, index: Tensor | None) -> Tensor:
    """No dropout."""
    return x


class Dropout(nn.Module):
    """Drops elements of hidden states in training; a run gives it the key of its seed and its name."""

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # A tensor, so that the compiled code of one block serves all of them.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def begin(self, seed: int, name: str) -> None:
        """Take the draws of a seed and a module's name."""
        self.key.fill_(signed(key(seed, f"{name}.draws")))

    def forward(self, x: Tensor, index: Tensor | None) -> Tensor:
        """x (b, s, hidden); index (b, s) keys the draws, None (or evaluation) drops nothing."""
        if index is None or not self.training:
            return x
        return Dropped.apply(x, index, self.key, self.p, 0)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


def kept(index: Tensor, key: Tensor, hidden: int, p: float, first: int = 0) -> Tensor:
    """Which of the elements (b, s, hidden), counted from a first one, stay.

    In 32-bit arithmetic, in place, so that little memory is taken.
    """
    token = index * signed(GOLDEN) + key
    token = (token ^ (token >> 32)) * TOKEN_MIX
    draw = (token ^ (token >> 29)).to(torch.int32)[..., None] ^ (
        torch.arange(first, first + hidden, dtype=torch.int32, device=index.device) * ELEMENT
    )
    return logical_shift(mixed(draw, MIX, LAST_SHIFT), 32 - BITS) >= round(p * (1 << BITS))


class Dropped(Function):
    """What dropout leaves of the elements from a first one on, drawn again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, key: Tensor, p: float, first: int) -> Tensor:
        ctx.save_for_backward(index, key)
        ctx.p, ctx.first = p, first
        return torch.where(kept(index, key, x.shape[-1], p, first), x * (1 / (1 - p)), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        index, key = ctx.saved_tensors
        (grad,) = grads
        keep = kept(index, key, grad.shape[-1], ctx.p, ctx.first)
        return torch.where(keep, grad * (1 / (1 - ctx.p)), 0), None, None, None, None
