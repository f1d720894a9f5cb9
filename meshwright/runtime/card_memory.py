"""Who holds a GPU's memory: its processes as the driver counts them, asked of NVML or of `nvidia-smi`. No torch here.

Inside a container the driver may number processes as its host does, or hide those of others; then names are missing, or
the list is shorter than what is held.
"""

import csv
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.spec.units import GIB

NVML = "libnvidia-ml.so.1"
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
LONGEST_SECONDS = 10.0  # that the driver may take to answer
MOST_PROCESSES = 256
UNKNOWN = 2**64 - 1  # NVML's word for a size that it cannot tell
LONGEST_NAME = 60
CONTEXT_BYTES = 2 * GIB  # at most, that a process holds beside its tensors: CUDA's context, workspaces, NCCL's buffers


class CardProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    pid: int
    name: str  # empty: nobody says
    bytes: int | None  # None: nobody says

    def __str__(self) -> str:
        size = f", {self.bytes / GIB:.1f} GiB" if self.bytes is not None else ""
        return f"process {self.pid}{f' ({self.name})' if self.name else ''}{size}"


def processes(uuid: str, library: str = NVML, query: Sequence[str] = QUERY) -> list[CardProcess]:
    """The processes that compute on a card, those that hold most first; none where no driver can be asked."""
    found: list[CardProcess] = []
    for ask in (lambda: list(_of_nvml(uuid, library)), lambda: list(_of_command(uuid, query))):
        with suppress(OSError, AttributeError, ValueError, subprocess.SubprocessError):
            found = found or ask()
    return sorted(found, key=lambda process: -(process.bytes or 0))


def others(found: Sequence[CardProcess], own_pid: int, own_bytes: int) -> list[CardProcess]:
    """Those that are not this process; where the driver numbers it otherwise, it is known by what it holds."""
    if any(process.pid == own_pid for process in found):
        return [process for process in found if process.pid != own_pid]
    alike = [each for each in found if each.bytes and own_bytes <= each.bytes <= own_bytes + CONTEXT_BYTES]
    return [process for process in found if len(alike) != 1 or process is not alike[0]]


class _Info(ctypes.Structure):
    """`nvmlProcessInfo_t`, the second version."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _of_nvml(uuid: str, library: str) -> Iterator[CardProcess]:
    driver = ctypes.CDLL(library)
    _require(driver.nvmlInit_v2())
    try:
        card, count = ctypes.c_void_p(), ctypes.c_uint(MOST_PROCESSES)
        infos = (_Info * MOST_PROCESSES)()
        _require(driver.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(card)))
        _require(driver.nvmlDeviceGetComputeRunningProcesses_v3(card, ctypes.byref(count), infos))
        for info in infos[: count.value]:
            size = None if info.bytes == UNKNOWN else int(info.bytes)
            yield CardProcess(pid=info.pid, name=_name(info.pid), bytes=size)
    finally:
        driver.nvmlShutdown()


def _require(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML answers {code}")


def _of_command(uuid: str, query: Sequence[str]) -> Iterator[CardProcess]:
    said = subprocess.run(query, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=True).stdout
    for row in csv.reader(said.splitlines(), skipinitialspace=True):
        if len(row) != 4 or row[0] != uuid:
            continue
        pid, size = int(row[1]), row[3].strip()
        name = _name(pid) or ("" if row[2].startswith("[") else Path(row[2]).name)  # [Not Found], in containers
        yield CardProcess(pid=pid, name=name, bytes=int(size) * 2**20 if size.isdecimal() else None)


def _name(pid: int) -> str:
    """A process as people started it, as far as this process can see it."""
    try:
        said = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    program, *rest = said.rstrip("\0").split("\0")
    return " ".join([os.path.basename(program), *rest])[:LONGEST_NAME]
