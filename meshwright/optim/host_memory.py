"""Where the states of a weight live between updates: host memory, or a file."""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.optim import offload_update
from meshwright.parallel import precision
from meshwright.spec.problem import InputError, Problem

PAGE = 4096  # bytes: arrays begin on pages, as disks want them


class StateStorage(Protocol):
    """The states of one weight, as flat arrays of its elements."""

    @property
    def arrays(self) -> list[Tensor]:
        """All elements, for whoever reads or writes them while no update is on its way."""
        ...

    @property
    def staged(self) -> bool:
        """Whether they must be fetched into somebody's room first, and kept afterwards."""
        ...

    def fetch(self, begin: int, end: int, room: Sequence[Tensor]) -> list[Tensor]:
        """Some elements of every array, to be read and written in place."""
        ...

    def keep(self, begin: int, end: int, held: Sequence[Tensor]) -> None:
        """Take back what was fetched."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Arrays that may be used where they lie."""

    arrays: list[Tensor]
    staged: bool = False

    def fetch(self, begin: int, end: int, room: Sequence[Tensor]) -> list[Tensor]:
        return [array[begin:end] for array in self.arrays]

    def keep(self, begin: int, end: int, held: Sequence[Tensor]) -> None:
        return None


class PinnedMemory:
    """Host memory by the page; for copies at full speed to a GPU it is pinned.

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
        """Arrays of so many elements each, beside each other."""
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
            raise InputError([Problem(what, self.remedy, self.key)])
        self.addresses.append(whole.data_ptr())


def staging(size: int, dtypes: Sequence[torch.dtype], pinned: bool) -> list[Tensor]:
    """Buffers that pieces pass through, each beginning on a page: few enough for torch's own pinned memory."""
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
    """Which of some homes are in host memory: about that much in all, evenly among the others, never more.

    Evenly, so that a disk has all the time of an update, not only its end.
    """
    total, seen, taken = sum(sizes), 0, 0
    chosen: list[bool] = []
    for size in sizes:
        seen += size
        due = host_bytes if host_bytes >= total else host_bytes * seen // max(total, 1)
        chosen.append(taken + size <= due)
        taken += size if chosen[-1] else 0
    return chosen


MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: the limit, what is used, and where the part that would be given back is told.
GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def kinds(run: Run) -> dict[str, torch.dtype]:
    """What is kept of every weight off the device, by name."""
    if run.optim.state_dtype == "bf16":
        return {"low": torch.int16, "first": torch.bfloat16, "second": torch.bfloat16}
    return dict.fromkeys(("weight", "first", "second"), precision.weight_dtype(run.plan))


def width(run: Run) -> int:
    """Bytes of one parameter off the device."""
    return sum(dtype.itemsize for dtype in kinds(run).values())


def host_share(run: Run, parameters: int) -> int:
    """How much of the states may be in host memory."""
    return parameters * width(run) if run.plan.optimizer_offload == "host" else run.plan.optimizer_offload_host_bytes


def on_the_way(run: Run, largest: int) -> int:
    """Host memory for pieces on their way, none larger than the largest weight: gradients and weights, or states."""
    elements = offload_update.SLOTS * min(offload_update.PIECE, largest)
    fetched = width(run) if run.plan.optimizer_offload == "disk" else 0
    travelling = 2 * precision.weight_dtype(run.plan).itemsize if run.plan.optimizer_offload_update == "host" else 0
    return elements * (fetched + travelling)


def check(run: Run, sizes: Sequence[int], folder: Path) -> None:
    """Refuse what does not fit, for weights of so many elements each."""
    if run.plan.optimizer_offload == "disk" and not folder.is_dir():
        what = f"plan.optimizer_offload = disk is told to use {folder}, and there is no folder of that name"
        raise InputError(
            [
                Problem(
                    what, "make it, or name another by plan.optimizer_offload_folder", "plan.optimizer_offload_folder"
                )
            ]
        )
    widths = [size * width(run) for size in sizes]
    near = spread(widths, host_share(run, sum(sizes)))
    kept_bytes = sum(size for size, is_near in zip(widths, near, strict=True) if is_near)
    host_bytes = kept_bytes + on_the_way(run, max(sizes, default=0))
    if found := list(problems(run, host_bytes, sum(widths) - kept_bytes, folder)):
        raise InputError(found)


def problems(run: Run, host_bytes: int, disk_bytes: int, folder: Path) -> Iterator[Problem]:
    """What is missing for states of so many bytes. Where there is no room to copy them, checkpoints do without."""
    have = free_host_bytes()
    if have is not None and host_bytes > have:
        yield Problem(
            f"plan.optimizer_offload = {run.plan.optimizer_offload} needs {host_bytes:,} bytes of RAM; {have:,} free",
            _host_remedy(run),
            "plan.optimizer_offload",
        )
    free = free_disk_bytes(folder) if disk_bytes else 0
    if disk_bytes > free:
        yield Problem(
            f"plan.optimizer_offload = disk needs {disk_bytes:,} bytes on the disk, and {folder} has {free:,} free",
            "name another disk by plan.optimizer_offload_folder, keep more in host RAM by "
            "plan.optimizer_offload_host_bytes, or set "
            "optim.state_dtype = bf16",
            "plan.optimizer_offload",
        )


