"""Faults that need a GPU, on a real one: out of memory, a rank killed while it holds the card, saves, determinism.

`python benchmarks/gpu_faults.py` fills one card; `--small` does the same with a small model, on a CPU too, to try the
script. Every time is taken from the records of the runs themselves.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults import read, steps_of

from meshwright.runtime.records import AttemptRecord
from meshwright.verify.rehearse import model_digest

RESULT = Path(__file__).parents[1] / "results" / "gpu_faults.json"
QUIET = "eval.every=0 eval.batches=1 eval.sample_tokens=0 data.source=stdlib plan.replicate=1"
MIDDLE = (
    "arch.preset=tiny arch.vocab=8192 arch.layers=12 arch.hidden=1024 arch.ffn=4096 arch.heads=16 arch.kv_heads=8 "
    "arch.context=2048 sequence=2048 batch=16 plan.precision=bf16"
)  # 0.2 G parameters: a checkpoint of 2.5 GB
LARGE = MIDDLE.replace("batch=16", "batch=88")  # with activations that fill most of a card of 140 GB
SMALL = "arch.preset=starter sequence=64 batch=4"
HUGE_BATCH = "batch=4096 plan.microbatch=4096"  # no card has room for its activations


def train(words: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A run as a user would start it."""
    command = [sys.executable, "-m", "meshwright", "train", *QUIET.split(), *words.split(), *more]
    return subprocess.run(
        [*command, "--ranks", "1", "--folder", str(folder), "--json"], capture_output=True, text=True, check=False
    )


def out_of_memory(model: str, folder: Path) -> dict[str, Any]:
    """What a user is told whose microbatch does not fit."""
    done = train(f"{model} {HUGE_BATCH} steps=3 checkpoint.every=0", folder)
    told = [line for line in done.stderr.splitlines() if line][-8:]
    return {"exit_code": done.returncode, "told": told}


def killed(model: str, folder: Path) -> dict[str, Any]:
    """kill -9 in the middle of a backward: seconds to the next step, and steps made again."""
    done = train(f"{model} steps=34 checkpoint.every=16", folder, "--inject", "kill:0:30:backward")
    records = read(folder)
    before, after = steps_of(records, 1), steps_of(records, 2)
    attempts = [record for record in records if isinstance(record, AttemptRecord)]
    return {
        "exit_code": done.returncode,
        "attempts": len(attempts),
        "seconds": after[0].at - before[-1].at if after else None,
        "lost_steps": before[-1].step - after[0].step + 1 if after else None,
        "memory_bytes": max((record.memory_bytes for record in before), default=0),
    }


def saving(model: str, folder: Path) -> dict[str, Any]:
    """How long steps are held up by saves that are written while training goes on."""
    every = 4 if model == SMALL else 200  # so seldom that one is on the disk before the next begins
    done = train(f"{model} steps={3 * every} checkpoint.every={every}", folder)
    steps = steps_of(read(folder), 1)
    saved = [record for record in steps if record.save_seconds > 0]
    usual = statistics.median(record.seconds for record in steps[2:] if record.save_seconds == 0)
    size = max((_bytes(each) for each in (folder / "checkpoints").glob("step-*")), default=0)
    return {
        "exit_code": done.returncode,
        "bytes": size,
        "step_seconds": usual,
        "stall_seconds": [record.save_seconds for record in saved],
    }


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def deterministic(model: str, folder: Path, steps: int) -> dict[str, Any]:
    """The same bits twice, and once more with a kill in the middle; what the mode costs."""
    words, seconds, digests = f"{model} steps={steps} checkpoint.every={steps // 4}", {}, []
    for name in ("plain", "once", "twice", "killed"):
        place = folder / name
        fault = ("--inject", f"kill:0:{steps // 2}:forward") if name == "killed" else ()
        train(f"{words} plan.deterministic={str(name != 'plain').lower()}", place, *fault)
        seconds[name] = statistics.median(record.seconds for record in steps_of(read(place), 1)[2:])
        if name != "plain":
            digests.append(model_digest(place))
    return {
        "steps": steps,
        "same_bits": len(set(digests)) == 1 and digests[0] != "",
        "digests": digests,
        "cost": seconds["once"] / seconds["plain"],
    }


def main() -> None:
    """Every fault, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="of the deterministic runs")
    parser.add_argument("--only", default="", help="memory, kill, save or bits")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    large, middle = (SMALL, SMALL) if options.small else (LARGE, MIDDLE)
    parts = {
        "memory": lambda folder: out_of_memory(middle, folder),
        "kill": lambda folder: killed(large, folder),
        "save": lambda folder: saving(middle, folder),
        "bits": lambda folder: deterministic(SMALL, folder, options.steps),
    }
    found = {}
    for name, part in parts.items():
        if options.only in ("", name) and not (name == "memory" and options.small):
            with tempfile.TemporaryDirectory() as folder:
                found[name] = part(Path(folder) / "run")
            print(name, json.dumps(found[name]), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
