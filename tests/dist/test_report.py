"""`meshwright report`, on a real run that lost a rank on the way."""

import json
import re

import pytest
from commands import SMALL, meshwright, write_text


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with one run: ten steps, saved every four, rank 1 killed in the seventh."""
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    words = [*SMALL, "steps=10", "data.source=my/*.txt", "checkpoint.every=4", "checkpoint.async=false"]
    done = meshwright("train", *words, "--folder", "killed", "--inject", "kill:1:7:backward", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_killed_rank_is_told_with_what_it_cost(user):
    done = meshwright("report", "killed", folder=user)
    assert done.returncode == 0, done.stderr
    assert re.search(r"steps +10 of 10", done.stdout)
    assert re.search(r"state +finished", done.stdout)
    assert re.search(r"1\.1 .* steps 1 to 6 .*, 2 of them lost: rank 1 was ended by signal SIGKILL", done.stdout)
    assert re.search(r"1\.2 .* steps 5 to 10", done.stdout)
    assert re.search(r"lost work +[\d.]+ %", done.stdout)
    assert re.search(r"recovery +[\d.]+ %", done.stdout)
    assert "note " not in done.stdout


def test_the_numbers_are_those_of_the_runs_own_summary(user):
    found = json.loads(meshwright("report", "killed", "--json", folder=user).stdout)
    summary = json.loads((user / "killed" / "summary.json").read_text())
    assert {part["name"]: part["share"] for part in found["parts"]} == pytest.approx(
        {"goodput": summary["goodput"], **summary["badput"]}
    )
    assert found["wall_seconds"] == pytest.approx(summary["seconds"])
    assert found["losses"]["first"] == summary["first_loss"]
    assert found["losses"]["last"] == summary["loss"]
    assert found["losses"]["validation"][-1]["loss"] == summary["validation_loss"]
    assert len(found["attempts"]) == summary["attempts"] == 2
    assert found["saves"]["newest"] == 10  # the last step is saved too
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]


def test_the_page_shows_where_it_happened(user):
    done = meshwright("report", "killed", "--page", "killed.html", folder=user)
    assert done.returncode == 0, done.stderr
    assert "step 6: rank 1 was ended by signal SIGKILL" in (user / "killed.html").read_text()
