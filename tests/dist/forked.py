"""The program in a process that was forked from one that has torch: importing it takes longer than most runs here.

The verb, its launcher, its fork server and its ranks are the processes that a user has, each with its own parent; only
the interpreter that a new process would begin with is a copy. Tests of how processes begin and end start real ones.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from waiting import HANG
from worlds import RARELY, SERVER


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -m meshwright WORDS` in a folder, to its end."""
    program = Program(words, folder, environment)
    said = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess(list(words), program.returncode, *said)


class Program:
    """`python -m meshwright WORDS` in a folder, at work: what is used of a `Popen`."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.said = tempfile.TemporaryDirectory()
        self.process = SERVER.Process(target=_program, args=(list(words), folder, dict(environment), *self._files()))
        self.process.start()

    def _files(self) -> list[Path]:
        return [Path(self.said.name) / name for name in ("output", "errors")]

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        """Ask it to save, and to end."""
        self.process.terminate()

    def communicate(self) -> tuple[str, str]:
        """What it has printed, and what it said of errors, once it has ended; one that hangs is ended."""
        self.process.join(HANG)
        self.process.kill()
        self.process.join()
        said, errors = (file.read_text() if file.exists() else "" for file in self._files())
        return said, errors


def _program(words: list[str], folder: Path, environment: dict[str, str], output: Path, errors: Path) -> None:
    with open(output, "wb") as out, open(errors, "wb") as err:
        _take_over(environment, (os.devnull, out.fileno(), err.fileno()))
    os.chdir(folder)
    sys.argv[1:] = words
    gc.freeze()  # what was there before is never garbage; looking at it would copy its pages
    gc.set_threshold(*RARELY)  # of its ranks too, which are forked from here
    ranks: Any = import_module("meshwright.runtime.ranks")
    ranks.SERVER = multiprocessing.get_context("fork")
    ranks.subprocess.Popen = _start
    runpy.run_module("meshwright", run_name="__main__", alter_sys=True)


def _take_over(environment: Mapping[str, str], files: tuple[str | int, int, int]) -> None:
    """Be as a new process is: its environment, its standard files, no signal heeded."""
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        opened = os.open(file, os.O_RDONLY) if isinstance(file, str) else file
        os.dup2(opened, number)
    modes = ({"mode": "r"}, {"mode": "w"}, {"mode": "w", "buffering": 1})
    # Closed by nobody: the objects that these replace may go at any time.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, **mode, closefd=False) for n, mode in enumerate(modes))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


NEW_PROCESS = subprocess.Popen


def _start(command: list[str], **options: Any) -> Any:
    """In the place of a new process: a fork, if it is the fork server that is started, which answers in a pipe."""
    return _Forked(command, **options) if "pass_fds" in options else NEW_PROCESS(command, **options)


class _Forked:
    """What is used of a `Popen`."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdin: int, stdout: int, stderr: IO[bytes],
        pass_fds: tuple[int], start_new_session: bool,
    ) -> None:  # fmt: skip
        assert command[:2] == [sys.executable, "-m"]
        assert stdin == subprocess.PIPE
        assert start_new_session
        reading, writing = os.pipe()
        self.code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._become(command[2:], env, (reading, stdout, stderr.fileno()), pass_fds[0])
        os.close(reading)
        self.stdin = open(writing, "wb")  # noqa: SIM115 - whoever has it closes it

    @staticmethod
    def _become(command: list[str], env: dict[str, str], files: tuple[int, int, int], answers: int) -> None:
        try:
            os.setsid()
            first, second, third = (os.dup(file) for file in files)
            _take_over(env, (first, second, third))
            os.closerange(3, answers)
            os.closerange(answers + 1, os.sysconf("SC_OPEN_MAX"))
            sys.argv[:] = command
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        finally:
            os._exit(1)  # its end is to be killed

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, how: int) -> int | None:
        if self.code is None:
            found, status = os.waitpid(self.pid, how)
            self.code = os.waitstatus_to_exitcode(status) if found else None
        return self.code
