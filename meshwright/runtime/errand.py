"""Commands that are run beside a rank, one after another, by a small process of their own.

That process outlives nobody: when the rank that started it is gone, is asked to stop or has waited long enough, the
command ends with all that it started. It is told by a file what to do, and leaves another that says how it went.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any, Literal

import msgspec

from meshwright.runtime.files import replace_json
from meshwright.runtime.place import DIALECTS
from meshwright.runtime.ranks import SET_CHILD_SUBREAPER
from meshwright.spec.problem import UNDECODABLE

ORDER, RESULT = "order.json", "result.json"
LOOK_SECONDS = 0.1
GRACE_SECONDS = 5.0  # between asking a command to end and ending it
TAIL_BYTES = 64 * 1024  # of what it said that are looked at
MOST_SAID_BYTES = 64 * 1024**2  # that are kept of what it said, from the beginning; beyond them, its end
MOST_NUMBERS, MOST_JSON_BYTES = 64, 10**7
# What tells a process that it is a rank of a job: a command is none.
RANK_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    *(name for each in DIALECTS for name in (each.rank, each.world, each.local_rank, each.local_world)),
)  # fmt: skip
State = Literal["done", "failed", "timeout", "stopped"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    commands: tuple[tuple[str, tuple[str, ...]], ...]  # a name, and the words
    seconds: float  # that each may take
    parent: int = 0  # the process without which none goes on: who gives the order
    remove: tuple[str, ...] = ()  # folders that nobody needs afterwards


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How it went."""

    state: State
    name: str  # of the command that was last
    code: int | None
    seconds: float


class Errand:
    """An order that is under way, as its rank sees it."""

    def __init__(self, folder: Path, order: Order) -> None:
        self.folder = folder
        (folder / RESULT).unlink(missing_ok=True)
        replace_json(folder / ORDER, msgspec.structs.replace(order, parent=os.getpid()))
        unset = [word for name in RANK_VARIABLES for word in ("-u", name)]
        self.process = subprocess.Popen(
            ["env", *unset, sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the launcher, who sees to the ranks
        )

    def poll(self) -> Result | None:
        """How it went, once it is over."""
        if self.process.poll() is None:
            return None
        try:
            return msgspec.json.decode((self.folder / RESULT).read_bytes(), type=Result)
        except (OSError, *UNDECODABLE):
            return Result(state="failed", name="", code=self.process.returncode, seconds=0.0)

    def stop(self) -> Result:
        """End it, with all that it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2 * GRACE_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        result = self.poll()
        return result if result and result.name else Result(state="stopped", name="", code=None, seconds=0.0)


def said(folder: Path, name: str) -> Path:
    """Where all is that a command said."""
    return folder / f"{name}.txt"


def serve(folder: Path) -> None:
    """Do what the order says."""
    order = msgspec.json.decode((folder / ORDER).read_bytes(), type=Order)
    adopt_orphans()
    asked = list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    result = None
    for name, words in order.commands:
        began = time.monotonic()
        state, code = _run(words, said(folder, name), order.seconds, order.parent, asked)
        result = Result(state=state, name=name, code=code, seconds=time.monotonic() - began)
        if state != "done":
            break
    for path in order.remove:
        shutil.rmtree(path, ignore_errors=True)
    replace_json(folder / RESULT, result)


def _run(
    words: Sequence[str], output: Path, seconds: float, parent: int, asked: Sequence[int]
) -> tuple[State, int | None]:
    deadline = time.monotonic() + seconds
    with open(output, "wb", buffering=0) as stream:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            stream.write(f"{words[0]}: {error.strerror}\n".encode())
            return "failed", None
        assert process.stdout is not None, "a pipe was asked for"
        listener = Thread(target=keep, args=(process.stdout, stream), daemon=True)
        listener.start()
        try:
            return _ended(process, deadline, parent, asked)
        finally:
            listener.join(GRACE_SECONDS)  # nobody is left who could say more


def _ended(
    process: "subprocess.Popen[bytes]", deadline: float, parent: int, asked: Sequence[int]
) -> tuple[State, int | None]:
    while process.poll() is None:
        late, alone = time.monotonic() > deadline, os.getppid() != parent
        if late or alone or asked:
            # A rank that is gone may be started again soon, and write where this command reads.
            end_group(process, 0.0 if alone else GRACE_SECONDS)
            return "timeout" if late else "stopped", None
        time.sleep(LOOK_SECONDS)
    end_group(process)  # what it started and left behind
    return "failed" if process.returncode else "done", process.returncode


def keep(source: IO[bytes], file: IO[bytes], most: int = MOST_SAID_BYTES) -> None:
    """Write what a command says to a file as it comes; of more than so many bytes the last, when all is said."""
    room, rest, dropped = most, bytearray(), 0
    while said := os.read(source.fileno(), TAIL_BYTES):
        with suppress(OSError):  # of a full disk the command need not know
            file.write(said[:room])
        rest += said[room:]
        room = max(room - len(said), 0)
        dropped += max(len(rest) - TAIL_BYTES, 0)
        del rest[:-TAIL_BYTES]
    with suppress(OSError):
        file.write((f"\n[{dropped} bytes are left out here]\n".encode() if dropped else b"") + rest)


def end_group(process: "subprocess.Popen[bytes]", grace: float = GRACE_SECONDS) -> None:
    """Ask a process and all of its session to end, then end them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # until none is left
            time.sleep(LOOK_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.poll()
    end_orphans()


def adopt_orphans() -> None:
    """Have what a command leaves behind in sessions of its own, as daemons do, become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def end_orphans() -> None:
    """End the children of this process, and theirs, which become its own as it goes on."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (children := own_children()) and time.monotonic() < deadline:
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def own_children() -> list[int]:
    """The children of this process's main thread, which starts and adopts them, by the kernel's list of them."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def last_line(file: Path) -> str:
    """The last thing that a command said."""
    lines = [line for line in _tail(file).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def numbers(file: Path, output: Path) -> dict[str, float]:
    """What a command measured: the JSON object of its last line, or of the newest JSON file that it wrote.

    NaN and Infinity, which Python writes and no standard has, are read as what they are.
    """
    found = _object(last_line(file).encode())
    if found is None:
        files = sorted((path for path in output.rglob("*.json") if path.is_file()), key=lambda one: one.stat().st_mtime)
        found = next((values for path in reversed(files) if (values := _object(_small(path))) is not None), {})
    inner = found.get("results")  # where lm-evaluation-harness has them
    named = _leaves(inner if isinstance(inner, dict) else found)
    return {name: value for (name, value), _ in zip(named, range(MOST_NUMBERS), strict=False)}


def _small(file: Path) -> bytes:
    """A file of a command's, unless it is too large or not to be read."""
    with suppress(OSError):
        return file.read_bytes() if file.stat().st_size <= MOST_JSON_BYTES else b""
    return b""


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # a whole number that no float holds
                yield f"{before}{name}", float(value)


def _tail(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - TAIL_BYTES, 0))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
