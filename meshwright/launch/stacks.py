"""The Python stack of a process that may not be able to answer: written by a signal, below Python."""

import os
import signal
import time
from pathlib import Path

from meshwright.launch.heartbeat import Pulse, Seen
from meshwright.spec import phases
from meshwright.spec.phases import Frame

PATIENCE_SECONDS = 0.3


def capture(pulse: Pulse, seen: list[Seen]) -> dict[int, str]:
    """What faulthandler writes for each rank; empty for one that is stopped."""
    sizes = {one.rank: _size(pulse.stack_file(one.rank)) for one in seen}
    for one in seen:
        if one.state not in "TtZ":
            os.kill(one.beat.pid, signal.SIGUSR1)
    time.sleep(PATIENCE_SECONDS)
    return {one.rank: _since(pulse.stack_file(one.rank), sizes[one.rank]) for one in seen}


def confirmed(pulse: Pulse, seen: list[Seen], ranks: tuple[int, ...]) -> bool:
    """A second look before the accusation: who has moved meanwhile is slow, not hung.

    It comes before the signals, which wake some calls up.
    """
    time.sleep(PATIENCE_SECONDS)
    again = {one.rank: one.still_since for one in pulse.look()}
    return all(again.get(one.rank, 0.0) <= one.still_since for one in seen if one.rank in ranks)


def frames(text: str) -> list[Frame]:
    """The main thread's frames, innermost first."""
    return phases.parse(text)


def shown(found: list[Frame], most: int = 3) -> str:
    """Where a stack is, in one line: the innermost line, and the innermost lines of ours."""
    ours = [frame for frame in found[1:] if "/meshwright/" in frame.file]
    return " ← ".join(f"{Path(frame.file).name}:{frame.line} {frame.name}" for frame in [*found[:1], *ours][:most])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _since(file: Path, start: int) -> str:
    return file.read_bytes()[start:].decode(errors="replace") if file.exists() else ""
