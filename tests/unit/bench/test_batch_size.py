import json
from pathlib import Path

import pages
import pytest
from commands import script

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "results" / "batch_size.json").read_text())
SWEEP = script("batch_size")


def test_the_page_shows_the_record():
    pages.agree(ROOT / "docs" / "batch-size.md", "batch sizes", SWEEP.table(RECORD))


def test_the_page_shows_what_the_meter_costs_which_is_at_most_a_hundredth():
    record = json.loads((ROOT / "results" / "noise_meter.json").read_text())
    pages.agree(ROOT / "docs" / "batch-size.md", "noise meter", script("noise_meter").table(record))
    assert all(row["share"] <= 0.01 for row in record)


def test_the_critical_batch_is_that_of_a_law_that_holds():
    batches = (4, 16, 64)
    rows = [{"batch": each, "steps": 100 + 1000 / each, "tokens": 128 * (100 * each + 1000)} for each in batches]
    steps, tokens, batch = SWEEP.critical(rows)
    assert (steps, tokens, batch) == pytest.approx((100, 128_000, 10))
