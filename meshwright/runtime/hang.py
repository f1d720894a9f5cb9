"""Who hangs: the rank that everybody else waits for, not the one that noticed."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from meshwright.runtime.heartbeat import PHASES, HeartbeatReader, PhaseMark, PhaseTable, RankStatus

SAFETY = 5.0  # limit ÷ the longest stillness that turned out to be none
BUSY = 4.0  # a rank that uses its processor may be still for so much longer
FIRST_SECONDS = 120.0  # of a process's first two steps, in which anything may be made, compiled or fetched
LEAST_SECONDS = {"start": 300.0, "compile": 600.0, "end": 300.0, "save": 60.0, "eval": 30.0}  # else faults.hang_seconds
LATE_SECONDS = 2.0  # between two looks of our own: then the machine slept, and no rank is to blame
BUSY_SHARE = 0.2  # of one processor
STOPPED = "Tt"
PATIENCE_SECONDS = 0.3


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that hang, and why they are thought to."""

    ranks: tuple[int, ...]
    reason: str
    seconds: float
    limit: float


class HangDetector:
    """Learns how long each phase may be still, and accuses who is still for much longer."""

    def __init__(self, hang_seconds: float, world: int) -> None:
        self.hang_seconds = hang_seconds
        self.world = world  # ranks of the job; those of other machines are not seen
        self.longest: dict[str, float] = {}  # stillness by phase, "waiting" among them
        self.last: dict[int, RankStatus] = {}
        self.still_cpu: dict[int, float] = {}  # processor seconds when the stillness began
        self.all_wait = 0.0  # seconds for which everybody has been waiting
        self.forgiven = 0.0  # stillness before this moment does not count

    def forget(self) -> None:
        """New processes; what was learnt of their work stays."""
        self.last, self.still_cpu = {}, {}

    def look(self, seen: Sequence[RankStatus], now: float) -> Hang | None:
        """One look at all ranks; an accusation when there is one to make."""
        if self.last and now - max(one.now for one in self.last.values()) > LATE_SECONDS:
            self.forgiven = now
        for one in seen:
            self._learn(one)
        self.last = {one.rank: one for one in seen}
        return self._stuck(seen) or self._crossed(seen)

    def still(self, one: RankStatus) -> float:
        """How long a rank has been where it is."""
        return one.now - max(one.still_since, self.forgiven)

    def limit(self, one: RankStatus) -> float:
        """How long it may be."""
        if one.state in STOPPED:
            return self.hang_seconds  # whatever it was doing
        kind = _kind(one)
        least = LEAST_SECONDS.get(kind, self.hang_seconds)
        if kind not in LEAST_SECONDS and one.beat.steps_here < 2:
            least = max(least, FIRST_SECONDS)
        learnt = SAFETY * self.longest.get(kind, 0.0)
        return max(least, learnt) * (BUSY if self._busy(one) else 1.0)

    def _stuck(self, seen: Sequence[RankStatus]) -> Hang | None:
        """A rank that waits for nobody and does not move."""
        late = [one for one in seen if (one.silent or not one.beat.waiting) and self.still(one) > self.limit(one)]
        if not late:
            return None
        worst = max(late, key=self.still)
        return Hang(ranks=(worst.rank,), reason=reason(worst), seconds=self.still(worst), limit=self.limit(worst))

    def _crossed(self, seen: Sequence[RankStatus]) -> Hang | None:
        """Everybody waits: somebody is in the wrong collective, or left one out."""
        if len(seen) < max(self.world, 2):
            return None  # the one that all wait for may be on another machine
        together = min(map(self.still, seen)) if all(one.beat.waiting for one in seen) else 0.0
        if together < self.all_wait:
            self.longest["waiting"] = max(self.longest.get("waiting", 0.0), self.all_wait)
        self.all_wait = together
        if together <= max(map(self.limit, seen)):
            return None
        ranks, why = crossed(seen)
        return Hang(ranks=ranks, reason=why, seconds=min(map(self.still, seen)), limit=max(map(self.limit, seen)))

    def _learn(self, one: RankStatus) -> None:
        before = self.last.get(one.rank)
        if before is None or before.beat.moved != one.beat.moved:
            self.still_cpu[one.rank] = one.cpu_seconds
            kind = "" if before is None else _kind(before)
            if before is not None and kind != "waiting" and before.beat.steps_here >= 2:
                self.longest[kind] = max(self.longest.get(kind, 0.0), self.still(before))

    def _busy(self, one: RankStatus) -> bool:
        used = one.cpu_seconds - self.still_cpu.get(one.rank, one.cpu_seconds)
        return one.state in "RD" or used > BUSY_SHARE * max(one.now - one.still_since, 1.0)


def crossed(seen: Sequence[RankStatus]) -> tuple[tuple[int, ...], str]:
    """Of ranks that all wait, the one that went on without the others, or waits where none ever did."""
    newest = [one for one in seen if one.beat.step == max(other.beat.step for other in seen)]
    if len(newest) < len(seen):  # nobody can finish a step whose last collective another has not entered
        return tuple(one.rank for one in newest), "left out a collective that the others wait in"
    novel = [one for one in seen if one.beat.novel]
    if novel and len(novel) < len(seen):
        return tuple(one.rank for one in novel), "is in another collective than the others"
    skipped = [one for one in seen if any(_passed(one, other) for other in seen)]
    if skipped and len(skipped) < len(seen):
        return tuple(one.rank for one in skipped), "left out a collective that the others wait in"
    totals = [sum(one.beat.counts) for one in seen]
    behind = [one for one, total in zip(seen, totals, strict=True) if total < max(totals)]
    if behind and len(behind) < len(seen):
        return tuple(one.rank for one in behind), "has begun fewer collectives than the others"
    return tuple(one.rank for one in seen), "wait in different collectives"


