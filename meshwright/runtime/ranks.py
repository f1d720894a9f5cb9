"""Starting the ranks of one machine: forked from a process that has torch already, and ended together.

`run_ranks` calls a function on every rank and returns when all are done, a `Crew` does so again and again with the
same ranks: proofs, benchmarks and tests. A `ForkServer` starts ranks that are supervised: their launcher adopts them,
watches them and starts others in their place. It is the spare that makes a restart quick: a rank forked there is at
work in a tenth of a second, one that must import torch in three. It never touches a GPU, so that its children may.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from meshwright.runtime.failure import ASKS, Failure, FailureError
from meshwright.runtime.files import Speaker
from meshwright.runtime.heartbeat import STOPPED
from meshwright.runtime.heartbeat import process as process_of
from meshwright.runtime.place import Place, RankSpec, cores, local

SET_PARENT_DEATH_SIGNAL, SET_NAME, SET_CHILD_SUBREAPER = 1, 15, 36  # of Linux's prctl
START_SECONDS = 300.0  # importing torch from a cold and crowded disk
LOOK_SECONDS = 0.5
STOPPED_SECONDS = 5.0  # after which nobody is expected to let a stopped fork server go on
SOON = 0.3  # seconds in which the victims of a first failure fall
SERVER = multiprocessing.get_context("forkserver")
Work = Callable[..., None]  # (place, *args), to be found by its name in a module


class ForkServerError(RuntimeError):
    """The fork server ended, or did not answer; `is_lost`: by no doing of its own, so that another may do better."""

    def __init__(self, words: str, is_lost: bool = False) -> None:
        super().__init__(words)
        self.is_lost = is_lost


class ForkServer:
    """The process that ranks are forked from, started early; it imports `module` while the launcher works.

    The module has code(), the name of the source as it is now, serve_order(order), which is a rank from beginning to
    end, and fetch_rest(), called when ranks are at work: it imports what only restarts will use.
    """

    def __init__(self, module: str, environment: Mapping[str, str], log: Path, stdout: int) -> None:
        # Ranks, whose parent in the fork server ends at once, become children of this process.
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
        self.answers, writing = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright.runtime.ranks", module, str(writing)],
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

    def start(self, orders: Sequence[RankSpec]) -> dict[int, int]:
        """Fork a rank for each order; their process numbers, by rank."""
        started = dict[int, int]()
        try:
            for order in orders:
                self._tell(msgspec.json.encode(order))
            for order in orders:
                started[order.place.rank] = self._answer(order.place.rank)
        except ForkServerError:
            Ranks(started).end()  # nobody else knows of them
            raise
        return started

    def rest(self) -> None:
        """The ranks are at work: fetch what a restart will want. One that is gone is seen when it is needed."""
        with contextlib.suppress(ForkServerError):
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
            raise self._lost() from None

    def _answer(self, rank: int) -> int:
        text, deadline, stopped = b"", time.monotonic() + START_SECONDS, 0.0
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self.answers], [], [], LOOK_SECONDS)
            if not ready:
                if self.process.poll() is not None:  # the ranks that it has forked hold its end of the pipe open
                    raise self._lost()
                stopped = stopped + LOOK_SECONDS if process_of(self.process.pid)[0] in STOPPED else 0.0
                if stopped < STOPPED_SECONDS and time.monotonic() < deadline:
                    continue
                self.process.kill()
                what = "was stopped by a signal" if stopped else f"did not answer for {START_SECONDS:.0f} s"
                raise ForkServerError(f"the fork server {what}", is_lost=bool(stopped))
            letter = os.read(self.answers, 1)
            if not letter:
                raise self._lost()
            text += letter
        said, pid = (int(word) for word in text.split())
        assert said == rank, "orders are answered in turn"
        return pid

    def _lost(self) -> ForkServerError:
        """Why it does not answer any more: what it said last, or the signal that ended it."""
        code = self.process.wait()  # whose pipes are closed has ended but for a moment
        if code < 0:
            return ForkServerError(f"the fork server was ended by {signal.Signals(-code).name}", is_lost=True)
        return ForkServerError(tail(self.log) or f"the fork server ended with exit code {code} and said nothing")


class Ranks:
    """The processes of one attempt on this machine, by rank."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self.codes: dict[int, int | None] = dict.fromkeys(pids)

    def poll(self) -> dict[int, int | None]:
        """Exit codes so far; None: still running; below zero: ended by that signal."""
        for rank, pid in self.pids.items():
            if self.codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return self.codes

    def remove(self, ranks: Sequence[int]) -> None:
        """End some ranks, now, and forget them."""
        for rank in ranks:
            if self.poll()[rank] is None:
                os.kill(self.pids[rank], signal.SIGKILL)
                os.waitpid(self.pids[rank], 0)
            del self.pids[rank], self.codes[rank]

    def add(self, pids: Mapping[int, int]) -> None:
        """Others were started, some of them in the place of those that were removed."""
        self.pids |= pids
        self.codes |= dict.fromkeys(pids)

    def signal(self, number: signal.Signals) -> None:
        """To every rank that is still there."""
        for rank, code in self.poll().items():
            if code is None:
                os.kill(self.pids[rank], number)

    def end(self) -> None:
        """Now. A checkpoint that was being written is dropped; the one before it stands."""
        self.signal(signal.SIGKILL)
        for rank, pid in self.pids.items():
            if self.codes[rank] is None:
                self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve_orders(module: str, answers: int) -> None:
    """Be the fork server: read orders from standard input until it closes; answer each with the process's number."""
    launcher = os.getppid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)  # of the ranks too, until they listen
    with lasting_imports():
        ranks = importlib.import_module(module)
    ranks.code()  # remembered: ranks run what is imported here, whatever becomes of the files
    for line in sys.stdin.buffer:
        if line.strip() == b"rest":
            ranks.fetch_rest()
            continue
        order = msgspec.json.decode(line, type=RankSpec)
        os.write(answers, f"{order.place.rank} {_fork(ranks.serve_order, order, launcher)}\n".encode())


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Import without looking for garbage, a sixth of torch's time, and never look at what was imported.

    So children do not copy its pages either, by counting references in them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _fork(serve: Callable[[RankSpec], int], order: RankSpec, launcher: int) -> int:
    """A rank whose parent is the launcher: the process between them ends at once, and the launcher adopts."""
    reading, writing = os.pipe()
    if between := os.fork():
        os.close(writing)
        os.waitpid(between, 0)
        with open(reading, "rb") as said:
            return int(said.read())
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    code = 1
    try:
        while os.getppid() != launcher:  # the signal below follows the parent of the moment
            if os.getppid() == 1:
                os._exit(1)  # the launcher is gone
            time.sleep(0.001)
        die_with_parent()
        ctypes.CDLL(None).prctl(SET_NAME, f"rank{order.place.rank}".encode(), 0, 0, 0)  # for `ps` and `top`
        _redirect(order)
        code = serve(order)
        for stream in (sys.stdout, sys.stderr):  # whose reader may stand still
            Speaker(stream).say(stream.flush)
    finally:
        os._exit(code)  # what torch would do on the way out is not needed


