"""A run's folder as its files tell it: what was to be done, where, by whom, and what was recorded."""

import time
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.cost.goodput import kept
from meshwright.report import run_records
from meshwright.report.run_records import RankSeen
from meshwright.report.run_state import Owner, owner
from meshwright.spec import load, verdict
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.record import Record, StepRecord
from meshwright.spec.run import Run
from meshwright.spec.verdict import Verdict

RUN = "run.toml"
REMEDY = "give the folder of a run: `meshwright train` says where it is, runs/NAME-DIGEST unless told otherwise"
ELSEWHERE = ("init.from=", "init.moments=false")  # where the weights came from need not be there any more
CHANGED = "{} shows that run.toml changed between sessions: steps of the last session are measured, memory of all"
MOST_NAMED = 12  # runs of a folder of runs
Value = TypeVar("Value")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the files say, before anything is concluded from it."""

    path: Path
    run: Run
    changed: bool  # between sessions: the plan may have been another before
    environment: dict[str, Any]  # of env.json; empty where there is none
    finished: bool  # there is a summary, which is the last thing that a run writes
    witness: int | None  # the rank whose records are read in full, None where there are no records
    records: list[Record]
    kept: list[StepRecord]  # the steps that the weights went through
    ranks: tuple[RankSeen, ...]
    verdicts: tuple[Verdict, ...]  # last words of ranks, the earliest first
    ends: dict[str, Verdict]  # what ended attempts, by session and number
    saved: tuple[int, ...]  # steps that have a checkpoint
    owner: Owner | None  # who holds the folder, or held it last
    silent_seconds: float | None  # since the last record was written, by this machine's clock
    notes: tuple[str, ...]  # what is missing or damaged


def facts(path: Path) -> Facts:
    """Read a run's folder. What is no run folder is the user's mistake; what is damaged is noted, and left out."""
    _check(path)
    notes: list[str] = []
    run = _run(path / RUN, notes)
    files = run_records.rank_files(path)
    witness = min(files, default=None)
    lines = run_records.read(files[witness]) if witness is not None else run_records.Lines(records=[])
    steps = (record for record in lines.records if isinstance(record, StepRecord))
    ranks = tuple(
        run_records.summed(rank, steps) if rank == witness else run_records.seen(rank, file)
        for rank, file in files.items()
    )
    changed = [file.name for file in earlier(path)]
    notes += [CHANGED.format(changed[-1])] if changed else []
    notes += _missing_records(run.plan.world, witness, ranks, lines)
    return Facts(
        path=path,
        run=run,
        changed=bool(changed),
        environment=_json(path / "env.json", dict[str, Any], notes, "device and torch are not known") or {},
        finished=_is_finished(path / "summary.json", notes),
        witness=witness,
        records=lines.records,
        kept=kept(lines.records),
        ranks=ranks,
        verdicts=_verdicts(path, notes),
        ends=_ends(path, notes),
        saved=_saved(path),
        owner=owner(path / "lock"),
        silent_seconds=max(time.time() - files[witness].stat().st_mtime, 0.0) if witness is not None else None,
        notes=tuple(notes),
    )


def _check(path: Path) -> None:
    if not path.exists():
        raise InputError([Problem(f"there is no folder {path}", REMEDY)])
    if not path.is_dir():
        remedy = f"give its folder, {path.parent}" if (path.parent / RUN).is_file() else REMEDY
        raise InputError([Problem(f"{path} is a file", remedy)])
    inside = sorted(entry.parent.name for entry in path.glob(f"*/{RUN}"))
    is_run = (path / RUN).is_file()
    if inside and not (is_run and (run_records.rank_files(path) or (path / "logs").exists())):
        named = ", ".join(inside[:MOST_NAMED]) + (f" and {len(inside) - MOST_NAMED} more" * (len(inside) > MOST_NAMED))
        raise InputError([Problem(f"{path} is a folder of runs: {named}", f"name one: {path / inside[0]}")])
    if not is_run:
        what = "is empty" if not any(path.iterdir()) else f"is not a run's folder: it has no {RUN}"
        raise InputError([Problem(f"{path} {what}", REMEDY)])


def _run(file: Path, notes: list[str]) -> Run:
    """The run as it was decided. What today's rules would refuse was run all the same, and is only noted."""
    try:
        tomllib.loads(file.read_text(encoding="utf-8"))
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
    return loaded.run


def earlier(path: Path) -> list[Path]:
    """The run files of earlier sessions, under another plan for example."""
    found = [file for file in path.glob("run.*.toml") if file.name.split(".")[1].isdecimal()]
    return sorted(found, key=lambda file: int(file.name.split(".")[1]))


def _missing_records(
    world: int, witness: int | None, ranks: tuple[RankSeen, ...], lines: run_records.Lines
) -> list[str]:
    """What the ranks' files leave open, a sentence each."""
    if witness is None:
        return ["there are no records (steps.rank*.jsonl): no rank has been ready for a step"]
    found = []
    absent = sorted(set(range(world)) - {rank.rank for rank in ranks})
    if absent:
        named = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" * (len(absent) > 8))
        found.append(f"records of {len(absent)} of {world} ranks are missing: {named}")
    if witness:
        found.append(f"rank 0's records are missing: what follows is as rank {witness} saw it")
    if lines.damaged:
        found.append(f"lines of steps.rank{witness}.jsonl that are no records, and left out: {lines.damaged}")
    if lines.cut:
        found.append(f"the last line of steps.rank{witness}.jsonl is cut short, and left out")
    return found


def _json(file: Path, kind: type[Value], notes: list[str], without: str) -> Value | None:
    """A file of one value; None, with a note, where it cannot be had."""
    consequence = f": {without}" if without else ""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        notes.append(f"{file.name} is missing{consequence}")
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}){consequence}")
    except msgspec.MsgspecError as error:
        notes.append(f"{file.name} is damaged ({error}){consequence}")
    return None


def _is_finished(file: Path, notes: list[str]) -> bool:
    if not file.exists():
        return False
    _json(file, dict[str, Any], notes, "how it ended is read from the records")
    return True


def _verdicts(path: Path, notes: list[str]) -> tuple[Verdict, ...]:
    try:
        return tuple(sorted(verdict.read(path), key=lambda each: each.at))
    except (OSError, msgspec.MsgspecError) as error:
        notes.append(f"the last words of a rank (failure.rank*.json) are damaged: {error}")
        return ()


def _ends(path: Path, notes: list[str]) -> dict[str, Verdict]:
    """What the supervisor said when an attempt ended, by its session and number."""
    found = {}
    for file in sorted(path.glob("faults/ended-*.json"), key=lambda file: file.stat().st_mtime):
        if told := _json(file, Verdict, notes, "what ended an attempt is not known"):
            found[file.stem.removeprefix("ended-")] = told
    return found


def _saved(path: Path) -> tuple[int, ...]:
    names = [entry.name.removeprefix("step-") for entry in path.glob("checkpoints/step-*")]
    return tuple(sorted(int(name) for name in names if name.isdecimal()))
