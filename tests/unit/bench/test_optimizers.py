import json
import math
from pathlib import Path

import msgspec
import pages
import pytest
from commands import script

from meshwright.bench.optimizers import (
    FIRST,
    RATES,
    USUAL,
    Learned,
    LearningPoint,
    OptimizerBench,
    OptimizerRow,
    OptimizerTable,
    TriedRate,
    job,
    next_factor,
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


def search(loss) -> dict[float, float]:
    found: dict[float, float] = {}
    while len(found) < RATES:
        factor = next_factor(found)
        assert factor not in found
        found[factor] = loss(factor)
    return found


@pytest.mark.parametrize("best", [1 / 12, 0.3, 1.0, 1.7, 11.0])
def test_as_many_rates_for_each_find_the_best_within_a_root_of_two(best):
    found = search(lambda factor: abs(math.log(factor / best)))
    nearest = min(found, key=lambda factor: found[factor])
    assert min(found) < nearest < max(found)
    assert abs(math.log(nearest / best)) <= math.log(2) / 2 + 1e-9


def test_a_rate_that_diverges_is_left_for_lower_ones():
    found = search(lambda factor: math.inf if factor > 0.2 else -factor)
    assert set(FIRST) <= set(found)
    assert min(found, key=lambda factor: found[factor]) <= 0.2


def test_every_usual_rate_is_an_optimizers():
    assert set(USUAL) <= set(OPTIMIZERS)


def test_the_job_is_the_default_run_or_a_files_and_never_random_tokens(tmp_path):
    assert job(None, ["steps=7"]).data.source == "stdlib"
    with pytest.raises(InputError, match="trains on text"):
        job("tiny", [])
    with pytest.raises(InputError, match="validation losses"):
        OptimizerBench(None, ["data.eval_fraction=0.0"], tmp_path, tmp_path)


@pytest.mark.parametrize(("part", "name", "rates"), [
    ("optimizers", "optimizers", RATES), ("optimizers of gpt2", "optimizers-gpt2", 6),
])  # fmt: skip
def test_the_page_and_the_picture_show_the_record(part, name, rates):
    record = msgspec.json.decode((ROOT / "results" / f"{name}.json").read_bytes(), type=OptimizerTable)
    pages.agree(ROOT / "docs" / "optimizers.md", part, table(record))
    assert (ROOT / "docs" / f"{name}.svg").read_text() == optimizers_picture(record)
    alone = {each for each, spec in OPTIMIZERS.items() if not spec.compresses}  # one GPU has nobody to send to
    assert {each.name for each in record.rows} == (set(OPTIMIZERS) if name == "optimizers" else alone)
    assert all(len(each.tried) == rates for each in record.rows)
