"""Weights by name: a run, one of its steps, its best one, a saved step, a model folder."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from checkpoint import saved
from checkpoint.tiny import ARCHS, weights_of
from meshwright.checkpoint.convert import convert, logits, probe_tokens
from meshwright.checkpoint.model_folder import open_folder, save_native
from meshwright.checkpoint.state import TensorShard
from meshwright.checkpoint.storage import CorruptError
from meshwright.checkpoint.write import Saver
from meshwright.cli.main import main
from meshwright.config import load
from meshwright.config.weights import describe
from meshwright.spec.problem import InputError

ARCH = ARCHS["llama"]
WORDS = ["checkpoint.every=1", "checkpoint.keep_last=9", "plan.replicate=1"]
RUN = msgspec.structs.replace(load.load(None, WORDS).run, arch=ARCH)


@pytest.fixture
def run(tmp_path) -> Path:
    """An unfinished run that has saved steps 2, 4 and 6, each the weights plus its number."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(load.write(RUN))
    (folder / "tokenizer.json").write_text("{}")
    held = {f"{kind}/{name}": tensor for name, tensor in weights_of(ARCH).items() for kind in ("weight", "first")}
    held = {name: tensor.clone() for name, tensor in held.items()}
    # A matrix in two parts, as two ranks would write them: who reads it needs no two ranks.
    shards = saved.holdings(held)
    whole = next(one for one in shards if one.name == "weight/embed.weight")
    rows = len(whole.tensor) // 2
    cut = [(0, rows), (rows, len(whole.tensor))]
    parts = [
        TensorShard(whole.name, whole.shape, (part, *whole.region[1:]), whole.tensor[slice(*part)], True)
        for part in cut
    ]
    saver = Saver(
        folder / "checkpoints", RUN, saved.alone(), [one for one in shards if one is not whole] + parts, print
    )
    for step in (2, 4, 6):
        for tensor in held.values():
            tensor += 2
        saver.save(saved.progress(step))
    saver.close()
    return folder


def finish(run: Path, step: int) -> None:
    save_native(run / "model", ARCH, weights_of(ARCH).items(), None)
    (run / "summary.json").write_text(json.dumps({"step": step}))


def evaluate(run: Path, **losses: float | None) -> None:
    lines = [{"kind": "held", "step": int(step[1:]), "loss": loss} for step, loss in losses.items()]
    (run / "steps.rank0.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind":"held","st')


def value(reference: Path | str) -> float:
    """By how much the first weight was moved: the step that it is of."""
    folder = open_folder(reference)
    moved = folder.tensor("embed.weight") - weights_of(ARCH)["embed.weight"]
    assert torch.allclose(moved, moved[0, 0].expand_as(moved), atol=1e-5)  # the sums round, at 6 by 2⁻²²
    return round(float(moved[0, 0]), 4)


def test_a_run_that_is_not_finished_has_the_weights_of_its_newest_step(run):
    assert value(run) == 6
    assert describe(run).step == 6
    assert describe(run).tokenizer == run / "tokenizer.json"


def test_every_step_has_a_name_and_a_folder(run):
    assert [value(f"{run}@{step}") for step in (2, 4, 6)] == [2, 4, 6]
    assert value(run / "checkpoints" / "step-4") == 4


def test_a_finished_run_has_those_of_its_model_and_its_steps_too(run):
    finish(run, 7)
    assert (value(run), value(f"{run}@7"), value(f"{run}@4")) == (0, 0, 4)
    (run / "summary.json").unlink()  # it goes on
    assert value(run) == 6


@pytest.mark.parametrize("word", ["3", "99", "last", "-2"])
def test_a_step_that_is_not_there_is_told_with_those_that_are(run, word):
    finish(run, 7)
    with pytest.raises(InputError, match=rf"{word}.*saved are 2, 4, 6, 7 \(its model\)"):
        describe(f"{run}@{word}")


def test_the_best_is_the_saved_step_with_the_lowest_validation_loss(run):
    evaluate(run, s1=0.1, s2=2.0, s4=1.5, s6=None)
    assert value(f"{run}@best") == 4
    evaluate(run, s2=2.0, s4=1.5, s6=1.7, _4=1.9)  # gone back, and made again
    assert value(f"{run}@best") == 6


def test_without_a_validation_loss_of_a_saved_step_there_is_no_best(run):
    evaluate(run, s1=0.1, s3=2.0)
    with pytest.raises(InputError, match=r"no saved step of .* has a validation loss"):
        describe(f"{run}@best")


def test_a_run_without_weights_is_told(tmp_path):
    (tmp_path / "run.toml").write_text(load.write(RUN))
    with pytest.raises(InputError, match=r"has no weights yet.*checkpoint\.every"):
        describe(tmp_path)


def test_a_model_folder_has_no_steps(run):
    finish(run, 7)
    with pytest.raises(InputError, match="is not a run, so it has no step 3"):
        describe(f"{run}/model@3")


def test_a_folder_may_have_such_a_name_itself(tmp_path):
    save_native(tmp_path / "a@3", ARCH, weights_of(ARCH).items(), None)
    assert describe(tmp_path / "a@3").kind == "meshwright"


def test_a_run_begins_from_any_step(run):
    begun = load.load(None, [f"init.from={run}@4", "data.source=stdlib"]).run
    assert begun.arch == ARCH
    assert begun.data.tokenizer == str(run / "tokenizer.json")
    with pytest.raises(InputError, match=r"command line: .* has no step 5: saved are 2, 4, 6"):
        load.load(None, [f"init.from={run}@5"])


def test_convert_takes_any_step_and_says_what_it_wrote(run, capsys):
    (run / "tokenizer.json").write_text('{"added_tokens": []}')
    assert main(["convert", str(run), str(run.parent / "out"), "--step", "4", "--json"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert (report["step"], report["kind_from"], report["kind_to"]) == (4, "checkpoint", "huggingface")
    assert report["target"] == str(run.parent / "out")
    assert set(report["files"]) == {path.name for path in (run.parent / "out").iterdir()} > {"tokenizer.json"}
    assert f"wrote {run.parent / 'out'}: float32, " in told.err
    assert value(run.parent / "out") == 4


def test_convert_without_a_target_writes_beside_the_run(run):
    (run / "tokenizer.json").unlink()
    assert convert(f"{run}@2", None, print).target == str(run.parent / "mine-step-2-hf")
    finish(run, 7)
    assert convert(run, None, print).target == str(run.parent / "mine-hf")


def test_convert_of_an_unknown_step_leaves_nothing(run, capsys):
    assert main(["convert", str(run), str(run.parent / "out"), "--step", "5"]) == 2
    assert "has no step 5: saved are 2, 4, 6" in capsys.readouterr().err
    assert not (run.parent / "out").exists()


def test_a_damaged_step_is_exit_12_and_leaves_nothing(run, capsys):
    (run / "tokenizer.json").unlink()
    file = run / "checkpoints" / "step-6" / "chunk.rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4  # the last tensor is a weight
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="step-6"):
        logits(open_folder(run), probe_tokens(ARCH, 1))
    assert main(["convert", str(run), str(run.parent / "out")]) == 12
    assert "another step" in capsys.readouterr().err
    assert [path.name for path in run.parent.iterdir()] == ["mine"]
