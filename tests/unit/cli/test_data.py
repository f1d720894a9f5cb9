"""`meshwright data show` as a user types it."""

import json

import pytest
from chats import byte_level, turns, write_lines

from meshwright.cli.main import main

RECORDS = [
    {"messages": turns("What is two and two?", "It is four.", "Which colours are there?", "Red, green, blue.")},
    {"messages": turns("Only a question")},
    {"messages": turns("What is it?", "It is " + "green, " * 60)},
]
WORDS = ("arch.preset=tiny", "arch.vocab=336", "sequence=128", "batch=2", "plan.replicate=1")


@pytest.fixture
def shows(tmp_path, capsys, monkeypatch):
    """What the verb prints of some conversations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    file = write_lines(tmp_path / "chat.jsonl", RECORDS)
    own = (
        f"data.source={file}",
        "data.format=chat",
        f"data.tokenizer={tmp_path}/tokenizer.json",
        "data.template=chatml",
    )

    def run(*words: str, code: int = 0) -> str:
        assert main(["data", "show", *WORDS, *own, *words]) == code
        return capsys.readouterr().out if code == 0 else capsys.readouterr().err

    return run


def test_trained_tokens_are_marked_and_all_samples_counted(shows):
    shown = shows()
    assert "assistant\n⟦It is four.<|im_end|>⟧\n<|im_start|>user\nWhich colours" in shown
    assert "⟦Red, green, blue.<|im_end|>⟧" in shown
    assert "129 tokens" in shown
    assert "cut off" in shown
    assert "3 samples, 1 left out without a trained token, 1 truncated" in shown
    assert "\x1b" not in shown, "a pipe gets no colours"


def test_a_program_gets_tokens_mask_and_share(shows):
    found = json.loads(shows("--json"))
    assert [each["sample"] for each in found["samples"]] == [1, 3]
    first = found["samples"][0]
    assert len(first["tokens"]) == len(first["mask"])
    assert set(first["mask"]) == {0, 1}
    assert first["text"].startswith("<|im_start|>user\nWhat is two and two?")
    masks = [mark for each in found["samples"] for mark in each["mask"]]
    assert found["trained_share"] == sum(masks) / len(masks)
    assert (found["count"], found["untrained"], found["truncated"], found["longest"]) == (2, 1, 1, 129)


def test_one_sample_is_shown_by_its_number_in_the_data(shows):
    assert json.loads(shows("--json", "--sample", "3"))["samples"][0]["truncated"] > 0
    assert "sample 2 cannot be shown: it has no trained token" in shows("--sample", "2", code=2)
    assert "sample 9 cannot be shown: there are 3; use --sample 1 to 3" in shows("--sample", "9", code=2)


def test_what_is_made_of_conversations_is_in_the_cache(shows, capsys):
    shows()
    assert main(["cache", "show", "--json"]) == 0
    kinds = {each["name"]: each for each in json.loads(capsys.readouterr().out)["kinds"]}
    assert kinds["tokens"]["entries"] == 1


def test_text_is_shown_whole(shows, tmp_path):
    (tmp_path / "a.txt").write_text("It is four. " * 40)
    own = (f"data.source={tmp_path}/a.txt", "data.format=auto", "data.template=", "data.pack=documents")
    (sample,) = json.loads(shows(*own, "--json"))["samples"]
    assert sample["mask"] == [0] + [1] * (len(sample["tokens"]) - 1)
