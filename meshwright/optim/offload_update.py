"""The update of one piece of an offloaded weight: fp32 master and states, or bf16 states and a split master weight.

A split fp32 master weight is the bf16 parameter that the device has and `low`, their difference as integers. The
parameter is rounded to nearest, ties away from zero, so the difference always fits into 16 bits and nothing is lost.

bf16 states are rounded stochastically, so that they are right on average: rounded to nearest, one that changes by less
than half a unit in a step would never change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from meshwright.models.init import mixed, signed
from meshwright.optim.interface import UpdateRule, UpdateTerms

CPU_RUN = 1 << 20  # elements at a time on a CPU: temporaries stay in its caches

# A weight's own draws differ from those of others and of other updates by these odd factors.
OF_WEIGHT, OF_UPDATE = 0x632BE5AB, 0x9E3779B1
MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))  # a 32-bit hash of few biases (Wellons 2018)
LAST_SHIFT = 16
DRAWN = (0, 16)  # where each state has its 16 bits in a draw of 32: room for two states


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """The elements of a weight that are updated, and their weight decay."""

    weight: int
    begin: int
    decay: float


PieceUpdater = Callable[[Sequence[Tensor], Tensor, Tensor, UpdateTerms, UpdateSpan], None]  # states, param, gradient


def piece_update(rule: UpdateRule) -> PieceUpdater:
    """The update function of a rule, for the state dtype of its run."""
    return partial(update_bf16 if rule.optim.state_dtype == "bf16" else update_fp32, rule)


def update_fp32(
    rule: UpdateRule, held: Sequence[Tensor], weight: Tensor, gradient: Tensor, terms: UpdateTerms, span: UpdateSpan
) -> None:
    """Update an fp32 master weight and its fp32 states, and copy the master to the parameter."""
    terms = replace(terms, decay=span.decay)
    for part in _runs(weight):
        master, *states = (state[part] for state in held)
        rule.fused([master], [gradient[part].to(master.dtype)], [[state] for state in states], terms)
        weight[part].copy_(master)


def update_bf16(
    rule: UpdateRule, held: Sequence[Tensor], weight: Tensor, gradient: Tensor, terms: UpdateTerms, span: UpdateSpan
) -> None:
    """Update a split master weight and its bf16 states."""
    terms = replace(terms, decay=span.decay)
    for part in _runs(weight):
        low, *states = (state[part] for state in held)
        master, fp32_states = join(weight[part], low), [state.float() for state in states]
        rule.fused([master], [gradient[part].float()], [[state] for state in fp32_states], terms)
        drawn = draws(span.weight, span.begin + part.start, terms.count, len(low))
        for shift, state, new in zip(DRAWN[: len(states)], states, fp32_states, strict=True):
            state.copy_(rounded(new, (drawn >> shift) & 0xFFFF))
        high, rest = split(master)
        weight[part].copy_(high)
        low.copy_(rest)


def _runs(weight: Tensor) -> list[slice]:
    size = len(weight)
    step = CPU_RUN if weight.device.type == "cpu" else max(size, 1)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


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


def rounded(x: Tensor, drawn: Tensor) -> Tensor:
    """Stochastic rounding to bf16: away from zero with the probability of the part cut off; `drawn` has 16 bits."""
    return ((x.view(torch.int32) + drawn) >> 16).to(torch.int16).view(torch.bfloat16)


def draws(weight: int, begin: int, count: Tensor, size: int) -> Tensor:
    """32 random bits per element: a pure function of weight, element and update, so that a resumed run has the same."""
    state = torch.arange(size, dtype=torch.int32, device=count.device)
    state += count.to(torch.int32) * signed(OF_UPDATE, 32) + signed(begin + (weight + 1) * OF_WEIGHT, 32)
    return mixed(state, MIX, LAST_SHIFT)


PIECE = 1 << 24  # elements: large enough for full speed of copies and disks, small enough to have several in memory
AHEAD = 2  # pieces whose states are being read
SLOTS = AHEAD + 2  # pieces in flight: one more is being updated, one is being written


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of one weight, counted in its elements."""

    group: int
    weight: int
    begin: int
    end: int
    last: bool  # of its group


def cut(sizes: Sequence[Sequence[tuple[int, int]]], most: int) -> list[StatePiece]:
    """All elements of all groups as pieces in order, from each group's (index, size) of its weights."""
    found: list[StatePiece] = []
    for number, group in enumerate(sizes):
        parts = [(weight, *span) for weight, size in group for span in _spans(size, most)]
        for place, (weight, begin, end) in enumerate(parts):
            found.append(StatePiece(number, weight, begin, end, place == len(parts) - 1))
    return found


def _spans(size: int, most: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + most, size)) for begin in range(0, size, most))
