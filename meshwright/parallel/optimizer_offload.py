"""What runs beside the arithmetic when states are elsewhere: queues of copies, and gates that weights pass when moved.

An update goes on while the next forward has begun. Each part of the model waits, when it is called, for its own weights
alone; how long it waited is measured.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.models.decoder import Decoder
from meshwright.parallel import precision
from meshwright.parallel.model_spec import ModelSpec, with_weights
from meshwright.spec.plan import Plan

Mark = torch.cuda.Event | None  # a point in a queue; on a CPU whatever was asked for is done


class CopyStream:
    """A queue of work on the device beside the main one; on a CPU work is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def open(self) -> AbstractContextManager[Any]:
        """Work inside is put into this queue."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """The end of what is in this queue so far."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """What follows in this queue follows that point; nobody else waits."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def uses(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor of the main queue is not given away before this queue is done with it."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


def reached(mark: Mark) -> None:
    """Let the host wait for a point."""
    if mark is not None:
        mark.synchronize()


def here(device: torch.device) -> Mark:
    """A point in the main queue."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """Weights that are moved together, and the module whose call needs them first."""

    door: nn.Module
    weights: list[nn.Parameter]


def groups(model: nn.Module, anatomy: ModelSpec) -> list[OffloadGroup]:
    """All weights of a model in the order in which a forward needs them; what is shared belongs to its first use."""
    blocks = list(with_weights(anatomy.blocks(model)))
    last = _last(model)
    later = {id(weight) for module in (*blocks, *last) for weight in module.parameters()}
    first = [weight for weight in model.parameters() if id(weight) not in later]
    doors = [(model, first), *((block, list(block.parameters())) for block in blocks)]
    if last:
        doors.append((last[0], [weight for module in last for weight in module.parameters()]))
    seen = set[int]()
    return [OffloadGroup(door, list(_unseen(weights, seen))) for door, weights in doors]


def _last(model: nn.Module) -> list[nn.Module]:
    """What a decoder needs after all of its blocks: the norm, which is called, and the head, which may only be read."""
    if not isinstance(model, Decoder) or model.norm is None:
        return []
    return [module for module in (model.norm, model.head) if module is not None]


def _unseen(weights: Iterable[nn.Parameter], seen: set[int]) -> Iterator[nn.Parameter]:
    for weight in weights:
        if id(weight) not in seen:
            seen.add(id(weight))
            yield weight


def narrow(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Let weights that have no memory yet be as narrow as the arithmetic; the wide ones will be elsewhere."""
    for chunk in chunks:
        for weight in chunk.parameters():
            assert weight.is_meta
            weight.data = weight.data.to(precision.compute_dtype(plan))


def sum_wide(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Let gradients of several microbatches be added up in full width."""
    if plan.grad_accum == 1:
        return
    for chunk in chunks:
        for weight in chunk.parameters():
            weight.grad_dtype = precision.weight_dtype(plan)


class Gates:
    """One gate a group: closed when an update begins, opened when the group's weights are moved."""

    def __init__(self, groups: Sequence[OffloadGroup], device: torch.device) -> None:
        self.device = device
        self.gates: list[Future[Mark] | None] = [None] * len(groups)
        self.waits: list[tuple[Mark, Mark, float]] = []  # since the gates were closed: by both clocks
        self.earlier = self.waits  # of the step before
        for number, group in enumerate(groups):
            group.door.register_forward_pre_hook(partial(self._pass, number))

    def close(self) -> None:
        """An update begins."""
        self.gates = [Future() for _ in self.gates]
        self.earlier, self.waits = self.waits, []

    def open(self, number: int, mark: Mark) -> None:
        """A group's weights are moved, once the device has come to a point."""
        gate = self.gates[number]
        if gate is not None:
            gate.set_result(mark)

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits that the update came to nothing."""
        for gate in self.gates:
            if gate is not None and not gate.done():
                gate.set_exception(error)

    def _pass(self, number: int, module: nn.Module, arguments: Any) -> None:
        gate = self.gates[number]
        if gate is None:  # passed before in this step: another microbatch, or a block that is computed anew
            return
        before, began = here(self.device), time.perf_counter()
        mark = gate.result()
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)
        self.waits.append((before, here(self.device), time.perf_counter() - began))
        self.gates[number] = None

    def stall_seconds(self) -> float:
        """How long the device stood at the gates in the last whole step. Waits for that step."""
        total = 0.0
        for before, after, seconds in self.earlier:
            if before is not None and after is not None:
                after.synchronize()
                seconds = before.elapsed_time(after) / 1000
            total += seconds
        return total
