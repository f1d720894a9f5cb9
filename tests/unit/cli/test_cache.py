"""`meshwright cache`: shown by kind, emptied whole or by name, and nothing of anybody else's touched."""

import json

import pytest

from meshwright.cli import main
from meshwright.config import load
from meshwright.data.prepare import once, prepare

PROFILE = "vm-2-torch-2.13.0.json"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A cache as real runs left it: a tokenizer, tokens, a profile, and what a killed process had begun."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    words = ["arch.preset=tiny", "arch.vocab=300", "sequence=32", "batch=4", f"data.source={tmp_path / 'text.txt'}"]
    root = tmp_path / "cache" / "meshwright"
    prepare(load.load(None, words).run, root, lambda text: None)
    (root / "profiles").mkdir()
    (root / "profiles" / PROFILE).write_text("{}")
    (root / f".{'a' * 24}.{'b' * 8}.part").mkdir()
    return root


def told(capsys, *words: str) -> str:
    assert main.main(["cache", *words]) == 0
    return capsys.readouterr().out


def kinds(capsys) -> dict[str, int]:
    return {each["name"]: each["entries"] for each in json.loads(told(capsys, "--json"))["kinds"]}


def test_what_is_there_is_shown_by_kind(root, capsys):
    assert kinds(capsys) == {"tokens": 1, "tokenizers": 1, "profiles": 1, "unfinished": 1}
    text = told(capsys)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    assert text.startswith(f"{root}: {size / 1024:.1f} KiB")
    assert json.loads(told(capsys, "show", "tokens", "--json"))["kinds"][0]["bytes"] < size


def test_one_kind_is_emptied_and_the_others_stay(root, capsys):
    assert told(capsys, "clear", "tokens").startswith("removed 1 entry, ")
    assert kinds(capsys) == {"tokenizers": 1, "profiles": 1, "unfinished": 1}


def test_all_is_emptied_and_a_second_time_nothing(root, capsys):
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    record = json.loads(told(capsys, "clear", "--json"))
    assert record == {"folder": str(root), "removed": 4, "bytes": size, "in_use": 0}
    assert [entry.name for entry in root.iterdir()] == []
    assert told(capsys, "clear") == f"nothing to remove in {root}\n"
    assert told(capsys) == f"nothing is cached in {root}\n"


def test_what_somebody_else_put_there_is_left_alone(root, capsys, tmp_path):
    mine, hex_name = tmp_path / "mine", "c" * 24
    mine.mkdir()
    (mine / "tokens.bin").write_text("precious")
    (root / ("d" * 24)).symlink_to(mine)
    for place in (hex_name, "thesis", "profiles"):
        (root / place).mkdir(exist_ok=True)
        (root / place / "notes.txt").write_text("precious")
    (root / hex_name / "tokens.bin").write_text("precious")
    told(capsys, "clear")
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
    assert left >= {f"{hex_name}/notes.txt", f"{hex_name}/tokens.bin", "thesis/notes.txt", "profiles/notes.txt"}
    assert not (root / "profiles" / PROFILE).exists()
    assert (mine / "tokens.bin").read_text() == "precious"


def test_what_a_run_is_making_is_left_to_it(root, capsys):
    def make(folder):
        (folder / "tokens.bin").write_text("half")
        told(capsys, "clear", "tokens")
        assert told(capsys, "clear").rstrip().endswith("; 1 entry left, which a run is making now")

    made = once(root / ("e" * 24), make, lambda text: None)
    assert (made / "tokens.bin").read_text() == "half"


def test_a_name_that_is_none_is_answered_with_those_there_are(root, capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["cache", "clear", "weights"])
    assert left.value.code == 2
    assert "'tokens', 'tokenizers'" in capsys.readouterr().err
