"""Former keys: refused where people write, translated in run folders of version 0.1.0 (tests/data/old_runs)."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.config import load, renamed, schema
from meshwright.config.run import digest, digests
from meshwright.runtime import run_folder
from meshwright.spec.problem import InputError

OLD = Path(__file__).parents[2] / "data" / "old_runs"
STYLE = OLD / "old_style.toml"
# What the two folders' run files say, in the words of today.
STOPPED = (
    "name=stopped", "steps=12", "sequence=32", "batch=8", "seed=4",
    "arch.vocab=272", "arch.layers=2", "arch.hidden=8", "arch.heads=2", "arch.kv_heads=1", "arch.ffn=16",
    "arch.context=64", "data.source=text/*.txt", "data.eval_fraction=0.1",
    "optim.lr=0.003", "optim.warmup=2", "optim.min_lr_ratio=0.2", "optim.grad_clip=0.5", "optim.state_dtype=bf16",
    "eval.every=6", "eval.batches=1", "eval.sample_tokens=0", "checkpoint.every=0",
    "plan.grad_accum=2", "plan.precision=bf16", "plan.activation_quant=int8", "plan.recompute=first-1",
    "plan.bf16_params=true", "plan.optimizer_offload=host", "plan.optimizer_offload_update=device",
)  # fmt: skip


@pytest.fixture
def stated(tmp_path):
    """An empty run file, so that nothing is the default run's."""
    file = tmp_path / "mine.toml"
    file.touch()
    return file


@pytest.fixture
def folder(tmp_path):
    """A copy of the stopped run's folder, to be written to."""
    return Path(shutil.copytree(OLD / "stopped", tmp_path / "stopped"))


def test_every_former_key_of_a_file_is_refused_at_once_with_its_new_name(capsys, monkeypatch):
    monkeypatch.chdir(OLD)
    assert main.main(["config", "show", STYLE.name, "--ranks", "1"]) == 2
    first, *told = capsys.readouterr().err.splitlines()
    assert first == f"meshwright: {len(renamed.RENAMED)} problems"
    for old, new in renamed.RENAMED.items():
        (line,) = [line for line in told if f": {old} has a new name; write {new}" in line]
        assert line.lstrip().startswith("old_style.toml:")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("plan.activations=host", "plan.activation_offload = true"),
        ("plan.activations=device", "plan.activation_offload = false"),
        ("plan.scaling=row", 'plan.fp8_scaling = "rowwise"'),
        ("optim.rounding=compensated", 'optim.master_weights = "split"'),
        ("optim.rounding=stochastic", 'optim.master_weights = "none" and optim.stochastic_rounding = true'),
        ("plan.accumulate=2", "plan.grad_accum"),
        ("held.every=3", "eval"),
    ],
)
def test_where_the_value_changed_too_the_new_one_is_said(word, remedy):
    with pytest.raises(InputError) as caught:
        load.load(None, [word])
    (problem,) = caught.value.problems
    assert problem.remedy == f"write {remedy}"


def test_every_new_name_is_a_key_and_no_former_one_is():
    assert set(renamed.RENAMED.values()) <= schema.every_key().keys()
    assert not renamed.RENAMED.keys() & schema.every_key().keys()


def test_what_is_translated_says_all_that_the_file_said():
    table = renamed.translated(tomllib.loads(STYLE.read_text()))
    assert list(schema.misfits(table)) == []
    assert table["eval"] == {"every": 5, "batches": 2, "sample_tokens": 16, "prompt": "The rank", "temperature": 0.7}
    assert table["plan"]["activation_offload"] is True
    assert table["plan"]["fp8_scaling"] == "rowwise"
    assert table["optim"]["master_weights"] == "fp32"
    assert renamed.translated(table) == table


def test_the_run_file_of_a_folder_is_read_in_the_words_of_today(stated):
    loaded = load.load(OLD / "stopped" / "run.toml")
    assert loaded.run == load.load(stated, STOPPED).run
    assert loaded.origins["optim.lr"] == f"{OLD / 'stopped' / 'run.toml'}:54"


def test_the_same_text_as_a_file_of_ones_own_is_refused(tmp_path):
    shutil.copy(OLD / "stopped" / "run.toml", tmp_path)
    with pytest.raises(InputError, match=r"plan\.accumulate has a new name; write plan\.grad_accum"):
        load.load(tmp_path / "run.toml")


def test_a_table_under_both_names_is_refused(folder):
    with (folder / "run.toml").open("a") as file:
        file.write("\n[eval]\nevery = 3\n")
    with pytest.raises(InputError, match="held has a new name; write eval"):
        load.load(folder / "run.toml")


