"""Weights in bf16 without fp32 master weights: stochastic rounding, or split master weights; states in bf16.

Rounded to nearest, an update smaller than the last bit would be lost, however often it came. Stochastic rounding takes
it with the probability of its share, so that it arrives on average. A split fp32 master weight is the bf16 parameter
and `low`, their difference as integers: rounded to nearest, ties away from zero, it always fits into 16 bits.
Beside either the optimizer's states may be bf16, stochastically rounded: to the nearest, a running mean would stall.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from meshwright.config.run import Optim, Run
from meshwright.kernels.adamw import RoundingDraws
from meshwright.models.init import GOLDEN, hashed, key, logical_shift, mixed, signed, uniform
from meshwright.models.layers import accum_dtype
from meshwright.models.lora import trained
from meshwright.optim.interface import Arithmetic, Tensors, Update, UpdateRule, UpdateTerms
from meshwright.parallel import precision
from meshwright.parallel.mesh import local, region_of
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.optim.resident import ResidentOptimizer

SIXTEEN_BITS = 1 << 16  # values of the bits that fp32 has beyond bf16
STEP = 1 << 40  # elements that a weight may have before its draws of one step meet those of the next
CPU_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 24  # elements at a time: their fp32 copies stay in cache, or small
EVERYTHING = slice(None)  # all elements of a weight
# A weight's own draws differ from those of others and of other updates by these odd factors.
OF_WEIGHT, OF_UPDATE = 0x632BE5AB, 0x9E3779B1
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # a 32-bit hash of few biases (Wellons 2018)
LAST_SHIFT = 16
STATE_DRAWS = (48, 32)  # where each state has its 16 bits in a draw of 64, as in kernels/adamw.py


def given(weight: Tensor) -> Tensor:
    """The gradient of a weight that has one."""
    assert weight.grad is not None, "a weight without a gradient is not updated"
    return weight.grad


def weight_dtype(optim: Optim, plan: Plan) -> torch.dtype:
    """The dtype of the weights."""
    return torch.bfloat16 if optim.master_weights != "fp32" else precision.weight_dtype(plan)


def state_dtype(optim: Optim, master: Tensor) -> torch.dtype:
    """The dtype of a weight's states beside it, from how the optimizer updates it."""
    is_low = optim.state_dtype == "bf16" and optim.master_weights != "fp32"
    return torch.bfloat16 if is_low else accum_dtype(master)


def attach(chunks: Iterable[nn.Module], run: Run) -> None:
    """Give every weight what rounding needs: the keys of its draws and of its states', or memory for the low bits."""
    for chunk in chunks:
        for name, weight in trained(chunk):
            if run.optim.state_dtype == "bf16":
                weight.state_draws = key(run.seed, f"{name}.states")  # pyright: ignore[reportAttributeAccessIssue]
            if run.optim.master_weights == "none":
                weight.draws = key(run.seed, f"{name}.rounding")  # pyright: ignore[reportAttributeAccessIssue]
            elif run.optim.master_weights == "split":
                low = torch.zeros_like(local(weight.detach()), dtype=torch.int16)
                weight.low_bits = low  # pyright: ignore[reportAttributeAccessIssue]


def begin(weight: nn.Parameter, value: Tensor) -> None:
    """Write an fp32 value into a split weight."""
    high, low = split(value)
    local(weight.detach()).copy_(high)
    low_bits(weight).copy_(low)


def low_bits(weight: Tensor) -> Tensor:
    """The 16 bits that a split weight in bf16 leaves out, in its own shape."""
    return weight.low_bits  # pyright: ignore[reportAttributeAccessIssue]


def beside(weight: Tensor) -> dict[str, Tensor]:
    """The low bits of a split weight by kind of state, viewed as bf16, which checkpoints know; else nothing."""
    low = getattr(weight, "low_bits", None)
    return {} if low is None else {"low": low.view(torch.bfloat16)}


def widened(weight: Tensor, master: Tensor, part: slice = EVERYTHING) -> Tensor:
    """A weight, or its master weight, as an update reads it; or some of its elements, flat."""
    low = getattr(weight, "low_bits", None)
    if part != EVERYTHING:
        master, low = master.view(-1)[part], None if low is None else low.view(-1)[part]
    return master.to(accum_dtype(master)) if low is None else join(master, low)


def _store_master(weight: Tensor, master: Tensor, updated: Tensor, count: Tensor, begin: int = 0) -> None:
    master.view(-1)[begin : begin + updated.numel()].copy_(updated.reshape(-1))


def _store_split(weight: Tensor, master: Tensor, updated: Tensor, count: Tensor, begin: int = 0) -> None:
    high, low = split(updated.reshape(-1))
    master.view(-1)[begin : begin + len(high)].copy_(high)
    low_bits(weight).view(-1)[begin : begin + len(low)].copy_(low)


def _store_rounded(weight: Tensor, master: Tensor, updated: Tensor, count: Tensor, begin: int = 0) -> None:
    flat = updated.reshape(-1)
    block = CPU_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK

    def blocks() -> Blocks:
        for start in range(0, len(flat), block):
            new = flat[start : start + block]
            yield slice(begin + start, begin + start + len(new)), lambda _, new=new: new

    _stochastic(weight, master.view(-1), blocks(), count)


# By optim.master_weights, what writes a weight that was updated as a whole, from its value and the update's number; or
# the elements of it from one on.
STORES: dict[str, Callable[..., None]] = {
    "fp32": _store_master, "split": _store_split, "none": _store_rounded,
}  # fmt: skip


