"""Folders that are made once, by whichever process comes first, and are whole when they can be seen."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from meshwright.spec.writing import require_folder

REMEDY = "set XDG_CACHE_HOME to a folder that can be written"
SMALL = 64 << 20  # bytes of files that are told apart by their content; larger ones by name, size and time of change

try:
    import fcntl
except ImportError:  # not POSIX: whoever comes at the same time works too, and the first to finish is kept
    fcntl = None


def once(folder: Path, make: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """The folder, which `make` has filled: by this process, or by another one that was first."""
    if folder.is_dir():
        return folder
    require_folder(folder.parent, REMEDY)
    with _alone(folder, say) as alone:
        if not folder.is_dir():
            if alone:
                _remove_leftovers(folder)
            _publish(folder, make)
    return folder


def digest(*values: object) -> str:
    """A name for the values: any that JSON can hold, in this order."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:24]


def fingerprint(files: list[Path]) -> str:
    """A name for the content of files, in this order."""
    stats = [file.stat() for file in files]
    if sum(stat.st_size for stat in stats) > SMALL:
        names = [str(file.resolve()) for file in files]
        return digest(names, [(stat.st_size, stat.st_mtime_ns) for stat in stats])
    return digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])


def _publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a hidden folder, then give it its name in one step: what has the name is whole."""
    hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.part")
    hidden.mkdir()
    try:
        make(hidden)
        try:
            os.rename(hidden, folder)
        except OSError:
            if not folder.is_dir():  # else someone was faster where there are no locks, and theirs is as good
                raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What a killed process left behind; only the holder of the lock may say that it was killed."""
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[bool]:
    """One process at a time; yields False where the system or the file system has no locks."""
    with folder.with_name(f".{folder.name}.lock").open("a") as lock:
        yield _lock(lock.fileno(), say)  # closing the file releases it, and so does the end of the process


def _lock(descriptor: int, say: Callable[[str], None]) -> bool:
    if fcntl is None:
        return False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same data")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True
