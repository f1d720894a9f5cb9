"""LAMB (You et al. 2020): AdamW's direction, as long as the weight is, for very large batches.

    m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  r = m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε) + λw
    w ← w − η · ‖w‖/‖r‖ · r

Norms are of whole tensors, a stack of experts too; where one of them is zero, their ratio counts as 1. φ of the paper
is the identity, as in its authors' code, where also vectors (norms, biases) have no ratio and no decay: theirs is
AdamW's update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.optim.interface import UpdateTerms, WeightShard, WholeTensorRule, reduced
from meshwright.spec.optimizers import Statistic

TENSOR = Statistic(shape="tensor")


class LambRule(WholeTensorRule):
    """The update of LAMB."""

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """One reduction: of the squares of weights and directions."""
        for shard in shards:
            gradient = shard.gradient()
            first = (shard.states["first"] * self.optim.beta1).add_(gradient * (1 - self.optim.beta1))
            shard.keep({"first": first}, terms)
            del first
            second = gradient.square_().mul_(1 - self.optim.beta2).add_(shard.states["second"] * self.optim.beta2)
            shard.keep({"second": second}, terms)
        matrices = [shard for shard in shards if len(shard.shape) >= 2]
        sizes = [(shard, TENSOR, shard.value().square().sum()) for shard in matrices]
        lengths = [(shard, TENSOR, self._direction(shard, terms).square().sum()) for shard in matrices]
        whole = reduced([*sizes, *lengths])
        ratios = {
            id(shard): _ratio(*pair) for shard, *pair in zip(matrices, whole, whole[len(matrices) :], strict=False)
        }
        for shard in shards:
            move = self._direction(shard, terms).mul_(terms.rate)
            if id(shard) in ratios:
                move.mul_(ratios[id(shard)])
            shard.write(shard.value() - move)

    def _direction(self, shard: WeightShard, terms: UpdateTerms) -> Tensor:
        """AdamW's step of length one from the states as they are now, decay included."""
        first, count = shard.states["first"], terms.count.double()
        bias1, bias2 = ((1 - beta**count).to(first.dtype) for beta in (self.optim.beta1, self.optim.beta2))
        root = (shard.states["second"] / bias2).sqrt_().add_(self.optim.eps)
        move = (first / bias1).div_(root)
        return move.add_(shard.value() * shard.decay) if shard.decay else move


def _ratio(size: Tensor, length: Tensor) -> Tensor:
    """The trust ratio of a weight and its direction, from their squares."""
    return torch.where((size > 0) & (length > 0), (size / length).sqrt(), 1.0)
