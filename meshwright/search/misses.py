"""When nothing fits: the plans that come nearest, and changes after which something does."""

from collections.abc import Iterator

import msgspec

from meshwright.search.found import Found, priced
from meshwright.search.group import Group, groups
from meshwright.search.largest import largest_model, largest_sequence
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.search.questions import gpus_needed
from meshwright.search.room import Room, frugal_split
from meshwright.spec.cluster import cards

TRIED = 12  # of the least by the closed form, whose ledgers are then made


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something else to ask for, and the best plan it has."""

    change: str
    found: Found


def nearest(question: Question, top: int = 3) -> list[Found]:
    """The plans that lack least."""
    room = Room(question)
    least: dict[float, Group] = {}
    for group in groups(question):
        for order in group.parts():
            for part in order.parts():
                least.setdefault(room.least(part), part)
    tried = [priced(question.job(least[size].plan(frugal_split(least[size])))) for size in sorted(least)[:TRIED]]
    return sorted(tried, key=lambda found: -found.fit.headroom_bytes)[:top]


def changes(question: Question, top: int = 3) -> list[Change]:
    """The first few changes that let something fit: what was fixed, then machines, then the sequence."""
    found: list[Change] = []
    for attempt in (_released, _more, _larger, _shorter, _smaller):
        found += attempt(question)
        if len(found) >= top:
            break
    return found[:top]


def _released(question: Question) -> Iterator[Change]:
    for name, value in question.fixed.items():
        others = {key: kept for key, kept in question.fixed.items() if key != name}
        answer = search(msgspec.structs.replace(question, fixed=others), top=1)
        if answer.found:
            yield Change(change=f"leave plan.{name} = {value} to the search", found=answer.found[0])


def _more(question: Question) -> Iterator[Change]:
    needed = gpus_needed(question)
    if needed is not None:
        gpus, answer = needed
        yield Change(change=f"{gpus} of these GPUs", found=answer.found[0])


def _larger(question: Question) -> Iterator[Change]:
    memory = question.cluster.gpu.memory_bytes
    if question.is_limited:  # no card lets more be used
        return
    for card in sorted(cards(), key=lambda card: card.gpu.memory_bytes):
        if card.gpu.memory_bytes <= memory or not card.gpu.peak(question.precision):
            continue
        name = f"{question.cluster.gpus}x{card.gpu.name}"
        machines = msgspec.structs.replace(card, gpus=question.cluster.gpus, name=name)
        answer = search(question.on(machines), top=1)
        if answer.found:
            yield Change(change=f"{machines.name} instead", found=answer.found[0])
            return


def _shorter(question: Question) -> Iterator[Change]:
    longest = largest_sequence(question)
    if longest is not None:
        yield Change(change=f"a sequence of {longest.value}", found=longest.found)


def _smaller(question: Question) -> Iterator[Change]:
    largest = largest_model(question)
    if largest is not None:
        yield Change(change=f"{largest.value} instead of this model", found=largest.found)
