"""A run's folder as its files tell it: what was to be done, where, by whom, and what was recorded."""

import contextlib
import platform
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.config.weights import CHECKPOINTS, RUN, SUMMARY, present
from meshwright.cost.goodput import kept
from meshwright.runtime import failure
from meshwright.runtime.failure import Failure
from meshwright.runtime.records import CommandRecord, Record, StepRecord, read_lines
from meshwright.spec.problem import UNDECODABLE, InputError, Problem
from meshwright.spec.units import plural

NAME = "steps.rank*.jsonl"
REMEDY = "give the folder of a run: `meshwright train` says where it is, runs/NAME-DIGEST by default"
ELSEWHERE = ("init.from=", "init.optimizer_state=false")  # where the weights came from need not be there any more
CHANGED = "{} shows that run.toml changed between sessions: steps of the last session are measured, memory of all"
LOCKS = Path("/proc/locks")
HELD_BY = re.compile(r"process (\d+) on (\S+) since (.+)")
State = Literal["done", "going", "ended"]
Value = TypeVar("Value")


class RankRecords(msgspec.Struct, frozen=True, kw_only=True):
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
    staleness: int | None = None


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's steps in sum, those included that a restart went back behind."""

    rank: int
    step: int  # the last
    steps: int  # how many were made
    data_seconds: float  # spent waiting for the loader
    memory_bytes: int  # at the most
    staleness: dict[int, int] = {}  # steps by how many updates old their weights were; empty: no parameter server


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who claimed the folder last."""

    process: int
    host: str
    since: str
    holds: bool | None  # whether it still does; None: its machine is another, or does not list its locks


class StandingEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to judge by."""

    finished: bool  # there is a summary
    owner: Owner | None
    silent_seconds: float | None  # since the last record; None: there is none
    patience: float  # seconds without a record after which a run that nobody can ask about is taken to have ended
    said_end: bool  # the last record says that the session is over
    made_all: bool  # the last record is of the last step
    failure: Failure | None  # the failure report of the first rank that failed
    saved: tuple[int, ...] = ()  # steps that have a checkpoint


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands."""

    state: State
    words: str
    remedy: str = ""
    silent_seconds: float | None = None  # since the last record


class FolderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the files say, before anything is concluded from it."""

    path: Path
    run: Run
    text: str  # of run.toml
    sample: str  # what the trained model wrote, as its summary has it; empty: there is none
    updated: float  # when the last record was written, or run.toml where there is none: seconds since the epoch
    changed: bool  # between sessions: the plan may have been another before
    environment: dict[str, Any]  # of env.json; empty where there is none
    finished: bool  # there is a summary, which is the last thing that a run writes
    source_rank: int | None  # the rank whose records are read in full, None where there are no records
    records: list[Record]
    commands: list[CommandRecord]  # that were run on the model; some end after everything else
    kept: list[StepRecord]  # the steps that the weights went through
    ranks: tuple[RankSeen, ...]
    failures: tuple[Failure, ...]  # failure reports of ranks, the earliest first
    ends: dict[str, Failure]  # what ended attempts, by session and number
    saved: tuple[int, ...]  # steps that have a checkpoint
    owner: Owner | None  # who holds the folder, or held it last
    silent_seconds: float | None  # since the last record was written, by this machine's clock
    notes: tuple[str, ...]  # what is missing or damaged


def facts(path: Path) -> FolderFacts:
    """Read a run's folder. What is no run folder is the user's mistake; what is damaged is noted, and left out."""
    _check(path)
    notes: list[str] = []
    run, text = _run(path / RUN, notes)
    files = rank_files(path)
    source_rank = min(files, default=None)
    lines = read(files[source_rank]) if source_rank is not None else RankRecords(records=[])
    own = [record for record in lines.records if isinstance(record, StepRecord)]
    ranks = tuple(summed(rank, own if rank == source_rank else _rank_steps(file)) for rank, file in files.items())
    changed = [file.name for file in earlier(path)]
    notes += [CHANGED.format(changed[-1])] if changed else []
    notes += _missing_records(run.plan.world, source_rank, ranks, lines)
    environment = _json(path / "env.json", dict[str, Any], notes, "device and torch are not known")
    summary: dict[str, Any] = {}
    if finished := (path / SUMMARY).exists():
        summary = _json(path / SUMMARY, dict[str, Any], notes, "how it ended is read from the records") or {}
    updated = (files[source_rank] if source_rank is not None else path / RUN).stat().st_mtime
    return FolderFacts(
        path=path,
        run=run,
        text=text,
        sample=sample if isinstance(sample := summary.get("sample"), str) else "",
        updated=updated,
        changed=bool(changed),
        environment=environment or {},
        finished=finished,
        source_rank=source_rank,
        records=[each for each in lines.records if not isinstance(each, CommandRecord)],
        commands=[each for each in lines.records if isinstance(each, CommandRecord)],
        kept=kept(lines.records),
        ranks=ranks,
        failures=_failures(path, notes),
        ends=_ends(path, notes),
        saved=tuple(present(path / CHECKPOINTS)),
        owner=owner(path / "lock"),
        silent_seconds=max(time.time() - updated, 0.0) if source_rank is not None else None,
        notes=tuple(notes),
    )


