"""Measurements: a run's step, by the trainer's own loop and a clock; a single call's seconds; operations, counted."""

import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from meshwright.bench.optimizers import Learned, LearningPoint
from meshwright.bench.sweep import MEASURED
from meshwright.config.run import Run
from meshwright.cost.flops import attention_flops, causal_step_flops, hardware_flops, step_flops, utilization
from meshwright.data.prepare import prepare
from meshwright.hardware.cluster import peak_flops_per_second
from meshwright.models.decoder import Decoder
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.files import replace_file
from meshwright.runtime.place import Place
from meshwright.spec.arch import Arch
from meshwright.spec.params import count
from meshwright.train.build import build
from meshwright.train.log import peak_bytes
from meshwright.train.loop import StepResult, train
from meshwright.train.oom import explaining
from meshwright.train.world import world

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


KERNEL_WARM_UP = 3  # calls before the first that counts
MOST_SECONDS = 0.2  # that one measurement may take once warm
QUICK_SECONDS = 0.05  # the same of a quick one, which one call warms up
MOST_REPEATS = 50
LARGEST = 2**16  # tokens of two bytes; a larger vocabulary is used in part, which costs the same
Mark = tuple[torch.cuda.Event | None, float, StepResult]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run's steps, over all ranks: the slowest rank's time, the most loaded rank's memory."""

    plan: str
    device: str
    ranks: int
    parameters: int
    sequence: int
    batch: int
    step_seconds: float  # the median
    low_seconds: float  # the quickest and slowest of those that count
    high_seconds: float
    first_step_seconds: float  # compilation included
    tokens_per_second: float
    mfu: float | None  # None: the device has no peak in the catalogue
    mfu_causal: float | None  # the same with attention as it is computed, half of it and within documents
    hfu: float | None
    tflops: float  # 1e12 operations a second of a rank, attention counted as it is computed
    span: float  # mean over positions of the document that each is in: what attention is counted over
    peak_allocated_bytes: int  # by torch's allocator; on a CPU, by which the process has grown since before the model
    peak_reserved_bytes: int
    loss: float
    counted_flops_ratio: float | None = None  # operations that torch counts ÷ those that the MFU is made of
    waterfall: Waterfall | None = None


def measure(place: Place, run: Run, cache: Path, folder: Path, traced: int, warm_up: int) -> None:
    """Be one rank; the first leaves what all of them saw. The last `traced` steps are taken apart, and not timed."""
    with world(run, place) as mesh:
        corpus = prepare(run, cache, lambda text: None)
        before = peak_bytes(mesh.device)
        with explaining(run, mesh.device):
            state = build(run, corpus, mesh)
        dist.barrier()
        began = time.perf_counter()
        results = train(run, state, mesh)
        with explaining(run, mesh.device, state):
            marks = list(_marks(islice(results, run.steps - traced), mesh))
        *steps, first = _largest([*_seconds(marks, mesh), marks[0][1] - began], mesh)
        answer = _answer(run, mesh, steps[warm_up - 1 :], first, [mark[2] for mark in marks[warm_up:]], before)
        if traced:
            falls = waterfall(results, traced, mesh.device, _ideal(run, answer.device), folder / "trace.json")
            answer = msgspec.structs.replace(answer, waterfall=falls)
        state.loader.close()
        if mesh.rank == 0:
            answer = msgspec.structs.replace(answer, counted_flops_ratio=counted_ratio(run.arch, run.sequence))
            (folder / MEASURED).write_bytes(msgspec.json.encode(answer))


def learn(place: Place, run: Run, cache: Path, file: Path) -> None:
    """Be one rank of a run whose validation losses count; the first leaves what it found."""
    with world(run, place) as mesh:
        state = build(run, prepare(run, cache, lambda text: None), mesh)
        # A rank on a CPU is timed by what it worked: the machine may have other work.
        clock = time.perf_counter if mesh.device.type == "cuda" else time.process_time
        began, ends, points = clock(), [0.0], []
        for result in train(run, state, mesh):
            loss = result.loss.item()  # waits for the device
            now = clock() - began
            if isinstance(result, StepResult):
                ends.append(now)
            else:
                points.append(LearningPoint(result.step, ends[-1], loss if math.isfinite(loss) else None))
                began += now - ends[-1]  # validation is no training
        state.loader.close()
        if mesh.rank == 0:
            device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
            steps = statistics.median(later - earlier for earlier, later in pairwise(ends))
            found = Learned(points=tuple(points), step_seconds=steps, device=device)
            replace_file(file, msgspec.json.encode(found))


