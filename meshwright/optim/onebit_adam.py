"""1-bit Adam (Tang et al. 2021): Adam until the variance is stable, then momentum in one bit with the variance frozen.

    warm-up     m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  w ← (1 − ηλ)w − η · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
    after it    m_i = β₁m + (1 − β₁)g_i on each worker,  m ← their mean in one bit, with error feedback both ways
                w ← (1 − ηλ)w − η · m/(1 − β₁ᵗ) / (√v + ε)

The warm-up, `optim.freeze_step` steps, is AdamW over the sum of all gradients. At its end v is divided by its bias.
The paper has no weight decay and its code no correction of the bias: both are as in AdamW here.
"""

from torch import Tensor

from meshwright.optim.interface import UpdateTerms, WeightShard
from meshwright.optim.onebit import MomentumRule


class OneBitAdamRule(MomentumRule):
    """The update of 1-bit Adam."""

    def warm_up(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """AdamW, whose variance is freed of its bias at the end."""
        gradient = shard.gradient()
        shard.keep({"first": self.momentum(shard, gradient), "second": self.variance(shard, gradient)}, terms)
        second = shard.states["second"] / self.bias(self.optim.beta2, terms, gradient)
        self._move(shard, second, terms)
        if self.freezes:
            shard.states["second"].copy_(second)

    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The momentum that all received, beside the frozen variance."""
        shard.keep({"first": first}, terms)
        self._move(shard, shard.states["second"], terms)

    def _move(self, shard: WeightShard, second: Tensor, terms: UpdateTerms) -> None:
        first = shard.states["first"] / self.bias(self.optim.beta1, terms, second)
        move = self.direction(first, second).mul_(terms.rate)
        shard.write(shard.value() * (1 - terms.rate * shard.decay) - move)
