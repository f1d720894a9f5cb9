"""Text to tokens: a tokenizer.json that exists, or a byte-level BPE trained on the documents themselves.

Word by word (`Words`), from a dictionary of those that came before, and the tokens are the tokenizer's own: a
byte-level BPE cuts a text by a regular expression and encodes every piece by itself, so a piece always has the same
tokens. Python's own expressions cut in the same places, several times as fast as the tokenizer's. A piece that was not
met before, and text with characters that versions of Unicode may not agree on, is the tokenizer's to encode.
"""

import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.shards import token_dtype
from meshwright.spec.problem import mistake

# What ByteLevel of `tokenizers` cuts by if nothing else does (GPT-2's).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's, fewer than Python's
BEYOND = 1 << 16  # ranges from here on slow an expression down, and have few letters
FOLDED = "\u017f\u212a"  # which are an s and a k without regard to case
PROPERTIES = ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "Nd")
MOST = 1 << 20  # words that are remembered
WORD = np.dtype(np.int32)  # a token among those of a word
SHORT = 48  # characters of a text that is remembered whole: what a template writes between two marks


class _Remembered(dict[str, bytes]):
    """Tokens by text, asked for when they are missing."""

    def __init__(self, ask: Callable[[str], bytes]) -> None:
        super().__init__()
        self.ask = ask

    def __missing__(self, text: str) -> bytes:
        found = self.ask(text)
        if len(self) < MOST:
            self[text] = found
        return found


class Words:
    """The words of one tokenizer, and the tokens of each as the bytes of WORD: they are joined faster than numbers."""

    def __init__(self, tokenizer: Tokenizer, expression: str) -> None:
        self.own = lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, WORD).tobytes()
        self.expression, self.known = expression, set[str]()
        self.cut = re.compile(translated(expression, ascii_only=True)).findall
        self.words = _Remembered(self.own).__getitem__
        self.short = _Remembered(self._whole).__getitem__

    def encode(self, text: str) -> bytes:
        """The tokens of a text without special tokens."""
        return self.short(text) if len(text) <= SHORT else self._whole(text)

    def _whole(self, text: str) -> bytes:
        if text.isascii():
            return b"".join(map(self.words, self.cut(text)))
        new = set(text) - self.known
        if any(map(_is_doubtful, new)) or not unicodedata.is_normalized("NFC", text):  # as some normalise it
            return self.own(text)
        self.known |= new
        return b"".join(map(self.words, _compiled(self.expression).findall(text)))


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


END = "<|endoftext|>"  # of tokenizers trained here
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")
SMALLEST = 257  # every byte and the end of a document
PIECE = 1 << 20  # characters encoded as one string: bounds memory, and lets a single long document use all cores
BATCH = 1 << 22  # characters encoded in one go
SAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A tokenizer, where it is kept, and the token that closes a document."""

    file: Path
    tokenizer: Tokenizer
    end_token: int

    @property
    def vocab(self) -> int:
        """What every token is below."""
        return max(entries(self.tokenizer), self.end_token + 1)


def path(tokenizer: str) -> Path:
    """The file that a run means: a tokenizer.json, or the one in a folder."""
    named = Path(tokenizer).expanduser()
    file = named / "tokenizer.json" if named.is_dir() else named
    if not file.is_file():
        raise mistake(
            f"there is no tokenizer at {file}",
            'name a tokenizer.json or its folder, or set data.tokenizer = "train"',
            "data.tokenizer",
        )
    return file


def load(file: Path) -> Tokenizer:
    """A tokenizer from its file."""
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except Exception as error:  # the library raises nothing more exact
        raise mistake(
            f"{file} is not a tokenizer.json: {error}", "name a file that `tokenizers` wrote", "data.tokenizer"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` entries; the same texts give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def entries(tokenizer: Tokenizer) -> int:
    """One more than the largest token: there may be holes, so the number of entries would not do."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(tokenizer: Tokenizer, stated: int | None) -> int:
    """The token that closes a document: as stated, or the first of the usual ones that the tokenizer has."""
    if stated is not None:
        return stated
    known = (tokenizer.token_to_id(name) for name in ENDS)
    found = next((token for token in known if token is not None), None)
    if found is None:
        raise mistake(
            f"the tokenizer has none of the usual end tokens ({', '.join(ENDS)})",
            "set data.end_token to the number of the token that closes a document",
            "data.end_token",
        )
    return found


def encode(
    lexicon: TokenizerInfo, documents: Iterable[str], size: int, say: Callable[[str], None]
) -> Iterator[np.ndarray]:
    """Every document as tokens with the end token behind; `size` is the text's length when known, else 0."""
    tokenizer = lexicon.tokenizer
    tokenizer.encode_special_tokens = True  # text that spells out a special token is text: nothing forges an end
    dtype = token_dtype(lexicon.vocab)
    end = np.array([lexicon.end_token], dtype)
    parts: list[np.ndarray] = []
    for batch in _announced(_batches(documents), size, say):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, last) in zip(encodings, batch, strict=True):
            parts.append(np.array(encoding.ids, dtype))
            if last:
                yield np.concatenate([*parts, end])
                parts = []


def pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in parts of a bounded length, and whether each is its last.

    A cut lies behind a line's end that has no other white space around it, where byte-level and word-level tokenizers
    cut as well: the tokens do not change. Where a document has no such place it is cut all the same.
    """
    start = 0
    while len(document) - start > PIECE:
        low, high = start + PIECE // 2, start + PIECE
        at = document.rfind("\n", low, high)
        while at > low and (document[at - 1].isspace() or document[at + 1].isspace()):
            at = document.rfind("\n", low, at)
        stop = at + 1 if at > low else high
        yield document[start:stop], False
        start = stop
    yield document[start:], True


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    batch, length = [], 0
    for document in documents:
        for piece in pieces(document):
            batch.append(piece)
            length += len(piece[0])
            if length >= BATCH:
                yield batch
                batch, length = [], 0
    if batch:
        yield batch


def _announced(
    batches: Iterator[list[tuple[str, bool]]], size: int, say: Callable[[str], None]
) -> Iterator[list[tuple[str, bool]]]:
    """The batches as they are, with word of how far they have come every second or so."""
    whole = f" of {size / 1e6:.0f}" if size else ""
    done, said = 0, time.monotonic()
    for batch in batches:
        yield batch
        done += sum(len(text) for text, _ in batch)
        if time.monotonic() - said > SAY_SECONDS:
            say(f"tokenising {done / 1e6:.0f}{whole} MB")
            said = time.monotonic()
