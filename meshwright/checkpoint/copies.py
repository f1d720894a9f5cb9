"""Copies of what a rank writes, in host memory: made ahead of the first save, and filled while training goes on.

A device copies on a stream of its own. The next forward and backward read the same weights meanwhile; only the next
update has to wait until they are copied, on the device, and the host waits for nothing. Where that wait is long and the
device has room, what could not be copied in time is first copied on the device itself.
"""

import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.state import INTEGERS, SLICE_BYTES, Region, SlicePiece, TensorShard, inside, region_pieces
from meshwright.checkpoint.storage import side_by_side

ARENA_BYTES = 2 * SLICE_BYTES  # pinned at a time: the driver keeps launches waiting while it pins
PAGE = 4096
LONG_STALL_SECONDS = 0.1  # that an update may wait for a copy before device memory is spent on it
SPARE = 0.05  # of a device's memory that a snapshot leaves alone
GROUP, UNDER_WAY = 16, 16  # slices that arrive together, and groups that a stream has at a time
SURPLUS = 1.1  # of what the last wait says is copied on the device: steps are not all equally long


class HostMemory:
    """Host memory for many arrays, by the page, pinned for a GPU. A thread makes it, ahead of its first use.

    Torch's own pinned memory comes in powers of two, and is taken and pinned while the caller waits.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | None) -> None:
        self.device = device  # that copies to it; None: the CPU does
        self.refused = 0  # bytes that the driver would not pin
        self.places: list[tuple[int, int]] = []  # arena and first byte of each array
        self.arenas: list[int] = []  # their sizes
        for size in sizes:
            rounded = -(-size // PAGE) * PAGE
            if not self.arenas or self.arenas[-1] + rounded > ARENA_BYTES:
                self.arenas.append(0)
            self.places.append((len(self.arenas) - 1, self.arenas[-1]))
            self.arenas[-1] += rounded
        self.made: list[Tensor] = []
        self.error: BaseException | None = None
        self.pinned: list[int] = []  # addresses
        self.grown = threading.Condition()
        self.thread: threading.Thread | None = None
        self.ended = False
        weakref.finalize(self, _unpin, self.pinned)

    def begin(self) -> None:
        """Have it made, in the background."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._make, name="host-memory", daemon=True)
            self.thread.start()

    def array(self, number: int, like: Tensor) -> Tensor:
        """One of the arrays in the shape of a tensor; waits until it is there."""
        arena, begin = self.places[number]
        self.begin()
        with self.grown:
            self.grown.wait_for(lambda: len(self.made) > arena or self.error is not None)
            if self.error is not None:
                raise self.error
        return self.made[arena][begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Make no more of it."""
        self.ended = True
        if self.thread is not None:
            self.thread.join()

    def _make(self) -> None:
        try:
            for size in self.arenas:
                if self.ended:
                    return
                made = self._arena(size)
                with self.grown:
                    self.made.append(made)
                    self.grown.notify_all()
        except BaseException as error:  # for whoever waits
            with self.grown:
                self.error = error
                self.grown.notify_all()

    def _arena(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size)
        with suppress(AttributeError, OSError):  # fewer, larger pages, where the system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        whole[::PAGE].fill_(0)  # the system hands out a page when it is first touched
        if self.device is not None:
            torch.cuda.set_device(self.device)
            runtime: Any = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(whole.data_ptr(), size, 0)):
                self.refused += size  # a copy to it is slower, and waits
            else:
                self.pinned.append(whole.data_ptr())
        return whole


def _unpin(addresses: list[int]) -> None:
    if addresses:
        runtime: Any = torch.cuda.cudart()
        for address in addresses:
            runtime.cudaHostUnregister(address)


@dataclass(frozen=True, slots=True)
class SliceSource:
    """A slice where the state has it."""

    holding: TensorShard
    region: Region
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Stall:
    """How long a device waited for a copy, by its own clock."""

    before: torch.cuda.Event
    after: torch.cuda.Event

    def seconds(self) -> float:
        """Waits until it is over."""
        self.after.synchronize()
        return self.before.elapsed_time(self.after) / 1000


class Copies:
    """Copies of what this rank writes, in memory that every save uses again.

    `in_place` copies nothing. Until all of it is written, the state must not change.
    """

    def __init__(self, holdings: Sequence[TensorShard], *, in_place: bool = False) -> None:
        self.in_place = in_place
        self.sources = [
            SliceSource(holding, region, holding.tensor.detach()[inside(region, holding.region)])
            for holding in holdings
            if holding.writes and holding.tensor.numel()
            for region in region_pieces(holding.region, holding.tensor.element_size(), SLICE_BYTES)
        ]
        device = next((source.tensor.device for source in self.sources if source.tensor.is_cuda), None)
        self.memory = HostMemory([] if in_place else [source.tensor.nbytes for source in self.sources], device)
        self.link = None if device is None or in_place else DeviceLink(device)
        self.hosts: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """What the copies take."""
        return 0 if self.in_place else self.state_bytes

    @property
    def state_bytes(self) -> int:
        """What there is to write."""
        return sum(source.tensor.nbytes for source in self.sources)

    def prepare(self) -> None:
        """Make the host memory in the background: the first save finds it ready."""
        if not self.in_place:
            self.memory.begin()

    def take(self) -> None:
        """Copy what is in host memory, and begin to copy what a device has; see `hold_update`."""
        if self.in_place:
            self.hosts = [source.tensor for source in self.sources]
            for device in {host.device for host in self.hosts if host.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            return
        self.hosts = self.hosts or [self.memory.array(number, each.tensor) for number, each in enumerate(self.sources)]
        pairs = {number: (each.tensor, self.hosts[number]) for number, each in enumerate(self.sources)}
        if self.link is not None:
            self.link.copy({number: pair for number, pair in pairs.items() if pair[0].is_cuda})
        # Not by torch's own threads: they wait for each other after every tensor, on a busy machine for long.
        side_by_side(_copy, [pair for pair in pairs.values() if not pair[0].is_cuda])

    def wait(self) -> None:
        """Wait until all is copied."""
        if self.link is not None:
            self.link.finish()
            self.link.done.synchronize()
            self.link.held = True

    def stall_seconds(self) -> float:
        """How long the update after the last save waited for it; zero until there is one."""
        return self.link.stall.seconds() if self.link is not None and self.link.stall is not None else 0.0

    def hold_update(self) -> Stall | None:
        """Have the next update wait until what it changes is copied. The host does not wait."""
        return self.link.hold_update() if self.link is not None else None

    def pieces(self) -> Iterator[SlicePiece]:
        """What was copied, in slices of bounded size."""
        ready = self.link.ready if self.link is not None else {}
        for number, (source, host) in enumerate(zip(self.sources, self.hosts, strict=True)):
            yield SlicePiece(source.holding.name, source.holding.shape, source.region, host, ready.get(number))


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    source, host = (tensor.view(INTEGERS[tensor.element_size()]).numpy() for tensor in pair)
    np.copyto(host, source)


class Arrival:
    """When a group of slices that a device copies is in host memory."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event(blocking=True)
        self.launched = threading.Event()  # the copies are, or will never be
        self.error: BaseException | None = None  # why they will not be

    def record(self) -> None:
        """All copies of the group are launched."""
        self.copied.record()
        self.launched.set()

    def synchronize(self) -> None:
        """Wait until it is there."""
        self.launched.wait()
        if self.error is not None:
            raise OSError(f"the device could not copy the state: {self.error}")
        self.copied.synchronize()


class DeviceLink:
    """Copies from one GPU to pinned host memory, on a stream of their own, launched by a thread of their own.

    A stream takes about a thousand operations; whoever launches one more waits until the first are done. The thread
    has fewer under way at any time, and the host that trains launches nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.ready: dict[int, Arrival] = {}  # when each slice is there
        self.begun, self.safe, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.thread: threading.Thread | None = None
        self.guarded = threading.Event()  # `safe` is on the stream
        self.held = True  # the update after the last save has waited
        self.stall: Stall | None = None  # of that one
        self.copied = 0  # bytes, by the last save
        self.snapshot_bytes = 0  # of the last slices, that the device should copy while they wait for their turn
        self.snapshotted = 0  # bytes that it did, in the last save

    def copy(self, slices: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each from the device to the host, in their order."""
        self.finish()
        self._judge()
        self.copied = sum(host.nbytes for _, host in slices.values())
        late = self._chosen(slices)
        numbers = [number for number in slices if number not in late] + late
        arrivals = [Arrival() for _ in range(0, len(numbers), GROUP)]
        self.ready = {number: arrivals[place // GROUP] for place, number in enumerate(numbers)}
        self.guarded.clear()
        self.held = False
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        launch = partial(self._launch, slices, numbers, late, arrivals)
        self.thread = threading.Thread(target=launch, name="save-link", daemon=True)
        self.thread.start()

    def _launch(
        self, slices: dict[int, tuple[Tensor, Tensor]], numbers: list[int], late: list[int], arrivals: list[Arrival]
    ) -> None:
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                self.begun.record()
                kept = self._snapshot(slices, late)
                for place, number in enumerate(numbers):
                    if place == len(numbers) - len(kept):
                        self._guard()
                    source, host = slices[number]
                    host.copy_(kept.get(number, source), non_blocking=True)
                    if (place + 1) % GROUP == 0 or place == len(numbers) - 1:
                        group = place // GROUP
                        arrivals[group].record()
                        if group >= UNDER_WAY:
                            arrivals[group - UNDER_WAY].copied.synchronize()
                self._guard()
                self.done.record()
        except BaseException as error:  # for whoever waits for a slice: the save fails, and training goes on
            for arrival in arrivals:
                arrival.error = None if arrival.launched.is_set() else error
                arrival.launched.set()
        finally:
            self.guarded.set()

    def _guard(self) -> None:
        """From here on the state itself may change."""
        if not self.guarded.is_set():
            self.safe.record()
            self.guarded.set()

    def finish(self) -> None:
        """Wait until every copy of the last save is launched, or given up."""
        if self.thread is not None:
            self.thread.join()

    def hold_update(self) -> Stall | None:
        """Have what is launched from here on wait for the last copy of the state itself."""
        if self.held:
            return None
        self.held = True
        stream = torch.cuda.current_stream(self.device)
        self.stall = Stall(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self.stall.before.record(stream)
        self.guarded.wait()  # meanwhile the device does what was launched before, and what it then waits is counted
        stream.wait_event(self.safe)
        self.stall.after.record(stream)
        return self.stall

    def _judge(self) -> None:
        """Reckon how many bytes the update after the last save waited for: so many more are snapshotted from now on."""
        if self.stall is None:
            return
        waited = self.stall.seconds()
        if waited > LONG_STALL_SECONDS:
            rate = self.copied / max(self.begun.elapsed_time(self.done) / 1000, 1e-6)
            self.snapshot_bytes += int(SURPLUS * waited * rate)
        self.stall = None

    def _chosen(self, slices: dict[int, tuple[Tensor, Tensor]]) -> list[int]:
        """The last slices, as many as are to be copied on the device and there is room for."""
        room = self._room()
        chosen, taken = [], 0
        for number, (source, _) in reversed(slices.items()):
            if taken + source.nbytes > min(self.snapshot_bytes, room):
                break
            chosen.append(number)
            taken += source.nbytes
        self.snapshotted = taken
        return chosen[::-1]

    def _snapshot(self, slices: dict[int, tuple[Tensor, Tensor]], chosen: list[int]) -> dict[int, Tensor]:
        """Copies of some slices on the device; none where its memory is short after all."""
        try:
            return {number: slices[number][0].clone() for number in chosen}
        except torch.OutOfMemoryError:  # somebody else was quicker: the update waits, as it did before
            self.snapshot_bytes = self.snapshotted = 0
            return {}

    def _room(self) -> int:
        """Device memory that nobody has, and what the last snapshot has left to this stream."""
        if not self.snapshot_bytes:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return max(int(free + self.snapshotted - SPARE * total), 0)