# The right-hand column is what version 0.1.0 called the same run.
@pytest.mark.parametrize(
    ("name", "words", "before"),
    [
        ("finished", [], "bef43f42"),
        ("stopped", [], "4213fcf5"),
        ("stopped", ["optim.decay_fraction=0.3", "data.eval_fraction=0.2"], "dc0fd8f5"),
        ("finished", ["optim.master_weights=none", "optim.stochastic_rounding=true"], "db84b6cf"),
        ("finished", ["optim.master_weights=fp32"], "550edf0c"),
        ("finished", ["plan.activation_quant=fp8"], "75fcfe88"),
        ("stopped", ["plan.precision=fp8", "plan.fp8_scaling=rowwise"], "74553013"),
        ("stopped", ["optim.state_dtype=fp32", "plan.activation_quant=none"], "f6ae95e3"),
        ("stopped", ["init.from=finished", "init.optimizer_state=true"], "f6f564fa"),
    ],
)
def test_a_run_knows_what_it_was_called_before(name, words, before, monkeypatch):
    monkeypatch.chdir(OLD)
    run = load.load(Path(name, "run.toml"), words).run
    assert digests(run) == (digest(run), before)
    assert digest(run) != before


def test_the_folder_that_a_run_was_given_stays_its_own(folder, stated, monkeypatch):
    run = load.load(stated, STOPPED).run
    monkeypatch.chdir(folder.parent)
    assert run_folder.default(run) == Path("runs", f"stopped-{digest(run)}")
    folder.parent.joinpath("runs").mkdir()
    folder.rename("runs/stopped-4213fcf5")
    assert run_folder.default(run) == Path("runs/stopped-4213fcf5")
    Path("runs", f"stopped-{digest(run)}").mkdir()
    assert run_folder.default(run) == Path("runs", f"stopped-{digest(run)}")


def test_the_same_run_may_go_on_in_its_folder_which_then_has_the_words_of_today(folder, stated):
    run = load.load(stated, STOPPED).run
    claim = run_folder.Claim(folder, run)
    claim.release()
    assert claim.finished is None
    assert (folder / "run.toml").read_text() == load.write(run)
    assert not (folder / "run.1.toml").exists()  # nothing but names has changed


def test_under_another_plan_what_was_there_is_kept_and_still_read(folder, stated):
    before = (folder / "run.toml").read_text()
    run = load.load(stated, [*STOPPED, "plan.grad_accum=4"]).run
    run_folder.Claim(folder, run).release()
    assert (folder / "run.1.toml").read_text() == before
    assert load.load(folder / "run.1.toml").run.plan.grad_accum == 2


def test_another_run_is_refused_by_the_names_of_today(folder, stated):
    run = load.load(stated, [*STOPPED, "optim.lr=0.5"]).run
    with pytest.raises(InputError, match=r"belongs to another run \(optim\.lr 0\.003 → 0\.5\)"):
        run_folder.Claim(folder, run)


def test_a_finished_run_is_recognised(tmp_path):
    folder = Path(shutil.copytree(OLD / "finished", tmp_path / "finished"))
    claim = run_folder.Claim(folder, load.load(folder / "run.toml").run)
    claim.release()
    assert claim.finished is not None
    assert (claim.finished.step, claim.finished.validation_loss) == (6, 5.531707048416138)


def test_the_report_of_a_finished_run(capsys):
    assert main.main(["report", str(OLD / "finished"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    words = "shard=2 zero=3 microbatch=2 grad_accum=2 precision=bf16 recompute=full activation_offload"
    assert set(told["ran"]["plan"].split()) == set(words.split())
    assert told["standing"]["state"] == "done"
    assert told["notes"] == []
    assert (told["losses"]["first"], told["losses"]["last"]) == (5.611077070236206, 5.53247606754303)
    assert [each["step"] for each in told["losses"]["validation"]] == [2, 4, 6]
    assert told["losses"]["validation"][-1]["loss"] == 5.531707048416138
    assert told["saves"]["newest"] == 6
    assert [rank["steps"] for rank in told["ranks"]] == [6, 6]


def test_the_report_of_a_stopped_run_and_of_both(capsys):
    assert main.main(["report", str(OLD / "stopped"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    words = "microbatch=4 grad_accum=2 precision=bf16 recompute=first-1 activation_quant=int8 bf16_params"
    offload = "optimizer_offload=host optimizer_offload_update=device"
    assert set(told["ran"]["plan"].split()) == {*words.split(), *offload.split()}
    assert told["standing"]["remedy"] == "run the same command again to resume from step 4"
    assert told["notes"] == []
    assert main.main(["report", str(OLD / "finished"), str(OLD / "stopped")]) == 0
    assert "4 of 12" in capsys.readouterr().out