def _host_remedy(run: Run) -> str:
    words = []
    if run.plan.optimizer_offload == "host":
        words.append("set plan.optimizer_offload = disk")
    elif run.plan.optimizer_offload_host_bytes:
        words.append("lower plan.optimizer_offload_host_bytes")
    if run.optim.state_dtype == "fp32":
        words.append("set optim.state_dtype = bf16")
    return ", or ".join(words or ["use a smaller model, or a machine with more memory"])


def free_disk_bytes(folder: Path) -> int:
    """What may still be written there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def free_host_bytes(meminfo: Path = MEMINFO, groups: Path = GROUPS) -> int | None:
    """What this process may still take: of the machine, and of its control group. None where nobody says."""
    told = [free for free in (_of_machine(meminfo), *(_of_group(groups, files) for files in GROUP_FILES)) if free]
    return min(told, default=None)


def _of_machine(meminfo: Path) -> int | None:
    line = _line(meminfo, "MemAvailable:")
    return int(line.split()[1]) * 1024 if line else None


def _of_group(groups: Path, files: tuple[str, str, str, str]) -> int | None:
    limit_file, used_file, told_file, cached_name = files
    try:
        limit, used = (groups / limit_file).read_text().strip(), int((groups / used_file).read_text())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max": none
        return None
    cached = _line(groups / told_file, cached_name + " ")
    return max(int(limit) - used + (int(cached.split()[1]) if cached else 0), 1)


def _line(file: Path, beginning: str) -> str | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(beginning)), None)


LARGEST = 1 << 30  # bytes of one call: Linux transfers at most 2 GiB − 4 KiB at a time
DIRECT = getattr(os, "O_DIRECT", 0)
Transfer = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The states of one weight in a file."""

    arrays: list[Tensor]  # the file as memory, for reading and writing without an update on its way
    descriptor: int
    begins: list[int]  # of each array, in bytes
    staged: bool = True

    def fetch(self, begin: int, end: int, room: Sequence[Tensor]) -> list[Tensor]:
        """Read some elements of every array into room, which begins on a page."""
        for array, start, target in zip(self.arrays, self.begins, room, strict=True):
            width = array.element_size()
            _all(os.preadv, self.descriptor, _bytes(target, (end - begin) * width), start + begin * width)
        return [target[: end - begin] for target in room]

    def keep(self, begin: int, end: int, held: Sequence[Tensor]) -> None:
        """Write back what was read into room."""
        for array, start, source in zip(self.arrays, self.begins, held, strict=True):
            width = array.element_size()
            _all(os.pwritev, self.descriptor, _bytes(source, (end - begin) * width), start + begin * width)


class Files:
    """Room on a disk: one nameless file a weight."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = 0
        self.direct = DIRECT if DIRECT and _takes_direct(folder) else 0
        self.descriptors: list[int] = []

    def take(self, size: int, dtypes: Sequence[torch.dtype]) -> OnDisk:
        """Arrays of so many elements; their room is reserved at once, so that no later write finds the disk full."""
        begins = page_starts([size * dtype.itemsize for dtype in dtypes])
        length = max(begins.pop(), PAGE)
        descriptor = nameless(self.folder, self.direct)
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
        """Give the room back, once nobody reads the arrays any more."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def nameless(folder: Path, flags: int = 0) -> int:
    """A file that is gone when its last user is."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".states.")
    try:
        again = os.open(name, os.O_RDWR | flags)
    finally:
        os.unlink(name)
        os.close(descriptor)
    return again


def _takes_direct(folder: Path) -> bool:
    """Whether a file system lets its cache be passed by; some say so only when asked to write."""
    try:
        descriptor = nameless(folder, DIRECT)
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
    """The memory of a tensor's beginning, up to the end of a page: room has whole pages, and so has the file."""
    whole = -(-width // PAGE) * PAGE
    memory = tensor.view(torch.uint8).numpy().data
    assert len(memory) >= whole, "room is whole pages"
    return memory[:whole]


def _all(call: Transfer, descriptor: int, memory: memoryview, begin: int) -> None:
    """Read or write all of it; a call may do a part, and one past the end of a file does nothing."""
    done = 0
    while done < len(memory):
        count = call(descriptor, [memory[done : done + LARGEST]], begin + done)
        if count <= 0:
            raise OSError(errno.EIO, "the disk took or gave fewer bytes of offloaded states than it holds")
        done += count
