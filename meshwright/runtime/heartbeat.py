"""Heartbeats of ranks, and what a supervisor reads from them: who hangs, and where.

A rank writes one small record into shared memory, twenty times a second. The rank that hangs is the one that everybody
else waits for, not the one that noticed; its stack says which phase of a step it is in.
"""

import mmap
import os
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

PHASES = ("start", "data", "forward", "backward", "optimizer", "save", "eval", "compile", "end")
MOST_GROUPS = 32  # process groups whose collectives are counted
HEAD = struct.Struct("<QQQqqQQII")
COUNTS = struct.Struct(f"<{MOST_GROUPS}Q")
LEAVE = struct.Struct("<Q")
SIZE = HEAD.size + COUNTS.size + LEAVE.size
AT_COUNTS = HEAD.size
AT_LEAVE = AT_COUNTS + COUNTS.size


class PhaseMark(NamedTuple):
    """A phase, and the frames that mean it: part of a file's path, and a function ("": any)."""

    file: str
    function: str
    phase: str


class PhaseTable(msgspec.Struct, frozen=True):
    """Which frames mean which phase, told by whoever owns the code that a rank runs; here nothing of it is known."""

    enclosing: tuple[PhaseMark, ...] = ()  # what encloses other work, wherever in the stack it is: asked first
    innermost: tuple[PhaseMark, ...] = ()  # what decides by itself, from the innermost frame outwards
    outermost: tuple[PhaseMark, ...] = ()  # asked when nothing else said otherwise
    waiting: tuple[tuple[str, str], ...] = ()  # file and function in which a rank waits for others, beside torch's own

    def __post_init__(self) -> None:
        assert {mark.phase for mark in self.enclosing + self.innermost + self.outermost} <= set(PHASES)


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last said. Times are of the machine's monotonic clock, which no one can set."""

    pid: int = 0  # 0: the rank has not spoken yet
    tick: float = 0.0  # the last heartbeat; old while a thread holds Python's lock, or the process is stopped
    moved: float = 0.0  # when its main thread was last seen elsewhere than before
    step: int = 0  # steps done, those before a restart included
    restored: int = -1  # the step it began from; -1: not known yet
    phase: str = "start"
    waiting: bool = False  # in a collective, for other ranks
    novel: bool = False  # waiting at a line of ours where it never was before
    left: bool = False  # it is about to end by itself, well or not: who is gone without it was killed
    steps_here: int = 0  # steps done since the process began
    counts: tuple[int, ...] = ()  # collectives begun, by process group


def pack(beat: Beat) -> bytes:
    """The record without its last word, which is the supervisor's."""
    flags = beat.waiting | beat.novel << 1 | beat.left << 2
    head = HEAD.pack(
        beat.pid,
        int(beat.tick * 1e9),
        int(beat.moved * 1e9),
        beat.step,
        beat.restored,
        beat.steps_here,
        len(beat.counts),
        PHASES.index(beat.phase),
        flags,
    )
    return head + COUNTS.pack(*beat.counts[:MOST_GROUPS], *[0] * (MOST_GROUPS - len(beat.counts)))


def unpack(data: bytes) -> Beat:
    """What was packed."""
    pid, tick, moved, step, restored, steps_here, groups, phase, flags = HEAD.unpack_from(data, 0)
    return Beat(
        pid=pid,
        tick=tick / 1e9,
        moved=moved / 1e9,
        step=step,
        restored=restored,
        steps_here=steps_here,
        phase=PHASES[min(phase, len(PHASES) - 1)],
        waiting=bool(flags & 1),
        novel=bool(flags & 2),
        left=bool(flags & 4),
        counts=COUNTS.unpack_from(data, AT_COUNTS)[:groups],
    )


TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SILENT_SECONDS = 1.0  # without a heartbeat, which else comes twenty times a second


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one look."""

    rank: int
    beat: Beat
    now: float
    state: str = "S"  # the kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped, Z is dead
    cpu_seconds: float = 0.0

    @property
    def silent(self) -> bool:
        """The heartbeat has stopped: the process is stopped, or somebody holds Python's lock."""
        return self.beat.pid != 0 and self.now - self.beat.tick > SILENT_SECONDS

    @property
    def still_since(self) -> float:
        return self.beat.tick if self.silent else self.beat.moved


