"""Texts and a user's command while a model is trained: in the records and the report, and never training's end."""

import json
import re
import sys
import time
from io import StringIO
from pathlib import Path

import forked
import pytest
from chats import byte_level, ragged, write_lines
from commands import environment
from test_three_commands import a_model
from trials import alone

from meshwright.cli import report as report_verb
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost import goodput
from meshwright.data.prepare import prepare
from meshwright.report.run_data import facts
from meshwright.report.run_summary import Given, reported
from meshwright.report.run_text import of_evaluation
from meshwright.runtime.errand import Result
from meshwright.runtime.records import AttemptRecord, CommandRecord, ExportRecord, TextRecord
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.evaluator import Evaluator, command_line, encoded, outcome
from meshwright.train.log import PlainLines, Recorder, read_records
from meshwright.train.loop import StepResult, Stop, train
from meshwright.train.rank import check

SCORE = """
import json, os, sys
folder, output, step = sys.argv[1:]
assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir(folder))
json.dump({"results": {"colours": {"acc": 0.25, "alias": "colours"}}}, open(f"{output}/results_{step}.json", "w"))
print("scored")
"""
PROMPTS = ("What is two and two?", "Which colours are there?", "Be brief")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluator")
    a_model(folder)
    write_lines(folder / "messages.jsonl", ragged(16))
    (folder / "score it.py").write_text(SCORE)
    return folder


def a_run(home: Path, *words: str) -> Run:
    own = (f"init.from={home}/my-hf-model", f"data.source={home}/messages.jsonl", "data.format=chat")
    plain = ("sequence=128", "batch=2", "steps=6", "eval.every=0", "eval.batches=1", "adapter.kind=lora")
    return load.load(None, [*own, *plain, "eval.sample_tokens=5", "checkpoint.every=0", *words]).run


def test_texts_and_a_command_while_a_model_is_trained(home):
    said, folder = StringIO(), home / "run"
    command = f"{sys.executable} '{home}/score it.py' {{folder}} {{output}} {{step}}"
    words = (f"eval.command={command}", "eval.command_every=2", "eval.prompts_every=3")
    run = a_run(home, *words, f"eval.prompts={json.dumps(PROMPTS)}")
    folder.mkdir()
    (folder / "run.toml").write_text(load.write(run))
    corpus, mesh = prepare(run, home / "cache", lambda text: None), alone()
    check(run, corpus, folder, writes=True)  # keeps the texts of the model that it begins from
    state = build(run, corpus, mesh, folder)
    recorder = Recorder(run, mesh, folder, PlainLines(said, 1))
    recorder.begin(AttemptRecord(step=0, session="x", number=1, began=time.monotonic(), at=time.monotonic()))
    evaluator, stop = Evaluator(run, folder, 0), Stop()
    with evaluator.closing(stop):
        evaluator.begin(state, mesh, corpus, recorder)
        for result in train(run, state, mesh):
            recorder.add(result)
            if isinstance(result, StepResult):
                if result.step == 5:  # else the next might be due before the first is done
                    while evaluator.errand is not None:
                        evaluator._collect()
                        time.sleep(0.05)
                evaluator.after(result.step)
        evaluator.finish(state.step)
        recorder.end(state.step)
        recorder.close()
        stop.asked = True  # and the command on the last step is not begun
    state.loader.close()
    records = read_records(folder / "steps.rank0.jsonl", print)
    texts = [each for each in records if isinstance(each, TextRecord)]
    assert [(each.step, each.prompts, len(each.texts)) for each in texts] == [(3, PROMPTS, 3), (6, PROMPTS, 3)]
    commands = {each.step: each for each in records if isinstance(each, CommandRecord)}
    assert (commands[2].state, commands[2].numbers) == ("done", {"colours/acc": 0.25}), commands[2]
    assert commands[4].state == "skipped"
    assert not (folder / "evals" / "step-2" / "model-hf").exists()
    assert [each.step for each in records if isinstance(each, ExportRecord)] == [2]
    spent = goodput.account(records)
    assert spent.bad["eval"] >= sum(each.seconds for each in texts)
    shown = reported(facts(folder), Given())
    lines = list(of_evaluation(shown))
    assert any("colours/acc 0.25" in line for line in lines), lines
    assert sum("→" in line for line in lines) == 3
    assert shown.losses is not None
    assert "text after step 3: What is two and two? →" in said.getvalue()
    assert "eval.command of step 2: colours/acc 0.25" in said.getvalue()
    assert report_verb._lines(shown, facts(folder)) is not None


