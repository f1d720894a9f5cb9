"""The same run in every precision and with every kernel over real text: do the losses stay together?

`python benchmarks/losses.py [--steps 200] [--size least|small|large]` trains one model from one seed on one device
(or two ranks), once for each way of computing, and compares each step's loss with the twin's: plain kernels, not
compiled, in bf16.
What noise is shows the twin whose microbatches are half as large: the same numbers, added up in another order.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "losses.json"
SIZES = {
    "least": "arch.preset=starter arch.layers=2 sequence=128 batch=4",  # for a busy CPU
    "small": "arch.preset=starter sequence=256 batch=8",
    "large": (
        "arch.preset=tiny arch.vocab=8192 arch.layers=8 arch.hidden=512 arch.ffn=1536 arch.heads=8 arch.kv_heads=4 "
        "arch.context=512 sequence=512 batch=16"
    ),
}
RUN = (
    "data.source=stdlib optim.lr=2e-4 optim.warmup=100 seed=1 eval.sample_tokens=0 checkpoint.every=0 eval.every=0 "
    "plan.replicate=1"
)
TWIN = "bf16, plain"
ZERO = "plan.shard=2 plan.zero=3"
WAYS = {
    "fp32, plain": "plan.precision=fp32 plan.kernels=plain plan.compile=false",
    TWIN: "plan.precision=bf16 plan.kernels=plain plan.compile=false plan.bf16_params=false",
    "bf16, plain, other order": (  # of adding up: microbatches half as large
        "plan.precision=bf16 plan.kernels=plain plan.compile=false plan.bf16_params=false plan.grad_accum=2"
    ),
    "bf16, as a user gets it": "plan.precision=bf16",
    "bf16, compiled": "plan.precision=bf16 plan.compile=true",
    "bf16, selective recompute": "plan.precision=bf16 plan.recompute=selective",
    "bf16, masters in halves, compiled": "plan.precision=bf16 plan.compile=true optim.master_weights=split",
    "fp8 by tensor, masters in halves, compiled": "plan.precision=fp8 plan.compile=true optim.master_weights=split",
    **{
        f"fp8 by {name}, {accumulate} sums, gradients {grad}": (
            f"plan.precision=fp8 plan.fp8_scaling={scaling} plan.fp8_accumulate={accumulate} plan.fp8_grad={grad}"
        )
        for name, scaling in (("tensor", "tensorwise"), ("row", "rowwise"))
        for accumulate in ("fast", "exact")
        for grad in ("e4m3", "e5m2")
    },
    "bf16 weights, stochastic": "plan.precision=bf16 plan.bf16_params=false optim.master_weights=none "
    "optim.stochastic_rounding=true",
    "bf16 weights, compensated": "plan.precision=bf16 plan.bf16_params=false optim.master_weights=split",
    **{
        f"{name}, bf16 states": f"{words} optim.state_dtype=bf16"
        for name, words in {
            "bf16, masters in halves": "plan.precision=bf16 optim.master_weights=split",
            "bf16, masters in halves, beta2 0.999": "plan.precision=bf16 optim.master_weights=split optim.beta2=0.999",
            "fp8 by tensor, masters in halves": "plan.precision=fp8 optim.master_weights=split",
            "bf16 weights, stochastic": "plan.precision=bf16 optim.master_weights=none optim.stochastic_rounding=true",
        }.items()
    },
    # States in 8 and 4 bits, rounded to the nearest; with fp32 master weights, in fp32 too, where a CPU is enough.
    **{
        f"{name}, {states} states": f"{words} optim.state_dtype={states}"
        for name, words in {
            "fp32, plain": "plan.precision=fp32 plan.kernels=plain plan.compile=false",
            "fp32, plain, beta2 0.999": "plan.precision=fp32 plan.kernels=plain plan.compile=false optim.beta2=0.999",
            "bf16, masters in halves": "plan.precision=bf16 optim.master_weights=split",
        }.items()
        for states in ("int8", "int4", "fp8")
    },
    "fp32, plain, beta2 0.999": "plan.precision=fp32 plan.kernels=plain plan.compile=false optim.beta2=0.999",
    # The same memory of squares with fp32 states, as the twin of those above.
    "bf16, masters in halves, beta2 0.999": "plan.precision=bf16 optim.master_weights=split optim.beta2=0.999",
    "fp8 codes of activations": "plan.precision=bf16 plan.activation_quant=fp8",
    # What travels in FP8 between two ranks of ZeRO-3, and FP8 matmuls that two ranks share.
    **{
        f"two ranks, {name}": f"plan.kernels=plain plan.compile=false plan.bf16_params=false {words}"
        for name, words in {
            "bf16": f"{ZERO} plan.precision=bf16",
            "bf16, fp8 gathers": f"{ZERO} plan.precision=bf16 plan.gather=fp8",
            "bf16, fp8 gradients": f"{ZERO} plan.precision=bf16 plan.grad_reduce=fp8",
            "bf16, fp8 gathers, gradients and states": (
                f"{ZERO} plan.precision=bf16 plan.gather=fp8 plan.grad_reduce=fp8 optim.state_dtype=fp8"
            ),
            "fp8 matmuls, tp": "plan.tp=2 plan.precision=fp8",
            "fp8 matmuls, gathers, gradients and states": (
                f"{ZERO} plan.precision=fp8 plan.gather=fp8 plan.grad_reduce=fp8 optim.state_dtype=fp8"
            ),
        }.items()
    },
}
LAST = 50  # steps whose mean loss is compared: single steps scatter


def losses(words: str, folder: Path) -> list[float] | str:
    """The loss of each step, or why there are none."""
    ranks = 2 if any(f"plan.{axis}=2" in words.split() for axis in ("shard", "tp")) else 1
    command = [sys.executable, "-m", "meshwright", "train", *words.split(), "--ranks", str(ranks)]
    command += ["--folder", str(folder)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip()[-800:]
    rows = [json.loads(line) for line in (folder / "steps.rank0.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def beside(found: list[float], twin: list[float]) -> dict[str, float]:
    """How far the losses are from the twin's, as shares of them."""
    apart = [abs(a / b - 1) for a, b in zip(found, twin, strict=True)]
    last = statistics.mean(found[-LAST:]) / statistics.mean(twin[-LAST:]) - 1
    return {"mean": statistics.mean(apart), "largest": max(apart), "last_mean": last}


