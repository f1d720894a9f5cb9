"""What a thread is doing, read off its stack: no mark has to be set where the work is done."""

from collections.abc import Iterable, Sequence
from functools import cache
from types import FrameType
from typing import NamedTuple

from meshwright.spec.beat import PHASES


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


# Part of the file's path, function, phase. First what encloses other work, wherever in the stack it is; then, from the
# innermost frame outwards, what decides by itself.
ENCLOSING = (
    ("meshwright/train/loop.py", "held_out", "eval"),
    ("meshwright/train/rank.py", "_finish", "end"),
    ("meshwright/train/build.py", "", "start"),
    ("meshwright/train/world.py", "", "start"),
    ("meshwright/train/agree.py", "", "start"),
    ("meshwright/checkpoint/restore.py", "", "start"),
    ("meshwright/checkpoint/", "", "save"),
)
INNERMOST = (
    ("torch/_dynamo/convert_frame.py", "", "compile"),
    ("torch/_inductor/", "", "compile"),
    ("meshwright/data/", "", "data"),
    ("torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("meshwright/optim/", "", "optimizer"),
    ("meshwright/train/scale.py", "", "optimizer"),
    ("meshwright/train/step.py", "", "forward"),
)
OUTERMOST = (("meshwright/train/loop.py", "_steps", "forward"),)  # the loop runs, and nothing above said otherwise
BETWEEN = ("torch/_ops.py",)  # frames that a collective may have below its own
ARITHMETIC = "torch/distributed/tensor/"  # dispatches, and computes
WAITING = (("torch/distributed/", ""), ("torch/cuda/streams.py", ""), ("meshwright/parallel/ring.py", "arrival"))


def of(running: FrameType | None) -> list[Frame]:
    """A running thread's stack, innermost first."""
    found = []
    while running is not None:
        found.append(Frame(running.f_code.co_filename, running.f_lineno, running.f_code.co_name))
        running = running.f_back
    return found


def doing(stack: Sequence[Frame], before: str = "start") -> Doing:
    """The phase of a stack and whether it waits for others; what tells nothing leaves the phase as it was."""
    around = {_marked(ENCLOSING, frame.file, frame.name) for frame in stack}
    phase = (
        next((phase for _, _, phase in ENCLOSING if phase in around), "")
        or next((phase for frame in stack if (phase := _marked(INNERMOST, frame.file, frame.name))), "")
        or next((phase for frame in stack if (phase := _marked(OUTERMOST, frame.file, frame.name))), "")
    )
    site = next(((frame.file, frame.line) for frame in stack if "/meshwright/" in frame.file), ("", 0))
    return Doing(phase or before, is_waiting(stack), site)


def is_waiting(stack: Iterable[Frame]) -> bool:
    """Whether the innermost frame is a collective's, or the device's queue."""
    for frame in stack:
        if not any(part in frame.file for part in BETWEEN):
            return ARITHMETIC not in frame.file and any(_is(frame, *mark) for mark in WAITING)
    return False


def parse(text: str) -> list[Frame]:
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
def _marked(marks: tuple[tuple[str, str, str], ...], file: str, name: str) -> str:
    """Remembered: the same few lines are looked at twenty times a second."""
    return next((phase for part, function, phase in marks if part in file and function in ("", name)), "")


def _is(frame: Frame, file: str, name: str) -> bool:
    return file in frame.file and name in ("", frame.name)


assert {phase for _, _, phase in ENCLOSING + INNERMOST} <= set(PHASES)
