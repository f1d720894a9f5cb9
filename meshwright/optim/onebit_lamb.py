"""1-bit LAMB (Li et al. 2021): LAMB until the variance is stable, then momentum in one bit and frozen trust ratios.

    warm-up     as LAMB, with  c ← 0.9c + 0.1 · ‖w‖/‖r‖  of each matrix, divided by its bias at the end
    after it    m ← mean of β₁m + (1 − β₁)g_i in one bit,  g̃ = (m − β₁m′)/(1 − β₁) with m′ the momentum before
                ṽ ← β₂ṽ + (1 − β₂)g̃²,  p = m/(1 − β₁ᵗ) / (√v + ε),  r = p + λw
                f = max of (√v + ε)/(√ṽ + ε), of which decay takes its part,  0.5 ≤ f ≤ 4,  within 10 % of the last f
                w ← w − η · f · c · r

The frozen ratio follows how the variance has changed since the freeze, as the momentum that all received tells it. The
paper scales momenta of layers to one size before it compresses them together: here each has scales of its own. Vectors
have no ratio and no decay, as in `optim/lamb.py`.
"""

import torch
from torch import Tensor

from meshwright.optim.interface import UpdateTerms, WeightShard
from meshwright.optim.onebit import MomentumRule

RATIO_BETA = 0.9  # of the running mean of ratios
LEAST, MOST, DRIFT = 0.5, 4.0, 0.1  # of the factor, and how far it may move in a step


class OneBitLambRule(MomentumRule):
    """The update of 1-bit LAMB."""

    def warm_up(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """LAMB, with a running mean of its ratios."""
        gradient = shard.gradient()
        shard.keep({"first": self.momentum(shard, gradient), "second": self.variance(shard, gradient)}, terms)
        second = shard.states["second"] / self.bias(self.optim.beta2, terms, gradient)
        move = self._direction(shard, shard.states["first"], second, terms)
        if "ratio" in shard.states:
            value = shard.value()
            size, length = value.norm(), move.norm()
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
            mean = shard.states["ratio"] * RATIO_BETA + ratio * (1 - RATIO_BETA)
            shard.keep({"ratio": mean}, terms)
            move = move * ratio
        shard.write(shard.value() - move * terms.rate)
        if self.freezes:
            shard.states["second"].copy_(second)
            if "ratio" in shard.states:
                shard.states["fresh"].copy_(second)
                shard.states["ratio"].div_(self.bias(RATIO_BETA, terms, second))
                shard.states["factor"].fill_(1.0)

    def _direction(self, shard: WeightShard, first: Tensor, second: Tensor, terms: UpdateTerms) -> Tensor:
        """AdamW's step of length one, decay included."""
        move = self.direction(first / self.bias(self.optim.beta1, terms, first), second)
        return move.add_(shard.value() * shard.decay) if shard.decay else move

    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The momentum that all received, with the frozen ratio corrected."""
        second = shard.states["second"]
        move = self._direction(shard, first, second, terms)
        if "ratio" in shard.states:
            beta1, beta2 = self.optim.beta1, self.optim.beta2
            rebuilt = (first - shard.states["first"] * beta1).div_(1 - beta1)
            fresh = (shard.states["fresh"] * beta2).add_(rebuilt.square_(), alpha=1 - beta2)
            factor = self._factor(shard, first, fresh, move, terms)
            shard.keep({"fresh": fresh, "factor": factor}, terms)
            move = move * (shard.states["ratio"] * factor)
        shard.keep({"first": first}, terms)
        shard.write(shard.value() - move * terms.rate)

    def _factor(self, shard: WeightShard, first: Tensor, fresh: Tensor, move: Tensor, terms: UpdateTerms) -> Tensor:
        """By how much the frozen ratio is corrected."""
        eps, last = self.optim.eps, shard.states["factor"]
        factor = ((shard.states["second"].sqrt() + eps) / (fresh.sqrt() + eps)).amax()
        if shard.decay:
            prelim = self.direction(first / self.bias(self.optim.beta1, terms, first), shard.states["second"])
            share = (prelim.norm() / move.norm()).clamp(max=1.0)
            factor = factor * share + (1 - share)
        factor = factor.clamp(LEAST, MOST)
        return torch.minimum(torch.maximum(factor, last * (1 - DRIFT)), last * (1 + DRIFT))
