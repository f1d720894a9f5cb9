"""What a run leaves at its end, written until it is there.

A disk that is full, or for a moment not there, costs a save in the middle of a run little. At the end there is no next
one, and what the ranks hold may be all there is of the last steps: then they wait for somebody to make room, as long as
they are let. What the newest checkpoint has too is not waited for: the same command makes the rest of it.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from meshwright.checkpoint.write import first_words, number_of_first
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.failure import AGAIN, Exit, Failure, FailureError, is_full
from meshwright.runtime.place import RankSpec
from meshwright.runtime.supervise import newest_step
from meshwright.spec.problem import InputError
from meshwright.train.loop import Stop
from meshwright.train.saving import Say

WAIT_SECONDS = 600.0  # for room
AGAIN_SECONDS = 15.0  # until the next try, if nothing is seen to have changed: quotas are not seen
LOOK_SECONDS = 0.5  # far below what a watcher takes for a hang
WAIT, TRY, LEAVE = range(3)  # of all ranks' answers the largest counts


def surely(what: str, write: Callable[[], None], folder: Path, step: int, mesh: Mesh, stop: Stop, say: Say) -> None:
    """Write what a run leaves after its last step; FailureError when it cannot be. All ranks must call it.

    `write` is called on all of them too, again and again: one writes, the others take part in gathering.
    """
    deadline, told = time.monotonic() + WAIT_SECONDS, False
    while (words := first_words(refusal(write), mesh)) is not None:
        is_kept = bool(number_of_first(newest_step(folder) == step, mesh))
        if not told and not is_kept:
            told = True
            say(
                f"warning: {what} could not be written ({words}), and no checkpoint has the last steps: waiting for "
                f"room in {folder}, for {WAIT_SECONDS / 60:.0f} min at most; SIGTERM or Ctrl-C ends the wait"
            )
        if is_kept or not _worth_another_try(folder, deadline, mesh, stop):
            raise FailureError(unwritten(f"{what} of step {step} could not be written ({words})", folder, is_kept))


def refusal(write: Callable[[], None]) -> str | None:
    """Why something was not written; None: it was."""
    try:
        write()
    except OSError as error:
        return error.strerror or str(error)
    except (SafetensorError, InputError) as error:
        if not is_full(error):
            raise
        return str(error)
    return None


def _worth_another_try(folder: Path, deadline: float, mesh: Mesh, stop: Stop) -> bool:
    """Wait until another try may fare better; False when nobody lets this rank wait longer."""
    began, free = time.monotonic(), free_bytes(folder)
    while True:
        answer = WAIT
        if time.monotonic() > deadline or stop.asked:
            answer = LEAVE
        elif free_bytes(folder) > free or time.monotonic() - began > AGAIN_SECONDS:
            answer = TRY
        answer = _largest(answer, mesh)  # together: who waits in a collective for long is taken for hung
        if answer != WAIT:
            return answer == TRY
        time.sleep(LOOK_SECONDS)


def _largest(answer: int, mesh: Mesh) -> int:
    """Of all ranks, any of which may have been asked to end."""
    agreed = torch.tensor(answer, device=mesh.device)
    if mesh.world > 1:
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return int(agreed.item())


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder; 0 while it cannot be told."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def unsaved(order: RankSpec) -> Failure:
    """How a rank ends that was asked to, and whose last save failed; why was said then."""
    newest = newest_step(Path(order.folder))
    last = f"the newest is of step {newest}" if newest >= 0 else "there is none"
    return Failure(
        kind="stopped",
        code=Exit.RESUMABLE,
        what=f"asked to end, and no checkpoint of the last step could be saved: {last}",
        cause="the warning above says why; a disk that is full is to be freed",
        remedy=AGAIN,
        details=order.folder,
        rank=order.place.rank,
        at=time.time(),
    )


def unwritten(what: str, folder: Path, is_kept: bool) -> Failure:
    """How a run ends whose steps are all done, and whose model is not there."""
    newest = newest_step(folder)
    last = f"resume from step {newest}, the newest checkpoint" if newest >= 0 else "train again: there is no checkpoint"
    again = "write it from the last checkpoint" if is_kept else last
    return Failure(
        kind="error",
        code=Exit.RESUMABLE,
        what=what,
        cause="" if is_kept else "neither a checkpoint nor the model of the last steps could be written",
        remedy=f"free some space in {folder}, then run the same command again to {again}",
    )
