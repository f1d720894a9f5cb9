"""SM3 (Anil, Gupta, Koren and Singer 2019), its second form: AdaGrad whose sums are bounded by a row's and a column's.

With g the clipped gradient of a matrix, R and C accumulators of its rows and columns that begin at zero:

    ν = min(Rᵢ, Cⱼ) + g²         Rᵢ ← max over j of ν,  Cⱼ ← max over i of ν      of vectors  ν ← ν + g²
    m ← μm + (1 − μ) · g/√ν      where ν is zero, so is g/√ν
    w ← (1 − ηλ)w − ηm

μ is optim.momentum, which the paper trains with. It covers a tensor of more dims by slices of each of them; here every
matrix of a stack of experts is covered by its own rows and columns, which bound closer. The paper has no decay: λ is
decoupled. Maxima do not round, so accumulators have the same bits however tensors are cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.optim.interface import UpdateTerms, WeightShard, WholeTensorRule, reduced
from meshwright.spec.optimizers import Statistic

ROWS, COLUMNS = Statistic(shape="rows", op="max"), Statistic(shape="columns", op="max")


class SM3Rule(WholeTensorRule):
    """The update of SM3-II with momentum."""

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """One reduction: of the largest sums of rows and columns."""
        matrices = [shard for shard in shards if len(shard.shape) >= 2]
        largest = []
        for shard in matrices:
            sums = _sums(shard, shard.gradient())
            largest += [(shard, ROWS, _largest(sums, -1)), (shard, COLUMNS, _largest(sums, -2))]
        whole = iter(reduced(largest))
        for shard in shards:
            move = shard.gradient()
            sums = _sums(shard, move)
            new = {"row": next(whole), "column": next(whole)} if len(shard.shape) >= 2 else {"second": sums}
            move.div_(sums.sqrt()).masked_fill_(sums == 0, 0.0)
            del sums
            momentum = move.mul_(1 - self.optim.momentum).add_(shard.states["momentum"] * self.optim.momentum)
            value = shard.value() * (1 - terms.rate * shard.decay)
            shard.write(value.sub_(momentum * terms.rate))
            shard.keep({**new, "momentum": momentum}, terms)


def _sums(shard: WeightShard, gradient: Tensor) -> Tensor:
    """What bounds an element's sum of squares, this gradient's included."""
    states, squares = shard.states, gradient.square()
    if "second" in states:
        return squares.add_(states["second"])
    return squares.add_(torch.minimum(states["row"][..., None], states["column"][..., None, :]))


def _largest(sums: Tensor, dim: int) -> Tensor:
    """The maximum along a dim; of none, zero."""
    return sums.amax(dim) if sums.shape[dim] else sums.sum(dim)
