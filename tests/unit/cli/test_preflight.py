"""What `train` finds out before a rank is started, as a user sees it."""

import json
import os
import re

import pytest

from meshwright.cli import main, preflight
from meshwright.config import load, presets
from meshwright.config.huggingface import config_of
from meshwright.runtime import run_folder
from meshwright.runtime.records import Summary
from meshwright.spec.units import GIB

TEXT = "a line of text that a person wrote\n" * 300
SMALL = ["arch.preset=tiny", "sequence=32", "batch=4", "steps=300", "data.source=my.txt"]
H100 = "NVIDIA H100 80GB HBM3"
SUMMARY = Summary(
    step=300, first_loss=2.0, loss=1.0, validation_loss=None, tokens_per_second=1.0, seconds_to_first_loss=1.0,
    seconds=2.0, peak_bytes=1, parameters=1, ranks=2, folder="done",
)  # fmt: skip


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """A user's folder, on a machine without GPUs that has plenty of memory."""
    (tmp_path / "my.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 10**12)
    return tmp_path


def told(capsys, *words: str, code: int = 2) -> str:
    """What a refusal says; nothing is left of the attempt."""
    before = sorted(os.listdir())
    assert main.main([*words]) == code
    assert sorted(os.listdir()) == before
    return capsys.readouterr().err


PLANNED = '[goal]\ncluster = "64xh100"\n[plan]\nshard = 64\nzero = 3\nmicrobatch = 1\nprecision = "bf16"\n'


@pytest.mark.parametrize("verb", ["train", "rehearse"])
def test_a_plan_for_64_gpus_starts_no_64_processes_here(verb, desk, capsys):
    (desk / "run.toml").write_text(f'batch = 64\n[arch]\npreset = "tiny"\n[data]\nsource = "my.txt"\n{PLANNED}')
    said = told(capsys, verb, "run.toml")
    assert "run.toml:7: the plan is for 64 × h100 (goal.cluster = 64xh100), and this machine has no GPU; " in said
    assert "add --ranks 64" in said


@pytest.mark.parametrize(
    ("cluster", "gpus", "ranks", "is_refused"),
    [
        ("2xh100", [H100] * 2, 2, False),
        ("2xh100", [H100] * 8, 2, False),
        ("h100", [H100] * 2, 2, False),
        ("2xh100", ["a card that nobody knows"] * 2, 2, False),
        ("2xa100-80g", [H100] * 2, 2, True),
        ("16xh100", [H100] * 8, 16, True),
        ("2xh100", [], 2, True),
        ("", [], 2, False),
    ],
)
def test_devices_are_the_ones_that_the_goal_names(cluster, gpus, ranks, is_refused):
    words = [f"goal.cluster={cluster}"] if cluster else []
    run = load.load(None, [*words, "batch=16"], ranks=ranks).run
    assert bool(list(preflight.problems(run, gpus, is_asked=False))) is is_refused
    assert not list(preflight.problems(run, gpus, is_asked=True))


def test_a_tracker_that_is_missing_stops_the_start(capsys):
    said = told(capsys, "train", *SMALL, "log.writers=wandb")
    assert "log.writers names wandb, which is not installed; run: pip install wandb, or leave it out" in said


def test_a_vocabulary_beyond_any_model_is_a_sentence(capsys):
    said = told(capsys, "train", *SMALL, "arch.vocab=999999999")
    assert "arch.vocab = 999999999 is beyond any model; use at most 10000000" in said


def test_a_run_that_does_not_fit_is_three_with_a_plan_that_does(capsys, monkeypatch):
    words = [*SMALL, "arch.layers=24", "arch.hidden=512", "arch.heads=8", "arch.kv_heads=8", "arch.ffn=2048"]
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: int(2.2 * GIB))
    said = told(capsys, "train", *words, code=3)
    assert re.match(r"meshwright: the run does not fit: it needs [\d.]+ GiB for 2 ranks, and 2.2 are free here; ", said)
    remedy = said.partition("this plan fits: ")[2].split()
    assert remedy
    assert "plan.compile=true" not in remedy
    preflight.require_room(load.load(None, [*words, *remedy], default_ranks=2).run, run_folder.Path("x"), [])
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: int(0.1 * GIB))
    assert "no plan of as many ranks fits: use a smaller model" in told(capsys, "train", *words, code=3)
    main.main(["train", *words, "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3


def test_a_run_is_held_against_the_memory_of_its_gpus_and_of_their_host():
    large = ["arch.preset=llama3-8b", "plan.precision=bf16", "batch=4", "sequence=512"]
    run = load.load(None, large, ranks=2).run
    with pytest.raises(preflight.ShortageError, match=r"GiB, and NVIDIA H100 80GB HBM3 has 79.*this plan fits: plan"):
        preflight.require_room(run, run_folder.Path("x"), [H100] * 2)
    offloaded = load.load(None, [*large, "plan.optimizer_offload=host"], ranks=1).run
    preflight._require_devices(offloaded, H100, 200 * GIB)
    with pytest.raises(preflight.ShortageError, match=r"GiB of host RAM, and 50.0 are free"):
        preflight._require_devices(offloaded, H100, 50 * GIB)
    preflight._require_devices(run, "a card that nobody knows", None)


def test_checkpoints_that_the_disk_cannot_take_are_told_before_ranks_start(capsys, monkeypatch):
    class Full:
        free = 20_000_000

    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda place: Full)
    words = [*SMALL, "arch.hidden=256", "arch.vocab=4096", "checkpoint.every=10", "checkpoint.keep_last=5"]
    said = told(capsys, "train", *words)
    size = run_folder.state_bytes(load.load(None, words).run)
    assert f"not enough disk for checkpoints: need {7 * size:,} bytes (7 of {size:,}), free 20,000,000 in " in said
    assert "lower checkpoint.keep_last" in said
    x = run_folder.Path("x")
    milestones = load.load(None, [*words, "checkpoint.keep_every=100"]).run
    assert f"(10 of {size:,})" in run_folder.lack_of_room(milestones, x, 0)
    short = load.load(None, [*words, "steps=9"]).run  # whose last step is saved
    assert f"(1 of {size:,})" in run_folder.lack_of_room(short, x, size - 1)
    assert run_folder.lack_of_room(short, x, size) is None


def test_a_finished_run_that_goes_on_is_held_against_the_memory_that_there_is(capsys, monkeypatch):
    run, folder = load.load(None, SMALL, default_ranks=2).run, run_folder.Path("done")
    run_folder.Claim(folder, run).release()
    (folder / "checkpoints" / "step-300").mkdir(parents=True)
    run_folder.write_summary(folder, SUMMARY)
    monkeypatch.setattr(preflight, "free_host_bytes", lambda: 1000)
    assert "the run does not fit" in told(capsys, "train", *SMALL, "steps=400", "--folder", "done", code=3)
    assert main.main(["train", *SMALL, "--folder", "done"]) == 0  # only shown


@pytest.fixture
def model(desk):
    """A Hugging Face folder, with a tokenizer and no weights yet."""
    (desk / "hf").mkdir()
    (desk / "hf" / "config.json").write_text(json.dumps(config_of(presets.preset("tiny"), "float32")))
    return desk / "hf"


WORDS = ["train", "init.from=hf", "data.source=my.txt", "sequence=32", "batch=4"]


def test_weights_in_a_pickle_are_refused_with_the_whole_remedy(model, capsys):
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")
    said = told(capsys, *WORDS)
    assert "hf holds its weights only in pytorch_model.bin, a pickle" in said
    assert "Model.from_pretrained('hf').save_pretrained('hf-safetensors')\nand copy the tokenizer's files there" in said


def header(size: int) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, size]}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin with the header"),
        (b"<html>not found</html>", "does not begin with the header"),
        (header(4) + b"12", "bytes, and its header says"),
        (b"\x08" + b"\0" * 7 + b"notjson!", "does not begin with the header"),
    ],
)
def test_weights_that_are_not_whole_are_found_before_ranks_start(content, why, model, capsys):
    (model / "model.safetensors").write_bytes(content)
    said = told(capsys, *WORDS)
    assert "hf/model.safetensors cannot be used: it " in said
    assert why in said


def test_every_shard_of_the_index_must_be_there(model, capsys):
    (model / "a.safetensors").write_bytes(header(4) + b"1234")
    shards = {"weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert "hf/b.safetensors is missing, though model.safetensors.index.json names it" in told(capsys, *WORDS)


def test_a_tokenizer_that_cannot_be_read_is_told(model, capsys):
    (model / "model.safetensors").write_bytes(header(4) + b"1234")
    (model / "tokenizer.json").write_text("{}")
    assert "hf/tokenizer.json is not a tokenizer.json" in told(capsys, *WORDS)
