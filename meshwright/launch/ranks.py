"""Ranks for a proof or a measurement, forked from a server that has torch already: eight of them start in a second.

What a child is told travels through Python's own start pipe; what it found comes back as files.
"""

import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.spec.place import Place, local

Work = Callable[..., None]  # (place, *arguments), to be found by its name in a module
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["meshwright.train.build"])  # by name: this side never imports torch


class RankError(RuntimeError):
    """A rank failed: the first one's own words."""


class Remote:
    """A function by its name, imported where it is called: the process that sends it need not have torch."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *arguments: Any) -> None:
        getattr(importlib.import_module(self.module), self.name)(*arguments)


def run_ranks(work: Work, count: int, arguments: tuple[Any, ...], seconds: float) -> None:
    """Run `work` in so many processes that can meet; return when all are done, or raise what the first failure said."""
    with tempfile.TemporaryDirectory() as name:
        meeting = Path(name)
        processes = [
            SERVER.Process(
                target=_begin, args=(work, local(rank, count, meeting / "store", 1), arguments, meeting), daemon=True
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            _watch(processes, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
        _raise_first(meeting, [process.exitcode for process in processes], seconds)


def _begin(work: Work, place: Place, arguments: tuple[Any, ...], meeting: Path) -> None:
    try:
        work(place, *arguments)
    except BaseException:
        (meeting / f"failure.{place.rank}").write_text(f"rank {place.rank}: {traceback.format_exc()}")
        os._exit(1)
    (meeting / f"done.{place.rank}").touch()
    os._exit(0)  # what torch would do on the way out is not needed


def _watch(processes: list[Any], deadline: float) -> None:
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(0.3)  # the victims of the first failure fall soon after it
            return
        time.sleep(0.01)


def _raise_first(meeting: Path, codes: list[int | None], seconds: float) -> None:
    failures = sorted(meeting.glob("failure.*"), key=lambda file: file.stat().st_mtime_ns)
    if failures:
        raise RankError(failures[0].read_text())
    undone = [rank for rank in range(len(codes)) if not (meeting / f"done.{rank}").exists()]
    if undone:
        ends = [_ended(codes[rank]) for rank in undone]
        raise RankError(f"ranks {undone} did not finish within {seconds:.0f} s: {', '.join(ends)}")


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"
