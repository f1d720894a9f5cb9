"""Replicas that tell each other momenta in one bit an element: what each step exchanges, and in how many bytes.

Both towers read it. A weight of n elements is cut into as many chunks as there are replicas, each a multiple of eight
elements long. The replica of a chunk is its server: it receives the chunk's bits and a scale from every worker,
averages them, and sends bits and a scale of the mean to all.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, Protocol

from meshwright.spec.outer import SyncCalendar, calendar
from meshwright.spec.plan import Plan

WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"  # in checkpoints: what each compression has left out
OWN_ERRORS = frozenset((WORKER_ERROR, SERVER_ERROR))  # which no two replicas have alike
SCALE_BYTES = 4  # fp32, of each weight's chunk
WARM_UP_SHARE = 5  # of the run's steps, one in so many: 1-bit Adam's authors use 15 to 20 %
# Between replicas a step sends gradients in full, momenta in one bit, or nothing.
Exchange = Literal["exact", "compressed", "local"]


class HasPhases(Protocol):
    """The keys of [optim] that decide what a step exchanges."""

    @property
    def name(self) -> str: ...
    @property
    def freeze_step(self) -> int: ...
    @property
    def var_update_scaler(self) -> int: ...
    @property
    def local_step_scaler(self) -> int: ...
    @property
    def local_step_clipper(self) -> int: ...
    @property
    def sync_warmup(self) -> int: ...


class LocalStepCalendar(SyncCalendar, frozen=True, kw_only=True):
    """Of 0/1 Adam: replicas meet in every step until the variance is frozen, and then more and more rarely."""

    freeze: int
    scaler: int
    clipper: int

    def meets(self, step: int) -> bool:
        """Whether replicas have the same weights after a step, counted from 1."""
        if step <= self.freeze or step >= self.steps:
            return True
        return step % local_interval(step - self.freeze, self.scaler, self.clipper) == 0


def local_interval(since: int, scaler: int, clipper: int) -> int:
    """Steps between two syncs in a step that is the so-manieth since the variance was frozen."""
    return int(min(clipper, 2 ** min((since - 1) // scaler, 62)))


def calendar_of(plan: Plan, optim: HasPhases, steps: int) -> SyncCalendar:
    """When the replicas of a run have the same weights."""
    if optim.name == "zero_one_adam":
        return _local_steps(optim, steps)
    return calendar(plan, optim.sync_warmup, steps)


def _local_steps(optim: HasPhases, steps: int) -> LocalStepCalendar:
    scaler, clipper = optim.local_step_scaler, optim.local_step_clipper
    return LocalStepCalendar(
        every=1, fragments=1, warmup=0, steps=steps, freeze=optim.freeze_step, scaler=scaler, clipper=clipper
    )


def exchange_of(optim: HasPhases, step: int, steps: int) -> Exchange:
    """What a step of an optimizer that compresses exchanges; steps count from 1."""
    if optim.name != "zero_one_adam":
        return "exact" if step <= optim.freeze_step else "compressed"
    if step in variance_steps(optim.freeze_step, optim.var_update_scaler):
        return "exact"
    return "compressed" if _local_steps(optim, steps).meets(step) else "local"


@lru_cache(maxsize=64)
def variance_steps(freeze: int, scaler: int) -> frozenset[int]:
    """The steps in which 0/1 Adam updates its variance: so many, then as many at half the rate, and so on."""
    found, interval, counted = list[int](), 1, 0
    step = 1
    while step <= freeze:
        if step % interval == 0:
            found.append(step)
            counted += 1
            if counted == scaler:
                counted, interval = 0, 2 * interval
        step += 1
    return frozenset(found)


def variance_updates(freeze: int, scaler: int, step: int) -> int:
    """How many of them have been made after a step."""
    return sum(each <= step for each in variance_steps(freeze, scaler))


def warm_up_steps(steps: int) -> int:
    """The usual `optim.freeze_step` of a run."""
    return max(steps // WARM_UP_SHARE, 1)


def chunk_length(elements: int, replicas: int) -> int:
    """Elements of each replica's chunk of a weight, the last ones filled up."""
    return 8 * math.ceil(elements / (8 * replicas))


def packed_bytes(sizes: Iterable[int], replicas: int) -> int:
    """What a worker sends to one server, or a server to everybody, of some weights: scales and bits."""
    lengths = [chunk_length(size, replicas) for size in sizes]
    return SCALE_BYTES * len(lengths) + sum(lengths) // 8
