"""What this machine has, found out without torch: GPUs, their names and how they are, memory that is free.

NVML is asked for NVLinks, ECC errors, clocks and heat, without using a GPU, and for who holds its memory; `nvidia-smi`
where NVML cannot tell. Inside a container the driver may number processes as its host does, or hide those of others;
then names are missing, or the list is shorter than what is held.
"""

import csv
import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright.spec.units import GIB, gib

DRIVER = Path("/proc/driver/nvidia/gpus")
MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: files of the limit, the use, the statistics, and there the reclaimable cache.
GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def gpus(environment: Mapping[str, str]) -> int:
    """GPUs that ranks of this machine may use, counted without torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    return len([name for name in devices if name.removeprefix("nvidia").isdecimal() and name != "nvidia"])


def gpu_names(environment: Mapping[str, str], driver: Path = DRIVER) -> list[str]:
    """The GPUs that ranks of this machine may use, as the driver names them; "GPU" where it does not."""
    said = (_line(file, "Model:") for file in sorted(driver.glob("*/information")))
    names = [line.partition(":")[2].strip() for line in said if line]
    return [*names, *["GPU"] * gpus(environment)][: gpus(environment)]


def free_host_bytes(meminfo: Path = MEMINFO, groups: Path = GROUPS) -> int | None:
    """Bytes this process may still take, of the machine and of its control group; None where unknown."""
    known = [free for free in (_of_machine(meminfo), *(_of_group(groups, files) for files in GROUP_FILES)) if free]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    line = _line(meminfo, "MemAvailable:")
    return int(line.split()[1]) * 1024 if line else None


def _of_group(groups: Path, files: tuple[str, str, str, str]) -> int | None:
    limit_file, used_file, stat_file, cached_name = files
    try:
        limit, used = (groups / limit_file).read_text().strip(), int((groups / used_file).read_text())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max": none
        return None
    cached = _line(groups / stat_file, cached_name + " ")
    return max(int(limit) - used + (int(cached.split()[1]) if cached else 0), 1)


def _line(file: Path, beginning: str) -> str | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(beginning)), None)


LONGEST_SECONDS = 2.0  # that the driver may take, before every start on several machines
MOST_LINKS = 18  # of one GPU, as NVML numbers them
SM_CLOCK, UNCORRECTED, VOLATILE, NVLINK_CAPABILITY, NAME_BYTES = 1, 1, 0, 2, 96
# Bits by which NVML says why clocks are low. Idle GPUs, power caps and boost groups are no fault.
HELD_BY_SETTING = 0x2
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
NVML = "libnvidia-ml.so.1"
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
QUERY_SECONDS = 10.0  # that the driver may take to answer
MOST_PROCESSES = 256
UNKNOWN = 2**64 - 1  # NVML's word for a size that it cannot tell
LONGEST_NAME = 60
CONTEXT_BYTES = 2 * GIB  # at most, that a process holds beside its tensors: CUDA's context, workspaces, NCCL's buffers


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; what its driver does not tell is None, and counts of NVLinks are then 0."""

    index: int
    name: str = ""
    links: int = 0  # NVLinks that are active
    links_down: int = 0
    peers: tuple[int, ...] = ()  # GPUs of this machine that it reaches over NVLink
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    rows_pending: bool = False  # memory rows that only a reset of the GPU replaces
    rows_failed: bool = False  # and ones for which there was no spare
    clock: int | None = None  # MHz of its processors, now
    most_clock: int | None = None
    reasons: int = 0  # why that is low, in NVML's bits
    celsius: int | None = None

    @property
    def mhz(self) -> str:
        """Its clock, beside the highest where that is told."""
        return f"{self.clock or '?'} {f'of {self.most_clock} ' if self.most_clock else ''}MHz"

    @property
    def slowdowns(self) -> list[str]:
        """What holds its clocks back that should not."""
        return sorted({word for bit, word in SLOWDOWNS.items() if self.reasons & bit})


