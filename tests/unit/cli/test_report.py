import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
from folders import H100, attempt, run_folder, step, usual

from meshwright.cli import main
from meshwright.report.run_summary import RunReport
from meshwright.report.run_text import HEADS, difference, overview
from meshwright.runtime.failure import Failure, write
from meshwright.runtime.records import EndRecord, EventRecord, line


def told(capsys, *words) -> str:
    assert main.main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words) -> str:
    assert main.main(["report", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (sentence,) = said.err.splitlines()
    return sentence


def test_a_finished_run_is_told_in_short_sections(capsys, tmp_path):
    text = told(capsys, run_folder(tmp_path / "run", device=H100))
    assert "\x1b" not in text
    assert re.search(r"model +tiny: 360,896 parameters", text)
    assert re.search(r"ran on +2 × NVIDIA H100 80GB HBM3, nccl; torch 2.13.0", text)
    assert re.search(r"steps +12 of 12, 128 tokens each", text)
    assert re.search(r"state +finished", text)
    assert re.search(r"s/step +0\.\d+ +0\.5 +[\d.]+×", text)
    assert re.search(r"peak GiB +0\.\d+ +1 +[\d.]+×", text)
    assert "predicted from the catalogue's h100" in text
    assert "MFU: of the data sheet's peak" in text
    assert re.search(r"validation +0.7500 at step 12", text)
    assert len(text.splitlines()) < 40


def test_shares_of_the_time_add_up(capsys, tmp_path):
    text = told(capsys, run_folder(tmp_path / "run"))
    shares = dict(re.findall(r"^  ([a-z\- ]+?) +([\d.]+) %", text, re.MULTILINE))
    assert shares.pop("total") == "100.0"
    assert sum(round(float(share) * 10) for share in shares.values()) == 1000
    assert shares == {"goodput": "70.6", "start-up": "23.5", "eval": "3.0", "finish": "2.9"}


def test_a_run_on_a_cpu_says_why_there_is_no_prediction(capsys, tmp_path):
    text = told(capsys, run_folder(tmp_path / "run"))
    assert "no prediction for CPUs; measure this machine with `meshwright bench --probe --ranks 2`" in text
    assert "predicted from --cluster 2xh100" in told(capsys, tmp_path / "run", "--cluster", "2xh100")


def test_a_run_that_died_says_by_what_and_what_to_do(capsys, tmp_path):
    folder = run_folder(tmp_path / "run", usual()[:5], finished=False)
    write(folder, Failure(kind="error", code=1, what="rank 1 failed: boom", remedy="see the log", rank=1))
    (folder / "lock").write_text("process 1 on nowhere since noon")
    with (folder / "steps.rank0.jsonl").open("ab") as file:
        file.write(line(EndRecord(step=4, at=105.0)))
    text = told(capsys, folder)
    assert re.search(r"state +stopped early: rank 1 failed: boom", text)
    assert re.search(r"do +see the log", text)
    assert re.search(r"steps +4 of 12", text)


def test_restarts_and_events_are_told_with_step_and_time(capsys, tmp_path):
    records = [
        attempt(101.0),
        *(step(n, 101.0 + n) for n in range(1, 7)),
        EventRecord(step=6, what="straggler", text="rank 1 works 2.0 times as long as the others", rank=1, at=107.5),
        attempt(110.0, step=4, number=2),
        *(step(n, 106.0 + n) for n in range(5, 13)),
    ]
    text = told(capsys, run_folder(tmp_path / "run", records))
    assert re.search(r"attempts +2 in 1 session$", text, re.MULTILINE)
    assert "1.1  ready after 1.0 s, steps 1 to 6 in 6.5 s, 2 of them lost: a rank was killed" in text
    assert "1.2  ready after 10.0 s, steps 5 to 12 in 8.0 s" in text
    assert "step 6, after 7.5 s: straggler: rank 1 works" in text
    assert re.search(r"own work +rank 1 works 2.0 times", text)
    assert "lost work" in text


def test_ranks_are_told_apart_only_where_the_records_do(capsys, tmp_path):
    folder = run_folder(tmp_path / "run")
    assert "Ranks" not in told(capsys, folder)
    slow = [attempt(102.0), *(step(n, 102.0 + n / 2, data_seconds=0.25, memory_bytes=2**31) for n in range(1, 13))]
    (folder / "steps.rank1.jsonl").write_bytes(b"".join(map(line, slow)))
    text = told(capsys, folder)
    assert "rank 1 waited longest, 3.0 s; median 1.5 s" in text
    assert "most loaded rank 1, 2.00 GiB; least loaded rank 0, 1.00 GiB" in text


def test_what_is_missing_is_said_plainly(capsys, tmp_path):
    folder = run_folder(tmp_path / "run", finished=False)
    (folder / "env.json").unlink()
    (folder / "steps.rank1.jsonl").unlink()
    text = told(capsys, folder)
    assert re.search(r"note +records of 1 of 2 ranks are missing: 1", text)
    assert re.search(r"note +env.json is missing", text)
    assert "no prediction: env.json does not name the device; name the machines with --cluster" in text


def test_after_a_change_of_plan_the_last_session_is_measured(capsys, tmp_path):
    before = [attempt(102.0), *(step(n, 102.0 + n, seconds=1.0) for n in range(1, 7))]
    after = [attempt(7.0, step=6, session="vm:9:9", began=5.0), *(step(n, 1.0 + n) for n in range(7, 13))]
    folder = run_folder(tmp_path / "run", [*before, *after])
    assert re.search(r"s/step +– +0.75$", told(capsys, folder), re.MULTILINE)
    (folder / "run.1.toml").write_text((folder / "run.toml").read_text())
    text = told(capsys, folder)
    assert re.search(r"s/step +– +0.5$", text, re.MULTILINE)
    assert "run.1.toml shows that run.toml changed between sessions" in text
    assert "mean of" not in text
    assert re.search(r"last +0.5000 at step 12", text)


def test_a_run_without_records_is_told_all_the_same(capsys, tmp_path):
    text = told(capsys, run_folder(tmp_path / "run", [], finished=False))
    assert "no step was recorded" in text
    assert "Loss: none was recorded" in text


def test_names_cannot_speak_to_the_terminal(capsys, tmp_path):
    folder = run_folder(tmp_path / "run", None, r'name="red \u001b[31m"', device="2 × \x1b[2J\n, nccl")
    assert "\x1b" not in told(capsys, folder)


def test_several_runs_are_one_table_with_differences_to_the_first(capsys, tmp_path):
    slower = [attempt(102.0), *(step(n, 102.0 + n, seconds=1.0) for n in range(1, 13))]
    run_folder(tmp_path / "first")
    run_folder(tmp_path / "second", slower, finished=False)
    text = told(capsys, tmp_path / "first", tmp_path / "second")
    assert re.search(r"^ +first +second$", text.splitlines()[0])
    assert re.search(r"^s/step +0.5 +1 \(\+100.0%\)", text, re.MULTILINE)
    assert re.search(r"^tokens/s +256 +128 +\(-50.0%\)", text, re.MULTILINE)
    assert re.search(r"^validation loss +0.7500 +–", text, re.MULTILINE)


def test_a_program_gets_one_object_or_a_list(capsys, tmp_path):
    folder = run_folder(tmp_path / "run", [attempt(1.0), step(1, 2.0, loss=float("nan"))], device=H100)
    text = told(capsys, folder, "--json")
    assert "NaN" not in text
    found = json.loads(text)
    assert found["losses"]["last"] is None
    assert found["prediction"]["seconds"] > 0
    assert found["ran"]["ranks"] == 2
    assert [each["folder"] for each in json.loads(told(capsys, folder, folder, "--json"))] == [str(folder)] * 2


def test_a_page_is_written_whole_and_never_over_another(capsys, tmp_path):
    folder, file = run_folder(tmp_path / "run", device=H100), tmp_path / "page.html"
    assert told(capsys, folder, "--page", file).endswith(f"page: {file}\n")
    assert file.read_text().startswith("<!doctype html>")
    assert "--force" in refused(capsys, folder, "--page", file)
    file.write_text("mine")
    told(capsys, folder, "--page", file, "--force", "--json")
    assert "mine" not in file.read_text()
    assert "No such file" in refused(capsys, folder, "--page", tmp_path / "none" / "page.html")


@pytest.mark.parametrize("words", [["--cluster", "2xh10000"], ["--profile", "none.json"]])
def test_machines_that_are_wrong_are_one_sentence(capsys, tmp_path, words):
    refused(capsys, run_folder(tmp_path / "run"), *words)


def test_bad_folders_are_one_sentence_with_the_remedy(capsys, tmp_path):
    assert "there is no folder" in refused(capsys, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "is empty; give the folder of a run" in refused(capsys, tmp_path / "empty")
    with pytest.raises(SystemExit):
        main.main(["report", str(tmp_path), "--smooth", "1"])
    assert "from 0 to below 1" in capsys.readouterr().err


@pytest.fixture
def runs(tmp_path):
    """A folder of runs: one finished, one cut short, one damaged, and something else."""
    old = run_folder(tmp_path / "runs" / "old", device=H100)
    for file in old.glob("steps.rank*"):
        os.utime(file, (1e9, 1e9))
    cut = run_folder(tmp_path / "runs" / "cut", usual()[:4], "steps=3000", finished=False)
    with (cut / "steps.rank0.jsonl").open("ab") as file:
        file.write(line(EndRecord(step=3, at=105.0)))
    (run_folder(tmp_path / "runs" / "bad") / "run.toml").write_text("steps = = 3")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_a_folder_of_runs_is_a_table_newest_first(capsys, runs):
    assert main.main(["report", str(runs)]) == 0
    said = capsys.readouterr()
    heads, cut, old = said.out.splitlines()
    assert [head for head in HEADS if head not in heads] == []
    assert re.match(
        r"cut +tiny +3 of 3,000 +2.0000 +– +256 +– +stopped by SIGTERM +\d{4}-\d\d-\d\d \d\d:\d\d +replicate=2", cut
    )
    assert re.match(r"old +tiny +12 of 12 +0.5000 +0.7500 +256 +[\d.e-]+ +finished +2001-09-09 ", old)
    (left_out,) = said.err.splitlines()
    assert left_out.startswith("left out: ")
    assert left_out.count("bad") == 1
    assert "bad/run.toml is damaged" in left_out
    (runs / "bad" / "run.toml").write_text("")
    assert main.main(["report", str(runs)]) == 0
    assert f"left out: {runs}/bad: the run does not say what to train" in capsys.readouterr().err


def test_a_folder_of_runs_for_a_program_and_as_a_page(capsys, runs, tmp_path):
    found = json.loads(told(capsys, runs, "--json"))
    assert [each["ran"]["step"] for each in found] == [3, 12]
    assert [each["losses"]["best"] for each in found] == [None, {"step": 12, "loss": 0.75}]
    assert found[0]["updated"] > found[1]["updated"] == 1e9
    told(capsys, runs, "--page", tmp_path / "page.html", "--smooth", "0.8")
    assert "(--smooth 0.8)" in (tmp_path / "page.html").read_text()


def test_a_folder_of_damaged_runs_alone_is_a_mistake(capsys, tmp_path):
    (run_folder(tmp_path / "runs" / "bad") / "run.toml").write_text("steps = = 3")
    assert "bad/run.toml is damaged" in refused(capsys, tmp_path / "runs")


def test_a_folder_that_was_named_and_is_no_run_is_a_mistake_beside_runs(capsys, runs, tmp_path):
    assert "notes is empty" in refused(capsys, runs, runs / "notes")


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_terminal_is_not_overflowed_by_the_table(capsys, runs, columns):
    assert main.main(["report", str(runs), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=list[RunReport], strict=False)
    lines = list(overview(found, columns))
    assert all(len(each) <= columns for each in lines if not each.startswith("too narrow"))
    assert ("too narrow for plan" in lines[-1]) == (columns < 140)
    assert all(re.match(r"(cut|old) .* of ", each) for each in lines[1:3])


def test_differences_are_shown_where_they_mean_something(capsys, tmp_path):
    killed = [attempt(101.0), *usual()[1:7], attempt(110.0, step=4, number=2), *usual()[5:]]
    run_folder(tmp_path / "whole")
    run_folder(tmp_path / "killed", killed)
    run_folder(tmp_path / "cut", usual()[:4], finished=False)
    run_folder(tmp_path / "large", None, "arch.layers=8")
    run_folder(tmp_path / "other", None, "data.source=mine.txt")
    names = ("whole", "killed", "cut", "large", "other")
    rows = {}
    for each in told(capsys, *(tmp_path / name for name in names)).splitlines()[1:]:
        rows[each[:26].strip()] = [each[26 + 22 * number : 48 + 22 * number] for number in range(5)]
    shown = {name: "".join("×" if "(" in cell else "." for cell in cells) for name, cells in rows.items()}
    assert shown["attempts"] == shown["goodput %"] == shown["steps skipped"] == "....."
    assert shown["last loss"] == ".×.×."  # after as many steps, on the same data
    assert shown["tokens/s"] == shown["s/step"] == ".×..×"  # of as many steps, and of the same size
    assert shown["peak GiB"] == ".××.×"
    assert "(+0.0000)" in rows["last loss"][1]


def test_a_prediction_for_other_machines_is_not_held_against_the_run(capsys, tmp_path):
    text = told(capsys, run_folder(tmp_path / "run"), "--cluster", "2xh100")
    assert re.search(r"s/step +\S+ +0.5$", text, re.MULTILINE)
    assert "difference: none, since the prediction is for other machines than the run ran on" in text
    short = told(capsys, run_folder(tmp_path / "short", usual()[:4], device=H100))
    assert re.search(r"s/step +\S+ +0.5$", short, re.MULTILINE)
    assert "difference: of memory alone, since fewer than 5 steps were measured" in short


@pytest.mark.parametrize(
    ("first", "other", "said"), [(1, 12, "12×"), (10, 0.5, "0.05×"), (2, 1.9999, "+0.0%"), (0, 1, "")]
)
def test_a_difference_is_a_percentage_or_a_factor(first, other, said):
    assert difference(first, other) == said


def test_nothing_heavy_is_imported(tmp_path):
    folder = run_folder(tmp_path / "run", device=H100)
    code = f"""
import sys
from meshwright.cli.main import main
assert main(["report", {str(folder)!r}]) == 0
heavy = {{"torch", "numpy", "rich", "tokenizers", "safetensors"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
