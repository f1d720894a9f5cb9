"""The disk as a checkpoint uses it: a few operations, each of which is done, or raises.

Reading trusts no name: what a folder holds is opened inside that folder only, never through a link, and only if it is a
plain file. Tests put another `Disk` in the place of this one, which fails or ends after any number of operations.
Large files are written and read by several threads at a time: flushing, hashing and copying leave Python to itself.
"""

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from meshwright.runtime.failure import Exit
from meshwright.runtime.place import cores


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in a checkpoint that is not what was written."""

    file: str
    text: str
    tensor: str = ""  # where a tensor's bytes are hit
    begin: int = 0  # bytes of the file
    end: int = 0

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        place = f", bytes {self.begin}–{self.end}" if self.end else ""
        return f"{self.file}{tensor}{place}: {self.text}"


class CorruptError(RuntimeError):
    """A checkpoint cannot be trusted. Ends a command if there is no older one to fall back to."""

    code = Exit.CORRUPT

    def __init__(self, damages: list[Damage]) -> None:
        super().__init__("\n".join(str(damage) for damage in damages))
        self.damages = damages


ANOTHER = "reads differently from what was just written"
READ_BYTES = 4 * 2**20  # at a time
FLUSH_BYTES = 64 * 2**20  # that were written since the last flush make the next one worth its while
THREADS = max(min(cores(), 16), 2)  # while some wait for the disk, others hash
Buffer: TypeAlias = bytes | memoryview
Part: TypeAlias = tuple[int, Iterable[Buffer]]  # where in a file it begins, and its content
Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], threads: int = THREADS) -> list[Result]:
    """What work makes of every item, by threads that begin them in order; the first failure ends the rest."""
    if min(threads, len(items)) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), "checkpoint") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Disk:
    """Operations that a save is made of. What returns has reached the disk, apart from names: see `sync_folder`."""

    def make_folder(self, path: Path) -> None:
        """A folder, if it is not there yet."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, blocks: Iterable[Buffer]) -> None:
        """A new file, flushed to the disk."""
        with open(path, "xb") as file:
            for block in blocks:
                self.write_block(file.fileno(), block)
            os.fsync(file.fileno())

    def write_parts(self, path: Path, parts: Sequence[Part], threads: int = THREADS) -> None:
        """A new file of which threads write a part each, at its place, flushed to the disk.

        The disk begins while the first parts are still being made: what the system holds back is flushed meanwhile.
        """
        with open(path, "xb") as file, _Flusher(file.fileno()) as flusher:

            def one(part: Part) -> None:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # each has its own place in the file
                try:
                    os.lseek(descriptor, part[0], os.SEEK_SET)
                    for block in part[1]:
                        self.write_block(descriptor, block)
                        flusher.wrote(len(block))
                finally:
                    os.close(descriptor)

            side_by_side(one, parts, threads)
            flusher.end()
            os.fsync(file.fileno())

    def write_block(self, descriptor: int, block: Buffer) -> None:
        """All bytes of a block."""
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def rename(self, old: Path, new: Path) -> None:
        """Another name; a file of that name is replaced, at once."""
        os.replace(old, new)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """A file or a folder with all that is in it; a link itself, not what it leads to."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Room that this user has, where a path is or will be."""
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def forget_cache(self, descriptor: int) -> None:
        """Have the next read come from the disk, where the system can be asked for it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class _Flusher:
    """Flushes a file again and again while others write it, so that the disk is not idle until they have ended."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = 0  # bytes since the last flush
        self.ended = False
        self.error: OSError | None = None  # the system says it once: the flush at the end would find nothing wrong
        self.wake = threading.Condition()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> "_Flusher":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def end(self) -> None:
        """Flush no more; raises what a flush has met."""
        self._stop()
        if self.error is not None:
            raise self.error

    def _stop(self) -> None:
        with self.wake:
            self.ended = True
            self.wake.notify()
        if self.thread is not None:
            self.thread.join()

    def wrote(self, count: int) -> None:
        with self.wake:
            self.pending += count
            if self.pending < FLUSH_BYTES:
                return
            if self.thread is None:  # small files are done before one is worth its start
                self.thread = threading.Thread(target=self._serve, name="flush", daemon=True)
                self.thread.start()
            self.wake.notify()

    def _serve(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.ended or self.pending >= FLUSH_BYTES)
                if self.ended:
                    return
                self.pending = 0
            try:
                os.fsync(self.descriptor)
            except OSError as error:
                self.error = error
                return


