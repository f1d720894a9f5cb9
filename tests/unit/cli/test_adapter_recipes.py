"""What the recipes of adapters say of themselves is what `plan` answers."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_recipe_s_first_line_has_the_answer_of_plan(name, capsys):
    lines = (RECIPES / f"{name}.toml").read_text().splitlines()
    assert len(lines) <= 30
    said = re.search(r"`plan` on (\S+): ([\d.]+ of [\d.]+ GiB), ([\d.]+) s a step", lines[0])
    assert said is not None
    words = ["plan", str(RECIPES / f"{name}.toml"), "arch.preset=llama3-8b", "--cluster", said[1], "--exact"]
    assert main(words) == 0
    answer = capsys.readouterr().out
    assert f"Fits: {said[2]} per GPU" in answer
    assert f"\n{said[3]} s/step" in answer


@pytest.mark.parametrize("kind", ["LoRA", "QLoRA"])
def test_the_largest_models_of_the_page_are_those_that_plan_finds(kind, capsys):
    page = (RECIPES.parent / "docs" / "lora.md").read_text()
    said = re.search(rf"by {kind} (\S+) \(", page)
    assert said is not None
    question = ["--largest", "model", "--cluster", "1xrtx4090", "--sequence", "2048", "--batch", "2", "--json"]
    assert main(["plan", f"adapter.kind={kind.lower()}", *question]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == said[1]
