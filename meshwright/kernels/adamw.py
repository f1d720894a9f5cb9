"""Fused AdamW: one launch reads and writes the master weights, moments and gradients of many tensors once.

Per element with a bf16 gradient and bf16 parameters beside fp32 masters: 2 + 4 + 8 bytes read, 4 + 8 + 2 written.
Without fp32 masters the weights are bf16, either split masters (their 16 low bits beside them) or stochastically
rounded, and the moments may be bf16, stochastically rounded. A table of addresses finds the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Pointer, Values, constexpr, jit, tl

BLOCK = 2048  # elements of one program
ALIGNED = 16  # elements; tensors of other sizes are read element by element


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The hyperparameters and scalars of one step; the scalars are on the device, so nothing waits for it."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    count: Tensor  # steps taken, this one included
    factor: Tensor  # the gradient is multiplied by it
    finite: Tensor  # 1 or 0: whether to update at all


class AdamWGroup:
    """fp32 master weights that are updated together, their moments, and their bf16 or fp16 parameters if any."""

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
        starts = torch.cat([torch.arange(count) for count in programs]) if programs else torch.zeros(0)
        self.start = starts.int().to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).to(device)
        self.fixed = _addresses([*masters, *first, *second, *(copies or masters)]).to(device)

    def update(self, gradients: Sequence[Tensor], decay: float, step: AdamWStep) -> None:
        """Update every weight of the group."""
        gradients, addresses = self._contiguous(gradients)
        _adamw[(len(self.owner),)](
            self.owner, self.start, self.sizes, self.fixed, addresses, scalars(step),
            step.lr, step.beta1, step.beta2, step.eps, decay, len(self.masters),
            grad_dtype=_name(gradients[0]), copy_dtype=_name(self.copies[0]) if self.copies else "",
            aligned=self.aligned and _aligned(gradients),
            block=BLOCK, num_warps=8,
        )  # fmt: skip

    def _contiguous(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The gradients made contiguous, and their addresses."""
        dense = [gradient.contiguous() for gradient in gradients]
        addresses = _addresses(dense)
        if self.owner.is_cuda:  # from pinned memory, so that nothing waits
            addresses = addresses.pin_memory().to(self.owner.device, non_blocking=True)
        return dense, addresses


def scalars(step: AdamWStep) -> Tensor:
    """The scalars a kernel reads: the gradient's factor, both bias corrections, whether to update."""
    count = step.count.double()
    corrections = (1 - step.beta1**count, 1 - step.beta2**count)
    return torch.stack([step.factor.double(), *corrections, step.finite.double()]).float()


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all begin at 16 bytes, as vector loads need; a view into a larger buffer may not."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def _name(tensor: Tensor) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[tensor.dtype]


@jit
def _pointer(address: Values, name: constexpr, aligned: constexpr) -> Values:
    if name == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif name == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif name == "int16":
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _span(owners: Pointer, starts: Pointer, sizes: Pointer, aligned: constexpr, block: constexpr) -> Values:
    """The tensor this program works on, its elements of that, and which of these exist."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    size = tl.load(sizes + owner)
    if aligned:
        size = tl.multiple_of(size, 16)
    at = tl.load(starts + program).to(tl.int64) * block + tl.arange(0, block)
    return owner, at, at < size


@jit
def _updated(
    w: Values, m: Values, v: Values, g: Values, scalars: Pointer,
    lr: float, beta1: float, beta2: float, eps: float, decay: float,
) -> Values:  # fmt: skip
    """A weight and its moments after the update."""
    g = g * tl.load(scalars)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    ratio = (m / tl.load(scalars + 1)) / (tl.sqrt(v / tl.load(scalars + 2)) + eps)
    return w * (1 - lr * decay) - lr * ratio, m, v


@jit
def _adamw(
    owners: Pointer,
    starts: Pointer,
    sizes: Pointer,
    fixed: Pointer,
    gradients: Pointer,
    scalars: Pointer,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    count: int,
    grad_dtype: constexpr,
    copy_dtype: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    finite = tl.load(scalars + 3)
    if finite == 0:
        return
    owner, at, inside = _span(owners, starts, sizes, aligned, block)
    master = _pointer(tl.load(fixed + owner), "fp32", aligned) + at
    first = _pointer(tl.load(fixed + count + owner), "fp32", aligned) + at
    second = _pointer(tl.load(fixed + 2 * count + owner), "fp32", aligned) + at
    g = tl.load(_pointer(tl.load(gradients + owner), grad_dtype, aligned) + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(master, mask=inside, other=0.0)
    m = tl.load(first, mask=inside, other=0.0)
    v = tl.load(second, mask=inside, other=0.0)
    w, m, v = _updated(w, m, v, g, scalars, lr, beta1, beta2, eps, decay)
    tl.store(master, w, mask=inside)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    if copy_dtype != "":
        copy = _pointer(tl.load(fixed + 3 * count + owner), copy_dtype, aligned) + at
        tl.store(copy, w.to(copy.dtype.element_ty), mask=inside)


class RoundingDraws(NamedTuple):
    """The hash state of a weight's first element, and its increments per element and per update."""

    state: int
    element: int
    update: int


