"""Lion (Chen et al. 2023): one momentum, and of the update no more than its sign; decoupled weight decay.

    w ← (1 − ηλ)w − η · sign(β₁m + (1 − β₁)g),  m ← β₂m + (1 − β₂)g

Every element moves by η, so rates are three to ten times lower than AdamW's, and decay as much higher. The sign of an
element whose momentum and gradient cancel but for rounding is rounding's own.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.optim.interface import Arithmetic, Tensors, UpdateRule, UpdateTerms


class LionRule(UpdateRule):
    """The update of Lion; no library has a kernel of it, so lists of tensors go through one operation at a time."""

    def fused(self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], terms: UpdateTerms) -> None:
        """By torch's operations on lists, each no longer than the largest weight: of that size are the temporaries."""
        for part in _lists(weights):
            chosen, given, momentum = ([each[i] for i in part] for each in (weights, gradients, states[0]))
            self._update(chosen, given, momentum, terms)

    def _update(
        self, weights: list[Tensor], gradients: list[Tensor], momentum: list[Tensor], terms: UpdateTerms
    ) -> None:
        """A gradient that is not finite counts as zero and moves nothing."""
        dtype, beta1, beta2 = weights[0].dtype, self.optim.beta1, self.optim.beta2
        finite = terms.finite.to(dtype)
        given = [torch.where(finite > 0, each, 0.0) for each in gradients]
        torch._foreach_mul_(given, terms.factor.to(dtype))
        mixed = torch._foreach_mul(momentum, beta1)
        torch._foreach_add_(mixed, given, alpha=1 - beta1)
        torch._foreach_sign_(mixed)
        torch._foreach_mul_(mixed, finite * terms.rate)
        torch._foreach_mul_(weights, 1 - finite * (terms.rate * terms.decay))
        torch._foreach_sub_(weights, mixed)
        torch._foreach_mul_(momentum, 1 - finite * (1 - beta2))
        torch._foreach_add_(momentum, given, alpha=1 - beta2)

    def arithmetic(self, terms: UpdateTerms, dtype: torch.dtype) -> Arithmetic:
        """By operations that round once each."""
        factor, beta1, beta2 = terms.factor.to(dtype), self.optim.beta1, self.optim.beta2

        def updated(weight: Tensor, gradient: Tensor, states: Tensors) -> tuple[Tensor, Tensors]:
            gradient, (momentum,) = gradient * factor, states
            move = (momentum * beta1 + gradient * (1 - beta1)).sign()
            moved = weight * (1 - terms.rate * terms.decay) - move * terms.rate
            return moved, (momentum * beta2 + gradient * (1 - beta2),)

        return updated


def _lists(weights: Tensors) -> Iterator[list[int]]:
    """The weights in lists, by their numbers, none with more elements than the largest weight has."""
    most, part, elements = max(weight.numel() for weight in weights), list[int](), 0
    for number, weight in enumerate(weights):
        if part and elements + weight.numel() > most:
            yield part
            part, elements = [], 0
        part.append(number)
        elements += weight.numel()
    yield part
