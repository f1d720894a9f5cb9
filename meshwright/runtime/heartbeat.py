"""The heartbeat of a rank: one small record in shared memory, written by the rank, read by its supervisor."""

import mmap
import os
import struct
import time
from pathlib import Path
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
    steps_here: int = 0  # steps done since the process began
    counts: tuple[int, ...] = ()  # collectives begun, by process group


def pack(beat: Beat) -> bytes:
    """The record without its last word, which is the supervisor's."""
    flags = beat.waiting | beat.novel << 1
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
        memory = self.memories.get(rank) or self._open(rank)
        if memory is None:
            return None
        beat = unpack(bytes(memory))
        if not beat.pid:
            return None
        now = time.monotonic()
        state, cpu_seconds = process(beat.pid)
        if state == "Z":
            self.memories.pop(rank).close()  # a successor makes a file of its own
        return RankStatus(rank=rank, beat=beat, now=now, state=state, cpu_seconds=cpu_seconds)

    def _open(self, rank: int) -> mmap.mmap | None:
        file = self.folder / f"rank{rank}.beat"
        if not file.exists() or file.stat().st_size < SIZE:
            return None
        with open(file, "r+b") as opened:
            self.memories[rank] = mmap.mmap(opened.fileno(), SIZE)
        return self.memories[rank]


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
