"""Steps and tokens to one loss by batch size, beside the gradient noise scale: `python benchmarks/batch_size.py`.

Each batch trains the same model on the same text, with a constant learning rate that grows by the square root of the
batch, as AdamW's should, until the mean loss of ten steps is down to the target. Told are the steps and tokens that it
took, and what the meter suggests by the last of them. The sum of both in units of their least is smallest near the
noise scale (McCandlish et al. 2018). A run that is there is stopped.
"""

import argparse
import json
import math
import operator
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshwright.runtime.failure import Exit
from meshwright.runtime.records import StepRecord, read_line
from meshwright.runtime.run_folder import STOP
from meshwright.train.noise_scale import noise_scale

RESULT = Path(__file__).parents[1] / "results" / "batch_size.json"
BATCHES = (4, 8, 16, 32, 64, 128)
BASE, RATE = 16, 3e-3  # sequences, and the learning rate for as many
MEAN = 10  # steps whose mean loss is compared with the target
WORDS = (
    "data.source=stdlib",
    "sequence=128",
    "eval.every=0",
    "eval.sample_tokens=0",
    "checkpoint.every=0",
    "log.every=100",
    "log.noise_scale=true",
    "optim.schedule=constant",
    "optim.warmup=20",
    "plan.replicate=1",
)


def trained(batch: int, words: list[str], tokens: int, target: float, folder: Path) -> list[StepRecord]:
    """The steps of one run, in four microbatches each, which the meter compares, until it has reached the target."""
    steps = max(tokens // (128 * batch), 4 * MEAN)
    settings = [f"batch={batch}", "plan.grad_accum=4", f"steps={steps}", f"optim.lr={RATE * math.sqrt(batch / BASE)}"]
    command = [sys.executable, "-m", "meshwright", "train", *WORDS, *settings, *words, "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        while running.poll() is None:
            time.sleep(1)
            if reached(told(folder), target) is not None:
                (folder / STOP).touch()
    if running.returncode not in (Exit.DONE, Exit.INTERRUPTED):
        raise SystemExit(f"the run of batch {batch} ended with {running.returncode}")
    return told(folder)


def told(folder: Path) -> list[StepRecord]:
    """The steps that are recorded so far; a line that is being written is left out."""
    file = folder / "steps.rank0.jsonl"
    whole, _, _ = file.read_bytes().rpartition(b"\n") if file.exists() else (b"", b"", b"")
    return [record for line in whole.splitlines() if isinstance(record := read_line(line), StepRecord)]


def reached(records: list[StepRecord], target: float) -> int | None:
    """The first step by which the mean of so many losses is down to the target."""
    for end in range(MEAN, len(records) + 1):
        if sum(record.loss for record in records[end - MEAN : end]) / MEAN <= target:
            return end
    return None


def row(batch: int, records: list[StepRecord], target: float) -> dict[str, Any]:
    """What one batch took."""
    end = reached(records, target)
    seen = records if end is None else records[:end]
    noise = noise_scale(seen, batch)
    return {
        "batch": batch,
        "steps": end,
        "tokens": sum(record.tokens for record in seen) if end is not None else None,
        "loss": sum(record.loss for record in seen[-MEAN:]) / MEAN,
        "noise_scale_tokens": noise.tokens if noise else None,
        "noise_scale_sequences": noise.sequences if noise else None,
    }


def critical(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The least steps and tokens, and the batch in sequences where twice of both is needed.

    By least squares of tokens = least tokens + least steps · batch, relative to the tokens that each batch took.
    """
    found = [each for each in rows if each["tokens"] is not None]
    batches = [each["tokens"] / each["steps"] for each in found]
    weights = [1 / each["tokens"] ** 2 for each in found]
    total, x, y = sum(weights), _dot(weights, batches), _dot(weights, [each["tokens"] for each in found])
    xx = _dot(weights, [batch**2 for batch in batches])
    xy = _dot(weights, [batch * each["tokens"] for batch, each in zip(batches, found, strict=True)])
    steps = (total * xy - x * y) / (total * xx - x * x)
    tokens = (y - steps * x) / total
    each_sequence = found[0]["tokens"] / found[0]["steps"] / found[0]["batch"]
    return steps, tokens, tokens / steps / each_sequence


def _dot(one: list[float], other: list[float]) -> float:
    return sum(map(operator.mul, one, other))


def table(record: dict[str, Any]) -> str:
    """The record as the page shows it."""
    lines = ["| batch, sequences | steps | tokens | noise scale, sequences |", "|--:|--:|--:|--:|"]
    for each in record["rows"]:
        steps, tokens = (f"{each[key]:,}" if each[key] is not None else "not" for key in ("steps", "tokens"))
        noise = f"{each['noise_scale_sequences']:.0f}" if each["noise_scale_sequences"] else "–"
        lines.append(f"| {each['batch']} | {steps} | {tokens} | {noise} |")
    steps, tokens, batch = critical(record["rows"])
    lines += ["", f"Least steps {steps:.0f}, least tokens {tokens:,.0f}: a critical batch of {batch:.0f} sequences."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train every batch, print a line for each, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=5.0, help="the loss to reach")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of one run, at most")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("words", nargs="*", help="other settings of every run")
    options = parser.parse_args()
    rows = []
    print(f"{'batch':>6}{'steps':>8}{'tokens':>12}{'noise scale, sequences':>26}")
    for batch in options.batches:
        with tempfile.TemporaryDirectory() as name:
            records = trained(batch, options.words, options.tokens, options.target, Path(name) / "run")
        found = row(batch, records, options.target)
        rows.append(found)
        steps, tokens = (f"{found[key]:,}" if found[key] is not None else "not" for key in ("steps", "tokens"))
        noise = f"{found['noise_scale_sequences']:.0f}" if found["noise_scale_sequences"] else "–"
        print(f"{batch:>6}{steps:>8}{tokens:>12}{noise:>26}", flush=True)
        record = {"target": options.target, "tokens": options.tokens, "words": [*WORDS, *options.words], "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