def rounded(optimizer: "ResidentOptimizer", rule: UpdateRule) -> Update:
    """The update of weights in bf16, block by block, in fp32 arithmetic."""
    round_to = ROUND_TO[optimizer.optim.master_weights]

    def update(indices: list[int], terms: UpdateTerms) -> None:
        arithmetic = rule.arithmetic(terms, torch.float32)
        for i in indices:
            assert optimizer.masters[i].dtype == torch.bfloat16, "weights are made in bf16 when rounding says so"
            blocks = _blocks(optimizer, i, arithmetic, terms)
            round_to(optimizer.weights[i], optimizer.masters[i].view(-1), blocks, terms.count)

    return update


def rounding_draws(weight: Tensor, which: Literal["draws", "state_draws"]) -> RoundingDraws:
    """The hash states of a weight's own draws, or of its states', as a kernel steps through them."""
    begin = Elements(weight).begin()
    assert begin is not None, "only contiguous parts are given to the kernel"
    state = begin * GOLDEN + getattr(weight, which) + GOLDEN
    return RoundingDraws(signed(state), signed(GOLDEN), signed(STEP * GOLDEN))


def is_contiguous(weight: Tensor) -> bool:
    """Whether a kernel can step through the draws of this rank's part of a weight, if it has any."""
    draws = hasattr(weight, "draws") or hasattr(weight, "state_draws")
    return not draws or Elements(weight).begin() is not None


Blocks = Iterator[tuple[slice, Callable[[Tensor], Tensor]]]
WriteStates = Callable[[Tensors, Tensors, Tensor], None]  # the states, their new values, whether to write them


def _blocks(optimizer: "ResidentOptimizer", i: int, arithmetic: Arithmetic, terms: UpdateTerms) -> Blocks:
    """Parts of a weight, each with the function from its fp32 values to the updated ones."""
    weight = optimizer.weights[i]
    states = [state.view(-1) for state in optimizer.states_of(i)]
    gradient = local(given(weight)).reshape(-1)
    block = CPU_BLOCK if gradient.device.type == "cpu" else DEVICE_BLOCK
    for start in range(0, len(gradient), block):
        part = slice(start, start + block)
        held = [state[part] for state in states]
        write = _write
        if held[0].dtype == torch.bfloat16:
            write = _write_rounded(weight, start, min(part.stop, len(gradient)), terms.count)
        yield part, _guarded(arithmetic, gradient[part], held, terms.finite > 0, write)


def _write(states: Tensors, updated: Tensors, finite: Tensor) -> None:
    for state, new in zip(states, updated, strict=True):
        state.copy_(torch.where(finite, new, state))


def _write_rounded(weight: Tensor, start: int, stop: int, count: Tensor) -> WriteStates:
    """Writes states of bf16, each rounded by sixteen bits of its own in the draws of its elements."""

    def write(states: Tensors, updated: Tensors, finite: Tensor) -> None:
        index = Elements(weight).indices(start, stop) + count.long() * STEP
        drawn = hashed(weight.state_draws, index)  # pyright: ignore[reportAttributeAccessIssue]
        for shift, state, new in zip(STATE_DRAWS[: len(states)], states, updated, strict=True):
            chosen = (logical_shift(drawn, shift) & (SIXTEEN_BITS - 1)).to(torch.int32)
            state.copy_(torch.where(finite, round_stochastic(new, chosen), state))

    return write


def _guarded(
    arithmetic: Arithmetic, gradient: Tensor, states: list[Tensor], finite: Tensor, write: WriteStates
) -> Callable[[Tensor], Tensor]:
    """One block's update, which leaves everything as it is when the gradient is not finite."""

    def updated(weight: Tensor) -> Tensor:
        moved, new_states = arithmetic(weight, gradient.float(), [state.float() for state in states])
        write(states, new_states, finite)
        return torch.where(finite, moved, weight)

    return updated


def _stochastic(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    at = Elements(weight)
    for part, updated in blocks:
        index = at.indices(part.start, min(part.stop, len(flat)))
        draws = uniform(weight.draws, index + count.long() * STEP)  # pyright: ignore[reportAttributeAccessIssue]
        flat[part] = round_stochastic(updated(flat[part].float()), (draws * SIXTEEN_BITS).to(torch.int32))


def _split(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    low = low_bits(weight).view(-1)
    for part, updated in blocks:
        flat[part], low[part] = split(updated(join(flat[part], low[part])))


def _kept(weight: Tensor, flat: Tensor, blocks: Blocks, count: Tensor) -> None:
    for part, updated in blocks:
        flat[part] = updated(flat[part])


# What writes a weight from its updated pieces, by optim.master_weights.
ROUND_TO = {"fp32": _kept, "none": _stochastic, "split": _split}


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


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master weight as its bf16 parameter and its low bits."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master weight, exactly."""
    high = weight.view(torch.int16).to(torch.int32)
    return ((high << 16) + low.to(torch.int32)).view(torch.float32)


def round_stochastic(x: Tensor, drawn: Tensor) -> Tensor:
    """Stochastic rounding to bf16: away from zero with the probability of the part cut off; `drawn` has 16 bits."""
    return ((x.view(torch.int32) + drawn) >> 16).to(torch.int16).view(torch.bfloat16)


def rounding_bits(weight: int, begin: int, count: Tensor, size: int) -> Tensor:
    """32 random bits per element: a pure function of weight, element and update, so that a resumed run has the same."""
    state = torch.arange(size, dtype=torch.int32, device=count.device)
    state += count.to(torch.int32) * signed(OF_UPDATE, 32) + signed(begin + (weight + 1) * OF_WEIGHT, 32)
    return mixed(state, MIX, LAST_SHIFT)
