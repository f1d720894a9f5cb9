"""Optimizer offload: states in host memory or on disk, updated while the next forward runs.

A step hands its gradients to a thread and returns. The thread updates the pieces in the order in which a forward needs
them: states two pieces ahead are being read, those behind are being written back, and a group's gate opens when the
last of its pieces is done. Each part of the model waits, when it is called, for the update of its own weights alone;
the wait is measured. A piece has fp32 master and states, or a split master weight and bf16 states, which are rounded
stochastically: rounded to nearest, one that changes by less than half a unit in a step would never change.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.config.run import Run
from meshwright.models.decoder import Decoder
from meshwright.optim import host_memory
from meshwright.optim.clip import GradStats
from meshwright.optim.host_memory import (
    AHEAD,
    PAGE,
    SLOTS,
    Files,
    InMemory,
    PinnedMemory,
    StateStorage,
    host_share,
    kinds,
    spread,
    staging,
    width,
)
from meshwright.optim.interface import Optimizer, Tensors, UpdateRule, UpdateTerms
from meshwright.optim.master_weights import join, round_stochastic, rounding_bits, split
from meshwright.optim.resident import rule_of
from meshwright.parallel import precision
from meshwright.parallel.model_spec import ModelSpec, note, with_weights
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


CPU_RUN = 1 << 20  # elements at a time on a CPU: temporaries stay in its caches
DRAWN = (0, 16)  # where each state has its 16 bits in a draw of 32: room for two states


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of one weight, counted in its elements."""

    group: int
    weight: int
    begin: int
    end: int
    last: bool  # of its group


PieceUpdater = Callable[[Tensors, Tensor, Tensor, UpdateTerms, StatePiece], None]  # states, parameter, gradient


def update_fp32(
    rule: UpdateRule, held: Tensors, weight: Tensor, gradient: Tensor, terms: UpdateTerms, piece: StatePiece
) -> None:
    """Update an fp32 master weight and its fp32 states, and copy the master to the parameter."""
    for part in _runs(weight):
        master, *states = (state[part] for state in held)
        rule.fused([master], [gradient[part].to(master.dtype)], [[state] for state in states], terms)
        weight[part].copy_(master)


def update_bf16(
    rule: UpdateRule, held: Tensors, weight: Tensor, gradient: Tensor, terms: UpdateTerms, piece: StatePiece
) -> None:
    """Update a split master weight and its bf16 states."""
    for part in _runs(weight):
        low, *states = (state[part] for state in held)
        master, fp32_states = join(weight[part], low), [state.float() for state in states]
        rule.fused([master], [gradient[part].float()], [[state] for state in fp32_states], terms)
        drawn = rounding_bits(piece.weight, piece.begin + part.start, terms.count, len(low))
        for shift, state, new in zip(DRAWN[: len(states)], states, fp32_states, strict=True):
            state.copy_(round_stochastic(new, (drawn >> shift) & 0xFFFF))
        high, rest = split(master)
        weight[part].copy_(high)
        low.copy_(rest)


def _runs(weight: Tensor) -> list[slice]:
    size = len(weight)
    step = CPU_RUN if weight.device.type == "cpu" else max(size, 1)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def cut(sizes: Sequence[Sequence[tuple[int, int]]], most: int) -> list[StatePiece]:
    """All elements of all groups as pieces in order, from each group's (index, size) of its weights."""
    found: list[StatePiece] = []
    for number, group in enumerate(sizes):
        parts = [(weight, size, begin) for weight, size in group for begin in range(0, size, most)]
        for place, (weight, size, begin) in enumerate(parts):
            found.append(StatePiece(number, weight, begin, min(begin + most, size), place == len(parts) - 1))
    return found


@dataclass
class StagingSlot:
    """The staging buffers of one piece in flight."""

    room: list[Tensor]  # in host memory, for states that are fetched from a file
    near: list[Tensor]  # where the update is computed: the states, or the gradient and the parameter
    arrived: Mark = None  # the update's inputs are there
    left: Mark = None  # the update's outputs have been copied out


@dataclass(frozen=True, slots=True)
class PieceUpdate:
    """A piece with its parameter and gradient at a step."""

    piece: StatePiece
    weight: Tensor  # the piece of the parameter, on the device
    gradient: Tensor  # flat, on the device
    decay: float


