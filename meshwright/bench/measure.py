"""The step of a run, measured: the trainer's own loop, driven by somebody who looks at the clock."""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from meshwright.bench.counted import counted_ratio
from meshwright.bench.sweep import WARM_UP
from meshwright.bench.waterfall import Waterfall, waterfall
from meshwright.cost.flops import attention_flops, hardware_flops, step_flops, utilization
from meshwright.data.prepare import prepare
from meshwright.parallel.mesh import Mesh
from meshwright.spec.cluster import peak_flops_per_second
from meshwright.spec.params import count
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.train.build import build
from meshwright.train.log import peak_bytes
from meshwright.train.loop import StepResult, train
from meshwright.train.world import world

ANSWER = "measured.json"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run's steps, over all ranks: the slowest rank's time, the fullest rank's memory."""

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
    hfu: float | None
    peak_allocated_bytes: int  # by torch's allocator; on a CPU, by which the process has grown since before the model
    peak_reserved_bytes: int
    loss: float
    counted_flops_ratio: float | None = None  # operations that torch counts ÷ those that the MFU is made of
    waterfall: Waterfall | None = None


class Seen(NamedTuple):
    """What one rank saw of a run."""

    steps: list[float]  # seconds of those that count
    first: float
    loss: float
    before: int  # bytes of the process's peak before there was a model


def measure(place: Place, run: Run, cache: Path, folder: Path, traced: int) -> None:
    """Be one rank; the first leaves what all of them saw. The last `traced` steps are taken apart, and not timed."""
    with world(run, place) as mesh:
        corpus = prepare(run, cache, lambda text: None)
        before = peak_bytes(mesh.device)
        state = build(run, corpus, mesh)
        dist.barrier()
        began = time.perf_counter()
        results = train(run, state, mesh)
        marks = list(_marks(islice(results, run.steps - traced), mesh))
        seconds = _seconds(marks, mesh)
        numbers = torch.tensor([*seconds, marks[0][1] - began], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *steps, first = numbers.tolist()
        seen = Seen(steps=steps[WARM_UP - 1 :], first=first, loss=marks[-1][2].loss.item(), before=before)
        answer = _answer(run, mesh, seen)
        if traced:
            peak = peak_flops_per_second(answer.device, run.plan.precision)
            falls = waterfall(results, traced, mesh.device, _ideal(run, peak), folder / "trace.json")
            answer = msgspec.structs.replace(answer, waterfall=falls)
        state.loader.close()
        if mesh.rank == 0:
            answer = msgspec.structs.replace(answer, counted_flops_ratio=counted_ratio(run.arch, run.sequence))
            (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


def _ideal(run: Run, peak: float | None) -> dict[str, float]:
    """Seconds of each kind of operation if every rank worked at the peak; nothing where that is not known."""
    if not peak:
        return {}
    whole = step_flops(run.arch, run.sequence, run.batch)
    attention = attention_flops(run.arch, run.sequence, run.batch)
    return {
        kind: flops / peak / run.plan.world
        for kind, flops in (("products", whole - attention), ("attention", attention))
    }


Mark = tuple[torch.cuda.Event | None, float, StepResult]


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


def _largest(number: int, mesh: Mesh) -> int:
    """Over all ranks."""
    held = torch.tensor([number], device=mesh.device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held.item())


def _answer(run: Run, mesh: Mesh, seen: Seen) -> Measured:
    cuda = mesh.device.type == "cuda"
    allocated = _largest(peak_bytes(mesh.device) - (0 if cuda else seen.before), mesh)
    reserved = _largest(torch.cuda.max_memory_reserved(mesh.device) if cuda else 0, mesh)
    device = torch.cuda.get_device_name(mesh.device) if cuda else "cpu"
    seconds = statistics.median(seen.steps)
    peak = peak_flops_per_second(device, run.plan.precision)
    flops = step_flops(run.arch, run.sequence, run.batch)
    done = hardware_flops(run.arch, run.plan, run.sequence, run.batch)
    return Measured(
        plan=str(run.plan),
        device=device,
        ranks=mesh.world,
        parameters=count(run.arch),
        sequence=run.sequence,
        batch=run.batch,
        step_seconds=seconds,
        low_seconds=min(seen.steps),
        high_seconds=max(seen.steps),
        first_step_seconds=seen.first,
        tokens_per_second=run.tokens / seconds,
        mfu=utilization(flops, seconds, peak * mesh.world) if peak else None,
        hfu=utilization(done, seconds, peak * mesh.world) if peak else None,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        loss=seen.loss,
    )
