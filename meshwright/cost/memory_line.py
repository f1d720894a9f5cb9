"""One entry of the ledger, and the entries of a rank that rests."""

from collections.abc import Iterable
from typing import Literal

import msgspec

Name = Literal[
    "weights",
    "master",
    "gradients",
    "moments",
    "gathered",
    "waiting",
    "update",
    "activations",
    "recompute",
    "backward",
    "logits",
    "buffers",
    "workspace",
    "slack",
    "context",
    "states",
    "pieces",
]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of thing takes. Entries add up to the most that a rank holds during a step."""

    name: Name
    bytes: int
    why: str


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a rank as most moments of a step have them; each moment says which it has otherwise."""

    lines: tuple[tuple[Name, float, str], ...]  # name, bytes, why
    buffered: bool  # gradients are there from the first moment on
    gathered_at_loss: float = 0.0
    block_share: float = 0.0  # of all gradients, a block's
    begin_share: float = 0.0  # and those that the backward makes last, before the blocks
    gathered_at_end: float | None = None  # when the last backward reaches the first block; None: as ever
    outside: float = 0.0  # gathered, of what is outside the blocks: summed last
    outside_sums: float = 0.0  # its gradient as it came, and wide for the sum; 0: it is not summed as a whole
    update: float = 0.0  # what the optimizer's step makes beside its states

    def of(self, name: Name) -> float:
        """Bytes of one line."""
        return next(size for line, size, _ in self.lines if line == name)


def total(lines: Iterable[Line]) -> int:
    """Bytes of all lines."""
    return sum(line.bytes for line in lines)