def _redirect(order: RankSpec) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 2)
    if not order.speaks:
        os.dup2(log, 1)
    os.close(log)
    os.close(nothing)
    print(f"attempt {order.attempt}, process {os.getpid()}", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone, however that went."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def end_with_parent() -> None:
    """The same for a process that has others to end first."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def defaults(ranks: int) -> dict[str, str]:
    """What a rank's environment has unless the user's own says otherwise: its share of the cores, loopback only."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": str(max(cores() // ranks, 1)),
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives remembered, to tell who left one out
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it a GPU's matmuls refuse to be deterministic
    }


def threads(environment: Mapping[str, str]) -> int:
    """The threads of a rank's arithmetic, as its environment has them; the first of a list, which is by depth."""
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(int(first), 1) if first.isdecimal() else 1


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


class RankError(RuntimeError):
    """A rank failed: the first one's traceback, and its failure report where it made one."""

    def __init__(self, words: str, report: Failure | None = None) -> None:
        super().__init__(words)
        self.report = report


class Remote:
    """A function by its name, imported where it is called: the process that sends it need not have torch."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *args: Any) -> None:
        getattr(importlib.import_module(self.module), self.name)(*args)


class Crew:
    """Ranks of this machine that do a work again and again: what torch makes at first use is most of a short one."""

    def __init__(self, work: Work, count: int) -> None:
        if isinstance(work, Remote):
            SERVER.set_forkserver_preload([work.module])  # imported once, before the first fork
        start_server()
        self.meeting = tempfile.TemporaryDirectory()
        self.processes, self.ends = [], list[Any]()
        for rank in range(count):
            end, its_end = SERVER.Pipe()
            place = local(rank, count, Path(self.meeting.name) / "store", 1)
            process = SERVER.Process(target=_serve_works, args=(work, place, its_end), daemon=True)
            process.start()
            its_end.close()  # so that a rank that is gone is noticed
            self.processes.append(process)
            self.ends.append(end)

    def run(self, arguments: tuple[Any, ...], seconds: float) -> None:
        """Do the work once on every rank; raises what the first one to fail said, after which the crew is of no use."""
        for end in self.ends:
            with contextlib.suppress(BrokenPipeError):  # it is gone, as its answer will say
                end.send(arguments)
        deadline, waiting, failures = time.monotonic() + seconds, list(self.ends), []
        while waiting and (ready := wait(waiting, max(deadline - time.monotonic(), 0))):
            for end in ready:
                waiting.remove(end)
                at, said, report = self._answer(self.ends.index(end))
                if said:
                    failures.append((at, said, report))
                    deadline = min(deadline, time.monotonic() + SOON)
        if failures:
            _, said, report = min(failures)
            raise RankError(said, msgspec.json.decode(report, type=Failure) if report else None)
        if waiting:
            late = [self.ends.index(end) for end in waiting]
            raise RankError(f"ranks {late} did not finish within {seconds:.0f} s")

    def _answer(self, rank: int) -> tuple[float, str, bytes]:
        """When a rank was done, what it said if it failed, and the report it made of that, if any."""
        try:
            return self.ends[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(SOON)
            code = self.processes[rank].exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
            return 0.0, f"rank {rank} {how}", b""  # first of all: others can only say that they miss it

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.join()
        for end in self.ends:
            end.close()
        self.meeting.cleanup()


def start_server() -> None:
    """Have the process that a crew is forked from. Ctrl-C reaches it too, and is not for it to answer: it imports."""
    resource_tracker.ensure_running()  # which lets the signal through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_ranks(work: Work, count: int, arguments: tuple[Any, ...], seconds: float) -> None:
    """Do a work once in so many processes that can meet; return when all are done, or raise the first failure."""
    crew = Crew(work, count)
    try:
        crew.run(arguments, seconds)
    finally:
        crew.close()


def _serve_works(work: Work, place: Place, orders: Any) -> None:
    """Be a rank of a crew until it is closed."""
    gc.freeze()  # what was there before is never garbage; looking at it would copy its pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: who has the crew closes it
    while True:
        try:
            arguments = orders.recv()
        except EOFError:
            os._exit(0)
        said, report = "", b""
        try:
            work(place, *arguments)
        except BaseException as error:
            said = f"rank {place.rank}: {traceback.format_exc()}"
            report = msgspec.json.encode(error.report) if isinstance(error, FailureError) else b""
        orders.send((time.monotonic(), said, report))


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
    serve_orders(sys.argv[1], int(sys.argv[2]))
