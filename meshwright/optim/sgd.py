"""SGD with momentum, as torch.optim.SGD: coupled weight decay, heavy-ball (Polyak 1964) or Nesterov's (1983) momentum.

    g ← g + λw,  b ← μb + g,  w ← w − η · b, or with optim.nesterov  w ← w − η · (g + μb)

The buffer begins at zero, so the first step has b = g, and a weight that a step leaves out keeps its buffer as it is.
Without momentum (μ = 0) the buffer stays zero: one form for both, at the price of its bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.optim.interface import Arithmetic, Tensors, UpdateRule, UpdateTerms, scaled


class SGDRule(UpdateRule):
    """The update of SGD with momentum; torch's fused kernel moves no more than one of ours would."""

    def fused(self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], terms: UpdateTerms) -> None:
        """By torch's kernel."""
        (momentum,) = states
        gradients, divisor = scaled(gradients, terms)
        torch._fused_sgd_(
            list(weights), list(gradients), list(momentum) if self.optim.momentum else [],
            weight_decay=terms.decay, momentum=self.optim.momentum, lr=terms.rate, dampening=0.0,
            nesterov=self.optim.nesterov and self.optim.momentum > 0, maximize=False,
            is_first_step=False,  # which would only spare reading a buffer of zeros
            grad_scale=divisor, found_inf=(1.0 - terms.finite).float(),
        )  # fmt: skip

    def arithmetic(self, terms: UpdateTerms, dtype: torch.dtype) -> Arithmetic:
        """By operations that round once each."""
        factor, momentum, nesterov = terms.factor.to(dtype), self.optim.momentum, self.optim.nesterov

        def updated(weight: Tensor, gradient: Tensor, states: Tensors) -> tuple[Tensor, Tensors]:
            gradient = gradient * factor
            if terms.decay:
                gradient = gradient + weight * terms.decay
            if not momentum:
                return weight - gradient * terms.rate, states
            buffer = states[0] * momentum + gradient
            move = gradient + buffer * momentum if nesterov else buffer
            return weight - move * terms.rate, (buffer,)

        return updated