def write_whole(disk: Disk, path: Path, content: bytes, *, is_passing: bool = False) -> None:
    """A small file that is there whole or not at all, replacing an earlier one, and read again.

    `is_passing`: it need not survive a loss of power, and whoever finds it may rename or remove its folder at once.

    Not runtime/files.py's `replace_file`: a save survives a loss of power, and the tests of faults break each operation
    of its disk in turn.
    """
    temporary = path.with_name(f".{path.name}.partial")
    disk.remove(temporary)
    disk.write(temporary, [content])
    with opened(path.parent, temporary.name) as descriptor:
        disk.forget_cache(descriptor)
        if read_range(descriptor, 0, len(content) + 1) != content:
            raise CorruptError([Damage(file=str(path), text=ANOTHER)])
    disk.rename(temporary, path)
    if not is_passing:
        disk.sync_folder(path.parent)


@contextmanager
def opened(folder: Path, name: str) -> Iterator[int]:
    """A plain file of a folder, open for reading."""
    where = str(folder / name)
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise CorruptError([Damage(file=str(folder), text=f"names a file outside itself: {name!r}")])
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise CorruptError([Damage(file=str(folder), text=f"is not a folder of its own: {error.strerror}")]) from None
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
    except OSError as error:
        raise CorruptError([Damage(file=where, text=_unreadable(error))]) from None
    finally:
        os.close(inside)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptError([Damage(file=where, text="is not a plain file")])
        yield descriptor
    except OSError as error:  # a disk that fails while it is read
        raise CorruptError([Damage(file=where, text=_unreadable(error))]) from None
    finally:
        os.close(descriptor)


def _unreadable(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read: {error.strerror}"


def size_of(descriptor: int) -> int:
    """Bytes of an open file."""
    return os.fstat(descriptor).st_size


def read_small(folder: Path, name: str, limit_bytes: int) -> bytes:
    """A whole file, refused unread if it is larger than any of its kind."""
    with opened(folder, name) as descriptor:
        if (size := size_of(descriptor)) > limit_bytes:
            text = f"has {size} bytes, more than the {limit_bytes} that such a file can have"
            raise CorruptError([Damage(file=str(folder / name), text=text)])
        return read_range(descriptor, 0, size)


def read_range(descriptor: int, begin: int, end: int) -> bytes:
    """Some bytes of a file; fewer if it ends before."""
    buffer = bytearray(end - begin)
    filled = read_into(descriptor, begin, memoryview(buffer))
    return bytes(buffer[:filled])


def read_into(descriptor: int, begin: int, room: memoryview) -> int:
    """Fill a buffer from a file; how many bytes there were. Other threads may read the same file."""
    filled = 0
    while filled < len(room):
        count = os.preadv(descriptor, [room[filled : filled + READ_BYTES]], begin + filled)
        if count == 0:
            break
        filled += count
    return filled


def file_sha256(descriptor: int) -> str:
    """The sha256 of a whole open file."""
    return range_sha256(descriptor, 0, size_of(descriptor))


def range_sha256(descriptor: int, begin: int, end: int) -> str:
    """The sha256 of some bytes of an open file; of fewer if it ends before."""
    whole, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, end - begin)))
    for first in range(begin, end, READ_BYTES):
        room = buffer[: end - first]
        whole.update(room[: read_into(descriptor, first, room)])
    return whole.hexdigest()
