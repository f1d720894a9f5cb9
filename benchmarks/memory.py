"""Peak memory, predicted and measured, over a grid on one GPU: `python benchmarks/memory.py [--again FILE …]`.

Each row is a short `meshwright bench` in its own process: models of 0.1 to 8 G parameters, sequences of 1,024 to
32,768, recomputation, precision and optimizer varied. `--known FILE` keeps the rows of a record and measures those of
the grid that it lacks. `--again FILE` measures nothing: it prices the rows of a record anew, so that a change of the
ledger is judged without a GPU.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.bench import sweep
from meshwright.bench.measure import write_tokens
from meshwright.config import load
from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster_of_device
from meshwright.hardware.stacks import stacks
from meshwright.runtime.ranks import run_ranks
from meshwright.spec.units import GIB

STEPS = 2  # that count: a peak is reached in the first that updates
RESULT = Path(__file__).parents[1] / "results" / "memory.json"
LLAMA = "tiny arch.vocab=128256 arch.kv_heads=8 arch.context=32768 arch.rope_theta=500000.0 arch.heads=32"
MODELS = {
    "0.1G": "gpt2 arch.vocab=50304",
    "0.4G": "gpt2-medium arch.vocab=50304",
    "1.5G": f"{LLAMA} arch.layers=16 arch.hidden=2048 arch.ffn=8192",
    "4.5G": f"{LLAMA} arch.layers=16 arch.hidden=4096 arch.ffn=14336",
    "8G": f"{LLAMA} arch.layers=32 arch.hidden=4096 arch.ffn=14336",
}


class Case(NamedTuple):
    """A row of the grid."""

    model: str
    microbatch: int
    sequence: int
    plan: str
    words: str = ""


BF16 = "precision=bf16,compile=true"
EAGER = "precision=bf16,compile=false"
GRID = (
    Case("0.1G", 16, 1024, "precision=fp32,compile=false"),
    Case("0.1G", 32, 1024, BF16),
    Case("0.1G", 32, 1024, EAGER),
    Case("0.4G", 16, 1024, BF16),
    Case("0.4G", 16, 1024, f"{EAGER},recompute=full"),
    Case("0.4G", 8, 1024, "precision=fp16,compile=true"),
    Case("1.5G", 8, 1024, BF16),
    Case("1.5G", 4, 4096, f"{BF16},recompute=sqrt"),
    Case("1.5G", 2, 8192, BF16),
    Case("1.5G", 2, 8192, EAGER),
    Case("1.5G", 2, 8192, f"{EAGER},kernels=plain"),
    Case("1.5G", 2, 8192, f"{BF16},recompute=full"),
    Case("1.5G", 2, 8192, f"{BF16},recompute=selective,kernels=plain"),
    Case("1.5G", 1, 32768, f"{BF16},recompute=selective"),
    Case("1.5G", 1, 32768, f"{BF16},recompute=full"),
    Case("1.5G", 2, 8192, f"{BF16},bf16_params=false", "optim.master_weights=split"),
    Case("1.5G", 4, 4096, f"{BF16},activation_offload=true"),
    Case("1.5G", 4, 4096, f"{BF16},activation_quant=fp8"),
    Case("4.5G", 1, 8192, BF16),
    Case("4.5G", 1, 8192, f"{BF16},recompute=selective,bf16_params=false"),
    Case("4.5G", 2, 8192, f"{BF16},recompute=selective"),
    Case("4.5G", 1, 8192, "precision=fp8,compile=true"),
    Case("8G", 1, 2048, f"{BF16},recompute=full,bf16_params=false"),
    Case(
        "8G",
        1,
        8192,
        f"{BF16},recompute=selective,bf16_params=false",
        "optim.master_weights=none optim.stochastic_rounding=true",
    ),
    Case(
        "8G",
        1,
        32768,
        f"{BF16},recompute=full,bf16_params=false",
        "optim.master_weights=none optim.stochastic_rounding=true",
    ),
)


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """The row's peak and step, by `bench` itself in a process of its own."""
    preset, *words = words_of(case)
    [(_, run)] = sweep.runs(preset, words, [("", case.plan)], STEPS, folder, lambda text: None)
    place = folder / "found"
    place.mkdir(parents=True, exist_ok=True)
    write_tokens(folder / sweep.TOKENS, run.arch.vocab, (run.steps + 1) * run.batch * (run.sequence + 1))
    try:
        run_ranks(sweep.MEASURE, 1, (run, folder / "cache", place, 0), sweep.LONGEST)
    except RuntimeError as error:
        return {"error": str(error).strip()[-1000:]}
    found = json.loads((place / "measured.json").read_text())
    return found | predicted(case, found["device"])


def words_of(case: Case) -> list[str]:
    """The model and the sizes, as the program takes them."""
    return [*MODELS[case.model].split(), f"batch={case.microbatch}", f"sequence={case.sequence}", *case.words.split()]


def predicted(case: Case, device: str) -> dict[str, float]:
    """What the planner says now."""
    preset, *words = words_of(case)
    words = [f"arch.preset={preset}", *words, "steps=1", *(f"plan.{word}" for word in case.plan.split(","))]
    run = load.load(None, words, default_ranks=1).run
    job = Job(
        arch=run.arch, plan=run.plan, sequence=run.sequence,
        master_weights=run.optim.master_weights, state_dtype=run.optim.state_dtype,
        cluster=cluster_of_device(device, 1),
        stack=stacks()["meshwright"],
    )  # fmt: skip
    return {"predicted_bytes": worst(job).allocated, "predicted_seconds": price(job).seconds}


def report(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The table, and its mean and worst error."""
    errors = []
    print(
        "model    batch  plan                                                        GiB predicted  error      s  error"
    )
    for row in rows:
        case, found = Case(**row["case"]), row["found"]
        label = f"{case.model:<5}{case.microbatch:>3} × {case.sequence:<6} {case.plan} {case.words}"
        if found.get("error"):
            print(f"{label}: {str(found.get('error')).strip().splitlines()[-1][:200]}")
            continue
        error = found["predicted_bytes"] / found["peak_allocated_bytes"] - 1
        seconds = found["step_seconds"]  # none where other work was on the card
        time = f"{seconds:>7.3f}{found['predicted_seconds'] / seconds - 1:>+7.1%}" if seconds else ""
        errors.append(abs(error))
        sizes = f"{found['peak_allocated_bytes'] / GIB:7.2f}{found['predicted_bytes'] / GIB:10.2f}"
        print(f"{label:<72}{sizes}{error:>+7.1%}{time}")
    summary = {"rows": len(errors), "mape": statistics.mean(errors or [0.0]), "worst": max(errors or [0.0])}
    print(f"{summary['rows']} rows: mean error {summary['mape']:.1%}, worst {summary['worst']:.1%}")
    return summary


def main() -> None:
    """Measure or price anew, print the table, keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--again", type=Path, nargs="*", default=[], help="records to price anew, and join")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="records whose rows stand")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--folder", type=Path, default=Path("runs/memory"))
    options = parser.parse_args()
    rows = [row for file in (options.again or options.known) for row in json.loads(file.read_text())["rows"]]
    if options.again:
        for row in rows:
            if not row["found"].get("error"):
                row["found"] |= predicted(Case(**row["case"]), row["found"]["device"])
    else:
        known = [Case(**row["case"]) for row in rows]
        for case in GRID:
            if case.model in options.models.split(",") and case not in known:
                rows.append({"case": case._asdict(), "found": measured(case, options.folder)})
                report(rows[-1:])
                options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    options.out.write_text(json.dumps({"summary": report(rows), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
