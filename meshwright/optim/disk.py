"""States in files without a name: whoever is killed leaves nothing behind, so nothing half-written can be mistaken.

What outlives a run is its checkpoints, which copy from here. Reads and writes go past the system's cache where the file
system allows: it would fill the host memory that the states were moved out of.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.optim.homes import PAGE, page_starts

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
