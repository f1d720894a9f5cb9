"""A rehearsal, as far as it goes without training."""

import subprocess

import pytest

from meshwright.cli import main
from meshwright.config import load
from meshwright.spec.problem import InputError
from meshwright.verify import rehearse

RUN = load.load(None).run


class Inner:
    """The commands that a rehearsal gives, answered with exit codes in turn."""

    def __init__(self, *codes, said=""):
        self.codes, self.said, self.commands = list(codes), said, []

    def __call__(self, command, **options):
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self.codes.pop(0), "", self.said)


def test_what_an_earlier_rehearsal_left_is_not_judged(tmp_path, monkeypatch):
    inner = Inner(0, 11, 0)
    monkeypatch.setattr(subprocess, "run", inner)
    monkeypatch.setattr(rehearse, "_judged", lambda fault, folder, codes, words: codes)
    assert rehearse.rehearse(RUN, "kill", tmp_path, lambda text: None) == (11, 0)
    assert ["--fresh" in command for command in inner.commands] == [True, True, False]  # going on is what is rehearsed


def test_a_run_that_fails_by_itself_rehearses_nothing(tmp_path, monkeypatch):
    said = "building\nwhat:    too many gradients were not finite\ndetails: gone/log\n"
    monkeypatch.setattr(subprocess, "run", Inner(13, said=said))
    with pytest.raises(InputError, match=r"exit code 13: building \| what: too many gradients were not finite; put"):
        rehearse.rehearse(RUN, "kill", tmp_path, lambda text: None)


def test_a_copy_that_may_not_be_made_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Inner(0, 2, said="meshwright: kill is not a run folder"))
    with pytest.raises(InputError, match="the run with kill ended with exit code 2: meshwright: kill is not"):
        rehearse.rehearse(RUN, "kill", tmp_path, lambda text: None)


def test_a_place_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        rehearse.rehearse(RUN, "kill", tmp_path / "file", lambda text: None)


def test_missing_data_is_told_before_anything_is_rehearsed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["rehearse", "data.source=nowhere/*.txt"]) == 2
    assert "no file matches nowhere/*.txt" in capsys.readouterr().err


def test_what_is_asynchronous_is_not_rehearsed_and_a_warm_up_is_cut_short():
    words = ["arch.preset=tiny", "batch=8", "plan.replicate=2"]
    with pytest.raises(InputError, match="no two runs end with the same"):
        rehearse.short(load.load(None, [*words, "plan.staleness=1"]).run)
    assert rehearse.short(load.load(None, [*words, "plan.staleness=0"]).run).plan.staleness == 0
    assert rehearse.short(load.load(None, [*words, "optim.name=onebit_adam"]).run).optim.freeze_step < rehearse.STEPS
