"""Hold the ledger's foreign stacks to published runs, and fit their constants.

python benchmarks/fit_memory.py --data published_runs.csv            # the accuracy table
python benchmarks/fit_memory.py --data published_runs.csv --fit nanotron

Constants are those of one stack's table [NAME.holds] in meshwright/hardware/stacks.toml. Only rows meant for fitting
are read (memory-fit, fit, feasibility); every row left out is counted with its reason.
"""

import argparse
import csv
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import fits, ledger
from meshwright.hardware.stacks import StackMemory, stacks
from meshwright.published.rows import job_of
from meshwright.spec.units import GIB

USES = ("memory-fit", "fit", "feasibility")
# Runs that are another program: gradients checked against a second run, two models at a time.
OTHER_PROGRAMS = ("reruns_resume_check_grads", "modelopt_distill")
# Fitted constants of each stack; the rest of its table is what the program is known to do.
FITTED = {
    "nanotron": (
        "more_hidden",
        "gathered_left",
        "logits_bytes",
        "logits_left",
        "update_bytes",
        "workspace_bytes",
    ),
    "megatron": ("more_hidden", "logits_bytes", "workspace_bytes", "update_bytes"),
}
ROUNDS = 12  # of coordinate descent


class Seen(NamedTuple):
    """A published run: what it was and what was measured."""

    row: dict[str, str]
    job: Job
    bytes: float  # 0: the run failed
    rank: int  # whose memory was measured


class Score(NamedTuple):
    """How far predictions are from measurements, as shares of the measured."""

    runs: int
    mape: float
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        shares = (self.mape, self.median, self.p90, self.bias)
        words = ("MAPE", "median", "p90", "bias")
        return "  ".join([f"n {self.runs:5d}", *(f"{w} {s:+6.1%}" for w, s in zip(words, shares, strict=True))])


def read(file: Path, say: Counter[str]) -> list[Seen]:
    """The rows of two sources, as jobs; what is left out is counted in `say`."""
    found = []
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            reason = _left_out(row)
            if reason == "another source":
                continue
            priced = job_of(row)
            if reason or priced.job is None:
                say[f"{row['source_group']}: {reason or priced.refused}"] += 1
                continue
            rank = priced.job.plan.pp - 1 if row["source_group"] == "megatron_golden" else 0
            found.append(Seen(row, priced.job, float(row["peak_mem_gib"] or 0) * GIB, rank))
    return found


def _left_out(row: dict[str, str]) -> str:
    """Why a row is not used, or nothing."""
    if row["source_group"] not in ("ultrascale_playbook", "megatron_golden"):
        return "another source"
    if not any(row["suggested_use"].startswith(use) for use in USES):
        return f"meant for {row['suggested_use']}"
    if any(name in row["model_name"] for name in OTHER_PROGRAMS):
        return "another program"
    if row["source_group"] == "megatron_golden" and row["experts"]:
        return "a mixture of experts"
    if row["outcome"] == "ok" and not row["peak_mem_gib"]:
        return "no memory was published"
    return ""


def predicted(seen: Seen, holds: StackMemory | None = None) -> float:
    """Bytes as the stack's own reports count them."""
    job = seen.job
    if holds is not None:
        job = msgspec.structs.replace(job, stack=msgspec.structs.replace(job.stack, holds=holds))
    return ledger(job, {"pp": seen.rank}).reported


def score(errors: Sequence[float]) -> Score:
    """From signed relative errors."""
    sizes = sorted(abs(error) for error in errors)
    return Score(
        len(sizes),
        statistics.fmean(sizes),
        statistics.median(sizes),
        sizes[int(0.9 * (len(sizes) - 1))],
        statistics.fmean(errors),
    )


def errors(runs: Iterable[Seen], holds: StackMemory | None = None) -> list[float]:
    """Predicted ÷ measured − 1."""
    return [predicted(seen, holds) / seen.bytes - 1 for seen in runs]


def fit(runs: Sequence[Seen], holds: StackMemory, names: Sequence[str]) -> StackMemory:
    """Coordinate descent on the mean absolute relative error, each capped so that no single run leads."""

    def loss(candidate: StackMemory) -> float:
        return statistics.fmean(min(abs(error), 0.5) for error in errors(runs, candidate))

    best = loss(holds)
    steps = {name: max(abs(getattr(holds, name)) * 0.2, 1e-3) for name in names}
    for _ in range(ROUNDS):
        for name in names:
            for sign in (1, -1):
                value = max(getattr(holds, name) + sign * steps[name], 0.0)
                candidate = msgspec.structs.replace(holds, **{name: value})
                if (now := loss(candidate)) < best - 1e-6:
                    holds, best, steps[name] = candidate, now, steps[name] * 1.3
                    break
            else:
                steps[name] *= 0.5
    return holds


def groups(runs: Sequence[Seen]) -> dict[str, list[Seen]]:
    """The populations whose accuracy is published."""
    ok = [seen for seen in runs if seen.bytes]
    ultrascale = [seen for seen in ok if seen.row["source_group"] == "ultrascale_playbook"]
    golden = [seen for seen in ok if seen.row["source_group"] == "megatron_golden"]
    counted = [seen for seen in golden if seen.row["n_gpus"]]  # without, how far the optimizer is shared is a guess
    return {
        "ultrascale, MFU ≥ 10 %": [seen for seen in ultrascale if float(seen.row["mfu_pct"] or 0) >= 10],
        "ultrascale, all": ultrascale,
        "megatron golden, attention stated": [seen for seen in golden if seen.row["flash"]],
        "megatron golden, attention not stated": [seen for seen in counted if not seen.row["flash"]],
        "megatron golden, GPUs not counted": [seen for seen in golden if not seen.row["n_gpus"]],
    }


def feasibility(runs: Sequence[Seen]) -> str:
    """How often "does not fit" is right, and how many failures it finds."""
    tried = [seen for seen in runs if seen.row["source_group"] == "ultrascale_playbook"]
    refused = [seen for seen in tried if not fits(seen.job).fits]
    failed = sum(not seen.bytes for seen in tried)
    right = sum(not seen.bytes for seen in refused)
    return f"n {len(tried)}  failed {failed}  precision {right / max(len(refused), 1):.3f}  recall {right / failed:.3f}"


def main() -> None:
    """Print the accuracy table, after fitting one stack if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fit", choices=FITTED, help="fit this stack's constants and print them")
    arguments = parser.parse_args()
    left_out = Counter[str]()
    runs = read(arguments.data, left_out)
    if arguments.fit:
        mine = [seen for seen in runs if seen.bytes and seen.job.stack.name == arguments.fit]
        holds = fit(mine, stacks()[arguments.fit].holds, FITTED[arguments.fit])
        for name in FITTED[arguments.fit]:
            sys.stdout.write(f"{name} = {getattr(holds, name):.4g}\n")
        sys.stdout.write(f"{score(errors(mine, holds))}\n")
        return
    for name, population in groups(runs).items():
        sys.stdout.write(f"{name:40s} {score(errors(population))}\n")
    sys.stdout.write(f"{'ultrascale, does not fit':40s} {feasibility(runs)}\n")
    for reason, count in left_out.most_common():
        sys.stdout.write(f"left out {count:5d}  {reason}\n")


if __name__ == "__main__":
    main()
