"""What saving and checking cost: how long training stands still, and what the digests add to a load.

One rank trains a Llama shape and saves while it goes on. Then the saved step is read into memory with and without
hashing, by turns: from a disk of a stated speed, from this machine's (whose system is told to forget the files; below a
virtual disk there may be a cache that does not) and from memory. Each figure is a median; the overhead is the median of
the ratios of neighbouring loads, so that a machine which is busy for a while is busy for both.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from meshwright.checkpoint import format, storage
from meshwright.checkpoint import read as restore
from meshwright.checkpoint.format import Slice
from meshwright.checkpoint.read import StepReader
from meshwright.checkpoint.state import TensorShard
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.data.prepare import prepare
from meshwright.runtime.place import Place, cores
from meshwright.spec.params import count
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import holdings
from meshwright.train.world import world
from meshwright.verify import integrity

WORDS = (
    "arch.preset=tiny", "arch.vocab=8192", "arch.layers=6", "arch.hidden=512", "arch.heads=8", "arch.kv_heads=4",
    "arch.head_dim=64", "arch.ffn=1536", "sequence=64", "batch=2", "eval.every=0", "data.eval_fraction=0.0",
    "checkpoint.every=6", "checkpoint.keep_last=1",
)  # fmt: skip
DISK = 0.5e9  # bytes a second: a network disk of a cloud, or a share of a busy file system
WARM_UP = 2  # steps that are not counted


class Unchecked(StepReader):
    """The same reading without a digest: what the hashing is measured against."""

    def checked(self, each: Slice, descriptor: int) -> memoryview:
        content = np.empty(each.end - each.begin, dtype=np.uint8).data
        for begin in range(0, len(content), storage.READ_BYTES):
            storage.read_into(descriptor, each.begin + begin, content[begin : begin + storage.READ_BYTES])
        return content


@contextmanager
def disk_of(bytes_per_second: float) -> Iterator[None]:
    """A disk of some speed: what is read faster waits. Several readers share it."""
    read, turn, free_at = storage.read_into, threading.Lock(), [0.0]

    def read_slowly(descriptor: int, begin: int, room: memoryview) -> int:
        with turn:
            free_at[0] = max(free_at[0], time.perf_counter()) + len(room) / bytes_per_second
            ready = free_at[0]
        filled = read(descriptor, begin, room)
        time.sleep(max(ready - time.perf_counter(), 0))
        return filled

    storage.read_into = read_slowly
    try:
        yield
    finally:
        storage.read_into = read


@contextmanager
def alone(run: Run, folder: Path) -> Iterator[list[TensorShard]]:
    """One rank that trains and saves; then what it holds."""
    place = Place(
        rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="", threads=cores(),
        store=str(folder / "store"),
    )  # fmt: skip
    corpus = prepare(run, folder / "cache", lambda text: None)
    with world(run, place) as mesh:
        state = build(run, corpus, mesh)
        results, marks = [], [time.perf_counter()]
        for result in train(run, state, mesh, folder / "run"):
            assert isinstance(result, StepResult)
            results.append(result)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
        state.loader.close()
        seconds = [after - before for before, after in itertools.pairwise(marks)]
        (folder / "steps.json").write_text(json.dumps([seconds, [result.save_seconds for result in results]]))
        yield holdings(state, run, mesh)


def stalls(folder: Path, every: int) -> dict[str, float]:
    """How long a step without a save takes, and how long training stands still for one."""
    seconds, saves = json.loads((folder / "steps.json").read_text())
    plain = [each for step, each in enumerate(seconds, 1) if step > WARM_UP and step % every]
    stood = [each for step, each in enumerate(saves, 1) if step % every == 0][1:]  # the first takes its memory
    step, stall = statistics.median(plain), statistics.median(stood)
    return {"step_seconds": step, "stall_seconds": stall, "stall_share_of_a_save_interval": stall / (every * step)}


def loads(folder: Path, held: list[TensorShard], times: int, cold: bool) -> dict[str, float]:
    """A load with and without hashing, by turns."""
    seconds: dict[type[StepReader], list[float]] = {StepReader: [], Unchecked: []}
    work: dict[type[StepReader], list[float]] = {StepReader: [], Unchecked: []}  # of processors, whoever else is busy
    for number in range(times):
        for kind in (StepReader, Unchecked) if number % 2 else (Unchecked, StepReader):
            if cold:
                forget(folder)
            began, worked = time.perf_counter(), time.process_time()
            with kind(folder) as reader:
                restore.fill(reader, held)
            seconds[kind].append(time.perf_counter() - began)
            work[kind].append(time.process_time() - worked)
    checked, unchecked = seconds[StepReader], seconds[Unchecked]
    ratio = statistics.median(one / other for one, other in zip(checked, unchecked, strict=True))
    return {
        "checked_seconds": statistics.median(checked),
        "unchecked_seconds": statistics.median(unchecked),
        "overhead": ratio - 1,
        "checked_processor_seconds": statistics.median(work[StepReader]),
        "unchecked_processor_seconds": statistics.median(work[Unchecked]),
    }


def forget(folder: Path) -> None:
    """Have the next read come from the disk."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def checked_whole(folder: Path) -> float:
    """`meshwright verify --checkpoint` of the step, from the disk."""
    forget(folder)
    began = time.perf_counter()
    assert integrity.verify_step(folder).sound
    return time.perf_counter() - began


def measure(run: Run, times: int, folder: Path) -> dict[str, object]:
    """Everything about one run."""
    with alone(run, folder) as held:
        home = format.home(folder / "run")
        step = home / format.name(format.present(home)[-1])
        with disk_of(DISK):
            from_disk = loads(step, held, times, cold=False)
        return {
            "parameters": count(run.arch),
            "checkpoint_bytes": sum(file.stat().st_size for file in step.iterdir()),
            "manifest_bytes": (step / "manifest.json").stat().st_size,
            **stalls(folder, run.checkpoint.every),
            f"load_at_{DISK / 1e9:g}_gb_per_second": from_disk,
            "cold_load": loads(step, held, times, cold=True),
            "warm_load": loads(step, held, times, cold=False),
            "cold_verify_seconds": checked_whole(step),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="key=value", help="another model, for example arch.layers=24")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--times", type=int, default=7, help="loads of each kind (default 7)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("results/checkpoint.json"))
    options = parser.parse_args()
    run = load.load(None, [*WORDS, *options.words, f"steps={options.steps}"]).run
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        measured = measure(run, options.times, Path(name))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine = {"cores": cores(), "torch": str(torch.__version__), "machine": platform.machine(), "gpu": gpu}
    text = json.dumps(machine | measured, indent=2) + "\n"
    options.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
