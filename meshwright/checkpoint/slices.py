"""Regions of a tensor: how a checkpoint's slices and a rank's parts meet. Pure arithmetic, no collective."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

Region = tuple[tuple[int, int], ...]  # first and one past the last index of each dim
Shape = tuple[int, ...]

MOST_CELLS = 10**7  # of the grid that a tensor's slices draw; a pipeline of thousands of ranks stays far below


def region_of(place: Sequence[slice]) -> Region:
    """The same as numbers."""
    return tuple((part.start, part.stop) for part in place)


def size(region: Region) -> int:
    """Elements inside."""
    return math.prod(end - begin for begin, end in region)


def shape_of(region: Region) -> Shape:
    """The shape of what is inside."""
    return tuple(end - begin for begin, end in region)


def overlap(one: Region, other: Region) -> Region | None:
    """What lies in both, None if nothing does."""
    both = tuple((max(left[0], right[0]), min(left[1], right[1])) for left, right in zip(one, other, strict=True))
    return both if all(begin < end for begin, end in both) else None


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """A region as an index into a tensor that holds the outer one."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(region, outer, strict=True))


def pieces(region: Region, itemsize: int, limit_bytes: int) -> Iterator[Region]:
    """A region in pieces of at most so many bytes: rows of the first dim, or of the next where one row is too much."""
    if size(region) == 0:
        return
    if size(region) * itemsize <= limit_bytes or not region:
        yield region
        return
    (begin, end), rest = region[0], region[1:]
    rows = max(limit_bytes // (size(rest) * itemsize), 1)
    for first in range(begin, end, rows):
        last = min(first + rows, end)
        if last - first > 1 or not rest:
            yield ((first, last), *rest)
        else:
            yield from (((first, last), *piece) for piece in pieces(rest, itemsize, limit_bytes))


def text(region: Region) -> str:
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
