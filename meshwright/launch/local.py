"""Ranks of one machine: started together, watched together, ended together."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from meshwright.spec.place import STORE, cores

GRACE_SECONDS = 10.0  # between asking a rank to end and ending it
LOOK_SECONDS = 0.05


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended, in its own words where it could still write them."""

    rank: int
    at: float  # wall clock; the earliest is the cause, the others are its victims
    code: int
    text: str


@dataclass
class Ranks:
    """The processes of one local job."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    meeting: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def start(self, command: Sequence[str], count: int, environment: Mapping[str, str], stdout: int) -> None:
        """Start all ranks. Rank 0 speaks on `stdout`; what else they say goes to their logs."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        for rank in range(count):
            names = {
                "RANK": rank,
                "WORLD_SIZE": count,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": count,
                STORE: str(Path(self.meeting.name) / "store"),
            }
            with open(logs / f"rank{rank}.txt", "wb") as log:
                process = subprocess.Popen(
                    command,
                    env={**defaults(count), **environment, **{name: str(value) for name, value in names.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout if rank == 0 else log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches the launcher, who ends the ranks
                )
            self.processes.append(process)

    def wait(self) -> Failure | None:
        """Until all ranks are done, or the first has failed and the others are ended."""
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0) for code in codes):
                time.sleep(4 * LOOK_SECONDS)  # victims of the first failure fall together with it
                failure = self._cause()
                self.end()
                return failure
            if all(code == 0 for code in codes):
                return None
            time.sleep(LOOK_SECONDS)

    def end(self) -> None:
        """Ask every rank to end, then see to it."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.meeting.cleanup()

    def _cause(self) -> Failure:
        """The first rank that failed. A rank killed from outside leaves no words, and is nobody's victim."""
        told = {failure.rank: failure for failure in read_failures(self.folder)}
        silent = [
            Failure(rank=rank, at=0.0, code=code, text=_ended(code) + self._tail(rank))
            for rank, process in enumerate(self.processes)
            if (code := process.poll()) not in (None, 0) and rank not in told
        ]
        return min([*told.values(), *silent], key=lambda failure: failure.at)

    def _tail(self, rank: int, lines: int = 12) -> str:
        log = self.folder / "logs" / f"rank{rank}.txt"
        last = log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(["", *last]) if last else ""


def _ended(code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def defaults(ranks: int) -> dict[str, str]:
    """What a rank's environment has unless the user's own says otherwise: its share of the cores, loopback only."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(max(cores() // ranks, 1)),
        "GLOO_SOCKET_IFNAME": loopback,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it a GPU's products refuse to be deterministic
    }


def gpus(environment: Mapping[str, str]) -> int:
    """GPUs that ranks of this machine may use, counted without torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    return len([name for name in devices if name.removeprefix("nvidia").isdecimal() and name != "nvidia"])


def end_on_term() -> None:
    """Let SIGTERM end the launcher the way Ctrl-C does: ranks first, then itself."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its launcher is gone, however that went. Linux only."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def write_failure(folder: Path, failure: Failure) -> None:
    """A rank's last words, for whoever watches."""
    (folder / f"failure.rank{failure.rank}.json").write_bytes(msgspec.json.encode(failure))


def read_failures(folder: Path) -> list[Failure]:
    """The last words of all ranks that had any."""
    return [msgspec.json.decode(file.read_bytes(), type=Failure) for file in folder.glob("failure.rank*.json")]
