import json

import pytest

from meshwright.cli import env, main

ASKED = ["plan", "gpt2", "--cluster", "8xh100", "--sequence", "1024", "--batch", "64"]
TRACED = [
    *[
        "plan",
        "tiny",
        "--cluster",
        "4xh100",
        "--sequence",
        "256",
        "--batch",
        "16",
        "--exact",
        "--trace",
        "plan.shard=4",
        "plan.zero=3",
    ]
]


def test_a_chart_comes_after_the_answer_and_is_plain_when_piped(capsys):
    assert main.main(ASKED) == 0
    answer = capsys.readouterr().out
    assert main.main([*ASKED, "--chart"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(answer)
    assert "\x1b" not in text
    assert "Memory of a rank at its peak" in text
    assert "Plans by memory and time" in text


def test_a_page_is_written_beside_a_program_s_answer(capsys, tmp_path):
    file = tmp_path / "page.html"
    assert main.main([*ASKED, "--page", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]
    assert file.read_text().startswith("<!doctype html>")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_page_that_exists_is_kept_unless_forced(capsys, tmp_path):
    file = tmp_path / "page.html"
    file.write_text("mine")
    assert main.main([*ASKED, "--page", str(file)]) == 2
    assert file.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main.main([*ASKED, "--page", str(file), "--force"]) == 0
    assert "mine" not in file.read_text()


def test_a_run_s_name_is_text_on_its_page(tmp_path):
    run, file = tmp_path / "run.toml", tmp_path / "page.html"
    run.write_text('name = "<script>alert(1)</script>"\nsequence = 64\nbatch = 8\n[arch]\npreset = "tiny"\n')
    assert main.main(["plan", str(run), "--cluster", "8xh100", "--page", str(file)]) == 0
    assert "<script" not in file.read_text()
    assert "&lt;script&gt;" in file.read_text()


def test_a_plan_that_does_not_fit_is_drawn_beyond_its_limit(capsys):
    words = ["plan", "llama3-8b", "--cluster", "1xh100", "--sequence", "8192", "--batch", "1", "--exact", "--chart"]
    assert main.main(words) == 3
    assert "of 79.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [["--chart", "--json"], ["--chart", "--gpus-needed"], ["--page", "x.html", "--layers"]]
)
def test_pictures_of_what_is_no_plan_are_refused(more, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main([*ASKED, *more]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "terminal", "coloured"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_colour_is_for_terminals_and_for_those_who_want_it(variables, terminal, coloured, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.colour(terminal) is coloured


def test_a_dry_run_by_its_verb(capsys):
    code = main.main([*TRACED, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["agrees"] else 1)
    assert found["calls"]
    assert all(row["planned"] == row["traced"] for row in found["calls"])
    assert [row["name"] for row in found["held"]] == ["weights", "gradients", "moments", "peak"]
    assert all(row["planned"] == row["traced"] for row in found["held"][:-1])


def test_a_rank_that_is_not_there_is_refused(capsys):
    assert main.main([*TRACED, "--rank", "4"]) == 2
    assert "use 0 to 3" in capsys.readouterr().err
