"""Our step beside the peers' on one GPU, in one go: `python benchmarks/gpu.py [--peers] [--only NAME] --out FILE`.

`--promise` measures nothing: it gives an existing record the promises that the planner makes today, on any machine.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.bench.sweep import predicted, runs
from meshwright.cost.calibrate import PredictionSource
from meshwright.hardware.profile import Profile

LLAMA = [
    "arch.vocab=128256", "arch.layers=16", "arch.heads=32", "arch.kv_heads=8", "arch.context=8192",
    "arch.rope_theta=500000.0",
]  # fmt: skip
MOE = [
    "arch.vocab=32000", "arch.layers=8", "arch.hidden=2048", "arch.heads=16", "arch.kv_heads=16", "arch.head_dim=128",
    "arch.context=4096",
]  # fmt: skip
QWEN = [
    "arch.vocab=151936", "arch.layers=12", "arch.hidden=2048", "arch.heads=32", "arch.kv_heads=4", "arch.head_dim=128",
    "arch.context=4096",
]  # fmt: skip
ARCHS = {
    "gpt2-124m": ["gpt2", "arch.vocab=50304"],
    "llama3-1b": ["tiny", *LLAMA, "arch.hidden=2048", "arch.ffn=8192"],
    "llama3-8b-16": ["tiny", *LLAMA, "arch.hidden=4096", "arch.ffn=14336"],
    "moe-8": ["tiny", *MOE, "arch.experts=8", "arch.top_k=2", "arch.expert_ffn=4096"],
    "moe-64": ["tiny", *MOE, "arch.experts=64", "arch.top_k=8", "arch.expert_ffn=1024"],
    "moe-128": ["tiny", *QWEN, "arch.experts=128", "arch.top_k=8", "arch.expert_ffn=768"],  # Qwen3-30B-A3B's, 12 layers
}


class Case(NamedTuple):
    """A row of the table."""

    shape: str
    microbatch: int
    sequence: int
    peer: str  # empty: none is measured beside it
    plan: str
    words: str = ""


# Masters in two halves: bf16 weights, and the sixteen bits that they lack of fp32. What that leaves of the memory is
# given to activations, of which fewer are then computed anew.
HALVES = "optim.master_weights=split"
FP8 = "precision=fp8,compile=true"
CASES = (
    Case("gpt2-124m", 64, 1024, "transformers", "precision=bf16,compile=true"),
    Case("llama3-1b", 2, 8192, "torchtitan", "precision=bf16,compile=true,recompute=selective-3", HALVES),
    Case("llama3-1b", 4, 8192, "torchtitan", "precision=bf16,compile=true", HALVES),
    Case("llama3-8b-16", 1, 8192, "torchtitan", "precision=bf16,compile=true", HALVES),
    Case("llama3-8b-16", 2, 8192, "torchtitan", "precision=bf16,compile=true,recompute=selective-4", HALVES),
    # FP8 by the peer's own numerics, and ours beside the peer at its best: sums as fast as ours in all three matmuls.
    Case("llama3-8b-16", 1, 8192, "torchtitan-fp8", f"{FP8},fp8_accumulate=exact,fp8_grad=e5m2", HALVES),
    Case("llama3-8b-16", 1, 8192, "torchtitan-fp8-fast", FP8, HALVES),
    Case("moe-8", 4, 4096, "", "precision=bf16,compile=true", HALVES),
    Case("moe-64", 4, 4096, "", "precision=bf16,compile=true", HALVES),
    Case("moe-128", 4, 4096, "", "precision=bf16,compile=true", HALVES),
)


def words_of(case: Case) -> list[str]:
    """The model and the overrides, as a user would write them."""
    return [*ARCHS[case.shape], f"batch={case.microbatch}", f"sequence={case.sequence}", *case.words.split()]


def ours(case: Case, folder: Path) -> dict[str, Any]:
    """Our own step, through the program as a user would."""
    command = [sys.executable, "-m", "meshwright", "bench", *words_of(case), "--plan", case.plan, "--steps", "12"]
    done = subprocess.run([*command, "--json", "--folder", str(folder)], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}


def peer(case: Case) -> dict[str, Any]:
    """The peer's step, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), case.peer, case.shape]
    done = subprocess.run(
        [*command, str(case.microbatch), str(case.sequence)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}


def promise(record: dict[str, Any], profile: Profile | None = None) -> dict[str, Any]:
    """What the planner promises today of a step that was measured, as `meshwright bench` does."""
    case = Case(**record["case"])
    target, *overrides = words_of(case)
    [(_, run)] = runs(target, overrides, [(case.plan, case.plan)], 12, Path(), print)
    return predicted(run, record["ours"], PredictionSource(given=profile, probed=lambda: None))


def promise_again(file: Path) -> None:
    """Give every row of a record today's promise."""
    records = json.loads(file.read_text())
    for record in records:
        record["ours"] |= promise(record)
        mine, case = record["ours"], Case(**record["case"])
        error = mine["predicted_seconds"] / mine["step_seconds"] - 1
        print(f"{case.shape:<14}{case.microbatch:>4} × {case.sequence}  {case.plan}: predicted {error:+.1%}")
    file.write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    """Measure, print a table, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--promise", action="store_true", help="measure nothing: make the promises of --out anew")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    if options.promise:
        promise_again(options.out)
        return
    records = []
    print("shape            batch   ours ms    GiB    MFU   peer ms    GiB   speed ×  memory ×")
    for case in CASES:
        if options.only not in f"{case.shape}/{case.microbatch}/{case.peer}/":  # so that torchtitan-fp8/ is one
            continue
        mine, theirs = ours(case, options.folder), peer(case) if options.peers and case.peer else {}
        records.append({"case": case._asdict(), "ours": mine, "peer": theirs})
        print(_line(case, mine, theirs), flush=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")


def _line(case: Case, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    start = f"{case.shape:<14}{case.microbatch:>4} × {case.sequence}"
    if mine.get("error") or theirs.get("error"):
        return f"{start}  failed: {(mine.get('error') or theirs['error']).strip().splitlines()[-1][:300]}"
    gib = mine["peak_allocated_bytes"] / 2**30
    text = f"{start}{mine['step_seconds'] * 1e3:>10.1f}{gib:>7.1f}{mine['mfu'] or 0:>7.1%}"
    if theirs:
        held = theirs["peak_allocated_bytes"] / 2**30
        ratio = theirs["step_seconds"] / mine["step_seconds"]
        text += f"{theirs['step_seconds'] * 1e3:>10.1f}{held:>7.1f}{ratio:>9.3f}{gib / held:>10.3f}"
    return text


if __name__ == "__main__":
    main()
