"""The largest model, microbatch or sequence that some machines can train."""

import math
from collections.abc import Callable

import msgspec

from meshwright.search.empty import empty, refuse_empty
from meshwright.search.found import Found
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.spec import zoo
from meshwright.spec.params import count
from meshwright.spec.problem import InputError

SHORTEST = 1024  # a sequence; shorter ones are not looked for
MOST = 2**40


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest of something that fits, the plan that does it, and the next larger one, which does not."""

    value: int | str
    found: Found
    next_value: int | str | None = None  # None: nothing larger was tried
    end: str = ""  # why not, where there is a reason


def largest_model(question: Question) -> Largest | None:
    """Of the zoo, the largest model that can be trained on these machines."""
    larger = None
    for name in sorted(zoo.preset_names(), key=lambda name: (-count(zoo.preset(name)), name)):
        arch = zoo.preset(name)
        if arch.positions == "learned" and arch.context < question.sequence:
            continue
        answer = search(msgspec.structs.replace(question, arch=arch), top=1)
        if answer.found:
            return Largest(value=name, found=answer.found[0], next_value=larger)
        if answer.counts.legal:  # else what is fixed does not suit this model, whatever its size
            larger = name
    return None


def largest_microbatch(question: Question) -> Largest | None:
    """The most sequences in one forward pass of one rank, every GPU reading its own unless axes are fixed."""
    alone = {"tp": 1, "pp": 1, "cp": 1, "accumulate": 1} | question.fixed
    axes = math.prod(alone[axis] for axis in ("tp", "pp", "cp"))
    if axes < 1 or question.cluster.gpus % axes:
        raise InputError(empty(question))
    sequences = question.cluster.gpus // axes * alone["accumulate"]
    vary = tuple(each for each in question.vary if each != "batch")  # which follows from the microbatch

    def asked(microbatch: int) -> Question:
        fixed = alone | {"microbatch": microbatch}
        return msgspec.structs.replace(question, batch=microbatch * sequences, fixed=fixed, vary=vary)

    refuse_empty(asked(1))
    return _largest(lambda microbatch: _best(asked(microbatch)), start=1, grain=1, share=0.0)


def largest_sequence(question: Question) -> Largest | None:
    """The longest sequence that some plan can train on, to an eighth, or as long as the table of its positions."""
    has_table = question.arch.positions == "learned"
    most = question.arch.context if has_table else MOST

    def attempt(sequence: int) -> Found | None:
        return _best(msgspec.structs.replace(question, sequence=sequence))

    found = _largest(attempt, start=min(SHORTEST, most), grain=SHORTEST, share=1 / 8, most=most)
    if found is None or found.value != most or not has_table:
        return found
    return msgspec.structs.replace(found, end="the table of learned positions ends there")


def _best(question: Question) -> Found | None:
    return next(iter(search(question, top=1).found), None)


def _largest(
    attempt: Callable[[int], Found | None], start: int, grain: int, share: float, most: int = MOST
) -> Largest | None:
    """The largest number that an attempt survives: doubled until one fails, then halved in between.

    It is found to `grain`, and to a `share` of itself where that is more.
    """
    best, low, high = attempt(start), start, 0
    if best is None:
        return None
    while low < most and not high:
        tried = min(2 * low, most)
        found = attempt(tried)
        if found is None:
            high = tried
        else:
            best, low = found, tried
    while high - low > max(grain, share * low):
        middle = low + max((high - low) // 2 // grain, 1) * grain
        found = attempt(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return Largest(value=low, found=best, next_value=high or None)
