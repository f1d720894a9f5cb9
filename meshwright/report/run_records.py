"""The records of a run's ranks, read line by line; what is damaged is counted and left out, never guessed."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from meshwright.spec.problem import InputError, Problem
from meshwright.spec.record import Record, StepRecord, read_line

NAME = "steps.rank*.jsonl"


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's file as far as it can be read."""

    records: list[Record]
    damaged: int = 0  # whole lines that are no records
    cut: bool = False  # the last line has no end: it was being written when somebody looked, or killed


class RankLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is read of the other ranks: little, so that many of them are read quickly."""

    kind: str = ""
    step: int = 0
    data_seconds: float = 0.0
    memory_bytes: int = 0


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps in sum, those included that a restart went back behind."""

    rank: int
    step: int  # the last
    steps: int  # how many were made
    data_seconds: float  # spent waiting for the loader
    memory_bytes: int  # at the most


_decoder = msgspec.json.Decoder(RankLine)


def rank_files(folder: Path) -> dict[int, Path]:
    """The files of records by rank, lowest first."""
    found = {file.name.removeprefix("steps.rank").removesuffix(".jsonl"): file for file in folder.glob(NAME)}
    return {int(rank): found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)}


def read(file: Path) -> Lines:
    """Every record of a file."""
    records: list[Record] = []
    damaged, cut = 0, False
    for text in _texts(file):
        if not text.endswith(b"\n"):
            cut = True
            continue
        try:
            records.append(read_line(text))
        except (msgspec.MsgspecError, AttributeError, TypeError):  # no JSON, no object, or none of ours
            damaged += 1
    return Lines(records=records, damaged=damaged, cut=cut)


def seen(rank: int, file: Path) -> RankSeen:
    """A rank's steps in sum; lines that are damaged are left out."""
    return summed(rank, (line for line in _rank_lines(file) if line.kind == "step"))


def summed(rank: int, steps: Iterable[RankLine | StepRecord]) -> RankSeen:
    """Steps in sum."""
    last, count, data_seconds, memory_bytes = 0, 0, 0.0, 0
    for step in steps:
        last, count = step.step, count + 1
        data_seconds += step.data_seconds
        memory_bytes = max(memory_bytes, step.memory_bytes)
    return RankSeen(rank=rank, step=last, steps=count, data_seconds=data_seconds, memory_bytes=memory_bytes)


def _rank_lines(file: Path) -> Iterator[RankLine]:
    for text in _texts(file):
        with contextlib.suppress(msgspec.MsgspecError):
            yield _decoder.decode(text)


def _texts(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise InputError([Problem(f"{file}: {error.strerror}", "make it readable, or report on a copy")]) from None
