"""The ledger: every byte a rank holds at the peak of a step, by line, and the moment of that peak.

A step is a few moments: the loss of a microbatch, the first and the last block of its backward, the optimizer's step.
Each holds other things, so the peak is the largest of their sums, not the sum of what is largest.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory_away import NOWHERE, Away, away
from meshwright.cost.memory_line import Line, Name, total
from meshwright.cost.memory_moments import peak
from meshwright.cost.memory_states import FIRST, hosted, states
from meshwright.cost.traffic_held import placement
from meshwright.spec.holding import GIB
from meshwright.spec.plan import Plan
from meshwright.spec.recompute import by_operation

__all__ = ["FIRST", "Fit", "Ledger", "Line", "fits", "hosted", "ledger", "states", "total", "worst"]

Role = Literal["only", "first", "middle", "last"]
WITHOUT_LAYERS = 2  # stages that the output projection and the loss can fill without a layer
OUTSIDE_TORCH: tuple[Name, ...] = ("slack", "context")  # what torch's count of allocated bytes leaves out


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds when it holds most."""

    lines: tuple[Line, ...]
    moment: str  # of the peak
    role: Role  # of the rank in the pipeline
    rank: int  # its place on the axis pp
    low: float  # what is measured ÷ what is said here, nine times in ten between these two
    high: float
    published: Literal["allocated", "reserved", "shown"]  # which number the stack's reports print
    away: Away = NOWHERE  # what it keeps outside its device

    @property
    def allocated(self) -> int:
        """What torch's allocator gives out at most: `torch.cuda.max_memory_allocated`."""
        return total(line for line in self.lines if line.name not in OUTSIDE_TORCH)

    @property
    def reserved(self) -> int:
        """What it has taken from the device to give out: `torch.cuda.max_memory_reserved`."""
        return total(line for line in self.lines if line.name != "context")

    @property
    def shown(self) -> int:
        """What nvidia-smi shows: with the device's context and the buffers of collectives."""
        return total(self.lines)

    @property
    def reported(self) -> int:
        """The number that the stack's own reports print."""
        return int(getattr(self, self.published))


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a job's fullest rank has room."""

    fits: bool
    headroom_bytes: int  # what is left of the device; what lacks, when negative
    ledger: Ledger  # of the fullest rank
    why: str  # the reason, in a sentence


def ledger(job: Job, place: Mapping[str, int] = FIRST) -> Ledger:
    """The ledger of one rank, by its coordinates on the plan's axes."""
    job = as_held(job)
    fullest = peak(job, place)
    holds, rank = job.stack.holds, place.get("pp", 0)
    slack = Line(name="slack", bytes=round(fullest.bytes * holds.slack), why="reserved by the allocator, not given out")
    context = Line(name="context", bytes=round(holds.context_bytes), why="the device's context, collectives' channels")
    return Ledger(
        lines=(*fullest.lines, slack, context),
        moment=fullest.name,
        role=_role(rank, job.plan.pp),
        rank=rank,
        low=holds.low,
        high=holds.high,
        published=holds.published,
        away=away(job, fullest.sent, place),
    )


def as_held(job: Job) -> Job:
    """A job whose stack means by `selective` that attention is computed anew: it keeps what fused attention keeps."""
    if not by_operation(job.plan.recompute) or job.stack.speed.selective != "attention":
        return job
    stack = msgspec.structs.replace(job.stack, attention="flash")
    return msgspec.structs.replace(job, stack=stack, plan=msgspec.structs.replace(job.plan, recompute="none"))


def worst(job: Job) -> Ledger:
    """The ledger of the fullest pipeline rank."""
    return max((_ledger(job, rank) for rank in _rivals(job.plan)), key=lambda found: found.allocated)


def too_large(job: Job) -> Ledger | None:
    """The ledger of the first rank found that has not enough memory, None if every one has."""
    found = (_ledger(job, rank) for rank in _rivals(job.plan))
    return next((each for each in found if each.shown > job.cluster.gpu.memory_bytes or overflows(job, each)), None)


def overflows(job: Job, found: Ledger) -> str:
    """The place outside the device in which a rank has too little room, "" if there is none or nobody knows."""
    if 0 < job.cluster.host_bytes < found.away.host_bytes:
        return "host"
    return "disk" if 0 < job.cluster.disk_bytes < found.away.disk_bytes else ""


@lru_cache(maxsize=4096)
def _ledger(job: Job, rank: int) -> Ledger:
    return ledger(job, {"pp": rank})


def fits(job: Job) -> Fit:
    """Whether what the driver would show of the fullest rank is within the device's memory, and every rank has work."""
    found = worst(job)
    headroom = int(job.cluster.gpu.memory_bytes) - found.shown
    idle = job.plan.stages.count(0) > WITHOUT_LAYERS
    beyond = _beyond(job, _fullest_away(job, found))
    why = "some pipeline ranks would have nothing to compute" if idle else beyond or _why(found, headroom)
    return Fit(fits=headroom >= 0 and not idle and not beyond, headroom_bytes=headroom, ledger=found, why=why)


def _fullest_away(job: Job, found: Ledger) -> Ledger:
    """Of a pipeline's ranks the one that sends most to its host."""
    if not found.away.host or job.plan.pp == 1:
        return found
    return max((_ledger(job, rank) for rank in _rivals(job.plan)), key=lambda each: each.away.host_bytes)


def _beyond(job: Job, found: Ledger) -> str:
    """What lacks outside the device, "" if nothing does."""
    where = overflows(job, found)
    if not where:
        return ""
    lines, have = {
        "host": (found.away.host, job.cluster.host_bytes),
        "disk": (found.away.disk, job.cluster.disk_bytes),
    }[where]
    said = ", ".join(f"{line.name} {line.bytes / GIB:.1f}" for line in lines)
    place = "host memory" if where == "host" else "the disk"
    return f"{place} has {have / GIB:.1f} GiB for a GPU, and {total(lines) / GIB:.1f} are needed: {said}"


def _why(found: Ledger, headroom: int) -> str:
    """The reason of a verdict about the device."""
    fullest = max(found.lines, key=lambda line: line.bytes)
    where = f"the {found.role} pipeline rank" if found.role != "only" else "a rank"
    amount = f"{abs(headroom) / GIB:.1f} GiB {'left' if headroom >= 0 else 'too little'}"
    return f"{where} peaks at {found.moment}, with {amount}; most is {fullest.name}, {fullest.bytes / GIB:.1f} GiB"


def _role(rank: int, pp: int) -> Role:
    if pp == 1:
        return "only"
    return "first" if rank == 0 else "last" if rank == pp - 1 else "middle"


def _rivals(plan: Plan) -> list[int]:
    """Pipeline ranks that may be the fullest: both ends, and of those with equally long stages the first."""
    ranks = placement(plan)
    found: dict[tuple[int, ...], int] = {}
    for rank in range(1, plan.pp - 1):
        mine = tuple(length for length, owner in zip(plan.stages, ranks, strict=True) if owner == rank)
        found.setdefault(mine, rank)
    return sorted({0, plan.pp - 1, *found.values()})
