"""Run folders written by hand, so that what is read from them is known to the last figure."""

import json
from collections.abc import Iterable
from pathlib import Path

from meshwright.config import load
from meshwright.runtime.records import AttemptRecord, EndRecord, EvalRecord, Record, StepRecord, line

CPU = "2 × CPU (1 thread), gloo"
H100 = "2 × NVIDIA H100 80GB HBM3, nccl"


def attempt(at: float, step: int = 0, session: str = "vm:7:1", number: int = 1, began: float = 100.0) -> AttemptRecord:
    return AttemptRecord(step=step, session=session, number=number, began=began, at=at)


def step(number: int, at: float, **changes) -> StepRecord:
    usual = {
        "loss": 6.0 / number,
        "norm": 1.0,
        "rate": 1e-3,
        "tokens": 128,
        "seconds": 0.5,
        "data_seconds": 0.0,
        "memory_bytes": 2**30,
        "flops": 1e9,
    }
    return StepRecord(step=number, at=at, **{**usual, **changes})


def usual(steps: int = 12) -> list[Record]:
    """Two seconds of start, then two steps a second, a held-out loss and a quarter of a second to finish."""
    made: list[Record] = [attempt(102.0), *(step(n, 102.0 + n / 2) for n in range(1, steps + 1))]
    end = 102.0 + steps / 2
    made.append(EvalRecord(step=steps, loss=0.75, tokens=128, seconds=0.25, at=end + 0.25))
    return [*made, EndRecord(step=steps, at=end + 0.5)]


def run_folder(
    folder: Path,
    records: Iterable[Record] | None = None,
    *words: str,
    device: str = CPU,
    ranks: int = 2,
    finished: bool = True,
) -> Path:
    """A run of twelve steps, as its ranks would have left it."""
    folder.mkdir(parents=True)
    plan = ["arch.preset=tiny", "steps=12", "sequence=32", "batch=4", f"plan.replicate={ranks}", *words]
    (folder / "run.toml").write_text(load.write(load.load(None, plan).run))
    (folder / "env.json").write_text(json.dumps({"torch": "2.13.0", "device": device}))
    text = b"".join(line(record) for record in (usual() if records is None else records))
    for rank in range(ranks):
        (folder / f"steps.rank{rank}.jsonl").write_bytes(text)
    if finished:
        (folder / "summary.json").write_text('{"state": "done", "step": 12}')
    return folder