def _ideal(run: Run, device: str) -> dict[str, float]:
    """Seconds of each kind of operation if every rank worked at the peak; nothing where that is not known."""
    peak = peak_flops_per_second(device, run.plan.arithmetic)
    if not peak:
        return {}
    attention = attention_flops(run.arch, run.sequence, run.batch)
    flops = {"matmul": step_flops(run.arch, run.sequence, run.batch) - attention, "attention": attention}
    return {kind: each / peak / run.plan.world for kind, each in flops.items()}


def _marks(results: Iterator[object], mesh: Mesh) -> Iterator[Mark]:
    """The end of every step, by the device's clock where it works on its own. The first step is waited for."""
    for result in results:
        if not isinstance(result, StepResult):
            continue
        event = None
        if mesh.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            if result.step == 1:
                event.synchronize()
        yield event, time.perf_counter(), result


def _seconds(marks: Sequence[Mark], mesh: Mesh) -> list[float]:
    if mesh.device.type != "cuda":
        return [later[1] - earlier[1] for earlier, later in pairwise(marks)]
    torch.cuda.synchronize(mesh.device)
    events = [mark[0] for mark in marks if mark[0] is not None]
    return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(events)]


def _largest(numbers: Sequence[float], mesh: Mesh) -> list[float]:
    """Each number over all ranks."""
    held = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return held.tolist()


def _answer(
    run: Run, mesh: Mesh, steps: list[float], first: float, counted: Sequence[StepResult], before: int
) -> Measured:
    """What all ranks saw; `before` is the peak of this process before it had a model."""
    cuda = mesh.device.type == "cuda"
    grown = peak_bytes(mesh.device) - (0 if cuda else before)
    allocated, reserved = _largest([grown, torch.cuda.max_memory_reserved(mesh.device) if cuda else 0], mesh)
    device = torch.cuda.get_device_name(mesh.device) if cuda else "cpu"
    seconds = statistics.median(steps)
    peak = peak_flops_per_second(device, run.plan.arithmetic)
    span = statistics.fmean(result.span for result in counted)
    flops = step_flops(run.arch, run.sequence, run.batch, span)
    causal = causal_step_flops(run.arch, run.sequence, run.batch, span)
    done = hardware_flops(run.arch, run.plan, run.sequence, run.batch, span)
    return Measured(
        plan=str(run.plan),
        device=device,
        ranks=mesh.world,
        parameters=count(run.arch),
        sequence=run.sequence,
        batch=run.batch,
        step_seconds=seconds,
        low_seconds=min(steps),
        high_seconds=max(steps),
        first_step_seconds=first,
        tokens_per_second=run.tokens / seconds,
        mfu=utilization(flops, seconds, peak * mesh.world) if peak else None,
        mfu_causal=utilization(causal, seconds, peak * mesh.world) if peak else None,
        tflops=causal / seconds / mesh.world / 1e12,
        span=span,
        hfu=utilization(done, seconds, peak * mesh.world) if peak else None,
        peak_allocated_bytes=int(allocated),
        peak_reserved_bytes=int(reserved),
        loss=counted[-1].loss.item(),
    )


def counted_flops(arch: Arch, sequence: int) -> int:
    """Matmuls and attention of the forward and backward of one sequence.

    Nothing is computed: tensors have shapes only, which takes as long for a large model as for a small one.
    """
    with torch.device("meta"):
        model, tokens = Decoder(arch), torch.zeros(1, sequence, dtype=torch.int64)
    # Torch counts the matmuls of plain attention, not those of its fast kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()
    return counter.get_total_flops()


def counted_ratio(arch: Arch, sequence: int) -> float | None:
    """Operations counted ÷ operations by formula; None where experts choose by values, which shapes do not have."""
    if arch.experts:
        return None
    return counted_flops(arch, sequence) / step_flops(arch, sequence, 1)


def seconds_of(work: Callable[[], object], device: torch.device, quick: bool = False) -> float:
    """The median of some calls, by the device's own clock where it works on its own."""
    warm_up, most = (1, QUICK_SECONDS) if quick else (KERNEL_WARM_UP, MOST_SECONDS)
    for _ in range(warm_up):
        work()
    once = _timed(work, device, 1)[0]
    repeats = max(3, min(MOST_REPEATS, int(most / max(once, 1e-6))))
    return statistics.median(_timed(work, device, repeats))


def _timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(repeats):
            work()
            times.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(times)]
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(marks)]


def write_tokens(file: Path, vocab: int, count: int, seed: int = 1) -> None:
    """A shard of random tokens in nanoGPT's layout."""
    draws = np.random.default_rng(seed).integers(0, min(vocab, LARGEST), count, dtype=np.uint16)
    replace_file(file, draws.astype("<u2").tobytes())  # launched ranks may all write the same
