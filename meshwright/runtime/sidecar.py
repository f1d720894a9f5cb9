"""The watcher of ranks that torchrun, Slurm or MPI has started: a process beside the first rank of each machine.

It watches, says what it sees and clears the way for a restart, which is the launcher's part.
"""

import errno
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

from meshwright.config.run import Run
from meshwright.runtime import failure, heartbeat, run_folder
from meshwright.runtime.failure import ASKS, Failure, is_broken
from meshwright.runtime.heartbeat import Hang, HangDetector, HeartbeatReader, RankStatus
from meshwright.runtime.nodes import LOST_SECONDS, MOST_TEXT, Lost, Node, Nodes
from meshwright.runtime.place import Place
from meshwright.runtime.supervise import LOOK_SECONDS, report_hang

SIDECAR_LOOK_SECONDS = 0.1
LEAVE_SECONDS = 2.0  # for ranks whose heartbeat still runs to end their process
STILL_SECONDS = 2.0  # without a move of any rank here: then a silent machine is missed, not merely unheard
GONE_SECONDS = 5.0  # on a crowded machine, from a broken connection to the end of the process that held it
CLOSE_SECONDS = 2 * (GONE_SECONDS + LOST_SECONDS + STILL_SECONDS)  # that a watcher may take to know why ranks ended
TAKEN_SECONDS = 10.0  # in which the watcher of ranks that were started before leaves the port
DONE = b"."  # what the rank beside it says at its end; nothing: it was killed


class SidecarSpec(msgspec.Struct, frozen=True, kw_only=True):
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

    def __init__(self, run: Run, place: Place, ranks: Sequence[int], beats: Path, folder: Path) -> None:
        run_folder.sweep()
        post = SidecarSpec(
            beats=str(beats),
            folder=str(folder),
            ranks=list(ranks),
            world=place.world,
            hang_seconds=run.faults.hang_seconds,
            address=place.address,
            port=place.port,
        )
        command = [sys.executable, "-m", "meshwright.runtime.sidecar", msgspec.json.encode(post).decode()]
        self.beats = beats
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """The ranks are done, or failed. If another machine's loss was the cause, the watcher says so and ends us."""
        try:
            self.process.communicate(DONE, timeout=CLOSE_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.beats, ignore_errors=True)


def watch(post: SidecarSpec, beside: int) -> Failure | None:
    """Until a rank of this machine hangs, another machine is lost, or the rank beside us closes its end of the pipe."""
    nodes = _nodes(post)
    pulse, judge = HeartbeatReader(Path(post.beats), post.ranks), HangDetector(post.hang_seconds, post.world)
    try:
        while not select.select([beside], [], [], SIDECAR_LOOK_SECONDS)[0]:
            looked = pulse.look()
            seen = [one for one in looked if one.state != "Z"]
            if (gone := _gone(looked, post)) is not None:
                return _killed(post, pulse, nodes, gone.rank, gone)
            hang = judge.look(seen, time.monotonic())
            if hang is not None and heartbeat.confirmed(pulse, seen, hang.ranks):
                return _hang(post, pulse, nodes, hang, seen)
            if nodes is not None and (lost := nodes.look(time.monotonic())) and is_still(seen, time.monotonic()):
                return _lose(post, pulse, nodes, lost)
        if os.read(beside, 1) != DONE:  # the rank beside us is the first of this machine
            return _killed(post, pulse, nodes, post.ranks[0], None)
        if (gone := _gone_soon(post, pulse)) is not None:  # its loss ended the rank beside us before we looked
            return _killed(post, pulse, nodes, gone.rank, gone)
        return _end(post, pulse, nodes) if nodes is not None else None
    finally:
        if nodes is not None:
            nodes.close()


def is_still(seen: Sequence[RankStatus], now: float) -> bool:
    """Whether no rank here has moved for a while: they wait for whoever is missing."""
    return all(now - one.still_since > STILL_SECONDS for one in seen)


