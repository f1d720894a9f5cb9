"""Under somebody else's launcher: a process beside the first local rank that watches all ranks of the machine.

It sees a hang or the loss of another machine, says so and has the ranks leave with the code of a fault that can be
resumed from, so that torchrun, Slurm or whoever it was can start them again.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright.launch import leftovers, stacks, verdicts
from meshwright.launch.heartbeat import Pulse, Seen
from meshwright.launch.judge import Hang, Judge
from meshwright.launch.nodes import LOST_SECONDS, Lost, Node, Nodes
from meshwright.spec import verdict as verdict_file
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.spec.verdict import Verdict, is_broken

LOOK_SECONDS = 0.1
LEAVE_SECONDS = 2.0  # for hearts that still beat to end their process
STILL_SECONDS = 2.0  # without a move of any rank here: then a silent machine is missed, not merely unheard
DONE = b"."  # what the rank beside it says at its end; nothing: it was killed


class Post(msgspec.Struct, frozen=True, kw_only=True):
    """What to watch."""

    beats: str
    folder: str
    ranks: list[int]
    world: int
    hang_seconds: float
    address: str = ""  # where rank 0 listens
    port: int = 0


class Sidecar:
    """The watcher's process, seen from the rank beside it."""

    def __init__(self, run: Run, place: Place, beats: Path, folder: Path) -> None:
        leftovers.sweep()
        first = place.rank - place.local_rank
        post = Post(
            beats=str(beats),
            folder=str(folder),
            ranks=list(range(first, first + place.local_world)),
            world=place.world,
            hang_seconds=run.faults.hang_seconds,
            address=place.address,
            port=place.port,
        )
        command = [sys.executable, "-m", "meshwright.launch.sidecar", msgspec.json.encode(post).decode()]
        self.beats = beats
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """The ranks are done, or failed. If another machine's loss was the cause, the watcher says so and ends us."""
        try:
            self.process.communicate(DONE, timeout=2 * LOST_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.beats, ignore_errors=True)


def watch(post: Post, beside: int) -> Verdict | None:
    """Until a rank of this machine hangs, another machine is lost, or the rank beside us closes its end of the pipe."""
    nodes = _nodes(post)
    try:
        return _watch(post, beside, nodes)
    finally:
        if nodes is not None:
            nodes.close()


def _watch(post: Post, beside: int, nodes: Nodes | None) -> Verdict | None:
    pulse, judge = Pulse(Path(post.beats), post.ranks), Judge(post.hang_seconds, post.world)
    while not select.select([beside], [], [], LOOK_SECONDS)[0]:
        seen = [one for one in pulse.look() if one.state != "Z"]
        hang = judge.look(seen, time.monotonic())
        if hang is not None and stacks.confirmed(pulse, seen, hang.ranks):
            return _hang(post, pulse, nodes, hang, seen)
        if nodes is not None and (lost := nodes.look(time.monotonic())) and is_still(seen, time.monotonic()):
            return _lose(post, pulse, nodes, lost)
    return _end(post, pulse, nodes, os.read(beside, 1) == DONE) if nodes is not None else None


def is_still(seen: Sequence[Seen], now: float) -> bool:
    """Whether no rank here has moved for a while: they wait for whoever is missing."""
    return all(now - one.still_since > STILL_SECONDS for one in seen)


def _nodes(post: Post) -> Nodes | None:
    """The other machines, where there are any and they can be listened for."""
    if len(post.ranks) == post.world:
        return None
    node = Node(first=post.ranks[0], ranks=len(post.ranks), host=socket.gethostname()[:64])
    try:
        return Nodes(node, post.address, post.port, Path(post.folder))
    except OSError as error:
        what = f"warning: the loss of a machine will not be seen: cannot listen at {post.address}:{post.port} (UDP): "
        print(what + str(error.strerror), file=sys.stderr, flush=True)
        return None


def _end(post: Post, pulse: Pulse, nodes: Nodes, told: bool) -> Verdict | None:
    """The ranks here have ended: because another machine had, or by themselves, which the others are told."""
    if not told:
        nodes.leave(f"rank {post.ranks[0]} was killed")
        return None
    said = [verdict for verdict in verdict_file.read(Path(post.folder)) if verdict.rank in post.ranks]
    broken = bool(said) and all(is_broken(verdict.what) for verdict in said)
    deadline = time.monotonic() + LOST_SECONDS + STILL_SECONDS
    while broken and time.monotonic() < deadline:
        if (lost := nodes.look(time.monotonic())) is not None:
            return _lose(post, pulse, nodes, lost)
        time.sleep(LOOK_SECONDS)
    nodes.leave(min(said, key=lambda verdict: verdict.at).what if said else "")
    return None


def _lose(post: Post, pulse: Pulse, nodes: Nodes, lost: Lost) -> Verdict:
    """Another machine is gone."""
    details = Path(post.folder) / "faults" / f"node-{time.time_ns()}"
    verdict = verdicts.of_lost(lost, pulse.look(), details)
    verdicts.keep(verdict, {}, details)
    nodes.pass_on(lost)
    return _leave(post, pulse, verdict)


def _hang(post: Post, pulse: Pulse, nodes: Nodes | None, hang: Hang, seen: list[Seen]) -> Verdict:
    """A rank of this machine hangs."""
    words = stacks.capture(pulse, seen)
    details = Path(post.folder) / "faults" / f"hang-{time.time_ns()}"
    verdict = verdicts.of_hang(hang, {one.rank: one for one in seen}, words, details)
    verdicts.keep(verdict, words, details)
    if nodes is not None:
        nodes.leave(verdict.what)
    return _leave(post, pulse, verdict)


def _leave(post: Post, pulse: Pulse, verdict: Verdict) -> Verdict:
    """Say it, and clear the way for a restart."""
    print(verdict, file=sys.stderr, flush=True)
    pulse.ask_to_leave()
    time.sleep(LEAVE_SECONDS)
    for one in pulse.look():
        if one.state != "Z":
            os.kill(one.beat.pid, signal.SIGKILL)
    shutil.rmtree(post.beats, ignore_errors=True)
    return verdict


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(msgspec.json.decode(sys.argv[1], type=Post), sys.stdin.fileno())
