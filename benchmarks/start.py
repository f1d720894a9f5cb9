"""How long until a run is under way, on one GPU: `python benchmarks/start.py [--only gpt2-124m] [--out FILE]`.

Each shape is trained twice by `meshwright train`: cold, with empty compile caches, and warm, with those that the first
run left. Told are the phases of the start, the first loss (from Enter), the first step and what of it was compilation,
the first validation loss, and what comes behind the last: the sample and the model's files. Under four minutes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshwright.cost.goodput import first_loss_seconds
from meshwright.runtime.records import AttemptRecord, EndRecord, EvalRecord, Record, StepRecord, read_line

RESULT = Path(__file__).parents[1] / "results" / "start.json"
COMMON = (
    "steps=12",
    "eval.every=5",
    "eval.batches=2",
    "eval.sample_tokens=64",
    "checkpoint.every=0",
    "plan.precision=bf16",
    "plan.compile=true",
    "data.source=text.txt",
    "log.every=1",
)
SHAPES = {
    "gpt2-124m": ("arch.preset=gpt2-124m", "sequence=1024", "batch=64", "plan.microbatch=64"),
    "llama3.2-1b": ("arch.preset=llama3.2-1b", "sequence=8192", "batch=2", "plan.microbatch=2"),
}
AIMS = {"cold": 12.0, "warm": 6.0}  # seconds to the first loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SHAPES), action="append", help="a shape; may be repeated")
    parser.add_argument("--words", nargs="*", default=[], help="settings of every run, such as plan.compile=false")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for shape in options.only or SHAPES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_text(folder / "text.txt")
            for kind in ("warm data", "cold", "warm"):
                if kind == "warm data":  # tokens are prepared once in a data set's life: not what is measured here
                    trained(shape, [*options.words, "steps=1", "plan.compile=false"], folder, "first", folder / "none")
                    continue
                found = measured(trained(shape, options.words, folder, kind, folder / "compiled"), shape, kind)
                rows.append(found)
                print(told(found), flush=True)
    options.out.write_text(json.dumps({"device": device(), "words": options.words, "rows": rows}, indent=1) + "\n")
    return 0


def write_text(file: Path) -> None:
    """Enough text for a few batches of any shape, and for a validation loss."""
    lines = [
        f"line {n}: the quick brown fox jumps over {n * 7919 % 1013} lazy dogs and {n * n % 977} cats"
        for n in range(400_000)
    ]
    file.write_text("\n".join(lines))


def trained(shape: str, words: list[str], folder: Path, run: str, caches: Path) -> tuple[Path, float]:
    """A run's folder, and the seconds from Enter until its process was gone."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    if run == "cold":
        shutil.rmtree(caches, ignore_errors=True)
    command = [sys.executable, "-m", "meshwright", "train", *SHAPES[shape], *COMMON, *words]
    began = time.monotonic()
    subprocess.run(
        [*command, "--folder", run, "--ranks", "1"], cwd=folder, env=environment, check=True, stdout=sys.stderr
    )
    return folder / run, time.monotonic() - began


def measured(ran: tuple[Path, float], shape: str, kind: str) -> dict[str, object]:
    """What the records of a run say of its start and its end."""
    folder, seconds = ran
    lines = (folder / "steps.rank0.jsonl").read_bytes().splitlines()
    records: list[Record] = [read_line(line) for line in lines]
    head = next(record for record in records if isinstance(record, AttemptRecord))
    steps = [record for record in records if isinstance(record, StepRecord)]
    evals = [record for record in records if isinstance(record, EvalRecord)]
    end = next(record for record in records if isinstance(record, EndRecord))
    usual = statistics.median(step.seconds for step in steps[2:])
    return {
        "shape": shape,
        "kind": kind,
        "phases": head.phases,
        "ready_seconds": head.at - head.began,
        "first_loss_seconds": first_loss_seconds(records),
        "first_step_seconds": steps[0].seconds,
        "compile_seconds": steps[0].compile_seconds,
        "step_seconds": usual,
        "first_validation_seconds": evals[0].seconds,
        "later_validation_seconds": evals[1].seconds,
        "finish_seconds": end.at - max(steps[-1].ended, evals[-1].ended),
        "whole_seconds": seconds,
    }


def told(row: dict[str, object]) -> str:
    phases = row["phases"]
    assert isinstance(phases, dict)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    figures = {
        name: row[f"{name}_seconds"] for name in ("first_loss", "first_step", "compile", "first_validation", "finish")
    }
    words = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f} s" for name, seconds in figures.items())
    return f"{row['shape']:<12} {row['kind']:<5} {words} (aim {AIMS[str(row['kind'])]:.0f} s); {parts}"


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
