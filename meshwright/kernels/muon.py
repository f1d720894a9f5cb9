"""Muon's update by elements, before and after its matrices are whole: each reads and writes everything once.

Per element with bf16 matrices: before, 4 + 4 bytes read and 4 + 2 written (gradient, momentum; momentum, matrix);
after, 2 + 4 read and 4 written (matrix, weight; weight), and 2 for a bf16 copy. Split weights take as many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Pointer, constexpr, jit, tl

BLOCK = 4096  # elements of one program


@dataclass(frozen=True, slots=True)
class MuonStep:
    """The numbers of one step; scalars are on the device, so nothing waits for it."""

    share: float  # of the momentum that stays
    factor: Tensor  # the gradient is multiplied by it
    finite: Tensor  # 1 or 0: whether to update at all

    def scalars(self) -> Tensor:
        """Those that a kernel reads."""
        return torch.stack([self.factor.double(), self.finite.double()]).float()


def accumulate(gradient: Tensor, momentum: Tensor, room: Tensor | None, step: MuonStep) -> None:
    """Add a gradient to the momentum b, and write g + μb into `room`; where nothing is finite that is anything."""
    scaled = gradient.to(momentum.dtype) * step.factor.to(momentum.dtype)
    momentum.copy_(torch.where(step.finite > 0, momentum * step.share + scaled, momentum))
    if room is not None:
        room.copy_(scaled + momentum * step.share)


def accumulate_fused(gradient: Tensor, momentum: Tensor, room: Tensor | None, scalars: Tensor, share: float) -> None:
    """The same by one kernel."""
    assert momentum.is_contiguous(), "states are contiguous"
    size = momentum.numel()
    if size:
        _accumulate[(-(-size // BLOCK),)](
            gradient.contiguous(), momentum, momentum if room is None else room, scalars, share, size,
            has_room=room is not None, block=BLOCK, num_warps=8,
        )  # fmt: skip


@jit
def _accumulate(
    gradient: Pointer,
    momentum: Pointer,
    room: Pointer,
    scalars: Pointer,
    share: float,
    size: int,
    has_room: constexpr,
    block: constexpr,
) -> None:
    if tl.load(scalars + 1) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
    m = tl.load(momentum + at, mask=inside, other=0.0) * share + g
    tl.store(momentum + at, m, mask=inside)
    if has_room:
        tl.store(room + at, (g + m * share).to(room.dtype.element_ty), mask=inside)


def moved(weight: Tensor, made: Tensor, stays: float, by: float, finite: Tensor) -> Tensor:
    """The weight after the update: the share that decay leaves, less the orthogonalized matrix times a number."""
    return torch.where(finite > 0, weight * stays - made.to(weight.dtype) * by, weight)


def move_fused(weight: Tensor, beside: Tensor | None, made: Tensor, stays: float, by: float, scalars: Tensor) -> None:
    """The same in place by one kernel; `beside`: a bf16 or fp16 copy of the weight, or the low bits of a split one."""
    assert weight.is_contiguous(), "weights are contiguous"
    size = weight.numel()
    if size:
        split = weight.dtype == torch.bfloat16
        _move[(-(-size // BLOCK),)](
            weight.view(torch.int16) if split else weight, weight if beside is None else beside, made.contiguous(),
            scalars, stays, by, size,
            split=split, has_copy=not split and beside is not None, block=BLOCK, num_warps=8,
        )  # fmt: skip


@jit
def _move(
    weight: Pointer,
    beside: Pointer,
    made: Pointer,
    scalars: Pointer,
    stays: float,
    by: float,
    size: int,
    split: constexpr,
    has_copy: constexpr,
    block: constexpr,
) -> None:
    if tl.load(scalars + 1) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    u = tl.load(made + at, mask=inside, other=0.0).to(tl.float32)
    if split:
        bits = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
        bits += tl.load(beside + at, mask=inside, other=0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True) * stays - u * by
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(weight + at, high.to(tl.int16), mask=inside)
        tl.store(beside + at, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        w = tl.load(weight + at, mask=inside, other=0.0) * stays - u * by
        tl.store(weight + at, w, mask=inside)
        if has_copy:
            tl.store(beside + at, w.to(beside.dtype.element_ty), mask=inside)
