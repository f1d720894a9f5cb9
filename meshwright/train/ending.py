"""An error becomes a verdict: what it means, and the exit code that says so."""

import platform
import time
import traceback
from pathlib import Path

import msgspec
import torch

from meshwright.checkpoint.corrupt import CorruptError
from meshwright.spec.check import InputError
from meshwright.spec.exits import Exit
from meshwright.spec.order import Order
from meshwright.spec.verdict import FaultError, Kind, Verdict, is_broken, of_code

AGAIN = "put it right and run the same command again: it goes on from the newest checkpoint"


def verdict_of(error: Exception, order: Order, step: int, deviated: bool, begun: bool = True) -> Verdict:
    """The last words of a rank. `step` is −1 until the ranks stand ready; `begun`: they have made one since."""
    if isinstance(error, FaultError):
        verdict = error.verdict
    else:
        verdict = Verdict(kind="error", code=Exit.FAILED, what=_first_line(error))
        for kind, code, remedy in _known(error, order, begun and step >= 0):
            verdict = Verdict(kind=kind, code=code, what=_first_line(error), remedy=remedy)
    return msgspec.structs.replace(
        verdict,
        what=verdict.what if isinstance(error, FaultError) else f"rank {order.place.rank} failed: {verdict.what}",
        where=verdict.where or _where(error, step),
        remedy=verdict.remedy or "see the traceback in the log",
        details=verdict.details or order.log or order.folder,
        rank=order.place.rank,
        step=step if step >= 0 else None,
        stack=tuple(traceback.format_exception(error)),
        deviated=deviated,
        at=time.time(),
    )


def _known(error: Exception, order: Order, begun: bool) -> list[tuple[Kind, int, str]]:
    """Errors whose meaning is known: their kind, exit code and remedy."""
    if isinstance(error, CorruptError):
        return [("corrupt", Exit.CORRUPT, "restore the folder from a copy, or start anew with --fresh")]
    if isinstance(error, torch.OutOfMemoryError):
        return [("memory", Exit.DOES_NOT_FIT, "use a smaller microbatch, recompute, or more shards")]
    if isinstance(error, InputError):
        remedy = "; ".join(problem.remedy for problem in error.problems)
        if not begun:
            return [("input", Exit.INPUT, remedy)]
        return [(of_code(Exit.RESUMABLE), Exit.RESUMABLE, f"{remedy}; the same command then goes on")]
    # Our own launcher sees who it was that left; of somebody else's we know only that a rank is gone.
    if order.place.launcher != "meshwright" and is_broken(str(error)):
        return [("killed", Exit.RESUMABLE, AGAIN)]
    if isinstance(error, OSError) and _in_data(error):
        return [(of_code(Exit.RESUMABLE), Exit.RESUMABLE, AGAIN)]
    return []


def _in_data(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any("/meshwright/data/" in Path(frame.filename).as_posix() for frame in frames)


def _first_line(error: Exception) -> str:
    if isinstance(error, InputError):
        return "; ".join(problem.text for problem in error.problems)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _where(error: Exception, step: int) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/meshwright/" in frame.filename]
    line = f"; {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    when = f"after step {step}" if step >= 0 else "before the first step"
    return f"{platform.node()}, {when}{line}"
