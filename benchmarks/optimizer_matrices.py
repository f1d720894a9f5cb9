"""The standard set of plans under optimizers and dtypes of their states, each beside one process.

python benchmarks/optimizer_matrices.py [--ranks 2] [optim.name=sgd …]      adds to results/optimizer_matrices.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.runtime.files import replace_file

RECORD = Path(__file__).parents[1] / "results" / "optimizer_matrices.json"
CASES = (
    *(f"optim.name={name}" for name in ("sgd", "sm3", "lion", "adamw", "muon", "adafactor", "lamb")),
    # Signs divided by small roots amplify rounding: see docs/optimizers.md.
    *(f"optim.name={name} optim.eps=1e-5" for name in ("onebit_adam", "zero_one_adam", "onebit_lamb")),
    *(f"optim.state_dtype={states}" for states in ("int8", "int4", "fp8")),
)
KEPT = ("plan", "passed", "loss_deviation", "norm_deviation", "gradient_deviation", "weight_deviation", "error")


def matrix(case: str, ranks: int) -> list[dict[str, Any]]:
    """What `verify --matrix` says of every plan."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["verify", "--matrix", *case.split(), "--ranks", str(ranks), "--json", "--folder", folder]
        done = subprocess.run([sys.executable, "-m", "meshwright", *words], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"meshwright {' '.join(words)} ended with {done.returncode}")
    return [{key: row[key] for key in KEPT} for row in json.loads(done.stdout)]


def table(record: dict[str, Any]) -> str:
    """Plans and the largest deviations of every case."""
    lines = ["| | plans equal | ranks | largest deviation of a loss | of a weight |\n|---|--:|--:|--:|--:|"]
    for case, found in record.items():
        rows = found["rows"]
        equal = sum(row["passed"] for row in rows)
        loss, weight = (max(row[f"{kind}_deviation"] for row in rows) for kind in ("loss", "weight"))
        lines.append(f"| `{case}` | {equal} of {len(rows)} | {found['ranks']} | {loss:.1e} | {weight:.1e} |")
    return "\n".join(lines)


def main() -> int:
    """Exit 1 if any plan differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    record = json.loads(options.record.read_text()) if options.record.is_file() else {}
    for case in options.cases:
        rows = matrix(case, options.ranks)
        record[case] = {"ranks": options.ranks, "rows": rows}
        replace_file(options.record, (json.dumps(record, indent=1) + "\n").encode())
        print(f"{case}: {sum(row['passed'] for row in rows)} of {len(rows)} plans equal", flush=True)
    return 0 if all(row["passed"] for case in options.cases for row in record[case]["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