def reason(one: RankStatus) -> str:
    """What keeps a rank that waits for nobody."""
    if one.state in STOPPED:
        return "is stopped (SIGSTOP or a debugger)"
    if one.silent:
        return "does not let go of Python's lock"
    return "does not move"


def _kind(one: RankStatus) -> str:
    return "waiting" if one.beat.waiting and not one.silent else one.beat.phase


def _passed(one: RankStatus, other: RankStatus) -> bool:
    """Further on in the program, with no more collectives behind it."""
    no_more = any(mine <= theirs for mine, theirs in zip(one.beat.counts, other.beat.counts, strict=False) if theirs)
    return no_more and _position(one) > _position(other)


def _position(one: RankStatus) -> tuple[int, int]:
    return one.beat.step, PHASES.index(one.beat.phase)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    name: str


class Doing(NamedTuple):
    """What a stack means."""

    phase: str
    waiting: bool
    site: tuple[str, int]  # the innermost line of ours


BETWEEN = ("torch/_ops.py",)  # frames that a collective may have below its own
ARITHMETIC = "torch/distributed/tensor/"  # dispatches, and computes
WAITING = (("torch/distributed/", ""), ("torch/cuda/streams.py", ""))


def of(running: FrameType | None) -> list[Frame]:
    """A running thread's stack, innermost first."""
    found = []
    while running is not None:
        found.append(Frame(running.f_code.co_filename, running.f_lineno, running.f_code.co_name))
        running = running.f_back
    return found


def doing(stack: Sequence[Frame], table: PhaseTable, before: str = "start") -> Doing:
    """The phase of a stack and whether it waits for others; what tells nothing leaves the phase as it was."""
    around = {_marked(table.enclosing, frame.file, frame.name) for frame in stack}
    phase = (
        next((mark.phase for mark in table.enclosing if mark.phase in around), "")
        or next((phase for frame in stack if (phase := _marked(table.innermost, frame.file, frame.name))), "")
        or next((phase for frame in stack if (phase := _marked(table.outermost, frame.file, frame.name))), "")
    )
    site = next(((frame.file, frame.line) for frame in stack if "/meshwright/" in frame.file), ("", 0))
    return Doing(phase or before, is_waiting(stack, table), site)


def is_waiting(stack: Iterable[Frame], table: PhaseTable) -> bool:
    """Whether the innermost frame is a collective's, the device's queue, or one that the table names."""
    for frame in stack:
        if not any(part in frame.file for part in BETWEEN):
            return ARITHMETIC not in frame.file and any(_is(frame, *mark) for mark in WAITING + table.waiting)
    return False


def frames(text: str) -> list[Frame]:
    """The main thread's stack in what faulthandler writes, innermost first."""
    found = []
    _, current, rest = text.rpartition("Current thread")
    for line in rest.splitlines()[1:] if current else []:
        if not line.startswith("  File "):
            break  # another thread's
        file, _, rest = line.removeprefix('  File "').partition('", line ')
        number, _, name = rest.partition(" in ")
        found.append(Frame(file, int(number) if number.isdecimal() else 0, name))
    return found


@cache
def _marked(marks: tuple[PhaseMark, ...], file: str, name: str) -> str:
    """Remembered: the same few lines are looked at twenty times a second."""
    return next((phase for part, function, phase in marks if part in file and function in ("", name)), "")


def _is(frame: Frame, file: str, name: str) -> bool:
    return file in frame.file and name in ("", frame.name)


def capture(pulse: HeartbeatReader, seen: list[RankStatus]) -> dict[int, str]:
    """What faulthandler writes for each rank; empty for one that is stopped."""
    sizes = {one.rank: _size(pulse.stack_file(one.rank)) for one in seen}
    for one in seen:
        if one.state not in "TtZ":
            os.kill(one.beat.pid, signal.SIGUSR1)
    time.sleep(PATIENCE_SECONDS)
    return {one.rank: _since(pulse.stack_file(one.rank), sizes[one.rank]) for one in seen}


def confirmed(pulse: HeartbeatReader, seen: list[RankStatus], ranks: tuple[int, ...]) -> bool:
    """A second look before the accusation: who has moved meanwhile is slow, not hung.

    It comes before the signals, which wake some calls up.
    """
    time.sleep(PATIENCE_SECONDS)
    again = {one.rank: one.still_since for one in pulse.look()}
    return all(again.get(one.rank, 0.0) <= one.still_since for one in seen if one.rank in ranks)


def shown(found: list[Frame], most: int = 3) -> str:
    """Where a stack is, in one line: the innermost line, and the innermost lines of ours."""
    ours = [frame for frame in found[1:] if "/meshwright/" in frame.file]
    return " ← ".join(f"{Path(frame.file).name}:{frame.line} {frame.name}" for frame in [*found[:1], *ours][:most])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _since(file: Path, start: int) -> str:
    return file.read_bytes()[start:].decode(errors="replace") if file.exists() else ""