def runs_in(path: Path) -> list[Path]:
    """The folders of a folder of runs; none where it is a run's folder itself, or holds no run."""
    inside = sorted(entry.parent for entry in path.glob(f"*/{RUN}"))
    is_run = (path / RUN).is_file() and (rank_files(path) or (path / "logs").exists())
    return [] if is_run else inside


def rank_files(folder: Path) -> dict[int, Path]:
    """The files of records by rank, lowest first."""
    found = {file.name.removeprefix("steps.rank").removesuffix(".jsonl"): file for file in folder.glob(NAME)}
    return {int(rank): found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)}


def read(file: Path) -> RankRecords:
    """Every record of a file."""
    texts = list(_texts(file))
    whole = [text for text in texts if text.endswith(b"\n")]
    records, damaged = read_lines(whole)
    return RankRecords(records=records, damaged=damaged, cut=len(whole) < len(texts))


def summed(rank: int, steps: Iterable[RankLine | StepRecord]) -> RankSeen:
    """Steps in sum."""
    last, count, data_seconds, memory_bytes, stale = 0, 0, 0.0, 0, Counter[int]()
    for step in steps:
        last, count = step.step, count + 1
        data_seconds += step.data_seconds
        memory_bytes = max(memory_bytes, step.memory_bytes)
        stale.update([] if step.staleness is None else [step.staleness])
    return RankSeen(
        rank=rank,
        step=last,
        steps=count,
        data_seconds=data_seconds,
        memory_bytes=memory_bytes,
        staleness=dict(sorted(stale.items())),
    )


def _rank_steps(file: Path) -> Iterator[RankLine]:
    """The steps of a rank whose file is not read in full; lines that are damaged are left out."""
    decoder = msgspec.json.Decoder(RankLine)
    for text in _texts(file):
        with contextlib.suppress(*UNDECODABLE):
            if (line := decoder.decode(text)).kind == "step":
                yield line


