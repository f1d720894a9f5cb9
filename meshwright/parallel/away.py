"""Tensors sent to the host's memory in the forward and fetched before the backward asks for them.

Copies run on a stream of their own, both ways, beside the arithmetic. What a block saved leaves while the next one
computes; when the backward reaches a block, what the one before it saved is already on its way back.
"""

from collections import deque
from weakref import ref

import torch
from torch import Tensor

WAITING = 1  # blocks whose tensors may still be leaving while a later one computes


class Lane:
    """The way between a device and its host. Without streams, on a CPU, every copy is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[Load] = deque()  # those whose device memory is still held

    def depart(self, tensor: Tensor) -> Tensor:
        """A copy on the host that will be whole when the stream gets there."""
        if self.stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def arrive(self, hosts: list[Tensor]) -> list[Tensor]:
        """Copies on the device that will be whole when the stream gets there."""
        if self.stream is None:
            return [host.clone() for host in hosts]
        here = torch.cuda.current_stream(self.stream.device)
        # The memory is the computing stream's, so that what is freed there is used again there without waiting.
        devices = [torch.empty(host.shape, dtype=host.dtype, device=self.stream.device) for host in hosts]
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            for host, device in zip(hosts, devices, strict=True):
                device.copy_(host, non_blocking=True)
                device.record_stream(self.stream)  # a graph may be dropped before anybody has waited for the copy
        return devices

    def mark(self) -> torch.Event | None:
        """Everything that was asked for until now."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, event: torch.Event | None) -> None:
        """Let the computing stream go on after what was marked; nobody waits on the host."""
        if self.stream is not None and event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


class Sent:
    """One tensor: on the device still, on the host, or on the device again."""

    def __init__(self, tensor: Tensor, load: "Load") -> None:
        self.here: Tensor | None = tensor
        self.host = load.lane.depart(tensor)
        self.load = load

    def fetch(self) -> Tensor:
        """The tensor, on the device and whole."""
        self.load.back()
        assert self.here is not None, "a load comes back whole"
        return self.here


class Load:
    """What one forward of one block sent."""

    def __init__(self, lane: Lane, before: "Load | None") -> None:
        self.lane, self.before = lane, before
        self.sent: list[ref[Sent]] = []  # the graph holds them, and drops each when its backward is done
        self.event: torch.Event | None = None
        self.asked = False

    def send(self, tensor: Tensor) -> Sent:
        """Let a tensor leave; it must not be written to any more."""
        sent = Sent(tensor, self)
        self.sent.append(ref(sent))
        return sent

    def closed(self) -> None:
        """The block is done: of those before it, all but the newest give up their memory once they have left."""
        self.event = self.lane.mark()
        self.lane.leaving.append(self)
        while len(self.lane.leaving) > WAITING:
            self.lane.leaving.popleft().leave()

    def leave(self) -> None:
        """Nothing of it is on the device any more, as far as the computing stream can tell."""
        self.lane.wait(self.event)
        for sent in self._alive():
            sent.here = None

    def back(self) -> None:
        """The backward is here: all of this load must be whole, and the one before it comes next."""
        if not self.asked:
            self.ask()
        self.lane.wait(self.event)
        if self.before is not None:
            self.before.ask()
            self.before = None

    def ask(self) -> None:
        """Start to bring back what has left."""
        if self.asked:
            return
        self.asked = True
        if self in self.lane.leaving:
            self.lane.leaving.remove(self)
        gone = [sent for sent in self._alive() if sent.here is None]
        for sent, tensor in zip(gone, self.lane.arrive([sent.host for sent in gone]), strict=True):
            sent.here = tensor
        self.event = self.lane.mark()

    def _alive(self) -> list[Sent]:
        return [sent for each in self.sent if (sent := each()) is not None]
