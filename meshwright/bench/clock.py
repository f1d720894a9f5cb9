"""Timing: warmed up, synchronised, medians."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UP = 3  # calls before the first that counts
MOST_SECONDS = 0.2  # that one measurement may take once warm
MOST_REPEATS = 50


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The median of some calls, by the device's own clock where it works on its own."""
    for _ in range(WARM_UP):
        work()
    once = _timed(work, device, 1)[0]
    repeats = max(3, min(MOST_REPEATS, int(MOST_SECONDS / max(once, 1e-6))))
    return statistics.median(_timed(work, device, repeats))


def _timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    if device.type != "cuda":
        return [_by_host(work) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(marks)]


def _by_host(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
