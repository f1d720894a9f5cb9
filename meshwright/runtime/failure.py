"""How runs fail: exit codes, which scripts may rely on, and a failure report for each kind of end.

A report says what failed, where, since when, the likely cause and what to do. A rank that fails leaves its own; the
supervisor writes those of ranks that are killed or hang, and of machines that are gone.
"""

import errno
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from meshwright.runtime.files import replace_file, replace_json

if TYPE_CHECKING:  # exit codes are in every verb, what watches ranks only in those that start some
    from meshwright.runtime.heartbeat import Hang, PhaseTable, RankStatus
    from meshwright.runtime.nodes import Lost


class Exit(IntEnum):
    """How the program ended."""

    DONE = 0
    FAILED = 1
    INPUT = 2
    DOES_NOT_FIT = 3
    PREEMPTED = 10
    RESUMABLE = 11
    CORRUPT = 12
    NOT_FINITE = 13
    HARDWARE = 14
    INTERRUPTED = 130


MEANING = {
    Exit.DONE: "done",
    Exit.FAILED: "failed: a rank's error, a check that did not hold, or a fault of ours",
    Exit.INPUT: "bad input: every problem is listed with its remedy",
    Exit.DOES_NOT_FIT: "the plan does not fit the memory there is",
    Exit.PREEMPTED: "stopped by SIGTERM, checkpoint saved: run the same command again to resume",
    Exit.RESUMABLE: "failed, resumable (a killed or hung rank, data gone): run the same command again to resume",
    Exit.CORRUPT: "a checkpoint is damaged, and there is no older one",
    Exit.NOT_FINITE: "too many gradients in a row were not finite",
    Exit.HARDWARE: "replicas disagree, or matmuls with their checksums: suspected hardware",
    Exit.INTERRUPTED: "interrupted",
}


def table() -> str:
    """The codes and their meaning, as `--help` shows them."""
    return "\n".join(["exit codes:", *(f"  {code.value:<4} {text}" for code, text in MEANING.items())]) + "\n"


