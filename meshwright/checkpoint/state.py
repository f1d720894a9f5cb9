"""What a rank holds of the state, tensor by tensor: the same list is saved from and restored into.

A part of a tensor is a region: how a checkpoint's slices and a rank's parts meet is arithmetic on regions, and takes no
collective.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Region = tuple[tuple[int, int], ...]  # first and one past the last index of each dim
Shape = tuple[int, ...]

MOST_CELLS = 10**7  # of the grid that a tensor's slices draw; a pipeline of thousands of ranks stays far below
SLICE_BYTES = 32 * 2**20  # no slice is larger, so that checking one takes little memory
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STATE_DTYPES = {**TORCH_DTYPES, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}  # with codes of optimizer states
DTYPES = {dtype: name for name, dtype in STATE_DTYPES.items()}  # as safetensors writes them
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


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


class HasArrived(Protocol):
    """Something on its way."""

    def synchronize(self) -> None:
        """Wait until it is there."""
        ...


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """A slice that is about to be written: its numbers are in host memory, or on their way there."""

    name: str
    shape: Shape  # of the whole tensor
    region: Region
    tensor: Tensor  # what is inside the region
    ready: HasArrived | None = None  # when a device has copied it there

    @property
    def dtype(self) -> str:
        return DTYPES[self.tensor.dtype]

    @property
    def bits(self) -> np.ndarray:
        """The numbers as unsigned integers. Waits for the device that they come from."""
        if self.ready is not None:
            self.ready.synchronize()
        whole = self.tensor.contiguous().cpu().view(INTEGERS[self.tensor.element_size()]).numpy()
        return whole.view(f"u{self.tensor.element_size()}")


def region_size(region: Region) -> int:
    """Elements inside."""
    return math.prod(end - begin for begin, end in region)


def region_shape(region: Region) -> Shape:
    """The shape of what is inside."""
    return tuple(end - begin for begin, end in region)


def overlap(one: Region, other: Region) -> Region | None:
    """What lies in both, None if nothing does."""
    both = tuple((max(left[0], right[0]), min(left[1], right[1])) for left, right in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """A region as an index into a tensor that holds the outer one."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(region, outer, strict=True))


def region_pieces(region: Region, itemsize: int, limit_bytes: int) -> Iterator[Region]:
    """A region in pieces of at most so many bytes: rows of the first dim, or of the next where one row is too much."""
    if region_size(region) == 0:
        return
    if region_size(region) * itemsize <= limit_bytes or not region:
        yield region
        return
    (begin, end), rest = region[0], region[1:]
    rows = max(limit_bytes // (region_size(rest) * itemsize), 1)
    for first in range(begin, end, rows):
        last = min(first + rows, end)
        if last - first > 1 or not rest:
            yield ((first, last), *rest)
        else:
            yield from (((first, last), *piece) for piece in region_pieces(rest, itemsize, limit_bytes))


def region_text(region: Region) -> str:
    """A region as Python would index it."""
    return "[" + ",".join(f"{begin}:{end}" for begin, end in region) + "]"


def tiling_fault(shape: Shape, regions: Sequence[Region]) -> str | None:
    """Why regions do not cover a tensor exactly once; None if they do."""
    if any(len(region) != len(shape) for region in regions):
        return "a slice has another number of dims"
    if any(
        not 0 <= begin <= end <= length
        for region in regions
        for (begin, end), length in zip(region, shape, strict=True)
    ):
        return "a slice reaches outside"
    edges = [
        sorted({0, length, *(edge for region in regions for edge in region[dim])}) for dim, length in enumerate(shape)
    ]
    if math.prod(len(edge) for edge in edges) > MOST_CELLS:
        return "its slices draw too fine a grid"
    places = [{edge: place for place, edge in enumerate(dim)} for dim in edges]
    times = np.zeros([max(len(dim) - 1, 1) for dim in edges], dtype=np.int32)
    for region in regions:
        times[tuple(slice(place[begin], place[end]) for place, (begin, end) in zip(places, region, strict=True))] += 1
    if (times > 1).any():
        return "slices overlap"
    return "a part of it is in no slice" if (times == 0).any() and math.prod(shape) else None


def writers(sizes: Sequence[int], copies: int) -> list[int]:
    """Which of its equal holders writes each tensor: in turn the one with the least so far.

    A pure function of the sizes, so that all holders agree without a word.
    """
    loads = [0] * copies
    chosen = []
    for each in sizes:
        writer = loads.index(min(loads))
        loads[writer] += each
        chosen.append(writer)
    return chosen
