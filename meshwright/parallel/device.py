"""What a host knows of a device that works on its own: numbers on their way from it, and when it passed a moment.

Whoever reads such numbers waits for no work that was launched after them. A host that queues work is ahead of its
device by up to a few steps. Whether a wait of the host cost anything is seen on the device alone: between two of its
events lies what it did, and what it stood still for.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


class ArrivingNumbers:
    """A small tensor that is being copied to the host; one that is there already is taken as it is."""

    def __init__(self, numbers: Tensor, *, sleeps: bool = False) -> None:
        """`sleeps`: whoever waits leaves its core to others meanwhile."""
        self.host, self.ready = numbers, None
        if numbers.is_cuda:
            self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.host.copy_(numbers, non_blocking=True)
            self.ready = torch.cuda.Event(blocking=sleeps)
            self.ready.record()

    def read(self) -> list[float]:
        """They, once they have arrived."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.tolist()


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the program: when the host passed it, and an event that the device passes in its turn."""

    at: float  # by the machine's monotonic clock
    event: torch.cuda.Event | None = None  # None: the host is the device


def moment(device: torch.device) -> Moment:
    """Here and now. Nothing is waited for."""
    if device.type != "cuda":
        return Moment(time.monotonic())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Moment(time.monotonic(), event)


class DeviceTimeline:
    """Moments in the order of the device's work, by the host's clock.

    No device passes a moment before its host did: after every idle spell the two clocks agree again, so that they do
    not drift apart over a long run.
    """

    def __init__(self, start: Moment) -> None:
        self.last, self.at = start, start.at

    def reached(self, moment: Moment) -> float:
        """When the device passed a moment, which it has: never before the one asked for last."""
        if moment is self.last:
            return self.at
        passed = moment.at
        if moment.event is not None and self.last.event is not None:
            elapsed = self.last.event.elapsed_time(moment.event) / 1000
            passed = min(max(self.at + elapsed, moment.at), time.monotonic())
        self.last, self.at = moment, max(passed, self.at)
        return self.at
