"""A step whose states live off the device: its time, how long the device stands still, and where the bytes are.

One rank trains a preset on random tokens. Beside the step's time stand the update's own (from the last gradient to the
last state's being back), the stall (what of it the next forward could not hide), and the peaks of device, host and
disk. `--compare` runs the same without offload first, where that fits. On a CPU it works with small models.

    python benchmarks/offload.py llama3-8b plan.optimizer_offload=host --out results/offload-8b.json
    python benchmarks/offload.py llama3-8b arch.layers=90 plan.optimizer_offload=disk optim.state_dtype=bf16 \\
        plan.optimizer_offload_update=device plan.optimizer_offload_host_bytes=90000000000 \\
        --out results/offload-20b.json
"""

import argparse
import json
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from meshwright.bench.measure import write_tokens
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.flops import step_flops, utilization
from meshwright.data.prepare import prepare
from meshwright.hardware.cluster import peak_flops_per_second
from meshwright.optim.host_memory import free_host_bytes
from meshwright.optim.interface import Optimizer
from meshwright.optim.offload import OffloadedOptimizer
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.files import replace_json
from meshwright.runtime.place import Place, cores
from meshwright.spec.params import count
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.state import State
from meshwright.train.world import world

WORDS = (
    "sequence=4096", "batch=2", "plan.replicate=1", "plan.precision=bf16", "plan.recompute=full", "eval.every=0",
    "data.eval_fraction=0.0", "checkpoint.every=0", "eval.sample_tokens=0", "optim.lr=1e-5",
)  # fmt: skip
WARM_UP = 2  # steps that are not counted: memory is taken, kernels are chosen


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in seconds."""

    step: int
    loss: float
    seconds: float
    stall: float  # that its forward waited for the update before it
    update: float  # that the update before it took


def make(preset: str, words: list[str], steps: int, folder: Path) -> Run:
    """The run, over a file of random tokens."""
    file = folder / "tokens.bin"
    base = (f"arch.preset={preset}", *WORDS, *words, f"steps={steps + WARM_UP}")
    source = (f"data.source={file}", "data.format=nanogpt")
    run = load.load(None, [*base, "data.source=stdlib"]).run
    write_tokens(file, run.arch.vocab, (run.steps + 2) * run.batch * (run.sequence + 1))
    return load.load(None, [*base, *source]).run


def measure(run: Run, folder: Path) -> dict[str, object]:
    """The run's steps. Each one's numbers are waited for, which the update beside it does not notice."""
    here = Place(
        rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="", threads=cores(),
        store=str(folder / f"store.{time.monotonic_ns()}"),
    )  # fmt: skip
    corpus = prepare(run, folder / "cache", print)
    with world(run, here) as mesh:
        torch.set_num_threads(cores())  # the host's update is its own
        began = time.perf_counter()
        state = build(run, corpus, mesh, folder)
        wait(mesh.device)
        built = time.perf_counter() - began
        print(f"built {count(run.arch):,} parameters in {built:.1f} s", flush=True)
        if mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(mesh.device)
        rows = list(steps(run, state, mesh))
        state.optimizer.settle()
        answer = {"build_seconds": built, **summary(run, mesh.device, rows), **held(state.optimizer)}
        state.loader.close()
        state.optimizer.close()
    return answer


def steps(run: Run, state: State, mesh: Mesh) -> Iterator[Row]:
    """One row a step: from the end of the one before to its own."""
    optimizer, last = state.optimizer, time.perf_counter()
    for result in train(run, state, mesh):
        assert isinstance(result, StepResult)
        loss, now = result.loss.item(), time.perf_counter()
        update = optimizer.update_seconds if isinstance(optimizer, OffloadedOptimizer) else 0.0  # of the step before
        row = Row(step=result.step, loss=loss, seconds=now - last, stall=optimizer.stall_seconds(), update=update)
        print(f"step {row.step}: {row.seconds:.3f} s, stalled {row.stall:.3f} s, update {row.update:.3f} s", flush=True)
        yield row
        last = now


def summary(run: Run, device: torch.device, rows: list[Row]) -> dict[str, object]:
    """Medians of the steps that count, and the peaks."""
    counted = rows[WARM_UP:]
    seconds, stall, update = (
        statistics.median(getattr(row, name) for row in counted) for name in ("seconds", "stall", "update")
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops_per_second(name, run.plan.precision)
    flops = step_flops(run.arch, run.sequence, run.batch)
    unit = 1 if platform.system() == "Darwin" else 1024
    return {
        "device": name,
        "plan": str(run.plan),
        "states": run.optim.state_dtype,
        "parameters": count(run.arch),
        "sequence": run.sequence,
        "batch": run.batch,
        "step_seconds": seconds,
        "stall_seconds": stall,
        "stall_share": stall / seconds,
        "update_seconds": update,
        "tokens_per_second": run.tokens / seconds,
        "mfu": utilization(flops, seconds, peak) if peak else None,
        "device_peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "losses": [row.loss for row in rows],
        "seconds_of_steps": [row.seconds for row in rows],
        "stalls_of_steps": [row.stall for row in rows],
    }


def held(optimizer: Optimizer) -> dict[str, object]:
    """What the states take, by where they are."""
    if not isinstance(optimizer, OffloadedOptimizer):
        return {"host_state_bytes": 0, "disk_state_bytes": 0}
    files = optimizer.files
    return {
        "host_state_bytes": optimizer.memory.bytes,
        "disk_state_bytes": files.bytes if files is not None else 0,
        "past_the_cache": bool(files.direct) if files is not None else None,
    }


def wait(device: torch.device) -> None:
    """Let the host see what the device has done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tried(run: Run, folder: Path) -> dict[str, object]:
    """The measurement, or in one line why there is none."""
    try:
        return measure(run, folder)
    except (InputError, torch.OutOfMemoryError) as error:
        words = str(error).splitlines()[0]
        print(f"not measured: {words}", flush=True)
        return {"plan": str(run.plan), "refused": words}


def main() -> None:
    """Measure, print, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("words", nargs="*", help="key=value, as everywhere")
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--compare", action="store_true", help="the same without offload too, first")
    parser.add_argument("--folder", type=Path, help="of offloaded states on disk and of the tokens")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        run = make(arguments.preset, arguments.words, arguments.steps, folder)
        free = {"free_host_bytes": free_host_bytes(), "free_disk_bytes": shutil.disk_usage(folder).free}
        answer: dict[str, object] = {"torch": str(torch.__version__), "cores": cores(), **free}
        if arguments.compare:
            optim = msgspec.structs.replace(run.optim, state_dtype="fp32")
            plain = msgspec.structs.replace(run.plan, optimizer_offload="none")
            answer["without"] = tried(msgspec.structs.replace(run, plan=plain, optim=optim), folder)
        answer["offloaded"] = tried(run, folder)
    print(json.dumps(answer, indent=2))
    if arguments.out is not None:
        replace_json(arguments.out, answer)


if __name__ == "__main__":
    main()
