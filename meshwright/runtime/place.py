"""Who am I: which of how many ranks this process is, as torchrun, Slurm, Kubernetes or MPI tell it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One process among the ranks of a job."""

    rank: int
    world: int
    local_rank: int  # on this machine
    local_world: int
    address: str  # where rank 0 listens
    port: int
    launcher: str  # who said so
    threads: int = 1  # for arithmetic on the CPU
    store: str = ""  # a file where the ranks of one machine meet instead of at an address


class PlaceError(ValueError):
    """The environment names a job but not this process's place in it."""


# launcher, rank, world, local rank, local world. torchrun and Kubeflow's operators both speak the first dialect.
DIALECTS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
STORE = "MESHWRIGHT_STORE"  # set by our own launcher, beside torchrun's names
THREADS = "OMP_NUM_THREADS"  # else a rank takes an equal share of the cores


def place(environment: Mapping[str, str]) -> Place | None:
    """This process's place in a job that someone else launched; None when nobody did."""
    for launcher, rank, world, local_rank, local_world in DIALECTS:
        if rank not in environment or world not in environment:
            continue
        if launcher == "slurm" and "SLURM_STEP_ID" not in environment:
            continue  # inside a batch script, before srun: the script itself is no rank
        number = _integer(environment, rank)
        ranks = _integer(environment, world)
        local = _integer(environment, local_rank) if local_rank in environment else number
        beside = _slurm_tasks(environment) if launcher == "slurm" else None
        beside = beside or (_integer(environment, local_world) if local_world in environment else ranks)
        threads = _integer(environment, THREADS) if THREADS in environment else cores() // max(beside, 1)
        store = environment.get(STORE, "")
        address, port = ("", 0) if store else _rendezvous(environment, launcher, ranks)
        return Place(
            rank=number,
            world=ranks,
            local_rank=local,
            local_world=beside,
            address=address,
            port=port,
            launcher="meshwright" if store else launcher,
            threads=max(threads, 1),
            store=store,
        )
    return None


def _rendezvous(environment: Mapping[str, str], launcher: str, world: int) -> tuple[str, int]:
    # All ranks of a Slurm job derive the same port, and two jobs on one node rarely share it.
    derived = 20_000 + int(environment.get("SLURM_JOB_ID", "9500")) % 20_000
    port = _integer(environment, "MASTER_PORT") if "MASTER_PORT" in environment else derived
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], port
    if launcher == "slurm" and (nodes := environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST"))):
        return first_host(nodes), port
    if world == 1:
        return "127.0.0.1", port
    raise PlaceError(f"{launcher} gave a rank but no MASTER_ADDR: export the host name of rank 0 as MASTER_ADDR")


def local(rank: int, world: int, store: Path, threads: int) -> Place:
    """One of the ranks of a single machine, which meet in a file."""
    here = {"rank": rank, "world": world, "local_rank": rank, "local_world": world}
    return msgspec.structs.replace(ALONE, **here, threads=threads, store=str(store))


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: node[07-12,20] is node07."""
    head, bracket, rest = nodes.partition("[")
    if not bracket:
        return nodes.split(",")[0]
    if "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def _slurm_tasks(environment: Mapping[str, str]) -> int | None:
    """Ranks on this node: Slurm writes 4(x2),3 for four on each of two nodes and three on another."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    text = next((environment[name] for name in names if name in environment), "")
    nodes: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        nodes += [int(tasks)] * int(times or 1)
    here = _integer(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0
    return nodes[here] if here < len(nodes) else None


def _integer(environment: Mapping[str, str], key: str) -> int:
    try:
        return int(environment[key])
    except KeyError:
        raise PlaceError(f"the environment lacks {key}") from None
    except ValueError:
        raise PlaceError(f"{key} is {environment[key]!r}, which is not a whole number") from None


ALONE = Place(rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="meshwright")


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt at a run."""

    run: str  # the run file
    folder: str  # the run folder
    cache: str  # where tokens are kept
    session: str  # of which launcher
    place: Place = ALONE
    beats: str = ""  # where hearts are watched
    log: str = ""  # where this rank's own words go
    speaks: bool = False  # its standard output is where people read
    attempt: int = 1  # counts from 1 in a session
    began: float  # monotonic: when the user pressed Enter
    inject: str = ""  # a fault to rehearse
