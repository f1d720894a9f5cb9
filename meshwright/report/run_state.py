"""How a run stands: finished, still going, or ended, and by what."""

import platform
import re
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.spec.verdict import Verdict

State = Literal["done", "going", "ended"]
LOCKS = Path("/proc/locks")
HELD_BY = re.compile(r"process (\d+) on (\S+) since (.+)")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who claimed the folder last."""

    process: int
    host: str
    since: str
    holds: bool | None  # whether it still does; None: it is on another machine, which cannot be asked


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to judge by."""

    finished: bool  # there is a summary
    owner: Owner | None
    silent_seconds: float | None  # since the last record; None: there is none
    patience: float  # seconds without a record after which a run that nobody can ask about is taken to have ended
    said_end: bool  # the last record says that the session is over
    made_all: bool  # the last record is of the last step
    verdict: Verdict | None  # the last words of the first rank that failed
    saved: tuple[int, ...] = ()  # steps that have a checkpoint


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands."""

    state: State
    words: str
    remedy: str = ""
    silent_seconds: float | None = None  # since the last record


def owner(lock: Path) -> Owner | None:
    """Who holds the folder, or did last. The lock is not touched: a launcher must never be refused for a reader."""
    try:
        found = HELD_BY.match(lock.read_text(encoding="utf-8", errors="replace").strip())
        inode = lock.stat().st_ino
    except OSError:
        return None
    if found is None:
        return None
    here = found[2] == platform.node()
    return Owner(process=int(found[1]), host=found[2], since=found[3], holds=_held(inode) if here else None)


def _held(inode: int) -> bool | None:
    """Whether somebody on this machine holds the lock of a file; None where the system does not list its locks."""
    try:
        rows = LOCKS.read_text().splitlines()
    except OSError:
        return None
    return any(field.endswith(f":{inode}") for row in rows for field in row.split())


def standing(told: Told) -> Standing:
    """How a run stands, by the best witness there is: its summary, its lock, its last record's age, its last words."""
    if told.finished:
        return Standing(state="done", words="finished")
    silent = told.silent_seconds
    if _goes_on(told):
        last = "no record yet" if silent is None else f"last record {duration(silent)} ago"
        by = "" if told.owner is None else f", process {told.owner.process} on {told.owner.host}"
        return Standing(state="going", words=f"still going: {last}{by}", silent_seconds=silent)
    when = "" if silent is None else f", {duration(silent)} ago"
    what, remedy = _ending(told)
    return Standing(state="ended", words=f"{what}{when}", remedy=remedy, silent_seconds=silent)


def _goes_on(told: Told) -> bool:
    if told.owner is not None and told.owner.holds is not None:
        return told.owner.holds
    return told.silent_seconds is not None and told.silent_seconds < told.patience and not told.said_end


def _ending(told: Told) -> tuple[str, str]:
    """What ended a run, as far as anybody wrote it down, and what to do."""
    if told.verdict is not None:
        return f"ended early: {told.verdict.what}", told.verdict.remedy
    if told.made_all:
        return "all steps were made, but the run ended before its summary was written", _again(told)
    if told.said_end:
        saved = f", saved at step {told.saved[-1]}" if told.saved else ", and not saved"
        return f"ended early: asked to end{saved}", _again(told)
    if told.silent_seconds is None:
        return "no step was made, and nobody is at work", _again(told)
    return "ended early without a word: its launcher or a rank was killed, or its machine is gone", _again(told)


def _again(told: Told) -> str:
    where = f"goes on from step {told.saved[-1]:,}" if told.saved else "begins anew, since nothing was saved"
    return f"run the same command again: it {where}"


def duration(seconds: float) -> str:
    """A time in the unit in which it is at least one."""
    for scale, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