def table(record: dict[str, Any]) -> str:
    """Every way beside the twin, as a page shows it."""
    lines = [
        f"| beside {record['twin']} | mean of all steps | largest | mean loss of the last {LAST} |\n|---|--:|--:|--:|"
    ]
    for way, apart in record["beside"].items():
        if way != record["twin"]:
            shares = f"{apart['mean']:.3%} | {apart['largest']:.3%} | {apart['last_mean']:+.3%}"
            lines.append(f"| {way.removeprefix('two ranks, ')} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Train every way, print the table, keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--only", default="", help="beside the twin, the ways whose names have this")
    parser.add_argument("--twin", choices=WAYS, default=TWIN, help="the way that the others are compared with")
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other: nothing is timed")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, list[float] | str] = {}
    ways = {way: words for way, words in WAYS.items() if way == options.twin or options.only in way}
    with tempfile.TemporaryDirectory() as name:
        common = f"{SIZES[options.size]} {RUN} steps={options.steps}"
        with ThreadPoolExecutor(options.at_once) as pool:  # each is a process of its own
            runs = {
                way: pool.submit(losses, f"{common} {words}", Path(name) / str(i))
                for i, (way, words) in enumerate(ways.items())
            }
            for way, run in runs.items():
                found[way] = each = run.result()
                print(f"{way}: {'failed' if isinstance(each, str) else each[-1]}", flush=True)
    answer: dict[str, Any] = {
        "size": SIZES[options.size],
        "steps": options.steps,
        "twin": options.twin,
        "losses": found,
        "beside": {},
    }
    twin = found[options.twin]
    assert isinstance(twin, list), twin
    print(f"{'beside ' + options.twin:<44}{'mean':>9}{'largest':>9}  mean of the last {LAST}")
    for way, each in found.items():
        if isinstance(each, str):
            print(f"{way:<44} failed: {each.splitlines()[-1] if each else ''}")
            continue
        answer["beside"][way] = apart = beside(each, twin)
        print(f"{way:<44}{apart['mean']:>9.3%}{apart['largest']:>9.3%}{apart['last_mean']:>+10.3%}")
    options.out.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
