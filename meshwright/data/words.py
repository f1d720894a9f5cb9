"""Text to tokens word by word, from a dictionary of the words that came before: the tokens are the tokenizer's own.

A byte-level BPE cuts a text by a regular expression and encodes every piece by itself, so a piece always has the same
tokens. Python's own expressions cut in the same places, several times as fast as the tokenizer's. A piece that was not
met before, and text with characters that versions of Unicode may not agree on, is the tokenizer's to encode.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import chain, groupby
from typing import Any

from tokenizers import Tokenizer

# What ByteLevel of `tokenizers` cuts by if nothing else does (GPT-2's).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's, fewer than Python's
BEYOND = 1 << 16  # ranges from here on slow an expression down, and have few letters
FOLDED = "\u017f\u212a"  # which are an s and a k without regard to case
PROPERTIES = ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "Nd")
MOST = 1 << 20  # words that are remembered
SHORT = 48  # characters of a text that is remembered whole: what a template writes between two marks


class _Remembered(dict[str, list[int]]):
    """Tokens by text, asked for when they are missing."""

    def __init__(self, ask: Callable[[str], list[int]]) -> None:
        super().__init__()
        self.ask = ask

    def __missing__(self, text: str) -> list[int]:
        found = self.ask(text)
        if len(self) < MOST:
            self[text] = found
        return found


class Words:
    """The words of one tokenizer, and the tokens of each."""

    def __init__(self, tokenizer: Tokenizer, expression: str) -> None:
        self.own = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.expression, self.known = expression, set[str]()
        self.cut = re.compile(translated(expression, ascii_only=True)).findall
        self.words = _Remembered(self.own).__getitem__
        self.short = _Remembered(self._whole).__getitem__

    def encode(self, text: str) -> list[int]:
        """The tokens of a text without special tokens."""
        return self.short(text) if len(text) <= SHORT else self._whole(text)

    def _whole(self, text: str) -> list[int]:
        if text.isascii():
            return [*chain.from_iterable(map(self.words, self.cut(text)))]
        new = set(text) - self.known
        if any(map(_is_doubtful, new)) or not unicodedata.is_normalized("NFC", text):  # as some normalise it
            return self.own(text)
        self.known |= new
        return [*chain.from_iterable(map(self.words, _compiled(self.expression).findall(text)))]


def words_of(tokenizer: Tokenizer, described: dict[str, Any]) -> Words | None:
    """The words of a tokenizer, by its description; None where it does more than to cut and to encode the pieces."""
    plain = not any(token[flag] for token in described["added_tokens"] for flag in ("lstrip", "rstrip", "single_word"))
    model, normalizer = described["model"], described["normalizer"] or {"type": "NFC"}
    if not plain or model["type"] != "BPE" or model.get("dropout") or normalizer["type"] != "NFC":
        return None
    source = _expression(described["pre_tokenizer"] or {})
    if source is None:
        return None
    try:
        return Words(tokenizer, source)
    except (re.error, KeyError):
        return None


def translated(source: str, *, ascii_only: bool) -> str:
    """An expression in Python's words, properties as ranges; KeyError: one has a property that is unknown."""
    inside = False
    found = []
    for part in re.findall(r"\\p\{\w+\}|\\.|.", source, re.DOTALL):
        if part.startswith(r"\p") or part in (r"\s", r"\S"):
            found.append(_as_class(part, inside, ascii_only))
            continue
        inside = part == "[" or (inside and part != "]")
        found.append(part)
    return "".join(found)


def _as_class(part: str, inside: bool, ascii_only: bool) -> str:
    if part == r"\S" and inside:
        raise KeyError(part)
    ranges = SPACE if part in (r"\s", r"\S") else ranges_of(ascii_only)[part[3:-1]]
    if inside:
        return ranges
    negated = "^" if part == r"\S" else ""
    return f"[{negated}{ranges}]" if ranges else "(?!)"


@cache
def ranges_of(ascii_only: bool) -> dict[str, str]:
    """The characters of each property, as ranges of a class."""
    found: dict[str, list[str]] = {name: [] for name in PROPERTIES}
    numbers = range(128 if ascii_only else BEYOND)
    for category, group in groupby(numbers, lambda number: unicodedata.category(chr(number))):
        members = list(group)
        first, last = members[0], members[-1]
        for name in {category, category[0]} & found.keys():
            found[name].append(f"{re.escape(chr(first))}-{re.escape(chr(last))}")
    return {name: "".join(ranges) for name, ranges in found.items()}


@cache
def _compiled(expression: str) -> re.Pattern[str]:
    """What cuts text that has no doubtful characters."""
    return re.compile(translated(expression, ascii_only=False))


def _is_doubtful(letter: str) -> bool:
    """Whether versions of Unicode, or our ranges, may not say the same of a character."""
    category = unicodedata.category(letter)
    return category == "Cn" or letter in FOLDED or (ord(letter) >= BEYOND and category[0] in "LMN")


def _expression(described: dict[str, Any]) -> str | None:
    """The expression that a pre-tokenizer cuts by, None where there is none or more than one."""
    if described.get("type") == "ByteLevel" and not described["add_prefix_space"]:
        return GPT2 if described["use_regex"] else None
    steps = described.get("pretokenizers", []) if described.get("type") == "Sequence" else []
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, level = steps
    whole = split["behavior"] == "Isolated" and not split["invert"] and not level["use_regex"]
    return split["pattern"].get("Regex") if whole and not level["add_prefix_space"] else None
