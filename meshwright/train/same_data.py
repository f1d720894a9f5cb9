"""The data of a run, remembered: tokens that changed between two attempts would be another run's."""

import hashlib
from pathlib import Path

import msgspec

from meshwright.data.prepare import Corpus
from meshwright.data.shards import Tokens
from meshwright.spec.check import InputError, Problem
from meshwright.spec.run import Run

FILE = "data.json"
WINDOWS, WINDOW = 64, 256  # places that are looked at, and tokens at each


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one source."""

    source: str
    tokens: int
    digest: str


def check(run: Run, corpus: Corpus, folder: Path, writes: bool) -> None:
    """Refuse data that is not what the run began with; the first attempt remembers it."""
    here = [fact(one.source, tokens) for one, tokens in zip(run.data.sources, corpus.sources, strict=True)]
    file = folder / FILE
    if file.exists():
        there = msgspec.json.decode(file.read_bytes(), type=list[Fact])
        if found := differences(there, here):
            raise InputError(found)
    elif writes:
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(here)) + b"\n")
        temporary.replace(file)


def fact(source: str, tokens: Tokens) -> Fact:
    """How many tokens, and a digest of some of them."""
    digest = hashlib.sha256()
    for number in range(WINDOWS):
        start = number * max(tokens.total - WINDOW, 0) // max(WINDOWS - 1, 1)
        digest.update(tokens.read(start, min(WINDOW, tokens.total)).tobytes())
    return Fact(source=source, tokens=tokens.total, digest=digest.hexdigest()[:16])


def differences(there: list[Fact], here: list[Fact]) -> list[Problem]:
    """Sources that have changed."""
    remedy = "put the data back as it was, or start anew with --fresh"
    return [
        Problem(f"{new.source} has changed since the run began ({old.tokens} tokens then, {new.tokens} now)", remedy)
        for old, new in zip(there, here, strict=False)
        if (old.tokens, old.digest) != (new.tokens, new.digest)
    ]
