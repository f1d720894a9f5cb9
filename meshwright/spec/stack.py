"""What software runs a plan: where stacks differ in what they hold and how fast they go, by name and as data."""

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from meshwright.spec.holding import Holding
from meshwright.spec.speed import Speed


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of one training program. Those of our own trainer are the entry `meshwright`."""

    name: str
    match: tuple[str, ...] = ()  # words in the name that a publication gives

    sequence_parallel: bool = True  # with tp, what lies between matrices is split along the sequence
    attention: Literal["flash", "math"] = "flash"  # "math": the scores of a layer exist as a whole
    vocab_multiple: int = 1  # the vocabulary is filled up to a multiple of this times tp
    holds: Holding = Holding()  # what it keeps in memory
    speed: Speed = Speed()  # the table [NAME.speed]


@cache
def stacks() -> dict[str, Stack]:
    """Every known stack by name, in the order of the file."""
    table = tomllib.loads((resources.files("meshwright.spec") / "stacks.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **entry}, Stack) for name, entry in table.items()}


def stack_of(framework: str) -> Stack:
    """The stack of a framework's name as a publication gives it; `generic` where it is not known."""
    text = framework.lower()
    for stack in stacks().values():
        if any(word in text for word in stack.match):
            return stack
    return stacks()["generic"]
