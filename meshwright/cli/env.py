"""What the environment says: the only reader of its variables, beside the pure function in runtime/place.py."""

import os
import time
from pathlib import Path
from zlib import crc32

import msgspec

from meshwright.runtime.place import DEFAULT_PORT, DIALECTS, FIRST_PORT, MEMORY, PORTS, Place, place
from meshwright.spec.problem import mistake

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
    found = place(os.environ)
    if found is None or found.launcher != "mpi" or found.local_world < found.world or "MASTER_PORT" in os.environ:
        return found
    from meshwright.runtime.failure import session_above

    # MPICH gives a job no number; on one machine it is known by the process that started all its ranks.
    session = session_above(rank_variable(found))
    return msgspec.structs.replace(found, job=f"mpi {session}", port=FIRST_PORT + crc32(session.encode()) % PORTS)


def rank_variable(here: Place) -> str:
    """The variable that told this process its rank."""
    return next((each.rank for each in DIALECTS if each.launcher == here.launcher), "RANK")


def default_ranks() -> int:
    """One for each GPU, or two on a CPU."""
    from meshwright.runtime.devices import gpus

    return gpus(os.environ) or 2


def gpu_names() -> list[str]:
    """The GPUs of this machine that ranks may use, as their driver names them."""
    from meshwright.runtime import devices

    return devices.gpu_names(os.environ)


def attempt() -> int:
    """Which start of this job it is, from 1: torchrun and Slurm count the restarts."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return max(int(count) if count.isdecimal() else 0 for count in counts) + 1


# How pods and SkyPilot's machines are told which they are, and where the first is.
NODE_NUMBERS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "SKYPILOT_NODE_RANK", "SLURM_NODEID")
NODE_ADDRESSES = (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT"))


def node(said: str) -> tuple[int, str]:
    """Which machine of a job this is, and where rank 0 listens ("" where nobody says); `auto`: as it was told."""
    known = [os.environ[name] for name in NODE_NUMBERS if name in os.environ]
    number = (known[0] if known else "") if said == "auto" else said
    if not number.isdecimal():
        what = "nothing tells this machine its number" if said == "auto" else f"--node-rank {said} is no number"
        raise mistake(what, f"use --node-rank 0, 1, …, or set one of {', '.join(NODE_NUMBERS)}")
    for host, port in NODE_ADDRESSES:
        if address := os.environ.get(host):
            host = f"[{address}]" if ":" in address else address
            return int(number), f"{host}:{os.environ.get(port) or DEFAULT_PORT}"
    return int(number), os.environ.get("SKYPILOT_NODE_IPS", "").split("\n")[0].strip()


def cache() -> Path:
    """Where tokens are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def of_ranks(debug: bool = False) -> dict[str, str]:
    """The variables that ranks are started with."""
    return {**os.environ, **(DEBUG if debug else {})}


def listen_on(interface: str) -> None:
    """Have Gloo's sockets listen on one interface, if there is one to name; what the user says comes first."""
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def memory() -> str:
    """Where in host memory whoever started this rank keeps what it saves; "" where nobody does."""
    return os.environ.get(MEMORY, "")


def share_cores(processes: int) -> None:
    """Have the tokenizers of so many processes use each core once; what the user says comes first."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))


def debug() -> None:
    """Have everything that is still to be imported say all it does."""
    os.environ.update(DEBUG)


def can_erase(to_terminal: bool) -> bool:
    """Whether lines are drawn over each other there, as a bar's are."""
    return to_terminal and os.environ.get("TERM") != "dumb"


def colour(to_terminal: bool) -> bool:
    """Whether output may be coloured: on a terminal that can, and where nobody asked for none (no-color.org)."""
    return to_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