Kind = Literal[
    "killed", "hang", "error", "input", "data", "not-finite", "replicas", "matmul", "memory", "corrupt", "stopped"
]  # fmt: skip
RESTARTABLE: tuple[Kind, ...] = ("killed", "hang")  # the rest would only happen again
# What Gloo, NCCL and sockets say when the other side is gone.
BROKEN = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Connection refused")
FULL = (errno.ENOSPC, errno.EDQUOT)
WIDEST = 160  # characters of a line on the screen; all of it is in the file
KINDS: dict[int, Kind] = {  # by a rank's exit code
    Exit.INPUT: "input",
    Exit.DOES_NOT_FIT: "memory",
    Exit.PREEMPTED: "stopped",
    Exit.RESUMABLE: "data",
    Exit.CORRUPT: "corrupt",
    Exit.NOT_FINITE: "not-finite",
    Exit.HARDWARE: "replicas",
}
# What asks a rank to save and end. mpirun passes the second on at once, and SIGTERM after a long sleep.
ASKS = (signal.SIGTERM, signal.SIGUSR2)
AGAIN = "run the same command again to resume from the newest checkpoint"
# Of a run that is asked to end when only its last command is not done.
OWED, OWED_REMEDY = (
    "all steps are done, and the last eval.command is not",
    "run the same command again: it runs eval.command on the model, and nothing else",
)
STATES = {"T": "state T (stopped)", "t": "state t (traced)", "Z": "state Z (gone)"}
LIKELY = {
    signal.SIGKILL: "killed from outside: by a person, a scheduler, or the kernel for want of memory (see dmesg)",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "a file that was mapped became shorter (data?), or memory is faulty",
    signal.SIGABRT: "native code gave up; its words are in the log",
    signal.SIGTERM: "ended before it could listen",
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing on the screen of a failure."""

    kind: Kind
    code: int
    what: str
    where: str = ""
    since: str = ""
    cause: str = ""
    remedy: str = ""
    details: str = ""  # where they are
    rank: int | None = None
    phase: str = ""
    step: int | None = None
    good_until: int | None = None  # the last step whose state is beyond doubt; checkpoints after it are set aside
    stack: tuple[str, ...] = ()
    suspects: tuple[int, ...] = ()  # replicas whose devices may be at fault
    deviated: bool = False  # its last collectives were not those of the step before
    at: float = 0.0  # wall clock; of several the earliest is the cause, the others are its victims

    def lines(self) -> list[str]:
        """What, where, since when, likely cause, what to do, where the details are."""
        texts = (self.what, self.where, self.since, self.cause, self.remedy, self.details)
        named = list(zip(("what", "where", "since", "cause", "do", "details"), texts, strict=True))
        # A remedy that is cut off is none, it may be a command; of memory the line that is long names the culprit.
        whole = {"do"} if self.kind != "memory" else {"what", "where", "since", "cause", "do"}
        lengths = {name: len(text) if name in whole else WIDEST for name, text in named}
        return [f"{name + ':':<9}{_one_line(text, lengths[name])}" for name, text in named if text]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class FailureError(RuntimeError):
    """Something that ends a run with a failure report of its own."""

    def __init__(self, report: Failure) -> None:
        super().__init__(report.what)
        self.report = report


def report_of(error: Exception) -> Failure | None:
    """The failure report that an error carries, a rank's own or that of another process; None: it is none of ours."""
    found = getattr(error, "report", None)
    return found if isinstance(found, Failure) else None


def write(folder: Path, report: Failure) -> None:
    """A rank's failure report, for whoever watches; a folder that was never made is left so."""
    if folder.is_dir():
        replace_file(folder / f"failure.rank{report.rank}.json", msgspec.json.encode(report))


def write_somewhere(folders: Sequence[Path], report: Failure) -> None:
    """The same in the first of some folders that takes it: the run's may lie on a disk that is full."""
    for folder in folders:
        with suppress(OSError):
            write(folder, report)
            return


def read(folder: Path) -> list[Failure]:
    """The failure reports of all ranks that left one."""
    return [msgspec.json.decode(file.read_bytes(), type=Failure) for file in folder.glob("failure.rank*.json")]


def is_broken(text: str) -> bool:
    """Whether words are those of a rank that others left alone in a collective."""
    return any(word in text for word in BROKEN)


def _one_line(text: str, widest: int) -> str:
    """No line may be mistaken for two, and none may speak to the terminal."""
    plain = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return plain if len(plain) <= widest else plain[: widest - 1] + "…"


def of_exit(rank: int, code: int, seen: "RankStatus | None", folder: Path) -> Failure:
    """A rank that ended without words of its own."""
    from meshwright.runtime.ranks import tail

    kind: Kind = "killed" if code < 0 else KINDS.get(code, "error")
    log = folder / "logs" / f"rank{rank}.txt"
    if code < 0:
        number = signal.Signals(-code)
        what, cause = f"rank {rank} was ended by signal {number.name}", LIKELY.get(number, "")
    else:
        what, cause = f"rank {rank} ended with exit code {code}", tail(log, 1)
    is_full = os.strerror(errno.ENOSPC) in cause  # which is also why it could not write words of its own
    return Failure(
        kind=kind,
        code=Exit.RESUMABLE if kind == "killed" else code,
        what=what,
        where=place(seen) if seen else "",
        cause=cause,
        remedy=AGAIN if kind == "killed" else f"free some disk space, then {AGAIN}" if is_full else "see the log",
        details=str(log),
        rank=rank,
        phase=seen.beat.phase if seen else "start",
        step=seen.beat.step if seen else None,
    )


def of_killed(rank: int, seen: "RankStatus | None", details: Path) -> Failure:
    """A rank that somebody else had started, and that is gone without a word."""
    return Failure(
        kind="killed",
        code=Exit.RESUMABLE,
        what=f"rank {rank} was killed: its process is gone without a word",
        where=place(seen) if seen else socket.gethostname(),
        cause=LIKELY[signal.SIGKILL],
        remedy=AGAIN,
        details=str(details),
        rank=rank,
        phase=seen.beat.phase if seen else "",
        step=seen.beat.step if seen else None,
    )


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or somebody's share of one, is full; libraries say so in their own classes."""
    return getattr(error, "errno", None) in FULL or says_full(str(error))


def says_full(words: str) -> bool:
    """The same of an error's words."""
    return any(os.strerror(code) in words for code in FULL)


def of_full_disk(places: Sequence[Path]) -> Failure:
    """A verb that could not write on."""
    where = f"; little is free in {', '.join(map(str, places))}" if places else ""
    return Failure(
        kind="error",
        code=Exit.FAILED,
        what=f"a file could not be written: no space is left{where}",
        remedy="free some space, then run the same command again",
    )


def of_fork_server(words: str, folder: Path, is_lost: bool) -> Failure:
    """No rank could be started; `is_lost`: because somebody ended the process that forks them, time and again."""
    last = words.strip().splitlines()
    return Failure(
        kind="killed" if is_lost else "error",
        code=Exit.RESUMABLE if is_lost else Exit.FAILED,
        what=f"the ranks could not be started: {last[-1] if last else 'no word of why'}",
        where=f"{socket.gethostname()}, as ranks were started",
        cause="too little memory, or somebody's signal" if is_lost else "",
        remedy=AGAIN if is_lost else "see the log; `python -c 'import torch'` may tell as much",
        details=str(folder / "logs" / "fork_server.txt"),
    )


def is_mismatch(rank: int, folder: Path) -> bool:
    """Whether a rank died of another's wrong collective: Gloo ends a process whose message has an unexpected length."""
    from meshwright.runtime.ranks import tail

    return "preamble.length" in tail(folder / "logs" / f"rank{rank}.txt", 40)


def of_hang(
    hang: "Hang", seen: Mapping[int, "RankStatus"], words: Mapping[int, str], table: "PhaseTable", details: Path
) -> Failure:
    """Ranks that hang: which, where, since when. The stack of a process that is stopped cannot be had."""
    from meshwright.runtime.heartbeat import doing, frames, shown

    one = seen[hang.ranks[0]]
    found = frames(words.get(one.rank, ""))
    phase = doing(found, table, one.beat.phase).phase if found else one.beat.phase
    who = f"rank {one.rank}" if len(hang.ranks) == 1 else f"ranks {', '.join(map(str, hang.ranks))}"
    waiting = [rank for rank, other in seen.items() if other.beat.waiting and rank not in hang.ranks]
    them = f"rank {waiting[0]}" if len(waiting) == 1 else f"{len(waiting)} ranks"
    others = f"; waiting for it: {them}" if waiting else ""
    return Failure(
        kind="hang",
        code=Exit.RESUMABLE,
        what=f"{who} {hang.reason}, in {phase} of step {one.beat.step + 1}{others}",
        where=f"{place(one)}; {shown(found) or STATES.get(one.state, 'no stack')}",
        since=f"{hang.seconds:.1f} s ago; {hang.limit:.1f} s were allowed" if hang.limit else "just now",
        cause=_cause(hang, phase),
        remedy=AGAIN,
        details=str(details),
        rank=one.rank,
        phase=phase,
        step=one.beat.step + 1,
        stack=tuple(f"{frame.file}:{frame.line} {frame.name}" for frame in found),
    )


def of_lost(lost: "Lost", seen: Sequence["RankStatus"], details: Path) -> Failure:
    """Another machine that is gone: which, since when, and what the ranks here were doing."""
    steps = [one.beat.step for one in seen]
    moment = time.strftime("%H:%M:%S", time.localtime(time.time() - lost.seconds))
    return Failure(
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


def keep_end(report: Failure, folder: Path, attempt: str) -> None:
    """What ended an attempt, for whoever reads the run folder later; a disk that takes no more is no reason to stop."""
    with suppress(OSError):
        (folder / "faults").mkdir(exist_ok=True)
        (folder / "faults" / f"ended-{attempt}.json").write_bytes(msgspec.json.encode(report))


def keep(report: Failure, words: Mapping[int, str], details: Path) -> None:
    """The failure report and the stacks it rests on, for whoever wants to know more."""
    details.mkdir(parents=True, exist_ok=True)
    for rank, text in words.items():
        (details / f"rank{rank}.txt").write_text(text or "no stack: the process is stopped, or gone\n")
    replace_json(details / "verdict.json", report)


def place(one: "RankStatus") -> str:
    """Where a rank is: its machine, process, step and collective."""
    return (
        f"{socket.gethostname()}, process {one.beat.pid}, after step {one.beat.step}, "
        f"in {one.beat.phase}, collective {sum(one.beat.counts)}"
    )


def _cause(hang: "Hang", phase: str) -> str:
    if "stopped" in hang.reason:
        return "somebody stopped the process; `kill -CONT` lets it continue"
    if "lock" in hang.reason:
        return "native code that holds Python's lock: an extension, or a call that never returns"
    if "collective" in hang.reason:
        return "the ranks' programs differ: a branch that only some of them take"
    return "the data source does not answer" if phase == "data" else "the line above never returns"


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


def session_above(rank_variable: str = "") -> str:
    """The name of whoever launched this process: the nearest above it that is not itself told to be that rank.

    A shell between the launcher and a rank has the rank's environment.
    """
    above = os.getppid()
    while rank_variable and above > 1 and _has_variable(above, rank_variable):
        above = int(_stat(above)[1])
    return process_name(above)


def _has_variable(pid: int, name: str) -> bool:
    """Whether a process was started with a variable; of another user's nothing is known."""
    with suppress(OSError):
        return f"\0{name}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, behind its name: state, parent, …"""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", "0"]