def _texts(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise InputError([Problem(f"{file}: {error.strerror}", "make it readable, or report on a copy")]) from None


def owner(lock: Path) -> Owner | None:
    """Who holds the folder, or did last. The lock is not touched: a launcher must never be refused for a reader."""
    try:
        found = HELD_BY.match(lock.read_text(encoding="utf-8", errors="replace").strip())
        inode = lock.stat().st_ino
    except OSError:
        return None
    if found is None:
        return None
    holds = None
    if found[2] == platform.node():
        with contextlib.suppress(OSError):  # the system does not list its locks
            rows = LOCKS.read_text().splitlines()
            holds = any(field.endswith(f":{inode}") for row in rows for field in row.split())
    return Owner(process=int(found[1]), host=found[2], since=found[3], holds=holds)


def standing(evidence: StandingEvidence) -> Standing:
    """How a run stands, by the best evidence there is: summary, lock, age of the last record, failure report."""
    if evidence.finished:
        return Standing(state="done", words="finished")
    silent, owner = evidence.silent_seconds, evidence.owner
    is_running = silent is not None and silent < evidence.patience and not evidence.said_end
    if owner is not None and owner.holds is not None:
        is_running = owner.holds
    if is_running:
        last = "no record yet" if silent is None else f"last record {duration(silent)} ago"
        by = "" if owner is None else f", process {owner.process} on {owner.host}"
        return Standing(state="going", words=f"still running: {last}{by}", silent_seconds=silent)
    when = "" if silent is None else f", {duration(silent)} ago"
    what, remedy = _ending(evidence)
    return Standing(state="ended", words=f"{what}{when}", remedy=remedy, silent_seconds=silent)


def _ending(evidence: StandingEvidence) -> tuple[str, str]:
    """What ended a run, as far as anybody wrote it down, and what to do."""
    if evidence.failure is not None:
        return f"stopped early: {evidence.failure.what}", evidence.failure.remedy
    resuming, saved = "run the same command again: it starts over, since no checkpoint was saved", "no checkpoint saved"
    if evidence.saved:
        resuming = f"run the same command again to resume from step {evidence.saved[-1]:,}"
        saved = f"checkpoint saved at step {evidence.saved[-1]}"
    if evidence.made_all:
        what = "all steps were made, but the run stopped before its summary was written"
    elif evidence.said_end:
        what = f"stopped by SIGTERM, {saved}"
    elif evidence.silent_seconds is None:
        what = "no step was made, and no process is running"
    else:
        what = "stopped early without a failure report: its launcher or a rank was killed, or its machine is gone"
    return what, resuming


def duration(seconds: float) -> str:
    """A time in the unit in which it is at least one."""
    for scale, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _check(path: Path) -> None:
    if not path.exists():
        raise InputError([Problem(f"there is no folder {path}", REMEDY)])
    if not path.is_dir():
        remedy = f"give its folder, {path.parent}" if (path.parent / RUN).is_file() else REMEDY
        raise InputError([Problem(f"{path} is a file", remedy)])
    if not (path / RUN).is_file():
        what = "is empty" if not any(path.iterdir()) else f"is not a run's folder: it has no {RUN}"
        raise InputError([Problem(f"{path} {what}", REMEDY)])


def _run(file: Path, notes: list[str]) -> tuple[Run, str]:
    """The run as it was decided, and the text of its file. What today's rules would refuse was run, and is noted."""
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        older = [each.name for each in earlier(file.parent)]
        remedy = "restore it from a copy" + (f"; {older[-1]} beside it is how it was before" if older else "")
        raise InputError([Problem(f"{file} is damaged: {error}", remedy)]) from None
    except (OSError, UnicodeDecodeError):
        pass  # said by the loader
    loaded, problems = load.examine(file, ELSEWHERE)
    if loaded is None:
        raise InputError(problems)
    notes += [problem.text for problem in problems]
    return loaded.run, text


def earlier(path: Path) -> list[Path]:
    """The run files of earlier sessions, under another plan for example."""
    found = [file for file in path.glob("run.*.toml") if file.name.split(".")[1].isdecimal()]
    return sorted(found, key=lambda file: int(file.name.split(".")[1]))


def _missing_records(world: int, source_rank: int | None, ranks: tuple[RankSeen, ...], lines: RankRecords) -> list[str]:
    """What the ranks' files leave open, a sentence each."""
    if source_rank is None:
        return ["there are no records (steps.rank*.jsonl): no rank has been ready for a step"]
    found = []
    absent = sorted(set(range(world)) - {rank.rank for rank in ranks})
    if absent:
        named = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" * (len(absent) > 8))
        found.append(f"records of {len(absent)} of {plural(world, 'rank')} are missing: {named}")
    if source_rank:
        found.append(f"rank 0's records are missing: what follows is as rank {source_rank} saw it")
    if lines.damaged:
        found.append(f"lines of steps.rank{source_rank}.jsonl that are no records, and left out: {lines.damaged}")
    if lines.cut:
        found.append(f"the last line of steps.rank{source_rank}.jsonl is cut short, and left out")
    return found


def _json(file: Path, kind: type[Value], notes: list[str], without: str) -> Value | None:
    """A file of one value; None, with a note, where it cannot be had."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        notes.append(f"{file.name} is missing: {without}")
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}): {without}")
    except UNDECODABLE as error:
        notes.append(f"{file.name} is damaged ({error}): {without}")
    return None


def _failures(path: Path, notes: list[str]) -> tuple[Failure, ...]:
    try:
        return tuple(sorted(failure.read(path), key=lambda each: each.at))
    except (OSError, *UNDECODABLE) as error:
        notes.append(f"the failure report of a rank (failure.rank*.json) is damaged: {error}")
        return ()


def _ends(path: Path, notes: list[str]) -> dict[str, Failure]:
    """What the supervisor said when an attempt ended, by its session and number."""
    found = {}
    for file in sorted(path.glob("faults/ended-*.json"), key=lambda file: file.stat().st_mtime):
        if failed := _json(file, Failure, notes, "what ended an attempt is not known"):
            found[file.stem.removeprefix("ended-")] = failed
    return found
