"""Muon's update alone and whole steps beside AdamW's: `python benchmarks/muon.py [--steps-too] [--out FILE]`.

The update: weights, gradients and states of a model without the model; seconds of one update, FLOPs of Newton–Schulz,
the rate of a large bf16 matmul measured in the same process before and after, and what share of it the whole update
reaches, its work by elements included. AdamW's update of the same weights is beside it. Whole steps are those of
`meshwright bench` at 524,288 tokens a step, accumulated. On a CPU only `--only small` is of a size to be tried.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.matrices import matrix_teams
from meshwright.cost.rank_view import RankView
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.params import params

LLAMA = ["tiny", "arch.vocab=128256", "arch.layers=16", "arch.heads=32", "arch.kv_heads=8", "arch.context=8192"]
SPLIT = ["plan.precision=bf16", "optim.master_weights=split"]  # bf16 weights, and the sixteen bits that they lack
SHAPES = {
    "small": ["tiny"],
    "llama3-1b": [*LLAMA, "arch.hidden=2048", "arch.ffn=8192"],
    "llama3-8b-16": [*LLAMA, "arch.hidden=4096", "arch.ffn=14336"],
}
TOKENS, SEQUENCE = 524_288, 8192  # of a step
MICROBATCH = {"small": 16, "llama3-1b": 4, "llama3-8b-16": 1}
WARMING, STEPS = 1, {"small": 3, "llama3-1b": 2, "llama3-8b-16": 1}  # of up to 64 microbatches each
OPTIMIZERS = {"adamw": [], "muon": ["optim.name=muon"], "adamw int8": ["optim.state_dtype=int8"]}
UPDATES, WARM_UP = 10, 3


def device() -> torch.device:
    """Where it is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(call: Callable[[], Any]) -> float:
    """The median of some calls, each waited for."""
    found = []
    for _ in range(WARM_UP + UPDATES):
        wait()
        began = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found[WARM_UP:])


def wait() -> None:
    """Until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate() -> float:
    """Operations a second of a large bf16 matmul of random numbers."""
    size = 8192 if torch.cuda.is_available() else 512
    a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers: zeros would run faster than real data."""
    return torch.randn(shape, device=device(), dtype=dtype).mul_(0.02)


def weights_of(run: Run) -> dict[str, nn.Parameter]:
    """Split weights with a gradient as several microbatches leave it, in fp32."""
    found = {}
    for param in params(run.arch):
        weight = nn.Parameter(drawn(param.shape, torch.bfloat16))
        weight.low_bits = torch.zeros(param.shape, dtype=torch.int16, device=device())  # pyright: ignore[reportAttributeAccessIssue]
        weight.grad_dtype = torch.float32
        weight.grad = drawn(param.shape, torch.float32)
        found[param.name] = weight
    return found


def update(shape: str) -> dict[str, Any]:
    """One shape's updates, by Muon and by AdamW."""
    before = matmul_rate()
    one = torch.ones((), dtype=torch.float64, device=device())
    verdict = GradStats(loss=one, norm=one, finite=one, factor=one)
    row: dict[str, Any] = {"shape": shape}
    for name in OPTIMIZERS:
        run = load.load(None, [f"arch.preset={SHAPES[shape][0]}", *SHAPES[shape][1:], *SPLIT, *OPTIMIZERS[name]]).run
        held = weights_of(run)
        optimizer = ResidentOptimizer(run.optim, held.values(), run.plan, list(held))
        resident = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
        row[f"{name} seconds"] = seconds(lambda optimizer=optimizer: optimizer.step(1e-4, verdict))
        view = RankView(arch=run.arch, plan=run.plan, sequence=1)
        if name == "muon":
            row["flops"] = sum(team.flops for team in matrix_teams(view))
            row["parameters"] = sum(weight.numel() for weight in held.values())
            row["bytes said of its matrices"] = 2 * max(team.peak_elements(False) for team in matrix_teams(view))
        if torch.cuda.is_available():
            row[f"{name} bytes beside states"] = torch.cuda.max_memory_allocated() - resident
        del optimizer, held
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    row["matmul rate"] = (before + matmul_rate()) / 2
    row["share of it"] = row["flops"] / row["muon seconds"] / row["matmul rate"]
    return row