def gpu_health(library: str = NVML, seconds: float = LONGEST_SECONDS) -> tuple[GpuHealth, ...] | None:
    """Every GPU of this machine, none where there is no driver; None: the driver did not answer in time.

    It is asked beside this thread, because a GPU that has fallen off its bus can keep a call for minutes.
    """
    found: list[GpuHealth] = []
    asking = threading.Thread(target=lambda: found.extend(_asked(library)), name="nvml", daemon=True)
    asking.start()
    asking.join(seconds)
    return None if asking.is_alive() else tuple(found)


def _asked(library: str) -> list[GpuHealth]:
    try:
        driver = ctypes.CDLL(library)
        if driver.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    try:
        return _each(driver)
    finally:
        with suppress(AttributeError):
            driver.nvmlShutdown()


def _each(driver: ctypes.CDLL) -> list[GpuHealth]:
    cards: list[ctypes.c_void_p] = []
    for number in range(_number(driver, "nvmlDeviceGetCount_v2") or 0):
        card = ctypes.c_void_p()
        if _call(driver, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(card)):
            cards.append(card)
    return [_one(driver, number, cards) for number in range(len(cards))]


def _one(driver: ctypes.CDLL, index: int, cards: list[ctypes.c_void_p]) -> GpuHealth:
    card = cards[index]
    name = ctypes.create_string_buffer(NAME_BYTES)
    _call(driver, "nvmlDeviceGetName", card, name, ctypes.c_uint(NAME_BYTES))
    states = [_number(driver, "nvmlDeviceGetNvLinkState", card, ctypes.c_uint(link)) for link in range(MOST_LINKS)]
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    _call(driver, "nvmlDeviceGetRemappedRows", card, *map(ctypes.byref, rows))
    ecc = _number(driver, "nvmlDeviceGetTotalEccErrors", card, UNCORRECTED, VOLATILE, kind=ctypes.c_ulonglong)
    reasons = _number(driver, "nvmlDeviceGetCurrentClocksThrottleReasons", card, kind=ctypes.c_ulonglong)
    return GpuHealth(
        index=index,
        name=name.value.decode(errors="replace"),
        links=sum(state == 1 for state in states),
        links_down=sum(state == 0 for state in states),
        peers=tuple(_peers(driver, index, cards)),
        ecc_errors=ecc,
        rows_pending=bool(rows[2].value),
        rows_failed=bool(rows[3].value),
        clock=_number(driver, "nvmlDeviceGetClockInfo", card, SM_CLOCK),
        most_clock=_number(driver, "nvmlDeviceGetMaxClockInfo", card, SM_CLOCK),
        reasons=reasons or 0,
        celsius=_number(driver, "nvmlDeviceGetTemperature", card, 0),
    )


def _peers(driver: ctypes.CDLL, index: int, cards: list[ctypes.c_void_p]) -> Iterator[int]:
    for other in range(len(cards)):
        ask = (cards[index], cards[other], NVLINK_CAPABILITY)
        if other != index and _number(driver, "nvmlDeviceGetP2PStatus", *ask) == 0:
            yield other


def _number(driver: ctypes.CDLL, name: str, *asked: Any, kind: Callable[[], Any] = ctypes.c_uint) -> int | None:
    """A number that NVML writes behind its last argument; None where it has none to tell."""
    answer = kind()
    return int(answer.value) if _call(driver, name, *asked, ctypes.byref(answer)) else None


def _call(driver: ctypes.CDLL, name: str, *asked: Any) -> bool:
    """Whether NVML answered: older drivers lack functions, and GPUs lack what these tell."""
    with suppress(AttributeError):
        return getattr(driver, name)(*asked) == 0
    return False


class CardProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card."""

    pid: int
    name: str  # empty: nobody says
    bytes: int | None  # None: nobody says

    def __str__(self) -> str:
        size = f", {gib(self.bytes)} GiB" if self.bytes is not None else ""
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
    said = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
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
