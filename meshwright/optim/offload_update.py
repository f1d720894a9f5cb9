"""AdamW of one piece, wherever it lies: in full width, or with moments of 16 bits and a wide weight in two halves.

A wide weight of 32 bits is the narrow weight that the device has, and what it lacks: `low`, the difference of the two
as integers. The narrow weight is rounded to nearest, halves away from zero, so the difference always has room in 16
bits, and nothing is lost.

Moments of 16 bits are rounded at random, up or down in proportion to what is cut off, so that they are right on
average: rounded to nearest, a moment that changes by less than half a unit in a step would never change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.run import Optim

CPU_RUN = 1 << 20  # elements at a time on a CPU: what is made beside the states stays in its caches

# A weight's own draws differ from those of others and of other updates by these odd factors.
OF_WEIGHT, OF_UPDATE = 0x632BE5AB, 0x9E3779B1
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # a 32-bit hash of few biases (Wellons 2018)
LAST_SHIFT = 16


@dataclass(frozen=True, slots=True)
class UpdateTerms:
    """What one update needs beside the tensors; its scalars are where they are updated."""

    optim: Optim
    rate: float
    count: Tensor  # updates made, this one included
    factor: Tensor  # what the gradient is multiplied with
    finite: Tensor  # 1 or 0: whether to move at all


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Which elements of which weight are moved, and how fast they decay."""

    weight: int
    begin: int
    decay: float


Move = Callable[[Sequence[Tensor], Tensor, Tensor, UpdateTerms, UpdateSpan], None]  # states, narrow weight, gradient


def choose(optim: Optim) -> Move:
    """How this run's states are moved."""
    return move_halves if optim.state_dtype == "bf16" else move_wide


def move_wide(held: Sequence[Tensor], weight: Tensor, gradient: Tensor, terms: UpdateTerms, span: UpdateSpan) -> None:
    """Wide weight and both moments in full width."""
    for part in _runs(weight):
        master, first, second = (state[part] for state in held)
        adamw(master, first, second, gradient[part].to(master.dtype), terms, span.decay)
        weight[part].copy_(master)


def move_halves(held: Sequence[Tensor], weight: Tensor, gradient: Tensor, terms: UpdateTerms, span: UpdateSpan) -> None:
    """The wide weight's lower half, and both moments in 16 bits."""
    for part in _runs(weight):
        low, first, second = (state[part] for state in held)
        master, wide_first, wide_second = join(weight[part], low), first.float(), second.float()
        adamw(master, wide_first, wide_second, gradient[part].float(), terms, span.decay)
        drawn = draws(span.weight, span.begin + part.start, terms.count, len(low))
        first.copy_(rounded(wide_first, drawn & 0xFFFF))
        second.copy_(rounded(wide_second, (drawn >> 16) & 0xFFFF))
        high, rest = split(master)
        weight[part].copy_(high)
        low.copy_(rest)


def _runs(weight: Tensor) -> list[slice]:
    size = len(weight)
    step = CPU_RUN if weight.device.type == "cpu" else max(size, 1)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def adamw(master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, terms: UpdateTerms, decay: float) -> None:
    """Torch's own kernel, as without offload."""
    optim, divisor = terms.optim, terms.factor.reciprocal().float()
    if gradient.dtype == torch.float64:  # the kernel reads its divisor in fp32, too coarse for a proof
        gradient, divisor = gradient * terms.factor, None
    torch._fused_adamw_(
        [master],
        [gradient],
        [first],
        [second],
        [],
        [terms.count],
        lr=terms.rate,
        beta1=optim.beta1,
        beta2=optim.beta2,
        weight_decay=decay,
        eps=optim.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=(1.0 - terms.finite).float(),
    )


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A wide weight as the narrow one, and what that lacks."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The wide weight again, to the bit."""
    high = weight.view(torch.int16).to(torch.int32)
    return ((high << 16) + low.to(torch.int32)).view(torch.float32)


def rounded(wide: Tensor, drawn: Tensor) -> Tensor:
    """Numbers of 16 bits, each away from zero with the probability of what is cut off; `drawn` is of 16 bits."""
    return ((wide.view(torch.int32) + drawn) >> 16).to(torch.int16).view(torch.bfloat16)


def draws(weight: int, begin: int, count: Tensor, size: int) -> Tensor:
    """32 bits for each element: a pure function of weight, element and update, so that a resumed run has the same."""
    state = torch.arange(size, dtype=torch.int32, device=count.device)
    state += count.to(torch.int32) * _signed(OF_UPDATE) + _signed(begin + (weight + 1) * OF_WEIGHT)
    for shift, factor in MIX:
        state.bitwise_xor_(_logical_shift(state, shift)).mul_(_signed(factor))
    return state.bitwise_xor_(_logical_shift(state, LAST_SHIFT))


def _logical_shift(word: Tensor, bits: int) -> Tensor:
    return (word >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


PIECE = 1 << 24  # elements: large enough for full speed of copies and disks, small enough to have several in memory
AHEAD = 2  # pieces whose states are being read
SLOTS = AHEAD + 2  # pieces on their way: one more is being updated, one is being written


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of one weight, counted in its elements."""

    group: int
    weight: int
    begin: int
    end: int
    last: bool  # of its group


def cut(sizes: Sequence[Sequence[tuple[int, int]]], most: int) -> list[StatePiece]:
    """All elements of all groups, of which each lists its weights by number and size, in their order."""
    found: list[StatePiece] = []
    for number, group in enumerate(sizes):
        parts = [(weight, *span) for weight, size in group for span in _spans(size, most)]
        for place, (weight, begin, end) in enumerate(parts):
            found.append(StatePiece(number, weight, begin, end, place == len(parts) - 1))
    return found


def _spans(size: int, most: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + most, size)) for begin in range(0, size, most))
