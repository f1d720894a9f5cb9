"""What software runs a plan: where stacks differ in what they hold and how fast they go, by name and as data."""

from typing import Literal

import msgspec


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of one training program. Those of our own trainer are the entry `meshwright`."""

    name: str
    match: tuple[str, ...] = ()  # words in the name that a publication gives

    sequence_parallel: bool = True  # with tp, what lies between matrices is split along the sequence
    attention: Literal["flash", "math"] = "flash"  # "math": the scores of a layer exist as a whole
    vocab_multiple: int = 1  # the vocabulary is filled up to a multiple of this times tp
