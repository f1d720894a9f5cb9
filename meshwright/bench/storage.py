"""The disk under a folder: one file written and read from end to end."""

import os
import tempfile
import time
from pathlib import Path

MIB = 2**20
PIECE = 4 * MIB  # of one write


def disk_bandwidths(folder: Path, size: int) -> tuple[float, float]:
    """Bytes a second of writing until the disk has it, and of reading it back where the system lets go of it first."""
    piece = os.urandom(PIECE)  # a disk that compresses gains nothing
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        room = memoryview(bytearray(PIECE))
        began = time.perf_counter()
        while file.readinto(room):
            pass
        return size / written, size / (time.perf_counter() - began)
