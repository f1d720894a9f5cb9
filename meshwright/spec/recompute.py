"""What the backward computes anew instead of keeping: a word of the plan, read into runs of blocks."""

import difflib
import math
import re
from functools import lru_cache

from meshwright.spec.problem import Problem

WORDS = ("none", "full", "selective", "sqrt")
COUNTED = re.compile(r"(every|first|selective)-([1-9][0-9]{0,8})")
PATTERN = f"^({'|'.join(WORDS)}|{COUNTED.pattern})$"  # for whoever checks a run file by its schema


def problem(policy: str) -> Problem | None:
    """What is wrong with a word, if anything."""
    if policy in WORDS or COUNTED.fullmatch(policy):
        return None
    remedy = f"use one of {', '.join(WORDS)}, every-K, first-K or selective-K with a whole K of at least 1"
    if near := difflib.get_close_matches(policy, (*WORDS, "every-2", "first-2", "selective-2"), 1):
        remedy = f"did you mean {near[0]}? {remedy}"
    return Problem(f"plan.recompute = {policy!r} is not a way of computing anew", remedy, "plan.recompute")


def by_operation(policy: str) -> bool:
    """Whether a block keeps what its costly operations return, and computes anew only the others."""
    return policy.startswith("selective")


@lru_cache(maxsize=1024)
def runs(policy: str, blocks: int) -> tuple[range, ...]:
    """Which blocks of a stage (or of a model without stages) are computed anew, those of one run together.

    Of a run only its input is kept from the forward to the backward. What is in no run keeps everything. Under
    `selective` each block is a run of its own, of which `by_operation` keeps more; under `selective-K` the first are.
    """
    assert problem(policy) is None, "refused before ranks start"
    if policy == "none":
        return ()
    counted = COUNTED.fullmatch(policy)
    if counted is None:
        length = max(round(math.sqrt(blocks)), 1) if policy == "sqrt" else 1
        return _cut(blocks, length)
    word, number = counted[1], int(counted[2])
    return _cut(blocks, number) if word == "every" else _cut(min(number, blocks), 1)


def _cut(blocks: int, length: int) -> tuple[range, ...]:
    """Blocks in runs of one length; the last may be shorter."""
    return tuple(range(start, min(start + length, blocks)) for start in range(0, blocks, length))
