"""What the ledger and the planner say of adapter runs that others have published, beside what they measured.

    python benchmarks/adapters.py published_runs.csv

The rows have neither rank nor targets: assumed of every one are rank 8 on queries, values, the attention's output and
the MLP, and blocks that are all recomputed. It is our trainer that is priced, not theirs. Prints a table and writes
results/adapters.json.
"""

import argparse
import csv
from pathlib import Path

import msgspec

from meshwright.config import load
from meshwright.cost.memory import fits
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster
from meshwright.search.budget import job_of
from meshwright.spec.units import GIB

RESULTS = Path(__file__).parents[1] / "results" / "adapters.json"
RECIPE = (
    "adapter.rank=8", "adapter.alpha=16", "adapter.targets=q_proj,v_proj,o_proj,mlp.*", "plan.precision=bf16",
    "plan.recompute=full",
)  # fmt: skip
MODELS = {"llama3-8b": "llama3-8b", "llama3-70b": "llama3-70b", "llama3-405b": "llama3-405b", "3b": "llama3.2-3b"}
CARDS = {"RTX 4090": "rtx4090", "RTX A6000": "a6000", "A100": "a100-80g"}


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published run."""

    row: str
    kind: str
    gpus: str
    measured_gib: float
    ours_gib: float  # allocated at the most
    memory_off: float  # ours ÷ measured − 1
    measured_tokens: float  # a second of a GPU
    ours_tokens: float
    low_tokens: float  # of our interval
    high_tokens: float
    tokens_off: float


def adapter_rows(file: Path) -> list[tuple[dict[str, str], str]]:
    """The rows of adapters with a measured peak, each with the kind of its adapter."""
    found = []
    with open(file, newline="") as lines:
        for row in csv.DictReader(lines):
            words = f"{row['model_name']} {row['notes'].split('(')[0]}".lower()
            kind = "qlora" if "qlora" in words else "lora" if "lora" in words else ""
            if kind and row["source_group"] == "torchtune" and row["peak_mem_gib"]:
                found.append((row, kind))
    return found


def priced(row: dict[str, str], kind: str) -> AdapterRow | None:
    """Our figures for a row; None where its card is in no catalogue."""
    if row["gpu"] not in CARDS:
        return None
    model = next(ours for name, ours in MODELS.items() if f"-{name}-" in row["id"])
    gpus, micro = int(row["n_gpus"]), int(row["micro_batch"])
    shard = (f"plan.shard={gpus}", "plan.zero=3") if gpus > 1 else ("plan.bf16_params=true",)
    words = [f"arch.preset={model}", f"sequence={row['seq_len']}", f"batch={micro * gpus}", f"adapter.kind={kind}"]
    run = load.load(None, [*words, f"plan.microbatch={micro}", *RECIPE, *shard], ranks=gpus).run
    machines = cluster(f"{gpus}x{CARDS[row['gpu']]}")
    job = msgspec.structs.replace(job_of(run), cluster=machines)
    memory, time = fits(job).ledger.allocated / GIB, price(job)
    measured, tokens = float(row["peak_mem_gib"]), float(row["tokens_per_s_per_gpu"])
    if "GB not GiB" in row["notes"]:
        measured *= 1e9 / GIB
    step = time.tokens_per_second_per_gpu * time.seconds
    return AdapterRow(
        row=row["id"],
        kind=kind,
        gpus=f"{gpus} × {row['gpu']}",
        measured_gib=measured,
        ours_gib=memory,
        memory_off=memory / measured - 1,
        measured_tokens=tokens,
        ours_tokens=time.tokens_per_second_per_gpu,
        low_tokens=step / time.high_seconds,
        high_tokens=step / time.low_seconds,
        tokens_off=time.tokens_per_second_per_gpu / tokens - 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    found = [each for row, kind in adapter_rows(parser.parse_args().table) if (each := priced(row, kind)) is not None]
    for each in found:
        memory = f"{each.measured_gib:6.1f} GiB, ours {each.ours_gib:6.1f} ({each.memory_off:+.1%})"
        tokens = f"{each.measured_tokens:8.0f} tok/s, ours {each.ours_tokens:8.0f} ({each.tokens_off:+.1%})"
        print(f"{each.row:<36}{each.gpus:<14}{memory}   {tokens}")
    record = {"recipe": RECIPE, "rows": found}
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


if __name__ == "__main__":
    main()
