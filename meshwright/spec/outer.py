"""The outer loop of a plan whose replicas sync rarely: when they meet, and what each keeps for it.

Local SGD (`average`), SlowMo and DiLoCo differ in the update alone; both towers read what they share here. After
`optim.sync_warmup` steps of plain training every fragment of the model is synced once in `plan.sync_every` steps.
"""

from collections.abc import Iterator

import msgspec

from meshwright.spec.plan import Plan

ANCHOR, MOMENTUM = "anchor", "outer_momentum"  # in checkpoints: the weights as they were last synced, and the buffer
BLOCK, MOST_TP = 128, 8  # elements that share a scale, at most, in rows that so many ranks of tp may cut
SCALE_BYTES = 4  # fp32
BITS = {"int8": 8, "int4": 4, "fp8": 8}  # the last of lossy gradients and gathers alone
TOLD = 4  # numbers that parameter servers add up for an update: the square norm, the loss, the votes, the tokens
TALLY = 8  # numbers that replicas tell each other when they meet; see optim/outer.py


class SyncCalendar(msgspec.Struct, frozen=True, kw_only=True):
    """At which steps replicas meet, counted from 1."""

    every: int  # steps between two syncs of a fragment; 1: there is no outer loop
    fragments: int
    warmup: int
    steps: int

    def is_plain(self, step: int) -> bool:
        """Whether gradients are summed over all replicas in this step."""
        return self.every == 1 or step <= self.warmup

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that are synced at the end of a step: staggered, and all of them after the last."""
        if self.is_plain(step):
            return ()
        if step == self.steps:
            return tuple(range(self.fragments))
        since = (step - self.warmup) % self.every
        return tuple(number for number in range(self.fragments) if number * self.every // self.fragments == since)

    def meets(self, step: int) -> bool:
        """Whether all replicas hear of each other in this step."""
        return self.is_plain(step) or bool(self.due(step))

    def has_come(self, step: int, every: int) -> bool:
        """Whether what is due every so many steps is done now: where replicas meet, or at their next meeting."""
        if every == 0 or not self.meets(step):
            return False
        return any(each % every == 0 for each in self._since_last(step))

    def _since_last(self, step: int) -> Iterator[int]:
        yield step
        while step > 1 and not self.meets(step := step - 1):
            yield step


def calendar(plan: Plan, warmup: int, steps: int) -> SyncCalendar:
    """When the replicas of a plan meet."""
    return SyncCalendar(
        every=plan.sync_every if plan.parts > 1 else 1, fragments=plan.outer_fragments, warmup=warmup, steps=steps
    )


def fragment_of(layer: int, fragments: int) -> int:
    """The fragment of a layer, strided as in streaming DiLoCo; what is outside the blocks (-1) is in the first."""
    return max(layer, 0) % fragments


def outer_states(plan: Plan) -> tuple[str, ...]:
    """What a rank keeps of each of its weights for the outer update, by its names in checkpoints."""
    if not plan.has_outer_loop:
        return ()
    if plan.outer == "average":
        return (ANCHOR,) if plan.outer_quant != "none" else ()  # an exact mean needs no memory of the last one
    return ANCHOR, MOMENTUM


def served_rows(rows: int, servers: int, server: int) -> tuple[int, int]:
    """The rows of a weight, first and one past the last, of which one of so many parameter servers has the copy."""
    each = -(-rows // servers)
    return min(server * each, rows), min((server + 1) * each, rows)


def of_part(kind: str, part: int) -> str:
    """The name under which a replica saves what it alone has: the first one's has no number."""
    return f"{kind}@{part}" if part else kind


def kind_of(name: str) -> str:
    """The kind of a saved tensor, of whichever replica."""
    return name.partition("/")[0].partition("@")[0]


def part_of(name: str) -> int:
    """The replica that saved a tensor."""
    return int(name.partition("/")[0].partition("@")[2] or 0)


def block_length(length: int) -> int:
    """Elements of a row that share a scale: a power of two that no plan of up to MOST_TP ranks of tp cuts."""
    size = BLOCK
    while size > 1 and length % (MOST_TP * size):
        size //= 2
    return size if length % MOST_TP == 0 else length
