"""What a rank holds of the state, tensor by tensor: the same list is saved from and restored into."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint import slices as regions
from meshwright.checkpoint.format import DTYPES, SLICE_BYTES, SlicePiece
from meshwright.checkpoint.slices import Region, Shape


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A part of a tensor in this rank's memory."""

    name: str
    shape: Shape  # of the whole tensor
    region: Region
    tensor: Tensor  # what is inside the region, on the device
    writes: bool  # several ranks may hold the same part, and one of them writes it

    @property
    def dtype(self) -> str:
        return DTYPES[self.tensor.dtype]


class Copies:
    """Host memory for what this rank writes, taken by the first save and used for every one.

    `in_place` copies only what a device holds. Until the rest is written, it must not change.
    """

    def __init__(self, holdings: Sequence[TensorShard], *, in_place: bool = False) -> None:
        self.holdings = [holding for holding in holdings if holding.writes and holding.tensor.numel()]
        self.in_place = in_place
        self.hosts: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return sum(holding.tensor.nbytes for holding in self.holdings if not self._stays(holding))

    def take(self) -> None:
        """Copy everything; when this returns, training may go on."""
        self.hosts = self.hosts or [
            holding.tensor if self._stays(holding) else _room(holding.tensor) for holding in self.holdings
        ]
        for holding, host in zip(self.holdings, self.hosts, strict=True):
            if not self._stays(holding):
                host.copy_(holding.tensor, non_blocking=True)
        for device in {holding.tensor.device for holding in self.holdings if holding.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _stays(self, holding: TensorShard) -> bool:
        return self.in_place and not holding.tensor.is_cuda

    def pieces(self) -> Iterator[SlicePiece]:
        """What was copied, in slices of bounded size."""
        for holding, host in zip(self.holdings, self.hosts, strict=True):
            for region in regions.pieces(holding.region, host.element_size(), SLICE_BYTES):
                inside = regions.inside(region, holding.region)
                yield SlicePiece(holding.name, holding.shape, region, host[inside])


def _room(tensor: Tensor) -> Tensor:
    """Host memory for a tensor; for a GPU's pinned, which it can be copied to at full speed."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
