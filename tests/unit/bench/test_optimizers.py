import json
import math
from pathlib import Path

import msgspec
import pages
import pytest
from commands import script

from meshwright.bench.optimizers import (
    GRID,
    USUAL,
    Learned,
    LearningPoint,
    OptimizerBench,
    OptimizerRow,
    OptimizerTable,
    TriedRate,
    job,
    table,
)
from meshwright.cli.bench import optimizers_picture
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.problem import InputError

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_record_of_matrices():
    record = json.loads((ROOT / "results" / "optimizer_matrices.json").read_text())
    pages.agree(ROOT / "docs" / "optimizers.md", "matrices", script("optimizer_matrices").table(record))
    assert all(row["passed"] for found in record.values() for row in found["rows"])


def row(name: str, *losses: float | None, rate: float = 1e-3) -> OptimizerRow:
    points = tuple(LearningPoint(10 * number, 2.0 * number, loss) for number, loss in enumerate(losses, 1))
    tried = tuple(TriedRate(rate=each, loss=losses[-1]) for each in (5e-4, 1e-3, 2e-3))
    return OptimizerRow(name=name, tried=tried, rate=rate, best=Learned(points=points, step_seconds=0.2, device="cpu"))


def answer(*rows: OptimizerRow) -> OptimizerTable:
    return OptimizerTable(run="one", parameters=1, steps=30, tokens=960, device="cpu", rows=rows)


def test_others_are_timed_to_the_last_loss_of_adamw():
    quick, slow = row("muon", 5.0, 3.9, 3.5, rate=2e-3), row("sgd", 6.0, 5.5, 5.0)
    found = answer(row("adamw", 5.0, 4.5, 4.0), slow, quick)
    assert found.target == 4.0
    assert quick.reached(4.0) == LearningPoint(20, 4.0, 3.9)
    assert slow.reached(4.0) is None
    lines = table(found).splitlines()[2:]
    assert lines[0] == "| muon | 0.002 (edge) | 3.500 | 20 | 0.200 | 4.0 |"
    assert lines[2] == "| sgd | 0.001 | 5.000 | – | 0.200 | – |"


def test_a_run_that_diverged_is_worse_than_any_and_a_failure_is_told():
    lost = row("lion", 5.0, None)
    assert lost.loss == math.inf
    failed = OptimizerRow(name="lamb", error="why")
    assert table(answer(failed, lost)).splitlines()[-1].startswith(("| lion", "| lamb | why"))


def test_the_grid_is_the_same_for_all_and_every_usual_rate_is_an_optimizers():
    assert set(USUAL) <= set(OPTIMIZERS)
    assert GRID[len(GRID) // 2] == 1.0
    assert list(GRID) == sorted(GRID)


def test_the_job_is_the_default_run_or_a_files_and_never_random_tokens(tmp_path):
    assert job(None, ["steps=7"]).data.source == "stdlib"
    with pytest.raises(InputError, match="trains on text"):
        job("tiny", [])
    with pytest.raises(InputError, match="validation losses"):
        OptimizerBench(None, ["data.eval_fraction=0.0"], tmp_path, tmp_path)


def test_the_page_and_the_picture_show_the_record():
    record = msgspec.json.decode((ROOT / "results" / "optimizers.json").read_bytes(), type=OptimizerTable)
    pages.agree(ROOT / "docs" / "optimizers.md", "optimizers", table(record))
    assert (ROOT / "docs" / "optimizers.svg").read_text() == optimizers_picture(record)
    assert [each.name for each in record.rows] == list(OPTIMIZERS)
    assert all(len(each.tried) == len(GRID) for each in record.rows)
