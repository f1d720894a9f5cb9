"""Our step beside the peers' on one GPU, in one go: `python benchmarks/gpu.py [--peers] [--only NAME] --out FILE`.

Every row is measured three times, ours in processes of their own, and states the worst: our slowest run beside the
peer's fastest. With `--only` other rows of an existing record stay. `--predict` measures nothing: it gives an existing
record the predictions that the planner makes today, on any machine.
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
from meshwright.spec.units import GIB

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
    "llama3-8b": ["llama3-8b"],
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


# Split master weights: bf16 weights, and the sixteen bits that they lack of fp32.
SPLIT = "optim.master_weights=split"
BF16, FP8 = "precision=bf16,compile=true", "precision=fp8,compile=true"
AS_TORCHAO = "fp8_accumulate=exact,fp8_grad=e5m2"  # its tensor-wise default
RUNS = 3
CASES = (
    Case("gpt2-124m", 64, 1024, "nanogpt", BF16),
    Case("llama3-1b", 2, 8192, "torchtitan", BF16, SPLIT),
    Case("llama3-1b", 4, 8192, "torchtitan", BF16, SPLIT),
    Case("llama3-8b-16", 1, 8192, "torchtitan", BF16, SPLIT),
    Case("llama3-8b-16", 2, 8192, "torchtitan", BF16, SPLIT),
    Case("llama3-8b-16", 1, 8192, "torchtitan-fp8", f"{FP8},{AS_TORCHAO}", SPLIT),
    Case("llama3-8b-16", 1, 8192, "torchtitan-fp8-fast", FP8, SPLIT),
    Case("llama3-8b", 1, 8192, "", FP8, f"{SPLIT} optim.state_dtype=bf16"),
    Case("moe-8", 4, 4096, "torchtitan-moe", BF16, SPLIT),
    Case("moe-64", 4, 4096, "torchtitan-moe", BF16, SPLIT),
    Case("moe-128", 4, 4096, "", BF16, SPLIT),
)

# Settings of a peer of which the fastest counts: torchtitan's MoE under autocast, and under FSDP over one rank.
SETTINGS = {"torchtitan-moe": ("torchtitan-moe", "torchtitan-moe-fsdp")}


def words_of(case: Case) -> list[str]:
    """The model and the overrides, as a user would write them."""
    return [*ARCHS[case.shape], f"batch={case.microbatch}", f"sequence={case.sequence}", *case.words.split()]


def ours(case: Case, folder: Path) -> dict[str, Any]:
    """Our own step."""
    return benched(words_of(case), case.plan, folder)


def benched(words: list[str], plan: str, folder: Path, times: int = RUNS, *more: str) -> dict[str, Any]:
    """The slowest of our own runs, through the program as a user would, and the medians of all."""
    command = [sys.executable, "-m", "meshwright", "bench", *words, *["--plan", plan] * times]
    command += ["--steps", "12", "--json", "--folder", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if lines else [{"error": done.stderr[-2000:]}]
    found = found if isinstance(found, list) else [found]  # one plan's answer stands alone
    if failed := next((each for each in found if each["error"]), None):
        return failed
    seconds = [each["step_seconds"] for each in found]
    first = found[0]["first_step_seconds"]  # the others find what it compiled
    return max(found, key=lambda each: each["step_seconds"]) | {"runs": seconds, "first_step_seconds": first}


def peer(case: Case) -> dict[str, Any]:
    """The peer's step at the fastest of its settings, each in a process of its own."""
    found = [_peer(case, name) for name in SETTINGS.get(case.peer, (case.peer,))]
    best = min(found, key=lambda each: each.get("step_seconds", float("inf")))
    return best if len(found) == 1 else best | {"settings": found}


def _peer(case: Case, name: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), name, case.shape]
    done = subprocess.run(
        [*command, str(case.microbatch), str(case.sequence)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}


def prediction(record: dict[str, Any], profile: Profile | None = None) -> dict[str, Any]:
    """What the planner predicts today of a step that was measured, as `meshwright bench` does."""
    case = Case(**record["case"])
    return prediction_of(words_of(case), case.plan, record["ours"], profile)


def prediction_of(words: list[str], plan: str, ours: dict[str, Any], profile: Profile | None = None) -> dict[str, Any]:
    """The same of a model and overrides, as a user would write them."""
    target, *overrides = words
    [(_, run)] = runs(target, overrides, [(plan, plan)], 12, Path(), print)
    return predicted(run, ours, PredictionSource(given=profile, probed=lambda: None))


def predict_again(file: Path) -> None:
    """Give every row of a record today's prediction."""
    records = json.loads(file.read_text())
    for record in records:
        record["ours"] |= prediction(record)
        mine, case = record["ours"], Case(**record["case"])
        error = mine["predicted_seconds"] / mine["step_seconds"] - 1
        print(f"{case.shape:<14}{case.microbatch:>4} × {case.sequence}  {case.plan}: predicted {error:+.1%}")
    file.write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    """Measure, print a table, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--predict", action="store_true", help="measure nothing: write the predictions of --out again")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    if options.predict:
        predict_again(options.out)
        return
    # With a slash at the end, so that torchtitan-fp8/ is one row.
    chosen = [case for case in CASES if options.only in f"{case.shape}/{case.microbatch}/{case.peer}/"]
    before = json.loads(options.out.read_text()) if options.only and options.out.exists() else []
    records = {case: record for record in before if (case := Case(**record["case"])) in CASES}
    print("shape            batch   ours ms    GiB    MFU   peer ms    GiB   speed ×  memory ×")
    for case in chosen:
        mine, theirs = ours(case, options.folder), peer(case) if options.peers and case.peer else {}
        records[case] = {"case": case._asdict(), "ours": mine, "peer": theirs}
        print(_line(case, mine, theirs), flush=True)
        rows = [records[each] for each in CASES if each in records]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _line(case: Case, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    start = f"{case.shape:<14}{case.microbatch:>4} × {case.sequence}"
    if mine.get("error") or theirs.get("error"):
        return f"{start}  failed: {(mine.get('error') or theirs['error']).strip().splitlines()[-1][:300]}"
    gib = mine["peak_allocated_bytes"] / GIB
    text = f"{start}{mine['step_seconds'] * 1e3:>10.1f}{gib:>7.1f}{mine['mfu'] or 0:>7.1%}"
    if theirs:
        held = theirs["peak_allocated_bytes"] / GIB
        ratio = theirs["step_seconds"] / mine["step_seconds"]
        text += f"{theirs['step_seconds'] * 1e3:>10.1f}{held:>7.1f}{ratio:>9.3f}{gib / held:>10.3f}"
    return text


if __name__ == "__main__":
    main()
