"""Under somebody else's launcher: a process beside the first local rank that watches all ranks of the machine.

It sees a hang, says who is guilty and has the ranks leave with the code of a fault that can be resumed from, so that
torchrun, Slurm or whoever it was can start them again.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from meshwright.launch import stacks, verdicts
from meshwright.launch.heartbeat import Pulse, Seen
from meshwright.launch.judge import Hang, Judge
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.spec.verdict import Verdict

LOOK_SECONDS = 0.1
LEAVE_SECONDS = 2.0  # for hearts that still beat to end their process


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """What to watch."""

    beats: str
    folder: str
    ranks: list[int]
    world: int
    hang_seconds: float


class Sidecar:
    """The watcher's process, seen from the rank beside it."""

    def __init__(self, run: Run, place: Place, beats: Path, folder: Path) -> None:
        first = place.rank - place.local_rank
        post = Post(
            beats=str(beats),
            folder=str(folder),
            ranks=list(range(first, first + place.local_world)),
            world=place.world,
            hang_seconds=run.faults.hang_seconds,
        )
        command = [sys.executable, "-m", "meshwright.launch.sidecar", msgspec.json.encode(post).decode()]
        self.beats = beats
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """The ranks are done."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.beats, ignore_errors=True)


def watch(post: Post) -> Verdict:
    """Until a rank of this machine hangs."""
    pulse, judge = Pulse(Path(post.beats), post.ranks), Judge(post.hang_seconds, post.world)
    while True:
        time.sleep(LOOK_SECONDS)
        seen = [one for one in pulse.look() if one.state != "Z"]
        hang = judge.look(seen, time.monotonic())
        if hang is not None and stacks.confirmed(pulse, seen, hang.ranks):
            return _tell(post, pulse, hang, seen, stacks.capture(pulse, seen))


def _tell(post: Post, pulse: Pulse, hang: Hang, seen: list[Seen], words: dict[int, str]) -> Verdict:
    """Say it, keep it, and clear the way for a restart."""
    details = Path(post.folder) / "faults" / f"hang-{time.time_ns()}"
    verdict = verdicts.of_hang(hang, {one.rank: one for one in seen}, words, details)
    verdicts.keep(verdict, words, details)
    print(verdict, file=sys.stderr, flush=True)
    pulse.ask_to_leave()
    time.sleep(LEAVE_SECONDS)
    for one in pulse.look():
        if one.state != "Z":
            os.kill(one.beat.pid, signal.SIGKILL)
    shutil.rmtree(post.beats, ignore_errors=True)
    return verdict


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the rank beside it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(msgspec.json.decode(sys.argv[1], type=Post))
