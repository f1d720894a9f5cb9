"""A table of published runs, priced: every row comes back with our figures beside it, or with the reason why not."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import Ledger, fits, ledger
from meshwright.cost.published import Priced, job_of
from meshwright.cost.time import Price, price
from meshwright.spec.problem import InputError, Problem

NEEDED = ("layers", "hidden", "seq_len", "gpu", "n_gpus")
ADDED: tuple[str, ...] = (
    "pred_iter_time_s", "pred_low_s", "pred_high_s", "pred_tokens_per_s_per_gpu",
    "pred_peak_mem_gib", "pred_low_mem_gib", "pred_high_mem_gib", "pred_fits", "refused", "assumed",
)  # fmt: skip
GIB = 2**30
SAY_EVERY = 200  # rows
OUR_FAULTS = (ValueError, ArithmeticError, LookupError, AssertionError)

Row = dict[str, str]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What we say of one row. No figure where it is refused."""

    price: Price | None = None
    memory_bytes: float = 0.0
    low_bytes: float = 0.0
    high_bytes: float = 0.0
    fits: bool | None = None
    refused: str = ""
    assumed: tuple[str, ...] = ()

    def cells(self) -> Row:
        """The columns that are added to the row."""
        found: Row = dict.fromkeys(ADDED, "")
        found["pred_fits"] = {None: "", True: "yes", False: "no"}[self.fits]
        found["refused"], found["assumed"] = self.refused, "; ".join(self.assumed)
        if self.price is None:
            return found
        figures = (
            self.price.seconds, self.price.low_seconds, self.price.high_seconds, self.price.tokens_per_second_per_gpu,
            self.memory_bytes / GIB, self.low_bytes / GIB, self.high_bytes / GIB,
        )  # fmt: skip
        return found | {column: f"{figure:.6g}" for column, figure in zip(ADDED[:7], figures, strict=True)}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows of a table."""

    priced: int
    refused: int


def price_file(source: Path, target: Path, say: Callable[[str], None]) -> Told:
    """Read a table of runs, write it back with the columns of `ADDED`."""
    rows, columns = read(source)
    answers: list[Row] = []
    refused = 0
    for number, row in enumerate(rows, start=1):
        answer = answered(row)
        refused += bool(answer.refused)
        answers.append(row | answer.cells())
        if number % SAY_EVERY == 0:
            say(f"priced {number:,} of {len(rows):,} rows")
    write(target, [*(column for column in columns if column not in ADDED), *ADDED], answers)
    say(f"{len(rows) - refused:,} rows priced, {refused:,} refused with the reason, in {target}")
    return Told(priced=len(rows) - refused, refused=refused)


def answered(row: Mapping[str, str]) -> Answer:
    """Our figures for one row."""
    assumed: tuple[str, ...] = ()
    try:
        found = job_of(row)
        assumed = found.assumed
        if found.job is None:
            return Answer(refused=found.refused, assumed=assumed, fits=False if found.impossible else None)
        return _figures(found, found.job, row)
    except OUR_FAULTS as error:  # one row that we get wrong should not cost the user the others
        return Answer(refused=f"a fault of ours: {type(error).__name__}: {error}", assumed=assumed)


def _figures(found: Priced, job: Job, row: Mapping[str, str]) -> Answer:
    kind = row.get("peak_mem_kind", "").lower()
    held, room = _memory(job, measured_rank(kind, job))
    memory = as_measured(held, kind)
    return Answer(
        price=_price(job),
        memory_bytes=memory,
        low_bytes=memory * held.low,
        high_bytes=memory * held.high,
        fits=room and not found.impossible,
        assumed=found.assumed,
    )


@lru_cache(maxsize=4096)
def _price(job: Job) -> Price:
    return price(job)


@lru_cache(maxsize=4096)
def _memory(job: Job, rank: int | None) -> tuple[Ledger, bool]:
    """The ledger of a pipeline rank (None: the fullest), and whether the job fits."""
    fit = fits(job)
    return (fit.ledger if rank is None or fit.ledger.rank == rank else ledger(job, {"pp": rank})), fit.fits


def measured_rank(kind: str, job: Job) -> int | None:
    """The pipeline rank that a source measured: the first, the last, or None where it is not said: the fullest."""
    if "rank-0" in kind or "rank 0" in kind or (not kind and job.stack.name == "nanotron"):
        return 0
    return job.plan.pp - 1 if "last rank" in kind or "last pp" in kind else None


def as_measured(held: Ledger, kind: str) -> float:
    """The kind of number that a source gives; where its words do not settle it, what its stack's reports print."""
    words = {
        "allocated": ("alloc", "active"),
        "reserved": ("reserved",),
        "shown": ("nvidia-smi", "nvidia smi", "nvml", "driver"),
    }
    kinds = [name for name, found in words.items() if any(word in kind for word in found)]
    return float(getattr(held, kinds[0]) if len(kinds) == 1 else held.reported)


def read(source: Path) -> tuple[list[Row], list[str]]:
    """The rows and columns of a table."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as lines:
            return list(_rows(lines, source)), _columns(source)
    except OSError as error:
        raise InputError([Problem(f"{source}: {error.strerror}", "name a CSV file that can be read")]) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError([Problem(f"{source} is not a CSV table: {error}", "save it as UTF-8 CSV")]) from None


def _columns(source: Path) -> list[str]:
    with source.open(encoding="utf-8-sig", newline="") as lines:
        return next(csv.reader(lines), [])


def _rows(lines: TextIO, source: Path) -> Iterator[Row]:
    reader = csv.DictReader(lines, strict=True)
    columns = reader.fieldnames or []
    missing = [column for column in NEEDED if column not in columns]
    if missing:
        what = f"{source} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise InputError([Problem(what, "docs/accuracy.md lists the columns that rows are read from")])
    for row in reader:
        if None in row:
            what = f"{source}, line {reader.line_num}: more cells than the header has columns"
            raise InputError([Problem(what, "quote cells that hold commas")])
        yield {column: value or "" for column, value in row.items()}


def write(target: Path, columns: list[str], rows: list[Row]) -> None:
    """A table on disk, whole or not at all."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(target)
    except OSError as error:
        raise InputError([Problem(f"{target}: {error.strerror}", "name a file that can be written")]) from None
    finally:
        partial.unlink(missing_ok=True)
