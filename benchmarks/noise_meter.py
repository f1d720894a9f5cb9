"""What the meter of the gradient noise scale costs: the part of a step's seconds that is spent in it.

`python benchmarks/noise_meter.py [--steps 12] [KEY=VALUE …]` trains the default run on a CPU, two microbatches a step:
those of its own batch, and of one twice as large.
Seconds are those that the CPU worked for this process, on one thread, so that other work of the machine counts little.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from meshwright.cli import env
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.data.prepare import prepare
from meshwright.runtime.files import replace_file
from meshwright.runtime.place import Place
from meshwright.spec.params import count
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.noise_scale import NoiseMeter
from meshwright.train.world import world

RESULT = Path(__file__).parents[1] / "results" / "noise_meter.json"
WORDS = (
    "log.noise_scale=true", "eval.every=0", "eval.sample_tokens=0", "checkpoint.every=0", "plan.replicate=1",
    "plan.grad_accum=2",
)  # fmt: skip
BATCHES = (8, 16)
FIRST = 2  # steps that are not counted


class OwnTime:
    """Seconds that were spent inside some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def marks(run: Run, folder: Path, inside: OwnTime) -> Iterator[tuple[float, float]]:
    """Seconds until the end of every step: of the process, and inside the meter."""
    place = Place(
        rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="script", store=str(folder / "store")
    )
    with world(run, place) as mesh:
        assert mesh.device.type == "cpu", "a GPU works on while its host is timed"
        state = build(run, prepare(run, env.cache(), lambda text: None), mesh)
        for result in train(run, state, mesh):
            if isinstance(result, StepResult):
                yield time.process_time(), inside.seconds
        state.loader.close()


def measured(steps: int, words: list[str], folder: Path) -> dict[str, Any]:
    """The record."""
    run = load.load(None, [*WORDS, f"steps={steps + FIRST}", *words], ranks=1).run
    inside = OwnTime()
    with (
        mock.patch.object(NoiseMeter, "_arrived", inside.of(NoiseMeter._arrived)),
        mock.patch.object(NoiseMeter, "measure", inside.of(NoiseMeter.measure)),
    ):
        ends = list(marks(run, folder, inside))[FIRST - 1 :]
    each = [(later[0] - before[0], later[1] - before[1]) for before, later in pairwise(ends)]
    shares = sorted(own / step for step, own in each)
    return {
        "run": run.name,
        "parameters": count(run.arch),
        "tokens": run.tokens,
        "microbatches": run.plan.grad_accum,
        "device": platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "steps": len(each),
        "step_seconds": statistics.median(step for step, _ in each),
        "meter_seconds": statistics.median(own for _, own in each),
        "share": statistics.median(shares),
        "largest": shares[-1],
    }


def table(record: list[dict[str, Any]]) -> str:
    """The page's rows."""
    lines = [
        "| tokens of a microbatch | seconds of a step | of these the meter's | its share, median | largest of "
        f"{record[0]['steps']} steps |\n|--:|--:|--:|--:|--:|"
    ]
    lines += [
        f"| {row['tokens'] // row['microbatches']:,} | {row['step_seconds']:.3f} | {row['meter_seconds']:.4f} "
        f"| {row['share']:.2%} | {row['largest']:.2%} |"
        for row in record
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the row, keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--record", type=Path, default=RESULT)
    options = parser.parse_args()
    record = list[dict[str, Any]]()
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            record.append(measured(options.steps, [f"batch={batch}", *options.words], Path(folder)))
    replace_file(options.record, (json.dumps(record, indent=1) + "\n").encode())
    print(table(record))


if __name__ == "__main__":
    main()
