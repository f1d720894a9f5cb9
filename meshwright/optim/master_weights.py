"""Weights in bf16 without fp32 master weights: stochastic rounding, or split master weights.

Rounded to nearest, an update smaller than the last bit would be lost, however often it came. Stochastic rounding takes
it with the probability of its share, so that it arrives on average. Split master weights hold the 16 low bits beside
the bf16 weight: together they are exactly an fp32 master weight.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.config.run import Optim, Run
from meshwright.kernels.adamw import AdamWGroup, AdamWStep, BF16Group, RoundingDraws
from meshwright.models.init import GOLDEN, key, signed, uniform
from meshwright.optim import offload_update
from meshwright.optim.clip import GradStats
from meshwright.parallel import precision
from meshwright.parallel.mesh import local, region_of
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.optim.adamw import AdamW

# Of some weights by their index, with the learning rate, the decay and the count of updates, this one included.
Update = Callable[[list[int], float, float, Tensor, GradStats], None]
GROUPS = 8  # that are remembered; there are two, unless a model leaves out other parameters in every step


def given(weight: Tensor) -> Tensor:
    """The gradient of a weight that has one."""
    assert weight.grad is not None, "a weight without a gradient is not updated"
    return weight.grad


def grouped(optimizer: "AdamW", make: Callable[[list[int]], AdamWGroup]) -> Update:
    """The update of some of an optimizer's weights by one launch; `make` builds their group, once."""
    groups: dict[tuple[int, ...], AdamWGroup] = {}

    def update(indices: list[int], rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        key, optim = tuple(indices), optimizer.optim
        if key not in groups:
            if len(groups) == GROUPS:
                groups.clear()
            groups[key] = make(indices)
        gradients = [local(given(optimizer.weights[i])) for i in indices]
        step = AdamWStep(rate, optim.beta1, optim.beta2, optim.eps, count, verdict.factor, verdict.finite)
        groups[key].update(gradients, decay, step)

    return update


SIXTEEN_BITS = 1 << 16  # values of the bits that fp32 has beyond bf16
STEP = 1 << 40  # elements that a weight may have before its draws of one step meet those of the next
CPU_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 24  # elements at a time: their fp32 copies stay in cache, or small


def weight_dtype(optim: Optim, plan: Plan) -> torch.dtype:
    """The dtype of the weights."""
    return torch.bfloat16 if optim.master_weights != "fp32" else precision.weight_dtype(plan)


def attach(chunks: Iterable[nn.Module], run: Run) -> None:
    """Give every weight what its rounding needs: the key of its draws, or memory for the low bits."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if run.optim.master_weights == "none":
                weight.draws = key(run.seed, f"{name}.rounding")  # pyright: ignore[reportAttributeAccessIssue]
            elif run.optim.master_weights == "split":
                low = torch.zeros_like(local(weight.detach()), dtype=torch.int16)
                weight.low_bits = low  # pyright: ignore[reportAttributeAccessIssue]


def begin(weight: nn.Parameter, value: Tensor) -> None:
    """Write an fp32 value into a split weight."""
    high, low = offload_update.split(value)
    local(weight.detach()).copy_(high)
    weight.low_bits.copy_(low)  # pyright: ignore[reportAttributeAccessIssue]


def beside(weight: Tensor) -> dict[str, Tensor]:
    """The low bits of a split weight by kind of state, viewed as bf16, which checkpoints know; else nothing."""
    low = getattr(weight, "low_bits", None)
    return {} if low is None else {"low": low.view(torch.bfloat16)}


def rounded(optimizer: "AdamW") -> Update:
    """AdamW over weights in bf16: moments and arithmetic are fp32, block by block."""
    round_to = {"none": _stochastic, "split": _split}[optimizer.optim.master_weights]

    def update(indices: list[int], rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        step = _Bf16Update(optimizer, rate, decay, count, verdict)
        for i in indices:
            assert optimizer.wide[i].dtype == torch.bfloat16, "weights are made in bf16 when rounding says so"
            round_to(optimizer.weights[i], optimizer.wide[i].view(-1), step.blocks(i), count)

    return update


def at_once(optimizer: "AdamW") -> Update:
    """The same by one fused kernel."""
    plain, by_kernel = rounded(optimizer), grouped(optimizer, partial(_group, optimizer))
    is_contiguous = [_is_contiguous(weight) for weight in optimizer.weights]

    def update(indices: list[int], rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        for run, contiguous in ((by_kernel, True), (plain, False)):
            if chosen := [i for i in indices if is_contiguous[i] is contiguous]:
                run(chosen, rate, decay, count, verdict)

    return update


def _group(optimizer: "AdamW", indices: list[int]) -> AdamWGroup:
    weights, first, second = (
        [held[i] for i in indices] for held in (optimizer.wide, optimizer.first, optimizer.second)
    )
    whole = [optimizer.weights[i] for i in indices]
    if optimizer.optim.master_weights == "split":
        return BF16Group(weights, first, second, low=[each.low_bits for each in whole])  # pyright: ignore[reportAttributeAccessIssue]
    return BF16Group(weights, first, second, draws=[_draws(weight) for weight in whole])


def _draws(weight: Tensor) -> RoundingDraws:
    """The hash states of `uniform` as the kernel steps through them."""
    begin = Elements(weight).begin()
    assert begin is not None, "only contiguous parts are given to the kernel"
    state = begin * GOLDEN + weight.draws + GOLDEN  # pyright: ignore[reportAttributeAccessIssue]
    return RoundingDraws(signed(state), signed(GOLDEN), signed(STEP * GOLDEN))


def _is_contiguous(weight: Tensor) -> bool:
    return not hasattr(weight, "draws") or Elements(weight).begin() is not None


class _Bf16Update:
    """One update's arithmetic, with its scalars computed once."""

    def __init__(self, optimizer: "AdamW", rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        self.optimizer, self.rate, self.decay = optimizer, rate, decay
        count, optim = count.double(), optimizer.optim
        scalars = (verdict.factor, 1 - optim.beta1**count, 1 - optim.beta2**count)
        self.factor, self.bias1, self.bias2 = (scalar.float() for scalar in scalars)
        self.finite = verdict.finite > 0

    def blocks(self, i: int) -> Iterator[tuple[slice, Callable[[Tensor], Tensor]]]:
        """Parts of a weight, each with the function from its fp32 values to the updated ones."""
        optimizer = self.optimizer
        first, second = optimizer.first[i].view(-1), optimizer.second[i].view(-1)
        gradient = local(given(optimizer.weights[i])).reshape(-1)
        block = CPU_BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
        for start in range(0, len(first), block):
            part = slice(start, start + block)
            yield part, self._updated(gradient[part], first[part], second[part])

    def _updated(self, gradient: Tensor, first: Tensor, second: Tensor) -> Callable[[Tensor], Tensor]:
        """Operations that round once each: an element's bits do not depend on its neighbours, which sharding moves."""
        optim = self.optimizer.optim

        def updated(weight: Tensor) -> Tensor:
            g = gradient.float() * self.factor
            mean = first * optim.beta1 + g * (1 - optim.beta1)
            square = second * optim.beta2 + g.square() * (1 - optim.beta2)
            step = mean / self.bias1 / ((square / self.bias2).sqrt() + optim.eps)
            first.copy_(torch.where(self.finite, mean, first))
            second.copy_(torch.where(self.finite, square, second))
            return torch.where(self.finite, weight * (1 - self.rate * self.decay) - step * self.rate, weight)

        return updated


Blocks = Iterator[tuple[slice, Callable[[Tensor], Tensor]]]


def _stochastic(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    at = Elements(weight)
    for part, updated in blocks:
        index = at.indices(part.start, min(part.stop, len(flat)))
        draws = uniform(weight.draws, index + count.long() * STEP)  # pyright: ignore[reportAttributeAccessIssue]
        flat[part] = offload_update.rounded(updated(flat[part].float()), (draws * SIXTEEN_BITS).to(torch.int32))


def _split(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    low = weight.low_bits.view(-1)  # pyright: ignore[reportAttributeAccessIssue]
    for part, updated in blocks:
        flat[part], low[part] = offload_update.split(updated(offload_update.join(flat[part], low[part])))


class Elements:
    """Global indices of a rank's elements in a weight, so that their draws are the same under every plan."""

    def __init__(self, weight: Tensor) -> None:
        self.device = local(weight.detach()).device
        region = region_of(weight)
        self.shape, self.corner = tuple(part.stop - part.start for part in region), tuple(part.start for part in region)
        self.whole = tuple(weight.shape)

    def begin(self) -> int | None:
        """The flat index where this rank's part begins in the whole weight; None where it is not contiguous there."""
        if self.shape[1:] != self.whole[1:]:
            return None
        return self.corner[0] * math.prod(self.whole[1:]) if self.whole else 0

    def indices(self, start: int, stop: int) -> Tensor:
        """Global indices of the elements `start` to `stop` of this rank's flattened part."""
        left = torch.arange(start, stop, device=self.device)
        index, stride = torch.zeros_like(left), 1
        for length, corner, whole in zip(
            reversed(self.shape), reversed(self.corner), reversed(self.whole), strict=True
        ):
            index += (left % length + corner) * stride
            left, stride = left // length, stride * whole
        return index
