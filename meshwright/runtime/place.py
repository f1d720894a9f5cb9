"""Who am I: which of how many ranks this process is, as torchrun, Slurm, Kubernetes or MPI tell it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
    job: str = ""  # which of all jobs, where the launcher says
    node: str = ""  # which of its machines, likewise
    is_told_local: bool = True  # the launcher said which rank of its machine this is
    is_told_threads: bool = True
    is_agent: bool = False  # the launcher itself listens, and all its ranks have been started
    listener: int = -1  # rank 0's: a socket that listens already


class PlaceError(ValueError):
    """The environment names a job but not this process's place in it."""


class Dialect(NamedTuple):
    """The variables in which a launcher says who a process is."""

    launcher: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    node: str = ""  # the number of the machine
    job: tuple[str, ...] = ()  # what tells jobs apart


# Whoever started a process last comes first: mpirun starts its daemons by srun, torchrun may be started by either.
# torchrun and Kubeflow's operators both speak the first.
DIALECTS = (
    Dialect("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", job=("TORCHELASTIC_RUN_ID",)),
    Dialect(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    Dialect("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Dialect(
        "slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        node="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
DEFAULT_PORT = 29_500  # where rank 0 listens if nobody says
FIRST_PORT, PORTS = 20_000, 12_000  # of jobs that have a number: below those that systems give to whoever connects
FIRST_SPECIAL_STEP = 4_294_967_290  # of Slurm: interactive steps, batch scripts and the like
STORE = "MESHWRIGHT_STORE"  # set by our own launcher, beside torchrun's names
MEMORY = "MESHWRIGHT_MEMORY"  # set by our own start of one machine of several: where in-memory checkpoints are
THREADS = "OMP_NUM_THREADS"  # else a rank takes an equal share of the cores


def place(environment: Mapping[str, str]) -> Place | None:
    """This process's place in a job that someone else launched; None when nobody did."""
    speaks = next((each for each in DIALECTS if _is_spoken(each, environment)), None)
    if speaks is None:
        return None
    number, ranks = _integer(environment, speaks.rank), _integer(environment, speaks.world)
    is_told = speaks.local_rank in environment
    beside = _slurm_tasks(environment) if speaks.launcher == "slurm" else None
    beside = beside or (_integer(environment, speaks.local_world) if speaks.local_world in environment else ranks)
    is_told_threads = THREADS in environment
    threads = _integer(environment, THREADS) if is_told_threads else cores() // max(beside, 1)
    store = environment.get(STORE, "")
    alone = ranks == 1 or (beside == ranks and speaks.local_world in environment)
    address, port = ("", 0) if store else _rendezvous(environment, speaks, alone)
    return Place(
        rank=number,
        world=ranks,
        local_rank=_integer(environment, speaks.local_rank) if is_told else number,
        local_world=beside,
        address=address,
        port=port,
        launcher="meshwright" if store else speaks.launcher,
        threads=max(threads, 1),
        store=store,
        job=_job(environment, speaks),
        node=environment.get(speaks.node, ""),
        is_told_local=is_told,
        is_told_threads=is_told_threads,
        is_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and speaks.launcher == "torchrun",
    )


def _is_spoken(speaks: Dialect, environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank."""
    if speaks.rank not in environment or speaks.world not in environment:
        return False
    if speaks.launcher == "mpi":  # srun's own plugin says the same as Slurm, and less
        said = environment.get("SLURM_PROCID"), environment.get("SLURM_NTASKS")
        return said != (environment[speaks.rank], environment[speaks.world])
    if speaks.launcher != "slurm":
        return True
    step = environment.get("SLURM_STEP_ID", "")
    # A batch script before srun is no rank, nor is a shell that somebody types into: it will start ranks of its own.
    typed = "SLURM_PTY_PORT" in environment and environment[speaks.world] == "1"
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and not typed


def _job(environment: Mapping[str, str], speaks: Dialect) -> str:
    known = [environment[name] for name in speaks.job if environment.get(name)]
    return f"{speaks.launcher} {'.'.join(known)}" if known else ""


def _rendezvous(environment: Mapping[str, str], speaks: Dialect, alone: bool) -> tuple[str, int]:
    """Where rank 0 listens; `alone`: all ranks are on one machine."""
    port = _integer(environment, "MASTER_PORT") if "MASTER_PORT" in environment else _port(environment, speaks)
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], port
    is_slurm = speaks.launcher == "slurm"
    nodes = environment.get("SLURM_STEP_NODELIST" if is_slurm else "SLURM_NODELIST", environment.get("SLURM_NODELIST"))
    if nodes and (is_slurm or not alone):
        return first_host(nodes), port
    if alone:
        return "127.0.0.1", port
    raise PlaceError(f"{speaks.launcher} gave a rank but no MASTER_ADDR: export the host name of rank 0 as MASTER_ADDR")


def _port(environment: Mapping[str, str], speaks: Dialect) -> int:
    """A port that all ranks of a job derive alike, and two jobs, or two steps of one, rarely share."""
    said = [environment[name] for name in speaks.job if environment.get(name, "").isdecimal()]
    if speaks.launcher == "torchrun" or not said:
        return DEFAULT_PORT
    # A requeued job is the same job: its count is left out, so that a port that was opened for it stays the right one.
    job, step, *_ = [*map(int, said), 0, 0]
    return FIRST_PORT + (job + 977 * step * (speaks.launcher == "slurm")) % PORTS


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
    shared: str = ""  # where replicas meet that can do without each other, of all machines
    log: str = ""  # where this rank's own words go
    speaks: bool = False  # its standard output is where people read
    attempt: int = 1  # counts from 1 in a session
    began: float  # monotonic: when the user pressed Enter
    inject: str = ""  # a fault to rehearse
    start: int = 0  # how often its replica was started before, while the others trained
    memory: str = ""  # where in host memory in-memory checkpoints are