class BF16Group(AdamWGroup):
    """Weights in bf16: split master weights, given their 16 low bits, or stochastically rounded, given their draws.

    Moments are fp32, or bf16 given the draws of their own rounding.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        low: Sequence[Tensor] = (),
        draws: Sequence[RoundingDraws] = (),
        state_draws: Sequence[RoundingDraws] = (),
    ) -> None:
        super().__init__(weights, first, second, low)
        self.draws, self.state_draws = self._by_field(draws), self._by_field(state_draws)

    def _by_field(self, draws: Sequence[RoundingDraws]) -> Tensor:
        """One table for the kernel; where it reads none any valid pointer serves."""
        by_field = [list(field) for field in zip(*draws, strict=True)]
        return torch.tensor(by_field, dtype=torch.int64).flatten().to(self.sizes.device) if draws else self.sizes

    def update(self, gradients: Sequence[Tensor], decay: float, step: AdamWStep) -> None:
        """Update every weight of the group."""
        gradients, addresses = self._contiguous(gradients)
        _adamw_bf16[(len(self.owner),)](
            self.owner, self.start, self.sizes, self.fixed, addresses, scalars(step), step.count, self.draws,
            self.state_draws, step.lr, step.beta1, step.beta2, step.eps, decay, len(self.masters),
            grad_dtype=_name(gradients[0]), stochastic=not self.copies,
            bf16_states=self.first[0].dtype == torch.bfloat16, aligned=self.aligned and _aligned(gradients),
            block=BLOCK, num_warps=8,
        )  # fmt: skip


@jit
def _hashed(draws: Pointer, updates: Pointer, owner: Values, at: Values, count: int) -> Values:
    """The 64 bits of splitmix64 (Steele, Lea and Flood 2014) for each element and update."""
    step = tl.load(updates).to(tl.int64) * tl.load(draws + 2 * count + owner)
    state = (tl.load(draws + owner) + step + at * tl.load(draws + count + owner)).to(tl.uint64)
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@jit
def _rounded(x: Values, drawn: Values) -> Values:
    """Stochastic rounding to the bits of a bf16 number; `drawn` has 16 bits."""
    return ((x.to(tl.int32, bitcast=True) + drawn.to(tl.int32)) >> 16).to(tl.int16)


@jit
def _state(pointer: Pointer, inside: Values, in_bf16: constexpr) -> Values:
    """A moment in fp32."""
    if in_bf16:
        value = (tl.load(pointer, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(pointer, mask=inside, other=0.0)
    return value


@jit
def _adamw_bf16(
    owners: Pointer,
    starts: Pointer,
    sizes: Pointer,
    fixed: Pointer,
    gradients: Pointer,
    scalars: Pointer,
    updates: Pointer,
    draws: Pointer,
    state_draws: Pointer,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    count: int,
    grad_dtype: constexpr,
    stochastic: constexpr,
    bf16_states: constexpr,
    aligned: constexpr,
    block: constexpr,
) -> None:
    if tl.load(scalars + 3) == 0:
        return
    owner, at, inside = _span(owners, starts, sizes, aligned, block)
    high_bits = _pointer(tl.load(fixed + owner), "int16", aligned) + at
    low_bits = _pointer(tl.load(fixed + 3 * count + owner), "int16", aligned) + at
    if bf16_states:
        first = _pointer(tl.load(fixed + count + owner), "int16", aligned) + at
        second = _pointer(tl.load(fixed + 2 * count + owner), "int16", aligned) + at
    else:
        first = _pointer(tl.load(fixed + count + owner), "fp32", aligned) + at
        second = _pointer(tl.load(fixed + 2 * count + owner), "fp32", aligned) + at
    g = tl.load(_pointer(tl.load(gradients + owner), grad_dtype, aligned) + at, mask=inside, other=0.0).to(tl.float32)
    m, v = _state(first, inside, bf16_states), _state(second, inside, bf16_states)
    bits = tl.load(high_bits, mask=inside, other=0).to(tl.int32) << 16
    if not stochastic:
        bits += tl.load(low_bits, mask=inside, other=0).to(tl.int32)
    w = bits.to(tl.float32, bitcast=True)
    w, m, v = _updated(w, m, v, g, scalars, lr, beta1, beta2, eps, decay)
    if bf16_states:
        drawn = _hashed(state_draws, updates, owner, at, count)
        tl.store(first, _rounded(m, drawn >> 48), mask=inside)
        tl.store(second, _rounded(v, (drawn >> 32) & 0xFFFF), mask=inside)
    else:
        tl.store(first, m, mask=inside)
        tl.store(second, v, mask=inside)
    if stochastic:
        tl.store(high_bits, _rounded(w, _hashed(draws, updates, owner, at, count) >> 48), mask=inside)
    else:
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(high_bits, high.to(tl.int16), mask=inside)
        tl.store(low_bits, (bits - (high << 16)).to(tl.int16), mask=inside)
