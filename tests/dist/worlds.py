"""`@world(4)` runs a test's body in four Gloo processes; the first rank to fail tells why.

All files share them: what torch makes at first use, and remembers by shape, is most of a short run's work.
"""

import faulthandler
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import HANG

from meshwright.runtime.place import Place
from meshwright.runtime.ranks import SERVER, Crew, RankError

# Imported once by the server that ranks are forked from: a rank then starts in a tenth of a second, not in three. The
# compiler is what torch.compile imports at its first call, in nine tenths of a second of every rank that compiles.
COMPILER = "torch._inductor.compile_fx"
PRELOADED = ["meshwright.verify.evidence", "meshwright.train.rank", COMPILER, "pytest", "hypothesis"]
SERVER.set_forkserver_preload(PRELOADED)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# How many new objects there are before some are searched for garbage: after every 700, as by default, a tenth of a
# short run is spent to find next to none.
RARELY = (20_000, 10, 10)
WORLDS: dict[int, Crew] = {}  # of this process, by the number of ranks


def world(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in `ranks` processes that can already speak to each other."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            start(ranks, Path(body.__code__.co_filename), body.__name__, arguments)

        return test

    return decorate


def start(ranks: int, file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Run a body in so many ranks, and fail with the first one's own words."""
    if ranks not in WORLDS:
        WORLDS[ranks] = Crew(Bodies(), ranks)
    try:
        WORLDS[ranks].run((file, name, arguments), HANG)
    except RankError as error:
        WORLDS.pop(ranks).close()
        pytest.fail(str(error), pytrace=False)


def close() -> None:
    """End all ranks; others are started when they are needed."""
    while WORLDS:
        WORLDS.popitem()[1].close()


class Bodies:
    """The tests of one file after the other, loaded where they run, by ranks that have met."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.module: ModuleType | None = None

    def __call__(self, place: Place, file: Path, name: str, arguments: dict[str, Any]) -> None:
        if self.file is None:
            self._meet(place)
        if self.file != file:
            self.module = None
            _forget()
            self.file, self.module = file, _load(file)
        faulthandler.dump_traceback_later(0.95 * HANG)  # to standard error, should it hang
        getattr(self.module, name).__wrapped__(**arguments)

    def _meet(self, place: Place) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        gc.set_threshold(*RARELY)
        share_a_device()
        store = dist.FileStore(place.store, place.world)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)


def _forget() -> None:
    """Be as ranks of its own for a new file: without what the last one has kept, drawn and compiled."""
    import torch
    from torch._dynamo.utils import counters

    for name in [name for name in sys.modules if name.startswith("test_")]:
        del sys.modules[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    gc.collect()


def share_a_device() -> None:
    """Let all groups of this process have one device of Gloo's.

    A device is a thread that wakes up a hundred times a second for as long as its group lives, and plans of many
    shapes have many groups, most of which nobody uses now.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    group = distributed_c10d.ProcessGroupGloo
    device = group.create_default_device()

    class SharingGroup(group):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = group._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingGroup


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
