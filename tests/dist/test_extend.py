"""A run that goes on with more steps, or with other settings: from its newest save, and after a crash again."""

import json
import shutil

import pytest
import torch
from commands import TINY, meshwright, write_text
from trials import alone, corpus_file, make_corpus, make_run

from meshwright.checkpoint.model_folder import open_folder
from meshwright.optim.interface import learning_rate
from meshwright.runtime.run_folder import Claim
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import restore

ONE = ("plan.replicate=1", "data.eval_fraction=0.0", "checkpoint.every=2", "optim.schedule=cosine")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    return tmp_path


def went(folder, *words, stop=None):
    """The results and last state of a run in its folder, and what was said; ended before a step, as if killed."""
    run, said = make_run(folder, *ONE, *words), []
    Claim(folder / "run", run, extend=True).release()
    state = build(run, make_corpus(run, folder), alone())
    restore(state, run, alone(), folder / "run", said.append)
    results = []
    for result in train(run, state, alone(), folder / "run"):
        results.append(result)
        if result.step == stop:
            break
    state.loader.close()
    return results, state, said


def tokens_at(folder, *words, sample):
    """The tokens of a step that begins with a sample of the order, taken the usual way."""
    run = make_run(folder, *ONE, *words)
    corpus = make_corpus(run, folder)
    usual = build(run, corpus, alone()).loader
    assert sample % run.batch == 0
    tokens = usual.take(sample // run.batch).microbatches[0].tokens
    usual.close()
    return tokens


def test_a_longer_run_goes_on_with_the_schedule_of_its_new_length(folder):
    short, _, _ = went(folder, "steps=4")
    longer, state, said = went(folder, "steps=8")
    assert [result.step for result in longer] == [5, 6, 7, 8]
    optim = make_run(folder, *ONE).optim
    assert [result.rate for result in longer] == [learning_rate(optim, step, 8) for step in range(4, 8)]
    assert [result.rate for result in short] == [learning_rate(optim, step, 4) for step in range(4)]
    assert said[0].startswith("resuming from step 4")
    assert said[1].startswith("from here on: learning rate 0.001 → ")
    assert said[1].endswith("(8 steps in total), data at sample 32")
    assert (state.optimizer.count.item(), state.loader.shift) == (8, 0)


def test_after_a_crash_it_goes_on_again_with_the_same_bits(folder):
    went(folder, "steps=4")
    shutil.copytree(folder / "run", folder / "copy")
    whole, _, _ = went(folder, "steps=8", "batch=4")
    shutil.rmtree(folder / "run")
    (folder / "copy").rename(folder / "run")
    went(folder, "steps=8", "batch=4", stop=5)  # before it has saved: from the earlier run's step once more
    went(folder, "steps=8", "batch=4", stop=7)
    rest, state, said = went(folder, "steps=8", "batch=4")
    assert said[0].startswith("resuming from step 6")
    assert [result.loss.item() for result in rest] == [result.loss.item() for result in whole[2:]]
    assert state.loader.shift == 4 * 4


def test_another_batch_goes_on_behind_the_samples_that_were_used(folder):
    went(folder, "steps=4")  # 32 samples
    _, state, said = went(folder, "steps=6", "batch=16", stop=5)
    assert said[1].endswith("data at sample 32")
    tokens = tokens_at(folder, "batch=16", sample=32)
    state = build(run := make_run(folder, *ONE, "steps=6", "batch=16"), make_corpus(run, folder), alone())
    restore(state, run, alone(), folder / "run", said.append)
    assert state.loader.take(4).microbatches[0].tokens.equal(tokens)
    state.loader.close()


def test_other_data_begins_with_its_first_sample(folder):
    went(folder, "steps=4")
    _, state, said = went(folder, "steps=6", "data.pack=documents")
    assert said[1].endswith("data at the first sample of its new order")
    assert state.loader.shift == -32
    _, state, said = went(folder, "steps=8", "data.pack=documents")
    assert said[1].endswith("data at sample 16")
    assert state.loader.shift == -32


def test_another_run_begins_with_any_step_of_it_and_its_optimizer_state(folder):
    _, state, _ = went(folder, "steps=4", stop=3)  # unfinished, and saved after step 2
    words = (f"init.from={folder}/run@2", "init.optimizer_state=true", f"data.tokenizer={tokenizer(folder)}")
    run, said = make_run(folder, *ONE, "steps=4", *words), []
    begun = build(run, make_corpus(run, folder), alone())
    assert restore(begun, run, alone(), folder / "next", said.append) is None
    assert said == [f"optimizer state from step 2 of {folder}/run@2"]
    assert (begun.step, begun.optimizer.count.item()) == (0, 2)
    saved = open_folder(f"{folder}/run@2")
    for name, weight in begun.chunks[0].named_parameters():
        assert torch.equal(weight.detach(), saved.tensor(name))
        assert not torch.equal(weight.detach(), state.chunks[0].get_parameter(name).detach())  # a step further
    begun.loader.close()


def tokenizer(folder):
    return make_corpus(make_run(folder, *ONE), folder).tokenizer


def test_the_command_line_goes_on_extends_refuses_and_reports(tmp_path):
    write_text(tmp_path)
    small = (*TINY, "sequence=32", "batch=4", "eval.batches=1", "eval.sample_tokens=0", "data.source=my/*.txt")
    words = ["train", *small, "--ranks", "1"]

    def asked(*more):
        return meshwright(*words, *more, "--json", folder=tmp_path)

    assert asked("steps=2").returncode == 0
    longer = asked("steps=4")
    assert longer.returncode == 0, longer.stderr
    assert "resuming with steps 2 → 4; the learning rate schedule is now that of 4 steps" in longer.stderr
    assert "resuming from step 2" in longer.stderr
    summary = json.loads(longer.stdout)
    assert summary["step"] == 4
    run = tmp_path / summary["folder"]
    assert len(list(run.parent.iterdir())) == 1

    in_place = ("--folder", summary["folder"])
    refused = asked("steps=6", "optim.lr=1e-4", *in_place)
    assert refused.returncode == 2
    assert "optim.lr 0.002 → 0.0001; steps 4 → 6" in refused.stderr
    assert "--extend" in refused.stderr
    (tmp_path / "my" / "more.txt").write_text("another line of text\n" * 400)
    changes = ("steps=6", "optim.lr=1e-4", "data.source=my/more.txt", "--extend")
    refused = asked(*changes)
    assert refused.returncode == 2
    own = f"data.tokenizer={summary['folder']}/tokenizer.json"
    assert f"add {own}" in refused.stderr
    extended = asked(*changes, own)
    assert extended.returncode == 0, extended.stderr
    assert "data.source my/*.txt → my/more.txt" in extended.stderr
    assert "data at the first sample of its new order" in extended.stderr

    assert {"run.1.toml", "run.2.toml", "summary.1.json", "summary.2.json"} <= {file.name for file in run.iterdir()}
    told = json.loads(meshwright("report", summary["folder"], "--json", folder=tmp_path).stdout)
    told = [(attempt["first_step"], attempt["ended"]) for attempt in told["attempts"]]
    assert told == [(0, "finished, and gone on with later"), (2, "finished, and gone on with later"), (4, "")]
    converted = meshwright("convert", summary["folder"], "out", "--step", "4", "--json", folder=tmp_path)
    assert json.loads(converted.stdout)["step"] == 4
