"""The cells of a published row, read tolerantly: numbers with words around them, blanks filled and named."""

import re
from collections.abc import Iterable, Mapping

NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+")
NEGATIVE = re.compile(r"-[\d.]")
MOST = 1e9  # no count of any run
LARGEST = 1e18  # no number of any run: of its parameters, or of its tokens
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NOTHING = {"", "-", "n/a", "na", "none", "null", "?", "unknown", "not stated"}


class RefusalError(ValueError):
    """A row that cannot be priced, with the reason as a sentence."""


class ImpossibleError(RefusalError):
    """A row whose plan could not have run: that is an answer too."""


class Cells:
    """One row by column; remembers what had to be assumed."""

    def __init__(self, row: Mapping[str, str | None]) -> None:
        self.row = {key.strip().lower(): (value or "").strip() for key, value in row.items() if key}
        self.assumed: list[str] = []
        self.impossible = False  # priced, and such a plan cannot run

    def text(self, column: str) -> str:
        """A cell in lower case; empty where the source says nothing."""
        return self.row.get(column, "").lower()

    def number(self, column: str) -> float | None:
        """The first number of a cell: 8, 1.0, 50,257, 405e9, 52B, 8×; None where there is none."""
        text = self.row.get(column, "")
        found = number(text)
        if found is not None and (found > LARGEST or NEGATIVE.match(text)):
            raise RefusalError(f"{column} = {text} is {'too large' if found > LARGEST else 'negative'}")
        return found

    def whole(self, column: str) -> int | None:
        """The first number of a cell as a whole one; None where there is none, or it is 0."""
        found = self.number(column)
        if found is not None and found > MOST:
            raise RefusalError(f"{column} = {self.row.get(column, '')} is too large")
        return round(found) if found else None

    def needed(self, column: str, what: str) -> int:
        """A count that nothing can stand in for."""
        found = self.whole(column)
        if found is None or found < 1:
            raise RefusalError(f"{what} is not given (column {column})")
        return found

    def whole_or(self, column: str, default: int, why: str) -> int:
        """A count, or its documented default, which is then listed."""
        found = self.whole(column)
        if found is not None and found >= 1:
            return found
        return self.assume(column, default, why)

    def degree(self, column: str) -> int:
        """A degree of parallelism; a blank is 1, as sources leave out the axes they do not use."""
        return self.whole(column) or 1

    def flag(self, column: str) -> bool | None:
        """Yes, no, or None where the source says neither."""
        text = self.text(column)
        if text.startswith(("y", "true", "on", "1")):
            return True
        return False if text.startswith(("n", "false", "off", "0")) and text not in ("n/a", "na") else None

    def assume(self, column: str, value: int, why: str) -> int:
        """Take a default, and remember it."""
        self.assumed.append(f"{column} = {value} ({why})")
        return value

    def note(self, sentence: str) -> None:
        """Remember something that was taken as something else."""
        self.assumed.append(sentence)

    def cannot_run(self, sentence: str) -> None:
        """Remember why this plan would not run, whatever it would cost."""
        self.impossible = True
        self.assumed.append(sentence)

    def argument(self, name: str) -> str | None:
        """The value of a launcher's argument that the notes list, "" for a bare switch, None where it is not there."""
        found = re.search(rf"(?<![\w-]){re.escape(name)}(?:=([^,;]*))?(?=[,;\s]|$)", self.text("notes"))
        return (found[1] or "").strip() if found else None


def number(text: str) -> float | None:
    """The first number in a text, with the scale of a letter right behind it (52B is 52 billion)."""
    found = NUMBER.search(text)
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    scale = re.match(r"\s?([kKmMbBtT])(?![a-zA-Z])", text[found.end() :])
    return value * SCALES[scale[1].lower()] if scale else value


def holds(text: str, words: Iterable[str]) -> bool:
    """Whether one of some words is part of a text."""
    return any(word in text for word in words)
