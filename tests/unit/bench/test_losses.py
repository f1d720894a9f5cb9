import json
from pathlib import Path

import pages
from commands import script

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "results" / "fp8_communication.json").read_text())
NOISE = 1e-3  # of a mean loss: as far as FP8 matmuls alone may be from bf16 over a run


def test_the_page_shows_what_fp8_between_ranks_does_to_losses():
    pages.agree(ROOT / "docs" / "precision.md", "fp8 communication", script("losses").table(RECORD))


def test_fp8_between_ranks_learns_as_bf16_does():
    assert len(RECORD["beside"]) == 6
    assert all(abs(each["last_mean"]) < NOISE for each in RECORD["beside"].values())
