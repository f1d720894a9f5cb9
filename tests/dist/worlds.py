"""`@world(4)` runs a test's body in four Gloo processes; the first rank to fail tells why."""

import faulthandler
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG

from meshwright.runtime.place import Place
from meshwright.runtime.ranks import SERVER, RankError, run_ranks

# Imported once by the server that ranks are forked from: a rank then starts in a tenth of a second, not in three.
SERVER.set_forkserver_preload(["meshwright.verify.evidence", "meshwright.train.rank", "pytest", "hypothesis"])
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def world(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in `ranks` processes that can already speak to each other."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            start(ranks, Path(body.__code__.co_filename), body.__name__, arguments)

        return test

    return decorate


def start(ranks: int, file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Start, wait, clean up, and fail with the first rank's own words."""
    try:
        run_ranks(_rank, ranks, (file, name, arguments), HANG)
    except RankError as error:
        pytest.fail(str(error), pytrace=False)


def _rank(place: Place, file: Path, name: str, arguments: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(0.95 * HANG)  # to standard error, should it hang
    torch.set_num_threads(1)
    store = dist.FileStore(place.store, place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    _body(file, name)(**arguments)
    dist.destroy_process_group()


def _body(file: Path, name: str) -> Callable[..., None]:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name).__wrapped__
