"""`meshwright eval` and `generate` on what `meshwright train` has left."""

import json
import math
import shutil

import numpy as np
import pytest
from commands import SMALL, TINY, meshwright

from meshwright.runtime.records import EvalRecord, read_line

TEXTS = [f"document {number}: the quick brown fox jumps over {number * 7 % 13} dogs" for number in range(40)]
# A sum of 8 samples' losses in fp32, in another order and by another number of threads: a few roundings of 6e-8 each.
CLOSE = 1e-6


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with a run of short documents, the last 8 of them never trained on, and these as a file of their own."""
    folder = tmp_path_factory.mktemp("user")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "all.jsonl").write_text("\n".join(lines))
    (folder / "held.jsonl").write_text("\n".join(lines[-8:]))
    words = ("sequence=64", "data.source=all.jsonl", "data.pack=documents", "data.eval_fraction=0.2", "eval.batches=2")
    words += ("eval.every=2", "checkpoint.every=2", "steps=4", "optim.lr=3e-2")
    done = meshwright("train", *SMALL, *words, "--folder", "run", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def answer(user, *words: str) -> dict:
    done = meshwright(*words, "--json", folder=user)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def held_losses(user) -> dict[int, float]:
    records = [read_line(line) for line in (user / "run" / "steps.rank0.jsonl").open("rb")]
    return {record.step: record.loss for record in records if isinstance(record, EvalRecord)}


def test_it_is_the_runs_own_validation_loss(user):
    own = json.loads((user / "run" / "summary.json").read_text())["validation_loss"]
    found = answer(user, "eval", "run")
    assert found["loss"] == pytest.approx(own, rel=CLOSE)
    assert found["perplexity"] == pytest.approx(math.exp(own), rel=10 * CLOSE)
    assert (found["samples"], found["different"], found["sequence"]) == (8, 8, 64)
    # The same documents as data of their own, with the model's tokenizer and the run's packing.
    data = answer(user, "eval", "run", "--data", "held.jsonl")
    assert data["loss"] == pytest.approx(own, rel=CLOSE)
    assert data["tokens"] == found["tokens"]
    assert answer(user, "eval", "run", "--data", "all.jsonl")["samples"] == 40


def test_so_it_is_of_an_earlier_step(user):
    losses = held_losses(user)
    assert answer(user, "eval", "run@2")["loss"] == pytest.approx(losses[2], rel=CLOSE)
    step = "run/checkpoints/step-2"
    assert answer(user, "eval", step, "--data", "held.jsonl")["loss"] == pytest.approx(losses[2], rel=CLOSE)
    assert losses[2] != pytest.approx(losses[4], rel=1e-3)


def test_a_hugging_face_folder_has_the_same_loss_at_the_same_sequence(user):
    assert meshwright("convert", "run", "theirs", folder=user).returncode == 0
    ours = answer(user, "eval", "run/model", "--data", "held.jsonl")["loss"]
    (user / "elsewhere").mkdir()
    (user / "run" / "model").rename(user / "elsewhere" / "copy")  # no run.toml beside it: packed as a stream
    try:
        copied = answer(user, "eval", "elsewhere/copy", "--data", "held.jsonl", "--sequence", "64")
    finally:
        (user / "elsewhere" / "copy").rename(user / "run" / "model")
    theirs = answer(user, "eval", "theirs", "--data", "held.jsonl", "--sequence", "64")
    assert theirs["loss"] == pytest.approx(copied["loss"], rel=CLOSE)
    assert theirs["loss"] != pytest.approx(ours, rel=1e-3)


def test_tokens_are_evaluated_too(user):
    (np.arange(201, dtype="<u2") % 50).tofile(user / "tokens.bin")  # 0 ends a document: an empty one, four of 50
    found = answer(user, "eval", "run", "--data", "tokens.bin", "--dtype", "bfloat16")
    assert (found["samples"], found["tokens"]) == (4, 4 * 49)


def test_people_read_three_lines(user):
    done = meshwright("eval", "run", folder=user)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["loss", "perplexity", "tokens"]


def test_samples_that_are_taken_again_are_not_said_to_be_others(user):
    shutil.copytree(user / "run", user / "again")
    file = user / "again" / "run.toml"
    file.write_text(file.read_text().replace("batches = 2", "batches = 3"))
    found = answer(user, "eval", "again")
    assert (found["samples"], found["different"]) == (12, 8)
    assert meshwright("eval", "again", folder=user).stdout.endswith(" (12 samples of 64, 8 of them different)\n")


def test_a_run_and_its_steps_write_text(user):
    words = ("--prompt", "document 3", "--tokens", "8", "--greedy")
    last = answer(user, "generate", "run", *words)["completions"][0]
    assert last == answer(user, "generate", "run@4", *words)["completions"][0]
    earlier = answer(user, "generate", "run@2", *words)["completions"][0]
    assert earlier["tokens"] != last["tokens"]
    assert earlier == answer(user, "generate", "run/checkpoints/step-2", *words)["completions"][0]


def test_a_step_without_a_tokenizer_says_where_one_is_looked_for(user):
    shutil.copytree(user / "run", user / "bare")
    for file in (user / "bare").rglob("tokenizer.json"):
        file.unlink()
    done = meshwright("generate", "bare@2", "--prompt", "a", "--tokens", "1", folder=user)
    assert done.returncode == 2
    assert done.stderr.startswith("meshwright: bare has no tokenizer; put the tokenizer.json ")
    shutil.copy(user / "run" / "tokenizer.json", user / "bare")
    assert meshwright("generate", "bare@2", "--prompt", "a", "--tokens", "1", folder=user).returncode == 0


def test_a_damaged_step_is_not_read(user):
    shutil.copytree(user / "run", user / "damaged")
    chunk = next((user / "damaged" / "checkpoints" / "step-2").glob("chunk.*"))
    content = bytearray(chunk.read_bytes())
    for place in range(len(content) // 10, len(content), 1000):  # behind the header, optimizer states and weights alike
        content[place] ^= 1
    chunk.write_bytes(content)
    done = meshwright("generate", "damaged@2", "--prompt", "a", folder=user)
    assert done.returncode == 12
    assert "checksum mismatch" in done.stderr
    assert done.stderr.endswith("; name another step of the run, as RUN@STEP\n")
    assert meshwright("generate", "damaged", "--prompt", "a", folder=user).returncode == 0  # its model is sound
    done = meshwright(
        "train", *SMALL[len(TINY) :], "init.from=damaged@2", "data.source=all.jsonl", "--folder", "next", folder=user
    )
    assert done.returncode == 12
    assert "do:      name another step in init.from, as RUN@STEP" in done.stderr
    assert not (user / "next").exists()


REFUSALS = {
    ("eval", "nowhere"): "nowhere is not a folder",
    ("eval", "theirs"): "theirs is not a run, which has validation samples; name some with --data PATH",
    ("eval", "run", "--data", "none.txt"): "no file matches none.txt",
    ("eval", "run", "--data", "held.jsonl", "--sequence", "99999"): "--sequence 99999 is more than the model's",
    ("generate", "run@3", "--prompt", "a"): "run has no step 3: saved are 2, 4",
}


@pytest.mark.parametrize(("words", "sentence"), REFUSALS.items(), ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_sentence(user, words, sentence):
    if words[1] == "theirs" and not (user / "theirs").exists():
        assert meshwright("convert", "run", "theirs", folder=user).returncode == 0
    done = meshwright(*words, folder=user)
    assert done.returncode == 2
    assert done.stderr.startswith(f"meshwright: {sentence}")
    assert len(done.stderr.splitlines()) == 1
