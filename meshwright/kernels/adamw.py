"""AdamW in one pass: weights, moments and gradient are read once and written once, with a narrow copy of the weights.

Per element with a narrow gradient and copy: 2 + 4 + 8 bytes read, 4 + 8 + 2 written. One launch serves all tensors, by
a table of their addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Pointer, Values, constexpr, jit, tl

BLOCK = 2048  # elements of one program
ALIGNED = 16  # elements; a tensor that is no multiple of it is read number by number


@dataclass(frozen=True, slots=True)
class AdamWTensors:
    """What one update needs beside the tensors. Scalars are on the device: nothing here waits for it."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    count: Tensor  # updates made, this one included
    factor: Tensor  # what the gradient is multiplied with
    finite: Tensor  # 1 or 0: whether to move at all


class AdamWGroup:
    """Tensors that are updated together: masters in fp32, their moments, and the narrow copies if there are any."""

    def __init__(
        self, masters: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], copies: Sequence[Tensor]
    ) -> None:
        self.masters, self.first, self.second, self.copies = masters, first, second, copies
        device = masters[0].device
        sizes = [master.numel() for master in masters]
        programs = [(-(-size // BLOCK)) for size in sizes]
        tensors = [*masters, *first, *second, *copies]
        self.aligned = all(size % ALIGNED == 0 for size in sizes) and _aligned(tensors)
        self.owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(programs)).int().to(device)
        starts = torch.cat([torch.arange(number) for number in programs]) if programs else torch.zeros(0)
        self.start = starts.int().to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).to(device)
        self.fixed = _addresses([*masters, *first, *second, *(copies or masters)]).to(device)

    def update(self, gradients: Sequence[Tensor], decay: float, moves: AdamWTensors) -> None:
        """Move every weight of the group."""
        given, addresses = self._given(gradients)
        _adamw[(len(self.owner),)](
            self.owner, self.start, self.sizes, self.fixed, addresses, scalars(moves),
            moves.rate, moves.beta1, moves.beta2, moves.eps, decay, len(self.masters),
            gradient=_name(given[0]), narrow=_name(self.copies[0]) if self.copies else "",
            aligned=self.aligned and _aligned(given),
            block=BLOCK, num_warps=8,
        )  # fmt: skip

    def _given(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Gradients without gaps, and where they are."""
        given = [gradient.contiguous() for gradient in gradients]
        addresses = _addresses(given)
        if self.owner.is_cuda:  # from pinned memory, so that nothing waits
            addresses = addresses.pin_memory().to(self.owner.device, non_blocking=True)
        return given, addresses


def scalars(moves: AdamWTensors) -> Tensor:
    """What a kernel reads of the moves: the gradient's factor, both corrections of a young mean, whether to move."""
    count = moves.count.double()
    corrections = (1 - moves.beta1**count, 1 - moves.beta2**count)
    return torch.stack([moves.factor.double(), *corrections, moves.finite.double()]).float()


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all begin where wide loads may; a view into a larger buffer need not."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def _name(tensor: Tensor) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[tensor.dtype]


@jit
def _typed(address: Values, name: constexpr, aligned: constexpr) -> Values:
    if name == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif name == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _place(owners: Pointer, starts: Pointer, sizes: Pointer, aligned: constexpr, block: constexpr) -> Values:
    """Which tensor this program works on, which elements of it, and which of those it has."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    size = tl.load(sizes + owner)
    if aligned:
        size = tl.multiple_of(size, 16)
    at = tl.load(starts + program).to(tl.int64) * block + tl.arange(0, block)
    return owner, at, at < size


@jit
def _moved(
    w: Values, m: Values, v: Values, g: Values, scalars: Pointer,
    rate: float, beta1: float, beta2: float, eps: float, decay: float,
) -> Values:  # fmt: skip
    """A weight and its moments after the update."""
    g = g * tl.load(scalars)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    move = (m / tl.load(scalars + 1)) / (tl.sqrt(v / tl.load(scalars + 2)) + eps)
    return w * (1 - rate * decay) - rate * move, m, v


@jit
def _adamw(
    owners: Pointer,
    starts: Pointer,
    sizes: Pointer,
    fixed: Pointer,
    gradients: Pointer,
    scalars: Pointer,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    count: int,
    gradient: constexpr,
    narrow: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    finite = tl.load(scalars + 3)
    if finite == 0:
        return
    owner, at, inside = _place(owners, starts, sizes, aligned, block)
    master = _typed(tl.load(fixed + owner), "fp32", aligned) + at
    first = _typed(tl.load(fixed + count + owner), "fp32", aligned) + at
    second = _typed(tl.load(fixed + 2 * count + owner), "fp32", aligned) + at
    g = tl.load(_typed(tl.load(gradients + owner), gradient, aligned) + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(master, mask=inside, other=0.0)
    m = tl.load(first, mask=inside, other=0.0)
    v = tl.load(second, mask=inside, other=0.0)
    w, m, v = _moved(w, m, v, g, scalars, rate, beta1, beta2, eps, decay)
    tl.store(master, w, mask=inside)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    if narrow != "":
        copy = _typed(tl.load(fixed + 3 * count + owner), narrow, aligned) + at
        tl.store(copy, w.to(copy.dtype.element_ty), mask=inside)


class RoundingDraws(NamedTuple):
    """Where a weight's draws begin: the hash's state of its first element, and an element's and an update's step."""

    state: int
    element: int
    update: int


class LowBits(AdamWGroup):
    """Weights in bf16 with the sixteen bits that these leave out beside them, as one fp32 number."""

    def __init__(
        self, weights: Sequence[Tensor], low: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> None:
        super().__init__(weights, first, second, low)

    def update(self, gradients: Sequence[Tensor], decay: float, moves: AdamWTensors) -> None:
        """Move every weight of the group."""
        _launch(self, gradients, decay, moves, None)


class Drawn(AdamWGroup):
    """Weights in bf16, each rounded up or down by a draw of its own."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        streams: Sequence[RoundingDraws],
    ) -> None:
        super().__init__(weights, first, second, [])
        by_field = [list(field) for field in zip(*streams, strict=True)]
        self.streams = torch.tensor(by_field, dtype=torch.int64).flatten().to(weights[0].device)

    def update(self, gradients: Sequence[Tensor], decay: float, moves: AdamWTensors) -> None:
        """Move every weight of the group."""
        _launch(self, gradients, decay, moves, self.streams)


def _launch(
    group: AdamWGroup, gradients: Sequence[Tensor], decay: float, moves: AdamWTensors, streams: Tensor | None
) -> None:
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
