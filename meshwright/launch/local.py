"""Ranks of one machine: forked from a nursery that has torch, adopted by the launcher, ended together."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright.spec.order import Order
from meshwright.spec.place import cores

SET_CHILD_SUBREAPER = 36  # of Linux's prctl
START_SECONDS = 300.0  # importing torch from a cold and crowded disk


class NurseryError(RuntimeError):
    """The nursery ended, or did not answer."""


class Nursery:
    """The process that ranks are forked from. It is started early, and imports torch while the launcher works."""

    def __init__(self, environment: Mapping[str, str], log: Path, stdout: int) -> None:
        adopt()
        self.answers, writing = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.train.nursery", str(writing)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=words,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C reaches the launcher, who sees to the ranks
            )
        os.close(writing)
        self.log = log
        self.closed = False

    def start(self, orders: Sequence[Order]) -> list[int]:
        """Fork a rank for each order; their process numbers."""
        for order in orders:
            self._tell(msgspec.json.encode(order))
        return [self._answer(order.place.rank) for order in orders]

    def rest(self) -> None:
        """The ranks are at work: fetch what a restart will want."""
        self._tell(b"rest")

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End it; the ranks are not its concern. Closing twice is no mistake."""
        if self.closed:
            return
        self.closed = True
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self.answers)

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise NurseryError(self._last_words()) from None

    def _answer(self, rank: int) -> int:
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self.answers], [], [], START_SECONDS)
            letter = os.read(self.answers, 1) if ready else b""
            if not letter:
                raise NurseryError(self._last_words())
            text += letter
        said, pid = (int(word) for word in text.split())
        assert said == rank, "orders are answered in turn"
        return pid

    def _last_words(self) -> str:
        return tail(self.log) or f"the nursery ended with {self.process.poll()}; see {self.log}"


def adopt() -> None:
    """Let ranks, whose parent in the nursery ends at once, become children of this process."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


class Ranks:
    """The processes of one attempt."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)
        self.codes: list[int | None] = [None] * len(pids)

    def poll(self) -> list[int | None]:
        """Exit codes so far; None: still running; below zero: ended by that signal."""
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return self.codes

    def signal(self, number: signal.Signals) -> None:
        """To every rank that is still there."""
        for pid, code in zip(self.pids, self.poll(), strict=True):
            if code is None:
                os.kill(pid, number)

    def end(self) -> None:
        """Now. A checkpoint that was being written is dropped; the one before it stands."""
        self.signal(signal.SIGKILL)
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def defaults(ranks: int) -> dict[str, str]:
    """What a rank's environment has unless the user's own says otherwise: its share of the cores, loopback only."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(max(cores() // ranks, 1)),
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives remembered, to tell who left one out
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it a GPU's products refuse to be deterministic
    }


def threads(environment: Mapping[str, str]) -> int:
    """Of a rank's arithmetic, as its environment has them; of a list, which is by depth, the first."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(int(first), 1) if first.isdecimal() else 1


def gpus(environment: Mapping[str, str]) -> int:
    """GPUs that ranks of this machine may use, counted without torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    return len([name for name in devices if name.removeprefix("nvidia").isdecimal() and name != "nvidia"])


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
