"""AdamW in one pass over weights that are bf16 alone: the bits they lack are kept beside them, or drawn.

Per element with a bf16 gradient: 2 + 2 + 8 bytes read and 2 + 8 written, and 2 more each way where the low bits are
kept. The draws are those of the plain twin, a hash of weight, element and update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.adamw import BLOCK, Group, Moves, _aligned, _moved, _name, _place, _typed, scalars
from meshwright.kernels.choose import Pointer, Values, constexpr, jit, tl


class Stream(NamedTuple):
    """Where a weight's draws begin: the hash's state of its first element, and an element's and an update's step."""

    state: int
    element: int
    update: int


class LowBits(Group):
    """Weights in bf16 with the sixteen bits that these leave out beside them, as one fp32 number."""

    def __init__(
        self, weights: Sequence[Tensor], low: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> None:
        super().__init__(weights, first, second, low)

    def update(self, gradients: Sequence[Tensor], decay: float, moves: Moves) -> None:
        """Move every weight of the group."""
        _launch(self, gradients, decay, moves, None)


class Drawn(Group):
    """Weights in bf16, each rounded up or down by a draw of its own."""

    def __init__(
        self, weights: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], streams: Sequence[Stream]
    ) -> None:
        super().__init__(weights, first, second, [])
        by_field = [list(field) for field in zip(*streams, strict=True)]
        self.streams = torch.tensor(by_field, dtype=torch.int64).flatten().to(weights[0].device)

    def update(self, gradients: Sequence[Tensor], decay: float, moves: Moves) -> None:
        """Move every weight of the group."""
        _launch(self, gradients, decay, moves, self.streams)


def _launch(group: Group, gradients: Sequence[Tensor], decay: float, moves: Moves, streams: Tensor | None) -> None:
    given, addresses = group._given(gradients)
    _adamw_bf16[(len(group.owner),)](
        group.owner, group.start, group.sizes, group.fixed, addresses, scalars(moves), moves.count,
        group.sizes if streams is None else streams,
        moves.rate, moves.beta1, moves.beta2, moves.eps, decay, len(group.masters),
        gradient=_name(given[0]), drawn=streams is not None, aligned=group.aligned and _aligned(given),
        block=BLOCK, num_warps=8,
    )  # fmt: skip


@jit
def _sixteen(address: Values, aligned: constexpr) -> Values:
    pointer = address.to(tl.pointer_type(tl.int16))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _draw(state: Values) -> Values:
    """Sixteen bits of splitmix64 (Steele, Lea and Flood 2014)."""
    state = state.to(tl.uint64)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return ((state ^ (state >> 31)) >> 48).to(tl.int32)


@jit
def _adamw_bf16(
    owners: Pointer,
    starts: Pointer,
    sizes: Pointer,
    fixed: Pointer,
    gradients: Pointer,
    scalars: Pointer,
    updates: Pointer,
    streams: Pointer,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    count: int,
    gradient: constexpr,
    drawn: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    if tl.load(scalars + 3) == 0:
        return
    owner, at, inside = _place(owners, starts, sizes, aligned, block)
    high_bits = _sixteen(tl.load(fixed + owner), aligned) + at
    low_bits = _sixteen(tl.load(fixed + 3 * count + owner), aligned) + at
    first = _typed(tl.load(fixed + count + owner), "fp32", aligned) + at
    second = _typed(tl.load(fixed + 2 * count + owner), "fp32", aligned) + at
    g = tl.load(_typed(tl.load(gradients + owner), gradient, aligned) + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first, mask=inside, other=0.0)
    v = tl.load(second, mask=inside, other=0.0)
    bits = tl.load(high_bits, mask=inside, other=0).to(tl.int32) << 16
    if not drawn:
        bits += tl.load(low_bits, mask=inside, other=0).to(tl.int32)
    w = bits.to(tl.float32, bitcast=True)
    w, m, v = _moved(w, m, v, g, scalars, rate, beta1, beta2, eps, decay)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    bits = w.to(tl.int32, bitcast=True)
    if drawn:
        step = tl.load(updates).to(tl.int64) * tl.load(streams + 2 * count + owner)
        state = tl.load(streams + owner) + step + at * tl.load(streams + count + owner)
        tl.store(high_bits, ((bits + _draw(state)) >> 16).to(tl.int16), mask=inside)
    else:
        high = (bits + 0x8000) >> 16
        tl.store(high_bits, high.to(tl.int16), mask=inside)
        tl.store(low_bits, (bits - (high << 16)).to(tl.int16), mask=inside)
