"""`@world(4)` runs a test's body in four Gloo processes; the first rank to fail tells why."""

import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SERVER = multiprocessing.get_context("forkserver")
# Imported once by the server that ranks are forked from: a rank then starts in a tenth of a second, not in three.
SERVER.set_forkserver_preload(["torch._dynamo", "torch.fx.experimental.symbolic_shapes", "meshwright.verify.evidence"])
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def world(ranks: int, seconds: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in `ranks` processes that can already speak to each other."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            start(ranks, Path(body.__code__.co_filename), body.__name__, arguments, seconds)

        return test

    return decorate


def start(ranks: int, file: Path, name: str, arguments: dict[str, Any], seconds: float) -> None:
    """Start, wait, clean up, and fail with the first rank's own words."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder)
        processes = [
            SERVER.Process(target=_rank, args=(rank, ranks, meeting, file, name, arguments), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in processes):
                time.sleep(0.5)  # the victims of the first failure fall soon after it
                break
            time.sleep(0.01)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        words = _words(meeting)
        _end(processes, meeting)
        if words:
            pytest.fail(words, pytrace=False)
        codes = [process.exitcode for process in processes]
        if late:
            stacks = "\n".join(file.read_text() for file in sorted(meeting.glob("stack.*")))
            pytest.fail(f"ranks {late} were still running after {seconds:g} s\n{stacks}", pytrace=False)
        assert codes == [0] * ranks, f"exit codes {codes}"


def _words(meeting: Path) -> str:
    failures = sorted(meeting.glob("failure.*"), key=lambda file: file.stat().st_mtime_ns)
    return failures[0].read_text() if failures else ""


def _end(processes: list[Any], meeting: Path) -> None:
    """Every process gone before the test returns; one that hangs leaves its stack."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2 if any(process.is_alive() for process in processes) else 0)
    for process in processes:
        process.kill()
        process.join()


def _rank(rank: int, ranks: int, meeting: Path, file: Path, name: str, arguments: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    stack = open(meeting / f"stack.{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(meeting / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        _body(file, name)(**arguments)
        dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
        (meeting / f"failure.{rank}").write_text(text)
        sys.stdout.flush()
        os._exit(1)


def _body(file: Path, name: str) -> Callable[..., None]:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name).__wrapped__
