"""The reader's side of heartbeats: what each rank last said, beside what the kernel says of its process."""

import mmap
import os
import time
from pathlib import Path

import msgspec

from meshwright.spec import beat as beats
from meshwright.spec.beat import Beat

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SILENT_SECONDS = 1.0  # without a heartbeat, which else comes twenty times a second


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one look."""

    rank: int
    beat: Beat
    now: float
    state: str = "S"  # the kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped, Z is dead
    cpu_seconds: float = 0.0

    @property
    def silent(self) -> bool:
        """The heart has stopped: the process is stopped, or somebody holds Python's lock."""
        return self.beat.pid != 0 and self.now - self.beat.tick > SILENT_SECONDS

    @property
    def still_since(self) -> float:
        return self.beat.tick if self.silent else self.beat.moved


class Pulse:
    """The hearts of all ranks of a machine."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.memories: dict[int, mmap.mmap] = {}

    def look(self) -> list[Seen]:
        """Everyone who has spoken."""
        return [seen for rank in self.ranks if (seen := self._look(rank)) is not None]

    def ask_to_leave(self) -> None:
        """Hearts that still beat end their process, with the code of a fault that can be resumed from."""
        for memory in self.memories.values():
            beats.LEAVE.pack_into(memory, beats.AT_LEAVE, 1)

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.stack"

    def _look(self, rank: int) -> Seen | None:
        memory = self.memories.get(rank) or self._open(rank)
        if memory is None:
            return None
        beat = beats.unpack(bytes(memory))
        if not beat.pid:
            return None
        now = time.monotonic()
        state, cpu_seconds = process(beat.pid)
        if state == "Z":
            self.memories.pop(rank).close()  # a successor makes a file of its own
        return Seen(rank=rank, beat=beat, now=now, state=state, cpu_seconds=cpu_seconds)

    def _open(self, rank: int) -> mmap.mmap | None:
        file = self.folder / f"rank{rank}.beat"
        if not file.exists() or file.stat().st_size < beats.SIZE:
            return None
        with open(file, "r+b") as opened:
            self.memories[rank] = mmap.mmap(opened.fileno(), beats.SIZE)
        return self.memories[rank]


def process(pid: int) -> tuple[str, float]:
    """A process's state and the seconds of processor it has used; Z when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "Z", 0.0
    words = text.rpartition(")")[2].split()  # the name before it may hold anything
    return words[0], (int(words[11]) + int(words[12])) / TICKS_PER_SECOND
