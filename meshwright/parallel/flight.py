"""An all-to-all that travels while other work is done: it is launched, and awaited where it lands.

Going back the gradient is launched where it landed, and awaited where it was launched: what the forward did between the
two the backward does between them as well, since it takes operations in the reverse of their order.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class Flight:
    """One exchange of rows among a group, and back: how many go to each rank, how many come, and what is on its way."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.work: dist.Work | None = None
        self.held: tuple[Tensor, ...] = ()  # what is sent, until it has been, and what arrives

    def start(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows; what is returned is not there before `wait`."""
        rows, arriving = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self.work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        self.held = rows, arriving
        return arriving

    def wait(self) -> Tensor:
        """What has arrived, for all that comes after; on a GPU its stream waits, and the host does not."""
        if self.work is not None:  # a group of fakes is done at once
            self.work.wait()
        *_, arrived = self.held
        self.work, self.held = None, ()
        return arrived


class _Launch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(x, flight.sent, flight.received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.wait(), None  # what autograd hands over only has the shape of what was sent


class _Land(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.start(grads[0], flight.received, flight.sent)
        return grads[0], None


def _launched(x: Tensor, flight: Flight) -> Tensor:
    """The rows that are coming in, to be read after they have `landed` alone."""
    return _Launch.apply(x, flight)


def _landed(x: Tensor, flight: Flight) -> Tensor:
    """The rows, arrived."""
    return _Land.apply(x, flight)


# The compiler knows collectives that it waits for by itself, and leaves these out of its graphs.
Step = Callable[[Tensor, Flight], Tensor]
launched = cast(Step, torch.compiler.disable(_launched))
landed = cast(Step, torch.compiler.disable(_landed))
