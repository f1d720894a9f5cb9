"""Where offloaded optimizer states are stored: pinned host memory or files, and whether they fit."""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.parallel import precision
from meshwright.runtime.devices import free_host_bytes
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.problem import InputError, Problem, mistake

PIECE = 1 << 24  # elements: large enough for full speed of copies and disks, small enough to have several in memory
AHEAD = 2  # pieces whose states are being read
SLOTS = AHEAD + 2  # pieces in flight: one more is being updated, one is being written


PAGE = 4096  # bytes: arrays begin on pages, as disks want them


@dataclass(frozen=True, slots=True)
class InMemory:
    """The states of one weight as flat arrays of its elements, which are used in place."""

    arrays: list[Tensor]
    staged: bool = False

    def fetch(self, begin: int, end: int, buffers: Sequence[Tensor]) -> list[Tensor]:
        return [array[begin:end] for array in self.arrays]

    def store(self, begin: int, end: int, held: Sequence[Tensor]) -> None:
        return None


class PinnedMemory:
    """Host memory by the page, pinned for copies at full speed to a GPU.

    Torch's own pinned memory comes in powers of two: states of 65 GiB would take 128.
    """

    def __init__(
        self,
        pinned: bool,
        remedy: str = "set plan.optimizer_offload_update = host, which pins little",
        key: str = "plan.optimizer_offload_update",
    ) -> None:
        self.pinned, self.remedy, self.key = pinned, remedy, key
        self.bytes = 0
        self.addresses: list[int] = []
        if pinned:
            weakref.finalize(self, _unpin, self.addresses)

    def take(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Contiguous arrays of so many elements each."""
        widths = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        begins = page_starts(widths)
        memory = mmap.mmap(-1, max(begins.pop(), PAGE))
        with suppress(AttributeError, OSError):  # fewer, larger pages, where the system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes += len(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        if self.pinned:
            self._pin(whole)
        parts = zip(begins, widths, dtypes, strict=True)
        return [whole[begin : begin + width].view(dtype) for begin, width, dtype in parts]

    def _pin(self, whole: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        result = runtime.cudaHostRegister(whole.data_ptr(), len(whole), 0)
        if int(result):
            what = f"the GPU's driver would not pin {len(whole):,} bytes of host memory (CUDA error {int(result)})"
            raise mistake(what, self.remedy, self.key)
        self.addresses.append(whole.data_ptr())


def staging(size: int, dtypes: Sequence[torch.dtype], pinned: bool) -> list[Tensor]:
    """Staging buffers, each beginning on a page: few enough for torch's own pinned memory."""
    if pinned:
        return [torch.empty(size, dtype=dtype, pin_memory=True) for dtype in dtypes]
    return PinnedMemory(pinned=False).take([size] * len(dtypes), dtypes)


def _unpin(addresses: list[int]) -> None:
    runtime: Any = torch.cuda.cudart()
    for address in addresses:
        runtime.cudaHostUnregister(address)


def page_starts(widths: Sequence[int]) -> list[int]:
    """Where arrays of so many bytes begin, each on a page, and where they end."""
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + -(-width // PAGE) * PAGE)
    return starts


def spread(sizes: Sequence[int], host_bytes: int) -> list[bool]:
    """Which weights' states are in host memory: at most that many bytes, evenly among those on disk.

    Evenly, so that the disk is busy during the whole update, not only at its end.
    """
    total, seen, taken = sum(sizes), 0, 0
    chosen: list[bool] = []
    for size in sizes:
        seen += size
        due = host_bytes if host_bytes >= total else host_bytes * seen // max(total, 1)
        chosen.append(taken + size <= due)
        taken += size if chosen[-1] else 0
    return chosen


def kinds(run: Run) -> dict[str, torch.dtype]:
    """The offloaded states of every weight: name and dtype."""
    names = OPTIMIZERS[run.optim.name].state_names
    if run.optim.state_dtype == "bf16":
        return {"low": torch.int16, **dict.fromkeys(names, torch.bfloat16)}
    return dict.fromkeys(("weight", *names), precision.weight_dtype(run.plan))


def width(run: Run) -> int:
    """Offloaded bytes per parameter."""
    return sum(dtype.itemsize for dtype in kinds(run).values())


def host_share(run: Run, parameters: int) -> int:
    """Bytes of the states that may be in host memory."""
    return parameters * width(run) if run.plan.optimizer_offload == "host" else run.plan.optimizer_offload_host_bytes


def check(run: Run, sizes: Sequence[int], folder: Path) -> None:
    """Refuse what does not fit, for weights of so many elements each."""
    if run.plan.optimizer_offload == "disk" and not folder.is_dir():
        what = f"plan.optimizer_offload = disk uses {folder}, and there is no folder of that name"
        key = "plan.optimizer_offload_folder"
        raise mistake(what, f"make it, or name another by {key}", key)
    widths = [size * width(run) for size in sizes]
    near = spread(widths, host_share(run, sum(sizes)))
    resident = sum(size for size, is_near in zip(widths, near, strict=True) if is_near)
    # Staging buffers: gradients and parameters, or states, of pieces in flight.
    fetched = width(run) if run.plan.optimizer_offload == "disk" else 0
    copied = 2 * precision.weight_dtype(run.plan).itemsize if run.plan.optimizer_offload_update == "host" else 0
    host_bytes = resident + SLOTS * min(PIECE, max(sizes, default=0)) * (fetched + copied)
    if found := list(problems(run, host_bytes, sum(widths) - resident, folder)):
        raise InputError(found)


def problems(run: Run, host_bytes: int, disk_bytes: int, folder: Path) -> Iterator[Problem]:
    """What is missing for states of so many bytes; without room for a copy, checkpoints write in place."""
    have = free_host_bytes()
    if have is not None and host_bytes > have:
        remedies = []
        if run.plan.optimizer_offload == "host":
            remedies.append("set plan.optimizer_offload = disk")
        elif run.plan.optimizer_offload_host_bytes:
            remedies.append("lower plan.optimizer_offload_host_bytes")
        if run.optim.state_dtype == "fp32":
            remedies.append("set optim.state_dtype = bf16")
        yield Problem(
            f"plan.optimizer_offload = {run.plan.optimizer_offload} needs {host_bytes:,} bytes of RAM; {have:,} free",
            ", or ".join(remedies or ["use a smaller model, or a machine with more memory"]),
            "plan.optimizer_offload",
        )
    free = free_disk_bytes(folder) if disk_bytes else 0
    if disk_bytes > free:
        yield Problem(
            f"plan.optimizer_offload = disk needs {disk_bytes:,} bytes on the disk, and {folder} has {free:,} free",
            "name another disk by plan.optimizer_offload_folder, keep more in host RAM by "
            "plan.optimizer_offload_host_bytes, or set optim.state_dtype = bf16",
            "plan.optimizer_offload",
        )


def free_disk_bytes(folder: Path) -> int:
    """Bytes that may still be written there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


LARGEST_TRANSFER = 1 << 30  # bytes of one call: Linux transfers at most 2 GiB − 4 KiB at a time
DIRECT = getattr(os, "O_DIRECT", 0)
Transfer = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The states of one weight in a file: fetched into a staging buffer for an update, and stored afterwards."""

    arrays: list[Tensor]  # the file as memory, while no update is running
    descriptor: int
    begins: list[int]  # of each array, in bytes
    staged: bool = True

    def fetch(self, begin: int, end: int, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Read some elements of every array into buffers, which begin on a page."""
        for array, start, target in zip(self.arrays, self.begins, buffers, strict=True):
            width = array.element_size()
            _all(os.preadv, self.descriptor, _bytes(target, (end - begin) * width), start + begin * width)
        return [target[: end - begin] for target in buffers]

    def store(self, begin: int, end: int, held: Sequence[Tensor]) -> None:
        """Write back what was read into buffers."""
        for array, start, source in zip(self.arrays, self.begins, held, strict=True):
            width = array.element_size()
            _all(os.pwritev, self.descriptor, _bytes(source, (end - begin) * width), start + begin * width)


StateStorage = InMemory | OnDisk


class Files:
    """Disk space: one unnamed file per weight."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = 0
        self.direct = DIRECT if DIRECT and _takes_direct(folder) else 0
        self.descriptors: list[int] = []

    def take(self, size: int, dtypes: Sequence[torch.dtype]) -> OnDisk:
        """Arrays of so many elements; their space is allocated at once, so that no later write finds the disk full."""
        begins = page_starts([size * dtype.itemsize for dtype in dtypes])
        length = max(begins.pop(), PAGE)
        descriptor = unnamed_file(self.folder, self.direct)
        self.descriptors.append(descriptor)
        os.posix_fallocate(descriptor, 0, length)
        self.bytes += length
        whole = torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)
        arrays = [
            whole[begin : begin + size * dtype.itemsize].view(dtype)
            for begin, dtype in zip(begins, dtypes, strict=True)
        ]
        return OnDisk(arrays, descriptor, begins)

    def close(self) -> None:
        """Free the space, once nobody reads the arrays any more."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def unnamed_file(folder: Path, flags: int = 0) -> int:
    """A file descriptor whose file vanishes when it is closed."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".states.")
    try:
        reopened = os.open(name, os.O_RDWR | flags)
    finally:
        os.unlink(name)
        os.close(descriptor)
    return reopened


def _takes_direct(folder: Path) -> bool:
    """Whether a file system takes O_DIRECT; some refuse only at the first write."""
    try:
        descriptor = unnamed_file(folder, DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    try:
        page = memoryview(mmap.mmap(-1, PAGE))
        return os.pwritev(descriptor, [page], 0) == PAGE and os.preadv(descriptor, [page], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _bytes(tensor: Tensor, width: int) -> memoryview:
    """The memory of a tensor's beginning, up to the end of a page: buffers and files have whole pages."""
    whole = -(-width // PAGE) * PAGE
    memory = tensor.view(torch.uint8).numpy().data
    assert len(memory) >= whole, "buffers are whole pages"
    return memory[:whole]


def _all(call: Transfer, descriptor: int, memory: memoryview, begin: int) -> None:
    """Read or write all of it; a call may do a part, and one past the end of a file does nothing."""
    done = 0
    while done < len(memory):
        count = call(descriptor, [memory[done : done + LARGEST_TRANSFER]], begin + done)
        if count <= 0:
            raise OSError(errno.EIO, "short read or write of offloaded optimizer states")
        done += count
