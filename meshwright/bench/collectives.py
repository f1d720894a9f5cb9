"""Seconds of collectives among the ranks of a job, by size: Gloo between CPUs, NCCL between GPUs."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from meshwright.cost.traffic import Kind
from meshwright.hardware.profile import CollectiveTime
from meshwright.parallel.collectives import all_gather, reduce_scatter
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.place import Place

KIB, MIB = 2**10, 2**20
SIZES = tuple(KIB * 4**power for power in range(9))  # 1 KiB to 64 MiB
QUICK = (KIB, 32 * KIB, MIB, 8 * MIB)
WIDTH = 4  # bytes of a number
WARM_UP = 2  # calls before the first that counts; connections are made by the first
ROUNDS = 5  # whose median counts
MOST_SECONDS = 0.05  # of one round
MOST_CALLS = 200  # in one round
ONCE = 0.5  # seconds: a call that takes longer is measured fewer times
FEW_ROUNDS = 2


def collective_times(mesh: Mesh, place: Place, quick: bool) -> Iterator[CollectiveTime]:
    """Every collective at every size, as the slowest rank saw it. All ranks must ask at once."""
    domains = max(place.world // max(place.local_world, 1), 1)
    far = place.local_world if domains > 1 else 1  # the rank that messages go to: across nodes, where there are several
    for size in QUICK if quick else SIZES:
        numbers = -(-size // WIDTH // mesh.world) * mesh.world  # a whole part for every rank
        for kind, work in _calls(mesh, numbers, far).items():
            seconds, size_in_bytes = _seconds(work, mesh), numbers * WIDTH
            ranks, between = mesh.world, domains
            if kind == "send":  # there and back, between two
                seconds, ranks, between = seconds / 2, 2, min(domains, 2)
            yield CollectiveTime(kind=kind, ranks=ranks, bytes=size_in_bytes, seconds=seconds, domains=between)


def _calls(mesh: Mesh, numbers: int, far: int) -> dict[Kind, Callable[[], object]]:
    whole = torch.zeros(numbers, device=mesh.device)
    other, part = torch.zeros_like(whole), torch.zeros(numbers // mesh.world, device=mesh.device)

    def there_and_back() -> None:
        if mesh.rank == 0:
            dist.send(whole, far)
            dist.recv(whole, far)
        elif mesh.rank == far:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": there_and_back,
    }


def _seconds(work: Callable[[], object], mesh: Mesh) -> float:
    """The median over rounds of calls one after another, ÷ the calls of a round."""
    for _ in range(WARM_UP):
        work()
    once = _round(work, 1, mesh)
    calls = max(1, min(MOST_CALLS, int(MOST_SECONDS / once)))
    rounds = FEW_ROUNDS if once > ONCE else ROUNDS
    return statistics.median([_round(work, calls, mesh) for _ in range(rounds)])


def _round(work: Callable[[], object], calls: int, mesh: Mesh) -> float:
    """Seconds of one call on the slowest rank: the same number on all of them, who decide by it."""
    dist.barrier()
    _wait(mesh)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(mesh)
    spent = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def _wait(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
