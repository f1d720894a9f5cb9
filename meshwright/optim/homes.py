"""Where the states of a weight live between updates: host memory, or a file."""

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.spec.problem import InputError, Problem

PAGE = 4096  # bytes: arrays begin on pages, as disks want them


class Home(Protocol):
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


class Memory:
    """Host memory by the page; for copies at full speed to a GPU it is pinned.

    Torch's own pinned memory comes in powers of two: states of 65 GiB would take 128.
    """

    def __init__(
        self,
        pinned: bool,
        remedy: str = "set plan.offload_update = host, which pins little",
        key: str = "plan.offload_update",
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
    return Memory(pinned=False).take([size] * len(dtypes), dtypes)


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
