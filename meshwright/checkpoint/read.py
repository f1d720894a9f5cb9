"""Reading a saved step: no byte is used before its sha256 fits."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np

from meshwright.checkpoint import manifest as manifests
from meshwright.checkpoint import slices as regions
from meshwright.checkpoint import storage
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.manifest import Chunk, Manifest, Slice
from meshwright.checkpoint.storage import READ_BYTES

THREADS = 4  # while some hash, others read: both leave Python to itself
MOST_OPEN = 64  # chunks at a time, more than are ever at work; systems allow a process about a thousand files


class StepReader:
    """An open step: its manifest, and the chunks that were used last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = manifests.read(folder)
        self._open: OrderedDict[int, tuple[AbstractContextManager[int], int]] = OrderedDict()  # chunk -> descriptor

    def __enter__(self) -> "StepReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._close_oldest()

    def slices(self, wanted: Iterable[Slice]) -> Iterator[tuple[Slice, memoryview]]:
        """The bytes of slices, in their order, a few of them at work at a time."""
        todo = iter(wanted)
        with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
            waiting = [self._begun(each, pool) for each in islice(todo, THREADS)]
            while waiting:
                each, future = waiting.pop(0)
                yield each, future.result()
                waiting += [self._begun(each, pool) for each in islice(todo, 1)]

    def _begun(self, each: Slice, pool: ThreadPoolExecutor) -> tuple[Slice, Future[memoryview]]:
        return each, pool.submit(self.checked, each, self._chunk(each.chunk))

    def checked(self, each: Slice, descriptor: int) -> memoryview:
        """The bytes of one slice, out of its open chunk."""
        content = np.empty(each.end - each.begin, dtype=np.uint8).data  # not zeroed: it is filled at once
        whole, filled = hashlib.sha256(), 0
        try:
            for begin in range(0, len(content), READ_BYTES):
                part = content[begin : begin + READ_BYTES]
                filled += storage.read_into(descriptor, each.begin + begin, part)
                whole.update(part)
        except OSError as error:
            raise CorruptError([self._damage(each, f"cannot be read: {error.strerror}")]) from None
        if filled < len(content) or whole.hexdigest() != each.sha256:
            raise CorruptError([self._damage(each, "is not what was written: the sha256 does not fit")])
        return content

    @contextmanager
    def chunk(self, number: int) -> Iterator[int]:
        """A chunk, open for reading, whose size and header are those that were written."""
        chunk = self.manifest.chunks[number]
        with storage.opened(self.folder, chunk.file) as descriptor:
            _check_header(descriptor, chunk, str(self.folder / chunk.file))
            yield descriptor

    def _chunk(self, number: int) -> int:
        """The same, kept open for the next slice."""
        if number not in self._open:
            if len(self._open) == MOST_OPEN:
                self._close_oldest()
            context = self.chunk(number)
            self._open[number] = context, context.__enter__()
        self._open.move_to_end(number)
        return self._open[number][1]

    def _close_oldest(self) -> None:
        _, (context, _) = self._open.popitem(last=False)
        context.__exit__(None, None, None)

    def _damage(self, each: Slice, text: str) -> Damage:
        return Damage(
            file=str(self.folder / self.manifest.chunks[each.chunk].file),
            text=text,
            tensor=self.manifest.tensors[each.tensor].name + regions.text(each.region),
            begin=each.begin,
            end=each.end,
        )


def _check_header(descriptor: int, chunk: Chunk, file: str) -> None:
    size = storage.size_of(descriptor)
    if size != chunk.bytes:
        text = f"has {size} bytes, not {chunk.bytes}"
        raise CorruptError([Damage(file=file, text=text, begin=min(size, chunk.bytes), end=max(size, chunk.bytes))])
    if manifests.sha256(storage.read_range(descriptor, 0, chunk.header_bytes)) != chunk.header_sha256:
        text = "the header is not what was written: the sha256 does not fit"
        raise CorruptError([Damage(file=file, text=text, begin=0, end=chunk.header_bytes)])
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
