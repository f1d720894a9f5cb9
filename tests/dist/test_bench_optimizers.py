"""`meshwright bench --optimizers` as a user runs it: every rate is trained once, kept, and the best one counts."""

import json

import pytest
from commands import SMALL, meshwright, write_text

from meshwright.bench.optimizers import RATES

WORDS = [
    "bench", "--optimizers", *SMALL, "steps=4", "data.source=my/*.txt", "data.eval_fraction=0.2", "arch.layers=1",
    "--only", "adamw", "--only", "onebit_adam", "--out", "found.json", "--picture", "found.svg", "--json",
]  # fmt: skip


@pytest.mark.slow
def test_rates_are_tried_alike_and_what_was_trained_is_not_trained_again(tmp_path):
    write_text(tmp_path)
    done = meshwright(*WORDS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "found.json").read_text())
    adam, onebit = found["rows"]
    for each in (adam, onebit):
        assert len(each["tried"]) == RATES
        best = min(each["tried"], key=lambda one: one["loss"])
        assert (each["rate"], each["best"]["points"][-1][2]) == (best["rate"], best["loss"])
        assert len({one["loss"] for one in each["tried"]}) == RATES
        assert each["best"]["points"][-1][0] == found["steps"] == 4
    assert (adam["ranks"], onebit["ranks"]) == (1, 2)
    assert "<polyline" in (tmp_path / "found.svg").read_text()
    assert f"[{2 * RATES}/{2 * RATES}] onebit_adam" in done.stderr
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs/bench/optimizers").iterdir()}
    again = meshwright(*WORDS, folder=tmp_path)
    assert json.loads(again.stdout) == found
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "runs/bench/optimizers").iterdir()}


@pytest.mark.slow
def test_optimizers_beside_each_other_are_timed_apart(tmp_path):
    write_text(tmp_path)
    several = [*WORDS[:-5], "--only", "lion", "--rates", "2", "--at-once", "2", "--json"]
    done = meshwright(*several, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ["adamw", "onebit_adam", "lion"]
    for row in rows:
        assert len(row["tried"]) == 2
        # What a step takes when nothing else runs, times the steps until then.
        assert [point[1] for point in row["best"]["points"]] == pytest.approx(
            [point[0] * row["best"]["step_seconds"] for point in row["best"]["points"]]
        )
