import argparse
import json

import pytest
from asking import LLAMA_7B

from meshwright.cli import main, plan
from meshwright.cli import plan as plan_options
from meshwright.cli.plan_tables import plan_words
from meshwright.config import load
from meshwright.spec.plan import Plan

ASKED = "plan gpt2 --cluster 8xh100 --sequence 1024 --batch 64"


def test_the_table_knows_every_option():
    parser = argparse.ArgumentParser()
    plan.add_plan(parser)
    known = vars(parser.parse_args([]))
    assert set(known) - {"json", "verb", "words"} == plan_options.OPTIONS


def refused(capsys, line: str) -> str:
    """What is said of a mistake."""
    assert main.main(line.split()) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--gpus-needed --write run.toml --tokens 1e9", "--write and --tokens cannot be combined with --gpus-needed"),
        ("--layers --textbook", "--textbook cannot be combined with --layers"),
        ("--traffic --vary batch", "--vary cannot be combined with --traffic"),
        ("--what-if batch=8 --page x.html", "--page cannot be combined with --what-if"),
        ("--network 10gbe --exact", "--exact cannot be combined with --network"),
        ("--exact --vary batch", "--vary cannot be combined with --exact"),
        ("--textbook --exact --vary batch", "--vary cannot be combined with --textbook --exact"),
        ("--largest model --tokens 1e9", "--tokens cannot be combined with --largest"),
        ("--trace --write run.toml", "--write cannot be combined with --trace"),
        ("--rank 0", "--rank cannot be combined with a plan search"),
        ("--out x.csv", "--out cannot be combined with a plan search"),
        ("--price in.csv --out x.csv", "--cluster and --sequence and --batch cannot be combined with --price"),
    ],
)
def test_an_option_that_an_answer_would_ignore_is_refused(capsys, tmp_path, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, f"{ASKED} {more}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("plan gpt2 --cluster 8xh100 --largest microbatch plan.microbatch=2", "plan.microbatch=2"),
        ("plan gpt2 --cluster 8xh100 --largest sequence --sequence 512", "--sequence 512"),
        ("plan gpt2 --cluster 8xh100 --largest model", "gpt2"),
    ],
)
def test_the_largest_of_what_is_given_is_refused(capsys, line, given):
    assert f"leave {given} out" in refused(capsys, line)


def test_a_rank_that_is_no_number_is_told_in_plain_words(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main([*ASKED.split(), "--trace", "--rank", "x"])
    assert caught.value.code == 2
    assert "'x' should be a whole number of at least 0" in capsys.readouterr().err


def test_a_plan_that_is_stated_is_written_too(capsys, tmp_path):
    file = tmp_path / "run.toml"
    words = [*ASKED.split(), "--exact", "plan.shard=8", "plan.zero=2", "--write", str(file)]
    assert main.main(words) == 0
    assert f"written: {file}" in capsys.readouterr().out
    plan = load.load(file).run.plan
    assert (plan.shard, plan.zero, plan.precision) == (8, 2, "bf16")


def test_a_stated_plan_that_does_not_fit_is_not_written(capsys, tmp_path):
    file = tmp_path / "run.toml"
    words = ["plan", "llama-7b", "--cluster", "1xa100-80g", "--sequence", "512", "--exact", "--write", str(file)]
    assert main.main(words) == 3
    assert "not written" in capsys.readouterr().out
    assert not file.exists()


def test_the_traffic_of_a_hugging_face_config(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B))
    found = []
    for target in ("llama-7b", str(file), str(tmp_path)):
        assert main.main(["plan", target, "plan.tp=2", "--traffic", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]


def test_a_program_is_told_what_became_of_a_table(capsys, tmp_path):
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("layers,hidden,seq_len,gpu,n_gpus\n24,1024,1024,h100,8\n-1,1024,1024,h100,8\n")
    assert main.main(["plan", "--price", str(source), "--out", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(target), "priced": 1, "refused": 1}


def test_plans_that_differ_are_said_differently():
    """On a single shard too, where zero decides whether a gathered copy of the weights stays."""
    plans = [Plan(replicate=8, microbatch=4, zero=zero) for zero in (0, 3)] + [Plan(shard=8, microbatch=4, zero=3)]
    assert len({plan_words(each) for each in plans}) == 3
