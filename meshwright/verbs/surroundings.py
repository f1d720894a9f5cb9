"""What the environment says: the only reader of its variables, beside the pure function in spec/place.py."""

import os
import time
from pathlib import Path

from meshwright.spec.place import Place, place

STARTED = time.time()
STARTED_VARIABLE = "MESHWRIGHT_STARTED"  # our launcher tells its ranks when the user pressed Enter


def here() -> Place | None:
    """Which rank of whose job this process is, None if nobody launched it as one."""
    return place(os.environ)


def default_ranks() -> int:
    """One for each GPU, or two on a CPU."""
    from meshwright.launch.local import gpus

    return gpus(os.environ) or 2


def cache() -> Path:
    """Where tokens are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def of_ranks() -> dict[str, str]:
    """The variables that ranks are started with."""
    return {**os.environ, STARTED_VARIABLE: str(STARTED)}


def started() -> float:
    """When the user pressed Enter."""
    return float(os.environ.get(STARTED_VARIABLE, STARTED))
