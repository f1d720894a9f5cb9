"""Where a piece is updated: by the host, to which gradients travel, or by the device, to which states do."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.optim.homes import staging
from meshwright.optim.moves import Move, Span, Terms
from meshwright.optim.piece import Piece
from meshwright.parallel.offload import Lane, Mark, reached


@dataclass
class Slot:
    """The buffers of one piece on its way; some of them take turns."""

    room: list[Tensor]  # in host memory, for states that are fetched from a file
    near: list[Tensor]  # where the update is computed: the states, or the gradient and the narrow weight
    arrived: Mark = None  # what the update reads is there
    left: Mark = None  # what the update made has gone out of the buffers


@dataclass(frozen=True, slots=True)
class Work:
    """A piece with what is known of it at a step."""

    piece: Piece
    weight: Tensor  # the piece of the narrow weight, on the device
    gradient: Tensor  # flat, on the device
    decay: float

    @property
    def span(self) -> Span:
        return Span(self.piece.weight, self.piece.begin, self.decay)


class OnHost:
    """Gradients come to the host, which updates states where they lie, and narrow weights go back."""

    def __init__(self, device: torch.device, move: Move, halves: bool) -> None:
        self.inward, self.outward = Lane(device), Lane(device)
        self.device, self.move, self.halves = device, move, halves

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.inward, self.outward

    def near(
        self, size: int, gradient: torch.dtype, weight: torch.dtype, states: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Buffers for one piece."""
        return staging(size, [gradient, weight], pinned=self.device.type == "cuda")

    def terms(self, terms: Terms) -> Terms | None:
        """The scalars where the update is computed, None if there is nothing to do. Waits for the verdict."""
        with self.inward.open():
            numbers = torch.stack([number.double() for number in (terms.count, terms.factor, terms.finite)]).cpu()
        count, factor, finite = numbers.unbind()
        return Terms(terms.optim, terms.rate, count.float(), factor, finite) if finite.item() else None

    def begin(self, work: Work, slot: Slot) -> None:
        """Let what the update reads be on its way."""
        size = len(work.weight)
        with self.inward.open():
            self.inward.wait(slot.left)
            slot.near[0][:size].copy_(work.gradient, non_blocking=True)
            if self.halves:
                slot.near[1][:size].copy_(work.weight, non_blocking=True)
            slot.arrived = self.inward.mark()

    def update(self, work: Work, held: Sequence[Tensor], slot: Slot, terms: Terms) -> Mark:
        """Move a piece; returns when its narrow weight is on the device."""
        gradient, weight = (buffer[: len(work.weight)] for buffer in slot.near)
        reached(slot.arrived)
        self.move(held, weight, gradient, terms, work.span)
        with self.outward.open():
            work.weight.copy_(weight, non_blocking=True)
            slot.left = self.outward.mark()
        return slot.left

    def returned(self, slot: Slot) -> None:
        """The states may be taken back: the host itself has written them."""


class OnDevice:
    """States come to the device and go back; gradients and narrow weights stay there."""

    def __init__(self, device: torch.device, move: Move) -> None:
        self.inward, self.work, self.outward = Lane(device), Lane(device), Lane(device)
        self.device, self.move = device, move

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.inward, self.work, self.outward

    def near(
        self, size: int, gradient: torch.dtype, weight: torch.dtype, states: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Buffers for one piece."""
        return [torch.empty(size, dtype=dtype, device=self.device) for dtype in states]

    def terms(self, terms: Terms) -> Terms | None:
        """The scalars are there already; the device itself leaves out an update whose gradient is not finite."""
        return terms

    def begin(self, work: Work, slot: Slot) -> None:
        """Nothing but the states travels, and they may still have to be fetched."""

    def update(self, work: Work, held: Sequence[Tensor], slot: Slot, terms: Terms) -> Mark:
        """Move a piece; returns when its narrow weight is there."""
        states = [buffer[: len(work.weight)] for buffer in slot.near]
        with self.inward.open():
            self.inward.wait(slot.left)
            for state, source in zip(states, held, strict=True):
                state.copy_(source, non_blocking=True)
            slot.arrived = self.inward.mark()
        with self.work.open():
            self.work.wait(slot.arrived)
            self.move(states, work.weight, work.gradient, terms, work.span)
            moved = self.work.mark()
        with self.outward.open():
            self.outward.wait(moved)
            for state, target in zip(states, held, strict=True):
                target.copy_(state, non_blocking=True)
            slot.left = self.outward.mark()
        return moved

    def returned(self, slot: Slot) -> None:
        """Wait until the states are back on the host."""
        reached(slot.left)


Site = OnHost | OnDevice
