"""`meshwright config explain KEY`: every key, in words that stand alone, with a page that is there."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from meshwright.cli import main
from meshwright.config import explain, schema
from meshwright.config.run import Source

ROOT = Path(__file__).parents[3]
MIX = [f"data.mix.{field.encode_name}" for field in msgspec.structs.fields(Source)]
KEYS = [*(key for key, kind in schema.every_key().items() if not schema.is_struct(kind)), *MIX]


def told(capsys, *words: str) -> str:
    assert main.main(["config", "explain", *words]) == 0
    return capsys.readouterr().out


def test_the_keys_are_those_of_the_schema():
    assert sorted(explain.keys()) == sorted(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_explained(key, capsys):
    text = told(capsys, key)
    assert text.splitlines()[0] == key
    rows = dict(line.split(maxsplit=1) for line in text.splitlines()[1:])
    assert list(rows) == ["means", "takes", "default", "affects", "more"]
    page, _, anchor = rows["more"].partition("#")
    titles = [re.sub(r"\W+", "-", line.strip("# ").lower()) for line in (ROOT / page).read_text().splitlines()]
    assert not anchor or anchor in titles


def test_choices_defaults_and_what_is_derived_are_said(capsys):
    assert re.search(r'takes +one of "constant", "cosine", "linear", "wsd"', told(capsys, "optim.schedule"))
    assert re.search(r"default +0.0003\n", told(capsys, "optim.lr"))
    assert re.search(r"default +derived: heads\n", told(capsys, "arch.kv_heads"))
    assert re.search(r"affects +memory, time, numerics\n", told(capsys, "plan.precision"))
    assert re.search(r"affects +nothing of what is computed\n", told(capsys, "checkpoint.every"))


def test_a_table_and_the_whole_file_are_lists(capsys):
    optim = told(capsys, "optim").splitlines()
    assert [line.split()[0] for line in optim] == [key for key in KEYS if key.startswith("optim.")]
    assert len(told(capsys).splitlines()) == len(KEYS)


def test_a_program_gets_one_object_or_a_list(capsys):
    found = json.loads(told(capsys, "plan.zero", "--json"))
    assert (found["key"], found["choices"], found["page"]) == ("plan.zero", [0, 1, 2, 3], "docs/axes/shard.md")
    assert [each["key"] for each in json.loads(told(capsys, "steps", "seed", "--json"))] == ["steps", "seed"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.warmpu", "did you mean optim.warmup?"),
        ("every", "did you mean eval.every or log.every or checkpoint.every?"),
        ("learning_rate", "here it is called optim.lr"),
        ("plan.shadow", "write plan.bf16_params"),
        ("nonsense", "`meshwright config schema` lists every key"),
    ],
)
def test_a_key_that_is_none_is_answered_with_what_was_meant(key, meant, capsys):
    assert main.main(["config", "explain", key]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.endswith(meant)
