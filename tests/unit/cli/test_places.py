"""Places that verbs are told to write to, and cannot: a sentence, before anything is measured or proved."""

import pytest

from meshwright.cli import main

OWN = "data.source=my.txt"
WRONG = [
    (["train", OWN, "--folder", "file"], "file cannot be written"),
    (["verify", OWN, "--plan", "replicate=2", "--folder", "file"], "file cannot be written: it is a file"),
    (["verify", "--resume", "tiny", OWN, "--folder", "file"], "file cannot be written: it is a file"),
    (["verify", "data.source=nowhere", "--plan", "replicate=2"], "no file matches nowhere"),
    (["rehearse", OWN, "--folder", "file"], "file cannot be written: it is a file"),
    (["bench", "tiny", "--folder", "file"], "file cannot be written: it is a file"),
    (["bench", "tiny", "--out", "nowhere/x.json"], "nowhere/x.json cannot be written: No such file"),
]


@pytest.mark.parametrize(("command", "told"), WRONG, ids=[" ".join(command) for command, _ in WRONG])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys, command, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "my.txt").write_text("a line of text\n" * 300)
    assert main.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
