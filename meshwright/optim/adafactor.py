"""Adafactor (Shazeer and Stern 2018): of a matrix's second moment the means of its rows and of its columns, no more.

With g the clipped gradient of a matrix (r, c), t the update's number and β₂ = 1 − t^−0.8:

    R ← β₂R + (1 − β₂) · row means of (g² + ε₁)      C ← β₂C + (1 − β₂) · column means of (g² + ε₁)
    u = g / √(R Cᵀ / mean(R))                         of vectors  v ← β₂v + (1 − β₂)(g² + ε₁),  u = g / √v
    u ← u / max(1, RMS(u) / d),  d = 1
    m ← β₁m + (1 − β₁)u,  u = m                       only with optim.beta1 above 0
    w ← (1 − ηλ)w − αu                                α = η, or with optim.relative_step  α = max(ε₂, RMS(w)) · η

RMS is over the whole tensor, a stack of experts too, whose matrices have row and column means each. Where libraries
differ: ε₁ is added to the squares, as in the paper and transformers (torch.optim.Adafactor bounds the estimate below
instead); the learning rate is the run's, as in transformers with relative_step and scale_parameter off (torch's is
always relative to the weight's RMS, and at most 1/√t: here that is optim.relative_step and a schedule); decay is by
η, as in torch (transformers: by α). The first moment is transformers' and the paper's; torch has none.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from meshwright.optim.interface import UpdateTerms, WeightShard, WholeTensorRule, reduced
from meshwright.spec.optimizers import Statistic

ROWS, COLUMNS, MATRIX, TENSOR = (Statistic(shape=shape) for shape in ("rows", "columns", "matrix", "tensor"))
DECAY = -0.8  # of 1 − β₂, as a power of the update's number
THRESHOLD = 1.0  # d: the RMS that an update is clipped to


class AdafactorRule(WholeTensorRule):
    """The update of Adafactor."""

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """Three reductions: of rows and columns, of the rows' mean, of the update's RMS."""
        weights = [_Factored(shard, self.optim.eps1, terms) for shard in shards]
        matrices = [weight for weight in weights if weight.is_matrix]
        sums = [part for weight in matrices for part in weight.squares()]
        sizes = [(shard, TENSOR, shard.value().square().sum()) for shard in shards] if self.optim.relative_step else []
        whole = reduced([*sums, *sizes])
        for number, weight in enumerate(matrices):
            weight.factor(*whole[2 * number : 2 * number + 2])
        for weight, total in zip(matrices, reduced([weight.rows_total() for weight in matrices]), strict=True):
            weight.normalise(total)
        lengths = reduced([(weight.shard, TENSOR, weight.direction().square().sum()) for weight in weights])
        scales: Sequence[Tensor | None] = whole[len(sums) :] or [None] * len(weights)
        for weight, length, size in zip(weights, lengths, scales, strict=True):
            move = weight.direction().div_((_rms(length, weight.shard) / THRESHOLD).clamp(min=1.0))
            scale = 1.0 if size is None else _rms(size, weight.shard).clamp(min=self.optim.eps2)
            weight.move(move, scale * terms.rate, self.optim.beta1)


class _Factored:
    """One weight on its way through an update."""

    def __init__(self, shard: WeightShard, eps1: float, terms: UpdateTerms) -> None:
        self.shard, self.eps1, self.terms = shard, eps1, terms
        self.is_matrix = len(shard.shape) >= 2
        self.second: tuple[Tensor, ...] = ()  # of matrices what rows and columns are multiplied with
        self.new: dict[str, Tensor] = {}
        if not self.is_matrix:
            second = self._mean("second", shard.gradient().square() + eps1)
            self.second = (second.rsqrt(),)

    def squares(self) -> tuple[tuple[WeightShard, Statistic, Tensor], ...]:
        """This rank's sums of squares by rows and by columns."""
        squares = self.shard.gradient().square_().add_(self.eps1)
        return (self.shard, ROWS, squares.sum(-1)), (self.shard, COLUMNS, squares.sum(-2))

    def factor(self, rows: Tensor, columns: Tensor) -> None:
        """The means of rows and columns, moved on."""
        *_, height, width = self.shard.shape
        self._mean("row", rows / width)
        self._mean("column", columns / height)

    def rows_total(self) -> tuple[WeightShard, Statistic, Tensor]:
        """This rank's sum of row means."""
        return self.shard, MATRIX, self.new["row"].sum(-1)

    def normalise(self, total: Tensor) -> None:
        """Take out the mean of the rows, which columns have too."""
        mean = (total / self.shard.shape[-2])[..., None]
        self.second = (self.new["row"] / mean).rsqrt()[..., None], self.new["column"].rsqrt()[..., None, :]

    def direction(self) -> Tensor:
        """The gradient over the root of its second moment."""
        move = self.shard.gradient()
        for factor in self.second:
            move *= factor
        return move

    def move(self, move: Tensor, rate: Tensor | float, beta1: float) -> None:
        """Move the weight, and keep what was made of its states."""
        if beta1:
            self.new["first"] = move.mul_(1 - beta1).add_(self.shard.states["first"] * beta1)
        value = self.shard.value() * (1 - self.terms.rate * self.shard.decay)
        self.shard.write(value.sub_(move * rate))
        self.shard.keep(self.new, self.terms)

    def _mean(self, name: str, mean: Tensor) -> Tensor:
        held, share = self.shard.states[name], (self.terms.count.double() ** DECAY).to(mean.dtype)
        self.new[name] = held + (mean - held) * share
        return self.new[name]


def _rms(squares: Tensor, shard: WeightShard) -> Tensor:
    """The root of the mean square of a whole tensor, from the sum."""
    return (squares / math.prod(shard.shape)).sqrt()
