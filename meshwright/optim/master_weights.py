"""Weights held in bf16 alone: what becomes of an update that is smaller than their last bit.

Rounded to the nearest, it would be lost, however often it came. Stochastic rounding takes it with the chance of its
share, so that it arrives on average. Compensated weights keep the sixteen bits that bf16 leaves out beside them: both
together are the very number that a master in fp32 would be.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.config.run import Optim, Run
from meshwright.kernels.adamw import AdamWGroup, AdamWStep, BF16Group, RoundingDraws
from meshwright.models.init import GOLDEN, key, signed, uniform
from meshwright.optim import offload_update
from meshwright.optim.clip import GradStats
from meshwright.parallel import precision
from meshwright.parallel.mesh import local
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.optim.adamw import AdamW

Update = Callable[[list[int], float, float, GradStats], None]


def grouped(optimizer: "AdamW", make: Callable[[list[int]], AdamWGroup]) -> Update:
    """The update of some of an optimizer's weights; `make` puts them together, once."""
    groups: dict[tuple[int, ...], AdamWGroup] = {}

    def update(indices: list[int], rate: float, decay: float, verdict: GradStats) -> None:
        key, optim = tuple(indices), optimizer.optim
        if key not in groups:
            groups[key] = make(indices)
        weights = [optimizer.weights[i] for i in indices]
        given = next((weight.grad.dtype for weight in weights if weight.grad is not None), None)  # one kernel, one type
        gradients = [
            local(torch.zeros_like(weight, dtype=given) if weight.grad is None else weight.grad) for weight in weights
        ]
        moves = AdamWStep(rate, optim.beta1, optim.beta2, optim.eps, optimizer.count, verdict.factor, verdict.finite)
        groups[key].update(gradients, decay, moves)

    return update


if TYPE_CHECKING:
    from meshwright.optim.adamw import AdamW

SIXTEEN_BITS = 1 << 16  # what an fp32 number has more than one of bf16
STEP = 1 << 40  # elements that a weight may have before its draws of one step meet those of the next
CPU_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 24  # elements at work: their few wide copies stay in cache, or small


def weight_dtype(optim: Optim, plan: Plan) -> torch.dtype:
    """In which weights are held."""
    return torch.bfloat16 if optim.master_weights != "fp32" else precision.weight_dtype(plan)


def attach(chunks: Iterable[nn.Module], run: Run) -> None:
    """Give every weight what its rounding needs: a stream of draws, or room for the low bits."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if run.optim.master_weights == "none":
                weight.draws = key(run.seed, f"{name}.rounding")  # pyright: ignore[reportAttributeAccessIssue]
            elif run.optim.master_weights == "split":
                low = torch.zeros_like(local(weight.detach()), dtype=torch.int16)
                weight.low_bits = low  # pyright: ignore[reportAttributeAccessIssue]


def begin(weight: nn.Parameter, wide: Tensor) -> None:
    """A weight's first value in both its parts."""
    high, low = offload_update.split(wide)
    local(weight.detach()).copy_(high)
    weight.low_bits.copy_(low)  # pyright: ignore[reportAttributeAccessIssue]


def beside(weight: Tensor) -> dict[str, Tensor]:
    """What belongs to a weight's state beside its number and its moments, by kind; as bf16, which savers know."""
    low = getattr(weight, "low_bits", None)
    return {} if low is None else {"low": low.view(torch.bfloat16)}


def rounded(optimizer: "AdamW") -> Update:
    """AdamW over weights in bf16: moments and arithmetic are fp32, block by block."""
    place = {"none": _by_chance, "split": _in_two_parts}[optimizer.optim.master_weights]

    def update(indices: list[int], rate: float, decay: float, verdict: GradStats) -> None:
        move = _Move(optimizer, rate, decay, verdict)
        for i in indices:
            assert optimizer.wide[i].dtype == torch.bfloat16, "weights are made in bf16 when rounding says so"
            place(optimizer.weights[i], optimizer.wide[i].view(-1), move.blocks(i), optimizer.count)

    return update


def at_once(optimizer: "AdamW") -> Update:
    """The same by one kernel that passes over everything once."""
    by_hand, by_kernel = rounded(optimizer), grouped(optimizer, partial(_group, optimizer))
    is_run = [_in_a_line(weight) for weight in optimizer.weights]

    def update(indices: list[int], rate: float, decay: float, verdict: GradStats) -> None:
        for place, runs in ((by_kernel, True), (by_hand, False)):
            if chosen := [i for i in indices if is_run[i] is runs]:
                place(chosen, rate, decay, verdict)

    return update


