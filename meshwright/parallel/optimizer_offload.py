"""Overlap of an offloaded optimizer's update with the next forward: CUDA copy streams, and a gate per group of weights.

Each part of the model waits, when it is called, for the update of its own weights alone; the wait is measured.
"""

import time
from collections.abc import Iterable, Sequence
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

Mark = torch.cuda.Event | None  # a point in a stream; None on a CPU, where work is done at once


class CopyStream:
    """A CUDA stream beside the main one; on a CPU work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def open(self) -> AbstractContextManager[Any]:
        """The context whose work goes to this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        """An event at the end of the stream so far."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        """Let later work of this stream wait for an event."""
        if self.stream is not None and mark is not None:
            self.stream.wait_event(mark)

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of the main stream until this stream is done with it."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


def reached(mark: Mark) -> None:
    """Let the host wait for an event."""
    if mark is not None:
        mark.synchronize()


def here(device: torch.device) -> Mark:
    """An event in the main stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """Weights that are updated together, and the module whose call needs them first."""

    door: nn.Module
    weights: list[nn.Parameter]


def groups(model: nn.Module, model_spec: ModelSpec) -> list[OffloadGroup]:
    """All trained weights of a model in the order in which a forward needs them.

    What is shared belongs to its first use.
    """
    blocks = list(with_weights(model_spec.blocks(model)))
    last: list[nn.Module] = []
    if isinstance(model, Decoder) and model.norm is not None:  # which is called; the head may only be read
        last = [module for module in (model.norm, model.head) if module is not None]
    later = {id(weight) for module in (*blocks, *last) for weight in module.parameters()}
    first = [weight for weight in model.parameters() if id(weight) not in later]
    doors = [(model, first), *((block, list(block.parameters())) for block in blocks)]
    if last:
        doors.append((last[0], [weight for module in last for weight in module.parameters()]))
    found, seen = [], set[int]()
    for door, weights in doors:
        mine = [weight for weight in weights if weight.requires_grad and id(weight) not in seen]
        found.append(OffloadGroup(door, mine))
        seen |= set(map(id, weights))
    return found


def cast_params(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Cast parameters on the meta device to the compute dtype; the master weights will be offloaded."""
    for chunk in chunks:
        for weight in (each for each in chunk.parameters() if each.requires_grad):  # frozen ones are cast already
            assert weight.is_meta
            weight.data = weight.data.to(precision.compute_dtype(plan))


def accumulate_fp32(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Let gradients of several microbatches be accumulated in the master dtype."""
    if plan.grad_accum == 1:
        return
    for chunk in chunks:
        for weight in (each for each in chunk.parameters() if each.requires_grad):
            weight.grad_dtype = precision.weight_dtype(plan)


class Gates:
    """One gate per group: closed when an update begins, opened when the group's weights are updated."""

    def __init__(self, groups: Sequence[OffloadGroup], device: torch.device) -> None:
        self.device = device
        self.gates: list[Future[Mark] | None] = [None] * len(groups)
        self.waits: list[tuple[Mark, Mark, float]] = []  # since the gates were closed: by both clocks
        self.earlier = self.waits  # of the step before
        for number, group in enumerate(groups):
            group.door.register_forward_pre_hook(partial(self._pass, number))

    def close(self) -> None:
        """Close all gates: an update begins."""
        self.gates = [Future() for _ in self.gates]
        self.earlier, self.waits = self.waits, []

    def open(self, number: int, mark: Mark) -> None:
        """Open a group's gate: its weights are updated once the device reaches the mark."""
        gate = self.gates[number]
        if gate is not None:
            gate.set_result(mark)

    def fail(self, error: BaseException) -> None:
        """Raise an update's error in whoever waits for it."""
        for gate in self.gates:
            if gate is not None and not gate.done():
                gate.set_exception(error)

    def _pass(self, number: int, module: nn.Module, arguments: Any) -> None:
        gate = self.gates[number]
        if gate is None:  # passed before in this step: another microbatch, or a recomputed block
            return
        before, began = here(self.device), time.perf_counter()
        mark = gate.result()
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)
        self.waits.append((before, here(self.device), time.perf_counter() - began))
        self.gates[number] = None

    def stall_seconds(self) -> float:
        """Seconds the device waited at the gates in the last whole step; waits for that step."""
        total = 0.0
        for before, after, seconds in self.earlier:
            if before is not None and after is not None:
                after.synchronize()
                seconds = before.elapsed_time(after) / 1000
            total += seconds
        return total
