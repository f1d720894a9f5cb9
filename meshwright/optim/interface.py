"""The optimizer as the trainer, checkpoints, replica checks, messages and proofs see it, its rule and learning rate.

A rule is one optimizer's arithmetic: by elements (`optim/adamw.py`, `optim/sgd.py`), or of whole tensors, of which a
rank may have a part (`optim/adafactor.py`). A form is where weights and states are: beside each other, on the device or
on the host (`optim/resident.py`), or with offloaded states (`optim/offload.py`). Every form takes every rule by
elements; rules of whole tensors are for weights and states on the device. What both towers know of an optimizer is in
`spec/optimizers.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config.run import Optim
from meshwright.optim.clip import GradStats
from meshwright.parallel.mesh import CUT_AXES, Cut
from meshwright.spec.optimizers import DESCRIPTIONS, Statistic, description_of

if TYPE_CHECKING:
    from meshwright.optim.resident import ResidentOptimizer


@dataclass(frozen=True, slots=True)
class UpdateTerms:
    """The scalars of one update; tensors are on the device of the update, so that nothing waits for it."""

    rate: float
    decay: float
    count: Tensor  # updates made, this one included
    factor: Tensor  # the gradient is multiplied by it
    finite: Tensor  # 1 or 0: whether to update at all


Tensors = Sequence[Tensor]
Update = Callable[[list[int], UpdateTerms], None]  # of some weights, by their index
# From a weight, its gradient as it came and its states, all of one dtype, to the new weight and states.
Arithmetic = Callable[[Tensor, Tensor, Tensors], tuple[Tensor, Tensors]]


class UpdateRule(ABC):
    """One optimizer's arithmetic; where weights and states are is not its affair."""

    def __init__(self, optim: Optim) -> None:
        self.optim = optim

    @abstractmethod
    def fused(self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], terms: UpdateTerms) -> None:
        """Update weights and states in place by torch's kernel; gradients are left multiplied by the factor."""

    @abstractmethod
    def arithmetic(self, terms: UpdateTerms, dtype: torch.dtype) -> Arithmetic:
        """The same by operations that round once each, with the scalars made once.

        An element's bits then do not depend on its neighbours, which sharding moves: fused kernels take the ends of a
        tensor through other instructions than its middle.
        """

    def one_pass(self, optimizer: "ResidentOptimizer") -> Update | None:
        """The same by one kernel of ours that also writes the low-precision copies; None where there is none."""
        return None

    def one_pass_quantized(self, optimizer: "ResidentOptimizer") -> Update | None:
        """The same of weights whose states are quantized."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class WeightShard:
    """This rank's part of one weight in an update of whole tensors."""

    name: str
    shape: tuple[int, ...]  # of the whole weight
    region: tuple[tuple[int, int], ...]  # where this part is in it
    cuts: tuple[Cut, ...]  # along which dims it is cut, and among whom
    decay: float
    states: Mapping[str, Tensor]  # those that a weight of this kind has, shaped after this rank's part of it
    # Both make a copy, in the precision of updates; a rule of whole tensors asks again rather than keep all of them.
    gradient: Callable[[], Tensor]  # multiplied by the factor
    value: Callable[[], Tensor]
    write: Callable[[Tensor], None]  # the updated value, in the form of the weight

    def keep(self, states: Mapping[str, Tensor], terms: UpdateTerms) -> None:
        """Write new states, unless the gradient is not finite."""
        for name, new in states.items():
            held = self.states[name]
            held.copy_(torch.where(terms.finite > 0, new, held))

    def group(self, statistic: Statistic) -> tuple[Cut, ...]:
        """Those that have other parts of a statistic of this weight."""
        over = statistic.over(len(self.shape))
        return tuple(cut for cut in self.cuts if cut.dim in over)


class WholeTensorRule(ABC):
    """One optimizer's arithmetic on tensors of which a rank may have a part: what needs all of one is reduced."""

    writes_always = False  # weights too where the gradient is not finite, of which it takes care itself

    def __init__(self, optim: Optim) -> None:
        self.optim = optim

    @abstractmethod
    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """Update weights and states in place, or nothing where the terms say that the gradient is not finite.

        All ranks call it with the same weights in the same order, whatever they have of each.
        """


