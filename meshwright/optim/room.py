"""Whether the host and its disk have room for offloaded states, asked before anything is taken."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from meshwright.optim import piece
from meshwright.optim.homes import spread
from meshwright.parallel import precision
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.run import Run

MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: the limit, what is used, and where the part that would be given back is told.
GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def kinds(run: Run) -> dict[str, torch.dtype]:
    """What is kept of every weight off the device, by name."""
    if run.optim.states == "bf16":
        return {"low": torch.int16, "first": torch.bfloat16, "second": torch.bfloat16}
    return dict.fromkeys(("weight", "first", "second"), precision.weight_dtype(run.plan))


def width(run: Run) -> int:
    """Bytes of one parameter off the device."""
    return sum(dtype.itemsize for dtype in kinds(run).values())


def host_share(run: Run, parameters: int) -> int:
    """How much of the states may be in host memory."""
    return parameters * width(run) if run.plan.offload == "host" else run.plan.offload_host_bytes


def on_the_way(run: Run, largest: int) -> int:
    """Host memory for pieces on their way, none larger than the largest weight: gradients and weights, or states."""
    elements = piece.SLOTS * min(piece.PIECE, largest)
    fetched = width(run) if run.plan.offload == "disk" else 0
    travelling = 2 * precision.weight_dtype(run.plan).itemsize if run.plan.offload_update == "host" else 0
    return elements * (fetched + travelling)


def check(run: Run, sizes: Sequence[int], folder: Path) -> None:
    """Refuse what does not fit, for weights of so many elements each."""
    if run.plan.offload == "disk" and not folder.is_dir():
        what = f"plan.offload = disk is told to use {folder}, and there is no folder of that name"
        raise InputError([Problem(what, "make it, or name another by plan.offload_folder", "plan.offload_folder")])
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
            f"plan.offload = {run.plan.offload} needs {host_bytes:,} bytes of host memory, and {have:,} are free",
            _host_remedy(run),
            "plan.offload",
        )
    free = free_disk_bytes(folder) if disk_bytes else 0
    if disk_bytes > free:
        yield Problem(
            f"plan.offload = disk needs {disk_bytes:,} bytes on the disk, and {folder} has {free:,} free",
            "name another disk by plan.offload_folder, keep more in memory by plan.offload_host_bytes, or set "
            "optim.states = bf16",
            "plan.offload",
        )


def _host_remedy(run: Run) -> str:
    words = []
    if run.plan.offload == "host":
        words.append("set plan.offload = disk")
    elif run.plan.offload_host_bytes:
        words.append("lower plan.offload_host_bytes")
    if run.optim.states == "fp32":
        words.append("set optim.states = bf16")
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