class OnHost:
    """The update on the host: gradients are copied to it, states are updated in place, parameters are copied back."""

    def __init__(self, device: torch.device, update: PieceUpdater, split: bool) -> None:
        self.inward, self.outward = CopyStream(device), CopyStream(device)
        self.device, self.update_piece, self.split = device, update, split

    @property
    def lanes(self) -> tuple[CopyStream, ...]:
        return self.inward, self.outward

    def near(
        self, size: int, gradient: torch.dtype, weight: torch.dtype, states: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Buffers for one piece."""
        return staging(size, [gradient, weight], pinned=self.device.type == "cuda")

    def terms(self, terms: UpdateTerms) -> UpdateTerms | None:
        """The scalars where the update is computed, None if there is nothing to do; waits for the gradient's norm."""
        with self.inward.open():
            scalars = torch.stack([scalar.double() for scalar in (terms.count, terms.factor, terms.finite)]).cpu()
        count, factor, finite = scalars.unbind()
        return replace(terms, count=count.float(), factor=factor, finite=finite) if finite.item() else None

    def begin(self, work: PieceUpdate, slot: StagingSlot) -> None:
        """Start to copy the update's inputs."""
        size = len(work.weight)
        with self.inward.open():
            self.inward.wait(slot.left)
            slot.near[0][:size].copy_(work.gradient, non_blocking=True)
            if self.split:
                slot.near[1][:size].copy_(work.weight, non_blocking=True)
            slot.arrived = self.inward.mark()

    def update(self, work: PieceUpdate, held: Tensors, slot: StagingSlot, terms: UpdateTerms) -> Mark:
        """Update a piece; the mark is reached when its parameter is on the device."""
        gradient, weight = (buffer[: len(work.weight)] for buffer in slot.near)
        reached(slot.arrived)
        self.update_piece(held, weight, gradient, replace(terms, decay=work.decay), work.piece)
        with self.outward.open():
            work.weight.copy_(weight, non_blocking=True)
            slot.left = self.outward.mark()
        return slot.left

    def returned(self, slot: StagingSlot) -> None:
        """Nothing to wait for: the host itself has written the states."""


class OnDevice:
    """The update on the device: states are copied to it and back; gradients and parameters stay there."""

    def __init__(self, device: torch.device, update: PieceUpdater) -> None:
        self.inward, self.work, self.outward = CopyStream(device), CopyStream(device), CopyStream(device)
        self.device, self.update_piece = device, update

    @property
    def lanes(self) -> tuple[CopyStream, ...]:
        return self.inward, self.work, self.outward

    def near(
        self, size: int, gradient: torch.dtype, weight: torch.dtype, states: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Buffers for one piece."""
        return [torch.empty(size, dtype=dtype, device=self.device) for dtype in states]

    def terms(self, terms: UpdateTerms) -> UpdateTerms | None:
        """The scalars are there already; the device itself leaves out an update whose gradient is not finite."""
        return terms

    def begin(self, work: PieceUpdate, slot: StagingSlot) -> None:
        """Nothing to copy yet: the states may still have to be fetched."""

    def update(self, work: PieceUpdate, held: Tensors, slot: StagingSlot, terms: UpdateTerms) -> Mark:
        """Update a piece; the mark is reached when its parameter is written."""
        states = [buffer[: len(work.weight)] for buffer in slot.near]
        with self.inward.open():
            self.inward.wait(slot.left)
            for state, source in zip(states, held, strict=True):
                state.copy_(source, non_blocking=True)
            slot.arrived = self.inward.mark()
        with self.work.open():
            self.work.wait(slot.arrived)
            self.update_piece(states, work.weight, work.gradient, replace(terms, decay=work.decay), work.piece)
            updated = self.work.mark()
        with self.outward.open():
            self.outward.wait(updated)
            for state, target in zip(states, held, strict=True):
                target.copy_(state, non_blocking=True)
            slot.left = self.outward.mark()
        return updated

    def returned(self, slot: StagingSlot) -> None:
        """Wait until the states are back on the host."""
        reached(slot.left)


class OffloadedOptimizer(Optimizer):
    """The same update of states in host memory or in files."""

    def __init__(self, run: Run, groups: Sequence[OffloadGroup], device: torch.device, folder: Path) -> None:
        super().__init__(run.optim)
        self.plan, self.device, self.groups = run.plan, device, list(groups)
        self.kinds = kinds(run)
        self.weights = [weight for group in groups for weight in group.weights]
        self.sizes = [weight.numel() for weight in self.weights]
        numbers = iter(range(len(self.weights)))
        sizes = [[(next(numbers), weight.numel()) for weight in group.weights] for group in groups]
        self.pieces = cut(sizes, host_memory.PIECE)
        update = partial(update_bf16 if run.optim.state_dtype == "bf16" else update_fp32, rule_of(run.optim))
        if run.plan.optimizer_offload_update == "device":
            self.site = OnDevice(device, update)
        else:
            self.site = OnHost(device, update, split=run.optim.state_dtype == "bf16")
        self.memory = PinnedMemory(pinned=device.type == "cuda" and run.plan.optimizer_offload_update == "device")
        self.files = Files(folder) if run.plan.optimizer_offload == "disk" else None
        self.locations = self._locations(run)
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        self.gates = Gates(groups, device)
        for group in groups:
            note(group.door, f"optimizer states offloaded to {run.plan.optimizer_offload}")
        self.slots = self._slots()
        self.threads = ThreadPoolExecutor(1, "update")
        self.readers, self.writers = ThreadPoolExecutor(AHEAD, "read"), ThreadPoolExecutor(SLOTS - AHEAD, "write")
        self.running: Future[None] | None = None
        self.ended: Mark = None
        self.update_seconds = 0.0  # of the last update, from the gradients' arrival to the last state's write
        self._number = {id(weight): number for number, weight in enumerate(self.weights)}

    def _locations(self, run: Run) -> list[StateStorage]:
        dtypes = list(self.kinds.values())
        in_memory = spread([size * width(run) for size in self.sizes], host_share(run, sum(self.sizes)))
        locations: list[StateStorage] = []
        for size, near in zip(self.sizes, in_memory, strict=True):
            if near or self.files is None:
                locations.append(InMemory(self.memory.take([size] * len(dtypes), dtypes)))
            else:
                locations.append(self.files.take(size, dtypes))
        return locations

    def _slots(self) -> list[StagingSlot]:
        largest = max((each.end - each.begin for each in self.pieces), default=1)
        dtypes = list(self.kinds.values())
        gradient = self.weights[0].dtype if self.plan.grad_accum == 1 else precision.weight_dtype(self.plan)
        pages = -(-largest // PAGE) * PAGE  # elements: whole pages of every type
        return [
            StagingSlot(
                room=staging(pages, dtypes, self.memory.pinned) if self.files is not None else [],
                near=self.site.near(largest, gradient, self.weights[0].dtype, dtypes),
            )
            for _ in range(SLOTS)
        ]

    @torch.no_grad()
    def begin(self, weight: nn.Parameter, value: Tensor) -> None:
        """Take a weight's first value, in fp32."""
        location = self.locations[self._number[id(weight)]]
        if self.optim.state_dtype == "bf16":
            high, low = split(value.flatten())
            weight.copy_(high.view(weight.shape))
            location.arrays[0].copy_(low)
        else:
            weight.copy_(value)
            location.arrays[0].copy_(value.flatten())
            weight.master = location.arrays[0].view(weight.shape)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def count(self) -> Tensor:
        """Updates made, skipped ones left out; waits for a running update."""
        self.settle()
        return self._count

    def states(self) -> Mapping[str, list[Tensor]]:
        held = list(self.held().values())
        return {name: [kinds[name] for kinds in held] for name in self.spec.state_names}

    def held(self) -> dict[int, dict[str, Tensor]]:
        found = {}
        for weight, location in zip(self.weights, self.locations, strict=True):
            arrays = dict(zip(self.kinds, (array.view(weight.shape) for array in location.arrays), strict=True))
            if "low" in arrays:
                # The device has the high half of the master weight; low bits go under a dtype that checkpoints know.
                arrays = {"weight": weight.detach(), **arrays, "low": arrays["low"].view(torch.bfloat16)}
            found[id(weight)] = arrays
        return found

    @torch.no_grad()
    def step(self, rate: float, stats: GradStats) -> None:
        """Start to update every weight, or none when the gradient is not finite."""
        self._join()
        self._count += stats.finite
        gradients = [weight.grad for weight in self.weights]
        terms = UpdateTerms(rate, 0.0, self._count, stats.factor, stats.finite)  # each piece has its own decay
        self.gates.close()
        self.running = self.threads.submit(self._run, terms, gradients, here(self.device))

    def settle(self) -> None:
        """Wait until the last update is complete, on the host and on the device."""
        self._join()
        reached(self.ended)

    def stall_seconds(self) -> float:
        """How long the last step's forward has waited for the update before it. Waits for that step."""
        return self.gates.stall_seconds()

    def close(self) -> None:
        """Give back threads and files."""
        self.settle()
        for pool in (self.threads, self.readers, self.writers):
            pool.shutdown()
        if self.files is not None:
            self.files.close()

    def _join(self) -> None:
        """Wait until the last update is enqueued; later work on the device follows it."""
        running, self.running = self.running, None
        if running is not None:
            running.result()
        if self.ended is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ended)

    @torch.no_grad()
    def _run(self, terms: UpdateTerms, gradients: list[Tensor | None], ready: Mark) -> None:
        """One step's update, once the norm and all gradients are there (`ready`)."""
        began = time.perf_counter()
        try:
            for lane in self.site.lanes:
                lane.wait(ready)
                lane.wait(self.ended)
            if (here := self.site.terms(terms)) is not None:
                self._update_all(gradients, here)
            for number, gate in enumerate(self.gates.gates):
                if gate is not None and not gate.done():  # nothing to update, or a group without weights
                    self.gates.open(number, None)
            self.ended = self.site.outward.mark()
        except BaseException as error:
            self.gates.fail(error)
            raise
        reached(self.ended)
        self.update_seconds = time.perf_counter() - began

    def _update_all(self, gradients: list[Tensor | None], terms: UpdateTerms) -> None:
        """Update all pieces, fetching ahead and writing back behind."""
        waiting: deque[tuple[PieceUpdate, StagingSlot, Future[list[Tensor]]]] = deque()
        writing: deque[Future[None]] = deque()
        for number, each in enumerate(self.pieces):
            if len(writing) > 1:  # the slot that comes next is the one whose states are being written longest
                writing.popleft().result()
            slot, work = self.slots[number % SLOTS], self._work(each, gradients)
            self.site.begin(work, slot)
            waiting.append((work, slot, self._fetch(each, slot)))
            if len(waiting) > AHEAD:
                writing.append(self._update(*waiting.popleft(), terms))
        while waiting:
            writing.append(self._update(*waiting.popleft(), terms))
        for write in writing:
            write.result()

    def _work(self, each: StatePiece, gradients: list[Tensor | None]) -> PieceUpdate:
        weight, gradient = self.weights[each.weight], gradients[each.weight]
        inward = self.site.lanes[-2]  # whose work reads the gradient
        with inward.open():
            flat = torch.zeros_like(weight) if gradient is None else gradient
            inward.uses(flat)
            flat = flat.detach().reshape(-1)[each.begin : each.end]
        if each.end == weight.numel():
            gradients[each.weight] = None  # its memory goes with its last piece
        return PieceUpdate(each, weight.detach().view(-1)[each.begin : each.end], flat, self.decay_of(weight))

    def _fetch(self, each: StatePiece, slot: StagingSlot) -> Future[list[Tensor]]:
        location = self.locations[each.weight]
        if location.staged:
            return self.readers.submit(location.fetch, each.begin, each.end, slot.room)
        return _now(location.fetch(each.begin, each.end, slot.room))

    def _update(
        self, work: PieceUpdate, slot: StagingSlot, fetched: Future[list[Tensor]], terms: UpdateTerms
    ) -> Future[None]:
        held, each = fetched.result(), work.piece
        updated = self.site.update(work, held, slot, terms)
        if each.last:
            self.gates.open(each.group, updated)
        location = self.locations[each.weight]

        def store() -> None:
            self.site.returned(slot)
            location.store(each.begin, each.end, slot.room)

        return self.writers.submit(store) if location.staged else _now(None)


Value = TypeVar("Value")


def _now(value: Value) -> Future[Value]:
    """A finished future of a value."""
    done: Future[Value] = Future()
    done.set_result(value)
    return done
