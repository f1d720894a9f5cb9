"""Pieces: the runs of neighbouring elements in which offloaded states are moved and updated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE = 1 << 24  # elements: large enough for full speed of copies and disks, small enough to have several in memory
AHEAD = 2  # pieces whose states are being read
SLOTS = AHEAD + 2  # pieces on their way: one more is being updated, one is being written


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one weight, counted in its elements."""

    group: int
    weight: int
    begin: int
    end: int
    last: bool  # of its group


def cut(sizes: Sequence[Sequence[tuple[int, int]]], most: int) -> list[Piece]:
    """All elements of all groups, of which each lists its weights by number and size, in their order."""
    found: list[Piece] = []
    for number, group in enumerate(sizes):
        parts = [(weight, *span) for weight, size in group for span in _spans(size, most)]
        for place, (weight, begin, end) in enumerate(parts):
            found.append(Piece(number, weight, begin, end, place == len(parts) - 1))
    return found


def _spans(size: int, most: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + most, size)) for begin in range(0, size, most))
