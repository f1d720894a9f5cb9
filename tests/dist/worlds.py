"""`@world(4)` runs a test's body in four Gloo processes; the first rank to fail tells why.

Those of one file share them: what torch makes at first use, and remembers by shape, is most of a short run's work.
"""

import faulthandler
import functools
import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import HANG

from meshwright.runtime.place import Place, local
from meshwright.runtime.ranks import SERVER

# Imported once by the server that ranks are forked from: a rank then starts in a tenth of a second, not in three.
SERVER.set_forkserver_preload(["meshwright.verify.evidence", "meshwright.train.rank", "pytest", "hypothesis"])
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

SOON = 0.3  # seconds in which the victims of a first failure fall
WORLDS: dict[tuple[Path, int], "World"] = {}  # of this process, by a test file and the number of ranks


def world(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in `ranks` processes that can already speak to each other."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            start(ranks, Path(body.__code__.co_filename), body.__name__, arguments)

        return test

    return decorate


def start(ranks: int, file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Run a body in the ranks of its file, and fail with the first one's own words."""
    if (file, ranks) not in WORLDS:
        WORLDS[file, ranks] = World(file, ranks)
    if said := WORLDS[file, ranks].run(name, arguments):
        WORLDS.pop((file, ranks)).close()
        pytest.fail(said, pytrace=False)


def close() -> None:
    """End all ranks; others are started when they are needed."""
    while WORLDS:
        WORLDS.popitem()[1].close()


class World:
    """Ranks that have met, and run one body of a test file after another."""

    def __init__(self, file: Path, count: int) -> None:
        self.meeting = tempfile.TemporaryDirectory()
        pipes = [SERVER.Pipe() for _ in range(count)]
        self.ends: list[Any] = [end for end, _ in pipes]
        places = [local(rank, count, Path(self.meeting.name) / "store", 1) for rank in range(count)]
        self.processes = [
            SERVER.Process(target=_rank, args=(place, file, end), daemon=True)
            for place, (_, end) in zip(places, pipes, strict=True)
        ]
        for process, (_, end) in zip(self.processes, pipes, strict=True):
            process.start()
            end.close()

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """What the first rank to fail said; nothing if none did."""
        for end in self.ends:
            end.send((name, arguments))
        deadline, open_ends, failures = time.monotonic() + HANG, list(self.ends), []
        while open_ends:
            ready = wait(open_ends, max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for end in ready:
                open_ends.remove(end)
                at, said = self._answer(end)
                if said:
                    failures.append((at, said))
                    deadline = min(deadline, time.monotonic() + SOON)
        late = [self.ends.index(end) for end in open_ends]
        return min(failures)[1] if failures else f"ranks {late} did not finish within {HANG:.0f} s" if late else ""

    def _answer(self, end: Any) -> tuple[float, str]:
        """When a rank was done and what it said."""
        try:
            return end.recv()
        except (EOFError, ConnectionResetError):
            rank = self.ends.index(end)
            self.processes[rank].join(SOON)
            # First of all: others can only say that they miss it.
            return 0.0, f"rank {rank} ended with exit code {self.processes[rank].exitcode}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for end in self.ends:
            end.close()
        self.meeting.cleanup()


def _rank(place: Place, file: Path, orders: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(place.store, place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    module = _load(file)
    while True:
        name, arguments = orders.recv()
        faulthandler.dump_traceback_later(0.95 * HANG)  # to standard error, should it hang
        said = ""
        try:
            getattr(module, name).__wrapped__(**arguments)
        except BaseException:
            said = f"rank {place.rank}: {traceback.format_exc()}"
        orders.send((time.monotonic(), said))


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