Partial = tuple[WeightShard, Statistic, Tensor]  # what a rank's own part of a weight gives


def reduced(parts: Sequence[Partial]) -> list[Tensor]:
    """Statistics of whole weights from those of every rank's part: one all-reduce for each axis and operation."""
    whole = [part for _, _, part in parts]
    for op, reduce in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        for axis in CUT_AXES:
            cuts = {
                number: cut
                for number, (shard, statistic, _) in enumerate(parts)
                for cut in shard.group(statistic)
                if (statistic.op, cut.axis) == (op, axis)
            }
            if cuts:
                flat = torch.cat([whole[number].reshape(-1) for number in cuts])
                dist.all_reduce(flat, reduce, group=next(iter(cuts.values())).group)
                pieces = flat.split([whole[number].numel() for number in cuts])
                for number, piece in zip(cuts, pieces, strict=True):
                    whole[number] = piece.view(whole[number].shape)
    return whole


def scaled(gradients: Tensors, terms: UpdateTerms) -> tuple[Tensors, Tensor | None]:
    """Gradients and the divisor that torch's fused kernels take; they read it in fp32, too coarse for float64."""
    if gradients[0].dtype == torch.float64:
        return torch._foreach_mul(list(gradients), terms.factor), None
    return gradients, terms.factor.reciprocal().float()


class SavedPart(NamedTuple):
    """A part of a state tensor as a checkpoint has it: it differs from its weight in the last dim."""

    size: int  # of the last dim of the whole tensor
    columns: tuple[int, int]  # the first and one past the last of this part, there
    tensor: Tensor
    writes: bool = True  # whether it is for this rank to save, or only to read


class Optimizer(ABC):
    """An optimizer of this rank's parts of the weights, in some form."""

    weights: list[nn.Parameter]
    is_one_pass = False  # whether one kernel of ours makes the update

    def __init__(self, optim: Optim) -> None:
        self.optim, self.spec = optim, DESCRIPTIONS[description_of(optim)]

    @property
    @abstractmethod
    def count(self) -> Tensor:
        """Updates made, skipped ones left out."""

    @abstractmethod
    def states(self) -> Mapping[str, list[Tensor]]:
        """Its state tensors by name, in the order of the weights that have it; valid while no update is running."""

    @abstractmethod
    def held(self) -> dict[int, dict[str, Tensor]]:
        """The state of every weight, by its id and by kind: what a checkpoint saves from and restores into."""

    def region(self, weight: Tensor) -> tuple[tuple[int, int], ...] | None:
        """The part of a weight whose master copy and states this rank has; None: the part that is its own anyway."""
        return None

    def saved_parts(self, weight: Tensor, kind: str, tensor: Tensor) -> Iterable[SavedPart]:
        """The parts of a tensor of `held` that is not shaped as its weight; none of one that is."""
        return ()

    @abstractmethod
    def step(self, rate: float, stats: GradStats) -> None:
        """Update every weight that has a gradient, or none when the statistics say the gradient is not finite."""

    def zero_grad(self) -> None:
        """Forget the gradient, and its memory."""
        for weight in self.weights:
            weight.grad = None

    def settle(self) -> None:
        """Wait until no update is on its way."""
        return None  # none ever is, unless states are offloaded

    def stall_seconds(self) -> float:
        """How long the device has waited for offloaded states."""
        return 0.0

    def close(self) -> None:
        """Give back what the optimizer has beside memory."""
        return None

    def decay_of(self, weight: Tensor) -> float:
        """Matrices decay, vectors do not."""
        return self.optim.weight_decay if weight.ndim >= 2 else 0.0


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate of step 0 … steps − 1."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / (optim.warmup + 1)
    return optim.lr * _shape(optim, step, steps)


def _shape(optim: Optim, step: int, steps: int) -> float:
    """The rate ÷ the highest rate, once warm."""
    if optim.schedule == "constant":
        return 1.0
    start = optim.warmup
    if optim.schedule == "wsd":  # warm-up, stable, decay
        start = max(start, steps - math.ceil(optim.decay_fraction * steps))
    done = min(max((step - start) / max(steps - 1 - start, 1), 0.0), 1.0)
    remaining = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * remaining
