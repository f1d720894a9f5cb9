"""What this machine has, found out without torch: GPUs, their names, memory that is free."""

import os
from collections.abc import Mapping
from pathlib import Path

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
