"""The group of one rank's peers, those that have its place in other replicas: what they exchange ends when one is lost.

It is torch's Gloo, outside torch's registry, and is made anew in every generation (runtime/generations.py). A machine
without power closes no socket, and nothing ends what waits for it: so every wait looks for who is gone.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from meshwright.runtime import generations
from meshwright.train.world import MEETING

CONNECT = timedelta(seconds=30)  # in which the ranks of a generation, who have all said that they are there, connect
WAIT = timedelta(milliseconds=100)  # for others, until it is looked who is still there
GONE = "a member was lost, or a newer generation has begun"


class ReplicaGroup:
    """Alone, it has no wire, and what a rank gathers is its own. `is_bereft`: a member is known to be gone."""

    def __init__(self, is_bereft: Callable[[], bool]) -> None:
        self.is_bereft = is_bereft
        self.wire: Any = None
        self.count = 1
        self.abandoned: list[Any] = []  # groups in which something still waits; to end one would wait for it too

    def leave(self) -> None:
        """Whoever still waits for this rank in there fails."""
        self.wire = None

    def connect(self, store: dist.Store, place: int, count: int, is_over: Callable[[], bool]) -> None:
        """Meet so many peers; RuntimeError if one of them does not come, or it is over before."""
        self.wire, self.count = None, count
        if count == 1:
            return
        made = list[Any]()
        self.aside(lambda: made.append(dist.ProcessGroupGloo(store, place, count, CONNECT)), is_over)
        self.wire = made[0]

    def summed(self, mine: Tensor) -> Tensor:
        """The sum over all members, in the place of what each had."""
        if self.wire is not None:
            options = dist.AllreduceOptions()
            options.timeout = MEETING
            self.arrived(self.wire.allreduce([mine], options))
        return mine

    def gather(self, mine: Tensor) -> Tensor:
        """All members' elements, a row each."""
        if self.wire is None:
            return mine[None]
        rows = mine.new_empty(self.count, *mine.shape)
        options = AllgatherOptions()
        options.timeout = MEETING
        self.arrived(self.wire._allgather_base(rows.view(-1), mine.reshape(-1), options))
        return rows

    def exchanged(self, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]) -> Tensor:
        """To each member its elements of `sent`, and what each has sent here, one after another."""
        received = sent.new_empty(sum(from_each))
        options = dist.AllToAllOptions()
        options.timeout = MEETING
        self.arrived(self.wire.alltoall_base(received, sent, list(from_each), list(to_each), options))
        return received

    def send(self, tensor: Tensor, member: int) -> None:
        """To one member."""
        self.aside(lambda: self.wire.send([tensor], member, 0).wait(MEETING), self.is_bereft)

    def receive(self, into: Tensor, member: int) -> Tensor:
        """From one member."""
        self.aside(lambda: self.wire.recv([into], member, 0).wait(MEETING), self.is_bereft)
        return into

    def arrived(self, work: Any) -> None:
        """Wait for the other members, until one of them is known to be lost.

        A watcher knows a rank in here to be waiting.
        """
        deadline = time.monotonic() + MEETING.total_seconds()
        while time.monotonic() < deadline:
            with suppress(RuntimeError):  # not yet; or never
                work.wait(WAIT)
            if work.is_completed():
                break
            if self.is_bereft():
                self.abandoned.append((self.wire, work))
                raise RuntimeError(GONE)
        work.wait(WAIT)  # raises what went wrong

    def aside(self, act: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Wait in a thread of its own for what nothing ends if a member is killed meanwhile: it is left alone there."""
        errors = list[RuntimeError]()

        def tried() -> None:
            try:
                act()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=tried, name="aside", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(generations.LOOK_SECONDS)
            if thread.is_alive() and is_over():
                self.abandoned.append(self.wire)
                raise RuntimeError(GONE)
        if errors:
            raise errors[0]
