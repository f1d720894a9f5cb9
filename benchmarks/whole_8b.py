"""All of Llama-3 8B on one GPU: `python benchmarks/whole_8b.py [--steps 200] [--out FILE] [KEY=VALUE …]`.

Trains recipes/llama3-8b-1xh200.toml on real text by the trainer's own loop, in FP8 and in bf16, each in a process of
its own; nothing is offloaded or saved. The record has every loss, the median step, tokens a second, the peak of memory,
and what the planner says of both. Losses beside fp32 states are in benchmarks/losses.py, on a model where both fit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.spec.units import GIB

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "llama3-8b-1xh200.toml"
WAYS = {"fp8": [], "bf16": ["plan.precision=bf16"]}
QUIET = ["eval.every=0", "eval.sample_tokens=0", "checkpoint.every=0"]
WARM_UP = 10  # steps that are not timed


def trained(words: list[str]) -> dict[str, Any]:
    """One run, in this process."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    import torch

    from meshwright.bench.sweep import predicted
    from meshwright.config import load
    from meshwright.cost.calibrate import PredictionSource
    from meshwright.data.prepare import prepare
    from meshwright.runtime.place import Place
    from meshwright.train.build import build
    from meshwright.train.log import peak_bytes
    from meshwright.train.loop import StepResult, train
    from meshwright.train.world import world

    run = load.load(RECIPE, [*QUIET, *words], ranks=1).run
    with tempfile.TemporaryDirectory() as name:
        alone = Place(
            rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="", store=f"{name}/store"
        )
        with world(run, alone) as mesh:
            state = build(run, prepare(run, Path(name), lambda text: None), mesh)
            losses, ends = [], []
            for result in train(run, state, mesh):
                if isinstance(result, StepResult):
                    losses.append(result.loss.item())  # waits, so that the clock sees the step's end
                    ends.append(time.perf_counter())
            state.loader.close()
            peak = peak_bytes(mesh.device)
            device = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
    seconds = statistics.median(later - earlier for earlier, later in list(pairwise(ends))[WARM_UP:])
    found = {
        "device": device,
        "plan": str(run.plan),
        "master_weights": run.optim.master_weights,
        "state_dtype": run.optim.state_dtype,
        "step_seconds": seconds,
        "tokens_per_second": run.tokens / seconds,
        "peak_allocated_bytes": peak,
        "mfu": None,
    }
    return found | predicted(run, found, PredictionSource(given=None, probed=lambda: None)) | {"losses": losses}


def main() -> None:
    """Train each way, print a line for each, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--here", action="store_true", help="train the one way in this process, and print its record")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "llama3-8b-1xh200.json")
    parser.add_argument("words", nargs="*", help="overrides of the recipe")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(trained([*WAYS[options.only or "fp8"], f"steps={options.steps}", *options.words])))
        return
    records = {}
    for way in [options.only] if options.only else WAYS:
        command = [sys.executable, __file__, "--here", "--only", way, "--steps", str(options.steps), *options.words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            records[way] = {"error": done.stderr[-2000:]}
            print(f"{way}: failed: {done.stderr.strip().splitlines()[-1][:300]}", flush=True)
        else:
            records[way] = found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{way}: {found['step_seconds'] * 1e3:.1f} ms, {found['tokens_per_second']:,.0f} tokens/s, "
                f"{found['peak_allocated_bytes'] / GIB:.1f} GiB, loss {found['losses'][0]:.3f} → "
                f"{statistics.mean(found['losses'][-20:]):.3f} (mean of the last 20)",
                flush=True,
            )
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
