"""From what the supervisor saw to the six lines that a person reads."""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.launch import stacks
from meshwright.launch.heartbeat import Seen
from meshwright.launch.judge import Hang
from meshwright.launch.local import tail
from meshwright.launch.nodes import Lost
from meshwright.spec import phases
from meshwright.spec.exits import Exit
from meshwright.spec.verdict import Kind, Verdict, of_code

AGAIN = "run the same command again: it goes on from the newest checkpoint"
STATES = {"T": "state T (stopped)", "t": "state t (traced)", "Z": "state Z (gone)"}
LIKELY = {
    signal.SIGKILL: "killed from outside: by a person, a scheduler, or the kernel for want of memory (see dmesg)",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "a file that was mapped became shorter (data?), or memory is faulty",
    signal.SIGABRT: "native code gave up; its words are in the log",
    signal.SIGTERM: "ended before it could listen",
}


def of_exit(rank: int, code: int, seen: Seen | None, folder: Path) -> Verdict:
    """A rank that ended without words of its own."""
    kind: Kind = of_code(code)
    log = folder / "logs" / f"rank{rank}.txt"
    if code < 0:
        number = signal.Signals(-code)
        what, cause = f"rank {rank} was ended by signal {number.name}", LIKELY.get(number, "")
    else:
        what, cause = f"rank {rank} ended with exit code {code}", tail(log, 1)
    return Verdict(
        kind=kind,
        code=Exit.RESUMABLE if kind == "killed" else code,
        what=what,
        where=place(seen) if seen else "",
        cause=cause,
        remedy=AGAIN if kind == "killed" else "see the log",
        details=str(log),
        rank=rank,
        phase=seen.beat.phase if seen else "start",
        step=seen.beat.step if seen else None,
    )


def of_nursery(words: str, folder: Path) -> Verdict:
    """No rank could be started."""
    last = words.strip().splitlines()
    return Verdict(
        kind="error",
        code=Exit.FAILED,
        what=f"the ranks could not be started: {last[-1] if last else 'no word of why'}",
        where=f"{socket.gethostname()}, before the first step",
        remedy="see the log; `python -c 'import torch'` may tell as much",
        details=str(folder / "logs" / "nursery.txt"),
    )


def is_mismatch(rank: int, folder: Path) -> bool:
    """Whether a rank died of another's wrong collective: Gloo ends a process whose message has an unexpected length."""
    return "preamble.length" in tail(folder / "logs" / f"rank{rank}.txt", 40)


def of_hang(hang: Hang, seen: Mapping[int, Seen], words: Mapping[int, str], details: Path) -> Verdict:
    """Ranks that hang: which, where, since when. The stack of a process that is stopped cannot be had."""
    one = seen[hang.ranks[0]]
    found = stacks.frames(words.get(one.rank, ""))
    phase = phases.doing(found, one.beat.phase).phase if found else one.beat.phase
    who = f"rank {one.rank}" if len(hang.ranks) == 1 else f"ranks {', '.join(map(str, hang.ranks))}"
    waiting = [rank for rank, other in seen.items() if other.beat.waiting and rank not in hang.ranks]
    others = f"; waiting for it: {_list(waiting)}" if waiting else ""
    return Verdict(
        kind="hang",
        code=Exit.RESUMABLE,
        what=f"{who} {hang.reason}, in {phase} of step {one.beat.step + 1}{others}",
        where=f"{place(one)}; {stacks.shown(found) or STATES.get(one.state, 'no stack')}",
        since=f"{hang.seconds:.1f} s ago; {hang.limit:.1f} s were allowed" if hang.limit else "just now",
        cause=_cause(hang, one, phase),
        remedy=AGAIN,
        details=str(details),
        rank=one.rank,
        phase=phase,
        step=one.beat.step + 1,
        stack=tuple(f"{frame.file}:{frame.line} {frame.name}" for frame in found),
    )


def of_lost(lost: Lost, seen: Sequence[Seen], details: Path) -> Verdict:
    """Another machine that is gone: which, since when, and what the ranks here were doing."""
    steps = [one.beat.step for one in seen]
    moment = time.strftime("%H:%M:%S", time.localtime(time.time() - lost.seconds))
    return Verdict(
        kind="killed",
        code=Exit.RESUMABLE,
        what=f"node {lost.node} {f'has ended: {lost.said}' if lost.said else 'is unreachable'}",
        where=f"seen from {socket.gethostname()}{f', after step {max(steps)}' if steps else ''}",
        since=f"{lost.seconds:.1f} s ago, at {moment}",
        cause="" if lost.said else "the machine is down or was taken away, or the network to it is",
        remedy=f"{AGAIN}, on fewer machines too",
        details=str(details),
        rank=lost.node.first,
        step=max(steps, default=None),
    )


def keep_end(verdict: Verdict, folder: Path, attempt: str) -> None:
    """What ended an attempt, for whoever reads the run folder later; a disk that takes no more is no reason to stop."""
    with suppress(OSError):
        (folder / "faults").mkdir(exist_ok=True)
        (folder / "faults" / f"ended-{attempt}.json").write_bytes(msgspec.json.encode(verdict))


def keep(verdict: Verdict, words: Mapping[int, str], details: Path) -> None:
    """The verdict and the stacks it rests on, for whoever wants to know more."""
    details.mkdir(parents=True, exist_ok=True)
    for rank, text in words.items():
        (details / f"rank{rank}.txt").write_text(text or "no stack: the process is stopped, or gone\n")
    (details / "verdict.json").write_bytes(msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")


def place(one: Seen) -> str:
    """Where a rank is: its machine, process, step and collective."""
    return (
        f"{socket.gethostname()}, process {one.beat.pid}, after step {one.beat.step}, "
        f"in {one.beat.phase}, collective {sum(one.beat.counts)}"
    )


def _cause(hang: Hang, one: Seen, phase: str) -> str:
    if "stopped" in hang.reason:
        return "somebody stopped the process; `kill -CONT` would let it go on"
    if "lock" in hang.reason:
        return "native code that holds Python's lock: an extension, or a call that never returns"
    if "collective" in hang.reason:
        return "the ranks' programs differ: a branch that only some of them take"
    return "the data source does not answer" if phase == "data" else "the line above never returns"


def _list(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def process_name(pid: int) -> str:
    """A process and when it began, which together are never used twice."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = "0"
    return f"{socket.gethostname()}:{pid}:{began}"


def this_session() -> str:
    """The name of this launcher."""
    return process_name(os.getpid())


def session_above() -> str:
    """The name of whoever launched this process."""
    return process_name(os.getppid())