class HeartbeatReader:
    """The heartbeats of all ranks of a machine."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.memories: dict[int, mmap.mmap] = {}

    def look(self) -> list[RankStatus]:
        """Everyone who has spoken."""
        return [seen for rank in self.ranks if (seen := self._look(rank)) is not None]

    def ask_to_leave(self) -> None:
        """Ranks whose heartbeat still runs end their process, with the code of a fault that can be resumed from."""
        for memory in self.memories.values():
            LEAVE.pack_into(memory, AT_LEAVE, 1)

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.stack"

    def phase_table(self, rank: int) -> PhaseTable:
        """What a rank said its frames mean."""
        return msgspec.json.decode(phase_file(self.folder, rank).read_bytes(), type=PhaseTable)

    def _look(self, rank: int) -> RankStatus | None:
        file = self.folder / f"rank{rank}.beat"
        if rank not in self.memories:
            if not file.exists() or file.stat().st_size < SIZE:
                return None
            with open(file, "r+b") as opened:
                self.memories[rank] = mmap.mmap(opened.fileno(), SIZE)
        beat = unpack(bytes(self.memories[rank]))
        if not beat.pid:
            return None
        now = time.monotonic()
        state, cpu_seconds = process(beat.pid)
        if state == "Z":
            self.memories.pop(rank).close()  # a successor makes a file of its own
        return RankStatus(rank=rank, beat=beat, now=now, state=state, cpu_seconds=cpu_seconds)


def phase_file(folder: Path, rank: int) -> Path:
    """Where a rank says what its frames mean: there before its first heartbeat."""
    return folder / f"rank{rank}.phases.json"


def process(pid: int) -> tuple[str, float]:
    """A process's state and the seconds of processor it has used; Z when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z", 0.0
    words = text.rpartition(")")[2].split()  # the name before it may hold anything
    return words[0], (int(words[11]) + int(words[12])) / TICKS_PER_SECOND


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
            before = self.last.get(one.rank)
            if before is None or before.beat.moved != one.beat.moved:
                self.still_cpu[one.rank] = one.cpu_seconds
                if before is not None and _kind(before) != "waiting" and before.beat.steps_here >= 2:
                    self.longest[_kind(before)] = max(self.longest.get(_kind(before), 0.0), self.still(before))
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
        used = one.cpu_seconds - self.still_cpu.get(one.rank, one.cpu_seconds)
        is_busy = one.state in "RD" or used > BUSY_SHARE * max(one.now - one.still_since, 1.0)
        return max(least, learnt) * (BUSY if is_busy else 1.0)

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


def crossed(seen: Sequence[RankStatus]) -> tuple[tuple[int, ...], str]:
    """The one among ranks that all wait that went on without the others, or waits where none ever did."""
    newest = [one for one in seen if one.beat.step == max(other.beat.step for other in seen)]
    if len(newest) < len(seen):  # nobody can finish a step whose last collective another has not entered
        return tuple(one.rank for one in newest), "left out a collective that the others wait in"
    novel = [one for one in seen if one.beat.novel]
    if novel and len(novel) < len(seen):
        return tuple(one.rank for one in novel), "is in another collective than the others"
    skipped = [one for one in seen if any(_has_passed(one, other) for other in seen)]
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


def _has_passed(one: RankStatus, other: RankStatus) -> bool:
    """Further on in the program, with no more collectives behind it."""
    no_more = any(mine <= theirs for mine, theirs in zip(one.beat.counts, other.beat.counts, strict=False) if theirs)
    mine, theirs = ((each.beat.step, PHASES.index(each.beat.phase)) for each in (one, other))
    return no_more and mine > theirs


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


BETWEEN = "torch/_ops.py"  # a frame that a collective may have below its own
LOCKS = "/threading.py"  # and one that whoever waits for another thread has
ARITHMETIC = "torch/distributed/tensor/"  # dispatches, and computes
WAITING = (("torch/distributed/", ""), ("torch/cuda/streams.py", ""))


def stack_of(running: FrameType | None) -> list[Frame]:
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
        if BETWEEN not in frame.file and not frame.file.endswith(LOCKS):
            return ARITHMETIC not in frame.file and any(
                file in frame.file and name in ("", frame.name) for file, name in WAITING + table.waiting
            )
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


def capture(pulse: HeartbeatReader, seen: list[RankStatus]) -> dict[int, str]:
    """What faulthandler writes for each rank; empty for one that is stopped."""
    sizes = {one.rank: len(_content(pulse.stack_file(one.rank))) for one in seen}
    for one in seen:
        if one.state not in "TtZ":
            os.kill(one.beat.pid, signal.SIGUSR1)
    time.sleep(PATIENCE_SECONDS)
    new = {one.rank: _content(pulse.stack_file(one.rank))[sizes[one.rank] :] for one in seen}
    return {rank: words.decode(errors="replace") for rank, words in new.items()}


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


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
