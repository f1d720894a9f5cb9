"""What the recipes of fine-tuning say of themselves is what `plan` answers."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.main import main

RECIPES = Path(__file__).parents[3] / "recipes"


MODELS = {
    "lora": "llama3-8b",
    "qlora": "llama3-8b",
    "dpo": "llama3-8b",
    "sft": "llama3.2-1b",
    "sft-8b": "llama3-8b",
    "alpaca-7b": "llama-7b",
    "alpaca-7b-lora": "llama-7b",
}


def test_every_recipe_of_chat_data_is_looked_at():
    tables = {file.stem: tomllib.loads(file.read_text()) for file in RECIPES.glob("*.toml")}
    assert {name for name, table in tables.items() if table["data"].get("format") == "chat"} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_recipe_s_comment_has_the_answer_of_plan(name, capsys):
    lines = (RECIPES / f"{name}.toml").read_text().splitlines()
    assert len(lines) <= 30
    comment = " ".join(line for line in lines[:2] if line.startswith("#"))
    said = re.search(r"`plan` on (\S+): ([\d.]+ of [\d.]+ GiB)(?: a GPU)?, ([\d.]+) s a step", comment)
    assert said is not None
    words = ["plan", str(RECIPES / f"{name}.toml"), f"arch.preset={MODELS[name]}", "--cluster", said[1], "--exact"]
    assert main(words) == 0
    answer = capsys.readouterr().out
    assert f"Fits: {said[2]} per GPU" in answer
    seconds = re.search(r"^([\d.]+) s/step", answer, re.MULTILINE)
    assert seconds is not None
    assert f"{float(seconds[1]):.1f}" == said[3]


@pytest.mark.parametrize(
    ("kind", "words", "more"),
    [("lora", "by LoRA", ()), ("qlora", "by QLoRA", ()), ("lora", "LoRA takes", ("goal.host_gib=192",))],
)
def test_the_largest_models_of_the_page_are_those_that_plan_finds(kind, words, more, capsys):
    page = (RECIPES.parent / "docs" / "lora.md").read_text()
    said = re.search(rf"{words} (\S+) \([\d.]+ billion", page.replace("\n", " "))
    assert said is not None
    question = ["--largest", "model", "--cluster", "1xrtx4090", "--sequence", "2048", "--batch", "2", "--json"]
    assert main(["plan", f"adapter.kind={kind}", *question, *more]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == said[1]