def _nodes(post: SidecarSpec) -> Nodes | None:
    """The other machines, where there are any and they can be listened for."""
    if len(post.ranks) == post.world:
        return None
    in_turn = post.ranks == list(range(post.ranks[0], post.ranks[0] + len(post.ranks)))
    listed = "" if in_turn else f"ranks {', '.join(map(str, post.ranks))}"[:MOST_TEXT]
    node = Node(first=post.ranks[0], ranks=len(post.ranks), host=socket.gethostname()[:64], listed=listed)
    deadline = time.monotonic() + TAKEN_SECONDS
    while True:
        try:
            return Nodes(node, post.address, post.port, Path(post.folder))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
                continue
            what = (
                f"warning: the loss of a machine will not be seen: cannot listen at {post.address}:{post.port} (UDP): "
            )
            print(what + str(error.strerror), file=sys.stderr, flush=True)
            return None


def _gone(looked: Sequence[RankStatus], post: SidecarSpec) -> RankStatus | None:
    """A rank whose process is no more, and that did not say that it would go; the first one's pipe tells of it."""
    return next((one for one in looked if one.state == "Z" and not one.beat.left and one.rank != post.ranks[0]), None)


def _gone_soon(post: SidecarSpec, pulse: HeartbeatReader) -> RankStatus | None:
    """The same where a collective broke here: a killed process loses its connections a while before it is gone."""
    deadline = time.monotonic() + GONE_SECONDS
    while (gone := _gone(looked := pulse.look(), post)) is None:
        is_over = all(one.beat.left for one in looked) or time.monotonic() > deadline
        if is_over or not any(is_broken(report.what) for report in _reports(post)):
            break
        time.sleep(LOOK_SECONDS)
    return gone


def _reports(post: SidecarSpec) -> list[Failure]:
    return [report for report in failure.read(Path(post.folder)) if report.rank in post.ranks]


def _killed(
    post: SidecarSpec, pulse: HeartbeatReader, nodes: Nodes | None, rank: int, seen: RankStatus | None
) -> Failure:
    """A rank of this machine is gone without a word; who ended it is not known, for it was somebody else's child."""
    details = Path(post.folder) / "faults" / f"killed-{time.time_ns()}"
    report = failure.of_killed(rank, seen, details)
    failure.keep(report, {}, details)
    if nodes is not None:
        nodes.leave(report.what)
    return _leave(post, pulse, report)


def _end(post: SidecarSpec, pulse: HeartbeatReader, nodes: Nodes) -> Failure | None:
    """The ranks here have ended: because another machine had, or by themselves, which the others are told."""
    said = _reports(post)
    broken = bool(said) and all(is_broken(report.what) for report in said)
    deadline = time.monotonic() + LOST_SECONDS + STILL_SECONDS
    while broken and time.monotonic() < deadline:
        if (lost := nodes.look(time.monotonic())) is not None:
            return _lose(post, pulse, nodes, lost)
        time.sleep(SIDECAR_LOOK_SECONDS)
    nodes.leave(min(said, key=lambda report: report.at).what if said else "")
    return None


def _lose(post: SidecarSpec, pulse: HeartbeatReader, nodes: Nodes, lost: Lost) -> Failure:
    """Another machine is gone."""
    details = Path(post.folder) / "faults" / f"node-{time.time_ns()}"
    report = failure.of_lost(lost, pulse.look(), details)
    failure.keep(report, {}, details)
    nodes.pass_on(lost)
    return _leave(post, pulse, report)


def _hang(
    post: SidecarSpec, pulse: HeartbeatReader, nodes: Nodes | None, hang: Hang, seen: list[RankStatus]
) -> Failure:
    """A rank of this machine hangs."""
    details, words = Path(post.folder) / "faults" / f"hang-{time.time_ns()}", heartbeat.capture(pulse, seen)
    report = report_hang(hang, {one.rank: one for one in seen}, words, pulse, details)
    if nodes is not None:
        nodes.leave(report.what)
    return _leave(post, pulse, report)


def _leave(post: SidecarSpec, pulse: HeartbeatReader, report: Failure) -> Failure:
    """Say it, and clear the way for a restart."""
    print(report, file=sys.stderr, flush=True)
    pulse.ask_to_leave()
    time.sleep(LEAVE_SECONDS)
    for one in pulse.look():
        if one.state != "Z":
            os.kill(one.beat.pid, signal.SIGKILL)
    shutil.rmtree(post.beats, ignore_errors=True)
    return report


if __name__ == "__main__":
    for asks in (signal.SIGINT, *ASKS):  # the ranks, of whose process group this may be
        signal.signal(asks, signal.SIG_IGN)
    watch(msgspec.json.decode(sys.argv[1], type=SidecarSpec), sys.stdin.fileno())