def test_lm_evaluation_harness_scores_the_exported_model(home):
    """The command of docs/generate.md, on a task of our own."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    page = (Path(__file__).parents[2] / "docs" / "generate.md").read_text()
    tasks = home / "tasks"
    tasks.mkdir()
    (task,) = re.findall(r"```yaml\n(# tasks/sums\.yaml\n.*?)```", page, re.DOTALL)
    (lines,) = re.findall(r'```json\n(\{"question".*?)```', page, re.DOTALL)
    (tasks / "sums.yaml").write_text(task)
    (tasks / "sums.jsonl").write_text(lines)
    (command,) = re.findall(r'^command = "(lm_eval .* --include_path tasks .*)"$', page, re.MULTILINE)
    program = str(Path(sys.executable).parent / "lm_eval")
    run = a_run(home, f"eval.command={command.replace('lm_eval', program, 1)}", "steps=1", "batch=2")
    (home / "run-lm.toml").write_text(load.write(run))
    offline = environment(home) | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = forked.run(["train", "run-lm.toml", "--folder", "lm"], home, offline)
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = [
        each for each in read_records(home / "lm" / "steps.rank0.jsonl", print) if isinstance(each, CommandRecord)
    ]
    assert record.state == "done", (home / "lm" / "evals" / "step-1" / "command.txt").read_text()[-2000:]
    assert 0 <= record.numbers["sums/acc,none"] <= 1
    assert record.numbers["sums/sample_len"] == 2


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (Result(state="failed", name="command", code=3, seconds=1.0), "failed with exit code 3: CUDA out of memory"),
        (Result(state="failed", name="export", code=1, seconds=1.0), "could not be exported: no place for it"),
        (Result(state="timeout", name="command", code=None, seconds=1.0), "longer than eval.command_seconds"),
        (Result(state="stopped", name="command", code=None, seconds=1.0), "training ended before it"),
    ],
)
def test_what_fails_is_said_in_one_line(tmp_path, result, told):
    (tmp_path / "command.txt").write_text("Traceback\nCUDA out of memory\n\n")
    (tmp_path / "export.txt").write_text("no place for it\n")
    line = command_line(outcome(7, tmp_path, result))
    assert told in line
    assert "\n" not in line


def test_numbers_that_are_not_finite_are_named_and_the_others_read(tmp_path):
    (tmp_path / "command.txt").write_text('{"acc": 0.5, "loss": NaN}')
    record = outcome(7, tmp_path, Result(state="done", name="command", code=0, seconds=1.0))
    assert (record.numbers, record.text) == ({"acc": 0.5}, "not finite: loss")
    assert command_line(record) == "eval.command of step 7: acc 0.5; not finite: loss (1 s)"


def test_questions_of_a_chat_are_asked_through_its_template(home):
    run, words = a_run(home), byte_level()
    (tokens,) = encoded(run, ("Why?",), words)
    assert words.decode(tokens, skip_special_tokens=False) == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    (home / "no.jinja").write_text("{{ raise_exception('no') }}{% generation %}{% endgeneration %}")
    other = a_run(home, f"data.template={home}/no.jinja")
    with pytest.raises(InputError, match="refuses a question"):
        encoded(other, ("Why?",), words)
