"""What the environment says: the only reader of its variables, beside the pure function in runtime/place.py."""

import os
import time
from pathlib import Path

from meshwright.runtime.place import Place, place

BEGAN = time.monotonic()  # when the user pressed Enter
DEBUG = {
    "LOGLEVEL": "DEBUG",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "ACCELERATE_DEBUG_MODE": "1",
    "NCCL_DEBUG": "INFO",
}


def here() -> Place | None:
    """Which rank of whose job this process is, None if nobody launched it as one."""
    return place(os.environ)


def default_ranks() -> int:
    """One for each GPU, or two on a CPU."""
    from meshwright.runtime.machine import gpus

    return gpus(os.environ) or 2


def gpu_names() -> list[str]:
    """The GPUs of this machine that ranks may use, as their driver names them."""
    from meshwright.runtime import machine

    return machine.gpu_names(os.environ)


def attempt() -> int:
    """Which start of this job it is, from 1: torchrun counts the restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1


def cache() -> Path:
    """Where tokens are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def of_ranks(debug: bool = False) -> dict[str, str]:
    """The variables that ranks are started with."""
    return {**os.environ, **(DEBUG if debug else {})}


def debug() -> None:
    """Have everything that is still to be imported say all it does."""
    os.environ.update(DEBUG)


def colour(to_terminal: bool) -> bool:
    """Whether output may be coloured: on a terminal that can, and where nobody asked for none (no-color.org)."""
    return to_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