def step(shape: str, name: str) -> dict[str, Any]:
    """Whole steps of one optimizer by `meshwright bench`, in a process of its own; the error if it fails."""
    small = shape == "small"
    sequence, tokens = (64, 4096) if small else (SEQUENCE, TOKENS)
    batch, microbatch = tokens // sequence, MICROBATCH[shape]
    words = [*SHAPES[shape], *SPLIT, *OPTIMIZERS[name], f"sequence={sequence}", f"batch={batch}"]
    plan = f"precision=bf16,microbatch={microbatch},grad_accum={batch // microbatch}"
    plan += "" if small else ",compile=true"
    command = [sys.executable, "-m", "meshwright", "bench", *words, "--plan", plan, "--json"]
    command += ["--warm-up", str(WARMING), "--steps", str(STEPS[shape])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = {"shape": shape, "optimizer": name, "tokens": tokens}
    if done.returncode:
        return answer | {"error": (done.stderr or done.stdout).strip().splitlines()[-1]}
    return answer | {"bench": json.loads(done.stdout)}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description="Muon's update alone and whole steps beside AdamW's.")
    parser.add_argument("--only", choices=SHAPES, action="append", help="a shape; may be repeated")
    parser.add_argument("--steps-too", action="store_true", help="whole steps by `meshwright bench` too")
    parser.add_argument("--no-updates", action="store_true", help="whole steps alone")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="of the steps; may be repeated")
    parser.add_argument("--out", type=Path, help="the record; rows of it that are not made again stay")
    options = parser.parse_args()
    usual = ["llama3-1b", "llama3-8b-16"] if torch.cuda.is_available() else ["small"]
    shapes = options.only or usual
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    old = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    record: dict[str, Any] = {"device": name, "torch": torch.__version__, "updates": [], "steps": []}
    for rows in ("updates", "steps"):
        record[rows] = old.get(rows, [])
    for shape in shapes:
        if not options.no_updates:
            keep(record["updates"], row := update(shape), "shape")
            print(
                f"{shape}: Muon {1e3 * row['muon seconds']:.1f} ms, {row['flops'] / 1e12:.2f} TFLOP, "
                f"{row['flops'] / row['muon seconds'] / 1e12:.1f} of {row['matmul rate'] / 1e12:.1f} TFLOP/s "
                f"({row['share of it']:.0%}); AdamW {1e3 * row['adamw seconds']:.1f} ms, "
                f"with int8 states {1e3 * row['adamw int8 seconds']:.1f} ms",
                flush=True,
            )
        for optimizer in (options.optimizer or OPTIMIZERS) if options.steps_too else ():
            keep(record["steps"], found := step(shape, optimizer), "shape", "optimizer")
            print(json.dumps(found)[:600], flush=True)
            if options.out:
                options.out.write_text(json.dumps(record, indent=2) + "\n")
        if options.out:
            options.out.write_text(json.dumps(record, indent=2) + "\n")


def table(record: dict[str, Any]) -> str:
    """Updates and whole steps as the page of measurements shows them."""
    head = "| shape | Muon's update | of a matmul's rate | AdamW's | with int8 states | a step by AdamW | by Muon | ÷ |"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in record["updates"]:
        times = [f"{1e3 * row[f'{name} seconds']:.1f} ms" for name in OPTIMIZERS]
        cells = [row["shape"], times[1], f"{row['share of it']:.0%}".replace("%", " %"), times[0], times[2]]
        made = {
            each["optimizer"]: each["bench"]["step_seconds"]
            for each in record["steps"]
            if each["shape"] == row["shape"]
        }
        cells += [f"{made['adamw']:.2f} s", f"{made['muon']:.2f} s", f"{made['muon'] / made['adamw']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def keep(rows: list[dict[str, Any]], row: dict[str, Any], *key: str) -> None:
    """Put a row in the place of the one that has its key, or last."""
    rows[:] = [each for each in rows if any(each[name] != row[name] for name in key)] + [row]


if __name__ == "__main__":
    main()
