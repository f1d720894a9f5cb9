"""What deterministic mode costs: steps of both modes by turns, in the same ranks, over the same model and data.

Ranks on the CPU with one thread each, fp32, a Llama shape of about 5 M parameters. The ratio is the median of the
ratios of neighbouring steps, so that a machine which is busy for a while is busy for both.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.data.prepare import prepare
from meshwright.runtime.place import Place, cores
from meshwright.spec.params import count
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.world import world

WORDS = (
    "arch.preset=tiny", "arch.vocab=4096", "arch.layers=4", "arch.hidden=256", "arch.heads=8", "arch.kv_heads=4",
    "arch.head_dim=32", "arch.ffn=704", "sequence=128", "batch=8", "eval.every=0", "data.eval_fraction=0.0",
)  # fmt: skip
PLANS = {
    "one rank": ("plan.microbatch=1", "plan.grad_accum=8"),
    "two replicas": ("plan.microbatch=1", "plan.grad_accum=4", "plan.replicate=2"),
    "two shards, zero 3": ("plan.microbatch=1", "plan.grad_accum=4", "plan.shard=2", "plan.zero=3"),
    "two shards, zero 3, one microbatch each": ("plan.microbatch=4", "plan.shard=2", "plan.zero=3"),
}
MODES = {"normal": "plan.deterministic=false", "deterministic": "plan.deterministic=true"}
WARM_UP = 3  # steps that are not counted


def runs(plan: tuple[str, ...], steps: int) -> dict[str, Run]:
    """The two runs of a plan, which differ in the mode alone."""
    return {name: load.load(None, [*WORDS, *plan, word, f"steps={steps}"]).run for name, word in MODES.items()}


def rank(number: int, plan: tuple[str, ...], steps: int, folder: Path) -> None:
    """One rank of a measurement; the first leaves the seconds of every step."""
    both = runs(plan, steps)
    run = both["normal"]
    here = Place(
        rank=number, world=run.plan.world, local_rank=number, local_world=run.plan.world, address="", port=0,
        launcher="", threads=1, store=str(folder / "store"),
    )  # fmt: skip
    corpus = prepare(run, folder / "cache", lambda text: None)
    with world(run, here) as mesh:
        states = {name: build(run, corpus, mesh) for name, run in both.items()}
        loops = {name: train(run, states[name], mesh) for name, run in both.items()}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for step in range(steps):
            for name in list(loops) if step % 2 else list(reversed(loops)):
                began = time.perf_counter()
                next(loops[name])
                seconds[name].append(time.perf_counter() - began)
        for state in states.values():
            state.loader.close()
    if number == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))


def measure(plan: tuple[str, ...], steps: int) -> dict[str, float]:
    """Both modes of a plan beside each other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = runs(plan, steps)["normal"]
        prepare(run, folder / "cache", lambda text: None)
        ranks = [
            multiprocessing.get_context("spawn").Process(target=rank, args=(number, plan, steps, folder))
            for number in range(run.plan.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert all(process.exitcode == 0 for process in ranks)
        seconds = json.loads((folder / "seconds.json").read_text())
    normal, fixed = (seconds[mode][WARM_UP:] for mode in MODES)
    return {
        "normal_seconds": statistics.median(normal),
        "deterministic_seconds": statistics.median(fixed),
        "ratio": statistics.median(one / other for one, other in zip(fixed, normal, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/deterministic.json"))
    options = parser.parse_args()
    run = runs(PLANS["one rank"], 1)["normal"]
    result = {
        "parameters": count(run.arch),
        "tokens_per_step": run.tokens,
        "steps": options.steps,
        "threads_per_rank": 1,
        "cores": cores(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "plans": {name: measure(plan, options.steps + WARM_UP) for name, plan in PLANS.items()},
    }
    text = json.dumps(result, indent=2) + "\n"
    options.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
