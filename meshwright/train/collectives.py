"""The collectives of this process, from torch's flight recorder: what was begun, in which order, of which sizes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch._C._distributed_c10d as c10d

# What matters of an operation: its name, its group, and the sizes it sends and gets.
Operation = tuple[str, str, str, str]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the recorder, as far as it is used."""

    profiling_name: str
    process_group: tuple[str, ...]
    input_sizes: Any
    output_sizes: Any
    time_created_ns: int

    @property
    def operation(self) -> Operation:
        return self.profiling_name, self.process_group[0], str(self.input_sizes), str(self.output_sizes)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorder holds."""

    entries: tuple[Entry, ...] = ()


def recorded() -> tuple[Entry, ...]:
    """The last collectives, oldest first; none where the recorder is off (TORCH_FR_BUFFER_SIZE)."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    return msgspec.json.decode(dump(True, False), type=Trace).entries if dump is not None else ()


def deviated(entries: Sequence[Entry], step_ends_ns: Sequence[int]) -> bool:
    """Whether the step under way began other collectives than the whole step before it, as far as it has come."""
    if len(step_ends_ns) < 2:
        return False
    earlier, last = step_ends_ns[-2], step_ends_ns[-1]
    before = [entry.operation for entry in entries if earlier < entry.time_created_ns <= last]
    now = [entry.operation for entry in entries if entry.time_created_ns > last]
    return now[: len(before)] != before[: len(now)]
