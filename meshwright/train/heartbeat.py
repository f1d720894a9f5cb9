"""A rank's heartbeat: a thread that looks where the main thread is and says so in shared memory, a few times a second.

Looking costs the main thread some microseconds each time; nothing is added to the work itself.
"""

import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from meshwright.runtime import heartbeat as beats
from meshwright.runtime.failure import Exit
from meshwright.runtime.heartbeat import MOST_GROUPS, PHASES, Beat, PhaseTable

SECONDS = 0.05  # between two looks
STACK_SIGNAL = signal.SIGUSR1


class Heartbeat:
    """Beats until it is closed, or until the supervisor asks this process to leave."""

    def __init__(self, folder: Path, rank: int, table: PhaseTable) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.table = table
        beats.phase_file(folder, rank).write_bytes(msgspec.json.encode(table))  # its readers wait for the first beat
        self.memory = _memory(folder / f"rank{rank}.beat")
        # A signal writes the stacks to a file. Its handler runs below Python: it works while the lock is held.
        self.stack = open(folder / f"rank{rank}.stack", "w")  # noqa: SIM115 - open until the process ends
        faulthandler.register(STACK_SIGNAL, file=self.stack, all_threads=True)
        now = time.monotonic()
        self.beat = Beat(pid=os.getpid(), tick=now, moved=now)
        self.work, self.wait = [0.0] * len(PHASES), [0.0] * len(PHASES)
        self.main = threading.get_ident()
        self.before: list[beats.Frame] = []
        self.site = ("", 0)
        self.known: set[tuple[str, int]] = set()  # lines that the main thread was at, and left again
        self.step, self.steps_here, self.restored = 0, 0, -1
        self.step_ends_ns: deque[int] = deque(maxlen=2)  # by the clock of torch's flight recorder
        self.closed = threading.Event()
        self._publish(self.beat)
        self.thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self.thread.start()

    def begins(self, step: int) -> None:
        """The loop is about to start, from this step."""
        self.step = self.restored = step
        self._publish(msgspec.structs.replace(self.beat, step=step, restored=step))

    def did(self, step: int) -> None:
        """A step is done."""
        self.step = step
        self.steps_here += 1
        self.step_ends_ns.append(time.time_ns())
        counts = collectives() or self.beat.counts
        here = {"step": step, "restored": self.restored, "steps_here": self.steps_here, "counts": counts}
        self._publish(msgspec.structs.replace(self.beat, **here))

    def looked(self) -> None:
        """A validation loss was taken: its collectives belong to the step before, not to the next."""
        if self.step_ends_ns:  # a run that lacked only its ending makes no step here
            self.step_ends_ns[-1] = time.time_ns()

    def spent(self) -> list[list[float]]:
        """Seconds of the main thread so far: at work and waiting, by phase."""
        return [list(self.work), list(self.wait)]

    def leave(self) -> None:
        """The process is about to end by itself."""
        self.beat = msgspec.structs.replace(self.beat, left=True)
        self._publish(self.beat)

    def close(self) -> None:
        """Stop beating."""
        self.closed.set()
        self.thread.join()
        faulthandler.unregister(STACK_SIGNAL)
        self.stack.close()
        self.memory.close()

    def _live(self) -> None:
        while not self.closed.wait(SECONDS):
            self._publish(self._look())
            if beats.LEAVE.unpack_from(self.memory, beats.AT_LEAVE)[0]:
                os._exit(Exit.RESUMABLE)  # the main thread may never come back to be asked

    def _publish(self, beat: Beat) -> None:
        packed = beats.pack(beat)
        self.memory[: len(packed)] = packed

    def _look(self) -> Beat:
        stack = beats.stack_of(sys._current_frames().get(self.main))
        seen = beats.doing(stack, self.table, self.beat.phase)
        waiting = seen.waiting or (seen.phase == "backward" and self._device_thread_waits())
        last, now = self.beat, time.monotonic()
        counts = collectives() or last.counts
        progress = stack != self.before or counts != last.counts or self.step != last.step
        if progress and seen.site != self.site:
            self.known.add(self.site)
        self.before, self.site = stack, seen.site
        # A look that came late was held up by the rank itself: it was stopped, or at work under Python's lock.
        phase, seconds = PHASES.index(seen.phase), now - last.tick
        waited = min(seconds, 2 * SECONDS) if waiting else 0.0
        self.wait[phase] += waited
        self.work[phase] += seconds - waited
        self.beat = msgspec.structs.replace(
            last,
            tick=now,
            moved=now if progress else last.moved,
            step=self.step,
            steps_here=self.steps_here,
            restored=self.restored,
            phase=seen.phase,
            waiting=waiting,
            novel=waiting and seen.site not in self.known,
            counts=counts,
        )
        return self.beat

    def _device_thread_waits(self) -> bool:
        """A GPU's backward runs in a thread of autograd's own, and so do the collectives in it."""
        return any(beats.is_waiting(stack, self.table) for stack in stacks_besides(self.main, threading.get_ident()))


def stacks_besides(*threads: int) -> list[list[beats.Frame]]:
    """The stacks of all other threads, as words.

    No frame outlives the expression. The caller's own is among them: in a variable it would hold itself, and with it
    every other thread's tensors, until Python's collector comes by.
    """
    return [beats.stack_of(frame) for number, frame in sys._current_frames().items() if number not in threads]


def collectives() -> tuple[int, ...]:
    """Collectives begun so far in each process group, in the order in which the groups were made."""
    if not dist.is_initialized():
        return ()
    groups: list[Any] = list(dist.distributed_c10d._world.pg_names)[:MOST_GROUPS]
    try:
        # Made whole: a tuple that grows while something else holds it ends the thread.
        return tuple([group._get_sequence_number_for_group() for group in groups])
    except RuntimeError:  # a group on its way in or out
        return ()


def _memory(file: Path) -> mmap.mmap:
    """A file of the record's size, shared with whoever watches."""
    new = file.with_suffix(".new")  # in place, a reader of the old one would find its memory gone
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(descriptor, beats.SIZE)
    memory = mmap.mmap(descriptor, beats.SIZE)
    os.close(descriptor)
    new.replace(file)
    return memory


class RecorderEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the recorder, as far as it is used."""

    profiling_name: str
    process_group: tuple[str, ...]
    input_sizes: Any
    output_sizes: Any
    time_created_ns: int

    @property
    def operation(self) -> tuple[str, str, str, str]:
        """What matters of it: its name, its group, and the sizes it sends and gets."""
        return self.profiling_name, self.process_group[0], str(self.input_sizes), str(self.output_sizes)


class RecorderTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorder holds."""

    entries: tuple[RecorderEntry, ...] = ()


def recorded() -> tuple[RecorderEntry, ...]:
    """The last collectives, oldest first; none where the recorder is off (TORCH_FR_BUFFER_SIZE)."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    return msgspec.json.decode(dump(True, False), type=RecorderTrace).entries if dump is not None else ()


def deviated(entries: Sequence[RecorderEntry], step_ends_ns: Sequence[int]) -> bool:
    """Whether the step under way began other collectives than the whole step before it, as far as it has come."""
    if len(step_ends_ns) < 2:
        return False
    earlier, last = step_ends_ns[-2], step_ends_ns[-1]
    before = [entry.operation for entry in entries if earlier < entry.time_created_ns <= last]
    now = [entry.operation for entry in entries if entry.time_created_ns > last]
    return now[: len(before)] != before[: len(now)]
