"""Where a step's time goes, from a profiler's trace: matmuls at the peak rate first, then everything above that."""

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The first pattern that fits a kernel's name says what it is; what fits none is element-wise.
KINDS = (
    ("attention", re.compile(r"sdpa|flash|fmha|attention", re.IGNORECASE)),
    ("optimizer", re.compile(r"adamw?|sgd", re.IGNORECASE)),
    ("norm of the gradient", re.compile(r"multi_tensor_apply|foreach_norm", re.IGNORECASE)),
    ("loss", re.compile(r"_loss_|cross_entropy|log_softmax|nll_loss", re.IGNORECASE)),
    ("communication", re.compile(r"nccl|gloo|c10d|all_?(gather|reduce|to_?all)|reduce_?scatter", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|nvjet|cutlass|xmma|addmm|aten::mm|aten::bmm|scaled_mm|mkldnn", re.IGNORECASE)),
)


class WaterfallBar(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step."""

    name: str
    seconds: float
    share: float  # of the step; all shares add up to 1


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """A step taken apart. The profiler slows it a little: shares, not seconds, are what to read."""

    step_seconds: float
    shares: tuple[WaterfallBar, ...]
    trace: str  # for Perfetto or chrome://tracing


def waterfall(
    results: Iterator[object], steps: int, device: torch.device, ideal: Mapping[str, float], trace: Path
) -> Waterfall:
    """Take some steps apart. `ideal`: seconds of the model's operations at the device's peak, as far as it is known."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        synchronize(device)
        began = time.perf_counter()
        for _ in islice(results, steps):
            pass
        synchronize(device)
        wall = (time.perf_counter() - began) / steps
    seen.export_chrome_trace(str(trace))
    return Waterfall(step_seconds=wall, shares=shares(_by_kind(seen, cuda, steps), ideal, wall), trace=str(trace))


def synchronize(device: torch.device) -> None:
    """Wait for what a device still has to do; a CPU has nothing outstanding."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shares(spent: Mapping[str, float], ideal: Mapping[str, float], wall: float) -> tuple[WaterfallBar, ...]:
    """The time by kind: what must be at the peak, what was above that, and when nothing ran."""
    parts: dict[str, float] = {}
    for kind, seconds in ideal.items():
        took = spent.get(kind, 0.0)
        parts[f"{kind} at peak"] = min(seconds, took)
        parts[f"{kind} above peak"] = max(took - seconds, 0.0)
    parts |= {kind: seconds for kind, seconds in spent.items() if kind not in ideal}
    parts["nothing running"] = max(wall - sum(parts.values()), 0.0)
    whole = sum(parts.values())
    return tuple(WaterfallBar(name=name, seconds=value, share=value / whole) for name, value in parts.items())


def _by_kind(seen: profile, cuda: bool, steps: int) -> dict[str, float]:
    """Seconds of a step by what ran; kernels that run beside others are counted while nothing counted before runs."""
    spent: dict[str, float] = defaultdict(float)
    if not cuda:
        for event in seen.key_averages():
            spent[_kind(event.key)] += event.self_cpu_time_total / 1e6 / steps
        return spent
    marks = ("ProfilerStep", "Command Buffer")  # around kernels and copies, which are what works
    events = [each for each in seen.events() or () if each.device_type == DeviceType.CUDA]
    events = [each for each in events if not each.name.startswith(marks)]
    busy = 0.0  # until when something runs
    for event in sorted(events, key=lambda each: each.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        alone = max(end - max(start, busy), 0.0)
        busy = max(busy, end)
        spent[_kind(event.name)] += alone / 1e6 / steps
    return spent


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "element-wise")