def _group(optimizer: "AdamW", indices: list[int]) -> AdamWGroup:
    weights, first, second = (
        [held[i] for i in indices] for held in (optimizer.wide, optimizer.first, optimizer.second)
    )
    whole = [optimizer.weights[i] for i in indices]
    if optimizer.optim.master_weights == "split":
        return BF16Group(weights, first, second, low=[each.low_bits for each in whole])  # pyright: ignore[reportAttributeAccessIssue]
    return BF16Group(weights, first, second, draws=[_stream(weight) for weight in whole])


def _stream(weight: Tensor) -> RoundingDraws:
    """`uniform`'s states as the kernel walks over them."""
    begin = Elements(weight).begin()
    assert begin is not None, "only parts that lie in a line are given to the kernel"
    state = begin * GOLDEN + weight.draws + GOLDEN  # pyright: ignore[reportAttributeAccessIssue]
    return RoundingDraws(signed(state), signed(GOLDEN), signed(STEP * GOLDEN))


def _in_a_line(weight: Tensor) -> bool:
    return not hasattr(weight, "draws") or Elements(weight).begin() is not None


class _Move:
    """One update's arithmetic: the scalars, once."""

    def __init__(self, optimizer: "AdamW", rate: float, decay: float, verdict: GradStats) -> None:
        self.optimizer, self.rate, self.decay = optimizer, rate, decay
        count, optim = optimizer.count.double(), optimizer.optim
        numbers = (verdict.factor, 1 - optim.beta1**count, 1 - optim.beta2**count)
        self.factor, self.bias1, self.bias2 = (number.float() for number in numbers)
        self.finite = verdict.finite > 0

    def blocks(self, i: int) -> Iterator[tuple[slice, Callable[[Tensor], Tensor]]]:
        """Parts of a weight, each with the function from its wide numbers to where they move."""
        optimizer = self.optimizer
        first, second = optimizer.first[i].view(-1), optimizer.second[i].view(-1)
        given = optimizer.weights[i].grad
        gradient = torch.zeros_like(first) if given is None else local(given).reshape(-1)
        block = CPU_BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
        for start in range(0, len(first), block):
            part = slice(start, start + block)
            yield part, self._moved(gradient[part], first[part], second[part])

    def _moved(self, gradient: Tensor, first: Tensor, second: Tensor) -> Callable[[Tensor], Tensor]:
        """Operations that round once each: an element's bits do not depend on its neighbours, which sharding moves."""
        optim = self.optimizer.optim

        def moved(wide: Tensor) -> Tensor:
            g = gradient.float() * self.factor
            mean = first * optim.beta1 + g * (1 - optim.beta1)
            square = second * optim.beta2 + g.square() * (1 - optim.beta2)
            step = mean / self.bias1 / ((square / self.bias2).sqrt() + optim.eps)
            first.copy_(torch.where(self.finite, mean, first))
            second.copy_(torch.where(self.finite, square, second))
            return torch.where(self.finite, wide * (1 - self.rate * self.decay) - step * self.rate, wide)

        return moved


Blocks = Iterator[tuple[slice, Callable[[Tensor], Tensor]]]


def _by_chance(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    at = Elements(weight)
    for part, moved in blocks:
        index = at.indices(part.start, min(part.stop, len(flat)))
        draws = uniform(weight.draws, index + count.long() * STEP)  # pyright: ignore[reportAttributeAccessIssue]
        flat[part] = offload_update.rounded(moved(flat[part].float()), (draws * SIXTEEN_BITS).to(torch.int32))


def _in_two_parts(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    low = weight.low_bits.view(-1)  # pyright: ignore[reportAttributeAccessIssue]
    for part, moved in blocks:
        flat[part], low[part] = offload_update.split(moved(offload_update.join(flat[part], low[part])))


class Elements:
    """The places of a rank's elements in the whole weight, so that their draws are the same under every plan."""

    def __init__(self, weight: Tensor) -> None:
        self.device = local(weight.detach()).device
        self.shape, self.corner = tuple(weight.shape), (0,) * weight.ndim
        if isinstance(weight, DTensor):
            self.shape, self.corner = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
        self.whole = tuple(weight.shape)

    def begin(self) -> int | None:
        """Where this rank's part begins in the whole laid out in a line; None where it is not one run of that."""
        if self.shape[1:] != self.whole[1:]:
            return None
        return self.corner[0] * math.prod(self.whole[1:]) if self.whole else 0

    def indices(self, start: int, stop: int) -> Tensor:
        """Of the elements from `start` to `stop` of this rank's part, laid out in a line."""
        left = torch.arange(start, stop, device=self.device)
        index, stride = torch.zeros_like(left), 1
        for length, corner, whole in zip(
            reversed(self.shape), reversed(self.corner), reversed(self.whole), strict=True
        ):
            index += (left % length + corner) * stride
            left, stride = left // length, stride * whole
        return index
