"""What `train` decides before a rank is started."""

import json
import os
import resource
import signal
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from meshwright.cli import main, preflight, train
from meshwright.config import load
from meshwright.runtime import run_folder as folders
from meshwright.runtime.failure import Failure
from meshwright.runtime.records import Summary
from meshwright.runtime.run_folder import Claim
from meshwright.spec.problem import InputError

WORDS = ["data.source=my.txt", "steps=3"]
SUMMARY = Summary(
    step=3, first_loss=2.0, loss=1.0, validation_loss=None, tokens_per_second=1.0, seconds_to_first_loss=1.0,
    seconds=2.0, peak_bytes=1, parameters=1, ranks=1, folder="x",
)  # fmt: skip


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A user's folder with some text and a finished run of it, seen by the only rank of a job of torchrun's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a line of text\n" * 300)
    Claim(tmp_path / "run", load.load(None, WORDS, ranks=1).run).release()
    folders.write_summary(tmp_path / "run", SUMMARY)
    for name in ("RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "MASTER_ADDR=x", "MASTER_PORT=1"):
        monkeypatch.setenv(*name.split("="))
    return tmp_path


def test_a_finished_run_is_told_under_any_launcher(finished, capsys):
    assert main.main(["train", *WORDS, "--folder", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == 1.0


def test_another_runs_result_is_not_taken_for_this_ones(finished, capsys):
    assert main.main(["train", *WORDS, "seed=7", "--folder", "run"]) == 2
    assert "belongs to another run (seed 1 → 7); ask for more than 3 steps and add --extend" in capsys.readouterr().err


def test_a_restart_of_a_fresh_run_goes_on(finished, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main.main(["train", *WORDS, "--folder", "run", "--fresh"]) == 0
    assert not (finished / "run.1").exists()


def test_a_thread_is_told_that_training_is_a_process_of_its_own(capsys):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main.main, ["train", "steps=1"]).result() == 2
    assert "only the main thread of a process can; start it as a process of its own" in capsys.readouterr().err


def test_a_rank_that_torchrun_starts_again_after_a_stop_file_ends_at_once(finished, monkeypatch, capsys):
    (finished / "run" / folders.SUMMARY).unlink()
    (finished / "run" / folders.STOP).touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main.main(["train", *WORDS, "--folder", "run"]) == 130
    assert "stop is there; remove it to resume" in capsys.readouterr().out
    assert (finished / "run" / folders.STOP).exists()


def test_a_failure_is_one_object_for_a_program(tmp_path, capsys):
    report = Failure(kind="killed", code=11, what="rank 1 was killed", details=str(tmp_path / "gone"), step=7)
    assert train._tell_failure(report, Namespace(json=True, words=[])) == 11
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["state"], answer["exit_code"], answer["what"], answer["step"]) == ("failed", 11, report.what, 7)
    assert "rank 1 was killed" in told.err
    assert "details" not in told.err  # what is not there is not named


def test_a_stop_is_no_failure(capsys):
    train._tell_failure(
        Failure(kind="stopped", code=10, what="stopped by SIGTERM, checkpoint saved at step 3"), machine=True
    )
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"


@pytest.mark.parametrize(("bias", "offered"), [("false", True), ("true", False)])
def test_convert_is_offered_where_it_would_not_refuse(bias, offered, capsys):
    """A Llama with biases is a run like any other, and has no place in a Hugging Face folder."""
    run = load.load(None, ["arch.preset=tiny", f"arch.bias={bias}"]).run
    summary = Summary(
        step=1, first_loss=2.0, loss=1.0, validation_loss=None, tokens_per_second=1.0, seconds_to_first_loss=1.0,
        seconds=1.0, peak_bytes=1, parameters=1, ranks=1, folder="runs/here",
    )  # fmt: skip
    train._tell(summary, run, Namespace(json=False, words=["my run.toml"]))
    told = capsys.readouterr().out
    assert ("meshwright convert runs/here" in told) is offered
    assert "  meshwright config show 'my run.toml'  " in told
    offers = told.partition("try next:\n")[2].splitlines()
    assert len({len(line) - len(line.rpartition("  ")[2]) for line in offers}) == 1, "in one column"


def test_a_sample_cannot_steer_the_screen(capsys):
    run = load.load(None, ["arch.preset=tiny"]).run
    told = msgspec.structs.replace(SUMMARY, sample="a\x1b]0;title\x07\rb\u202e\x85c\n\td é 漢 👩\u200d🚀")
    train._tell(told, run, Namespace(json=False, words=["my run.toml"]))
    assert "    a\\x1b]0;title\\x07\\rb\\u202e\\x85c\n    \td é 漢 👩\u200d🚀\n" in capsys.readouterr().out
    train._tell(told, run, Namespace(json=True, words=[]))
    assert json.loads(capsys.readouterr().out)["sample"] == told.sample


def test_before_a_start_on_several_machines_each_says_what_is_wrong_with_it(capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        train._warn_of_machine(3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = capsys.readouterr().err
    assert "rank 3 may open 512 files" in said
    assert "ulimit -n 65536" in said


def test_a_launcher_that_is_asked_to_end_while_it_prepares_says_so(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "_resolved", lambda *given, **named: signal.raise_signal(signal.SIGTERM))
    assert main.main(["train", *WORDS, "--ranks", "1", "--json"]) == 10
    assert signal.getsignal(signal.SIGTERM) == before  # whose process this is hears its own signals again
    told = capsys.readouterr()
    assert told.err == "stopped by SIGTERM before the first step; nothing to save\n"
    assert json.loads(told.out)["state"] == "stopped"


def test_spares_need_gpus_of_their_own():
    words = ["arch.preset=tiny", "batch=12", "plan.replicate=3", "plan.shard=2", "plan.zero=3", "plan.microbatch=1"]
    run = load.load(None, [*words, "faults.live=true", "faults.spares=1"]).run
    assert not [*preflight.spare_problems(run, 8)]
    (problem,) = preflight.spare_problems(run, 7)
    assert problem.text == "6 ranks and faults.spares = 1 need 8 GPUs, and this machine has 7"


def test_host_memory_that_is_too_small_is_refused_with_what_helps(tmp_path, monkeypatch):
    run = load.load(None, ["arch.preset=tiny", "faults.memory_every=5"]).run
    monkeypatch.setattr(preflight.Disk, "free_bytes", lambda self, path: 1000)
    with pytest.raises(InputError, match="1,000 are free; make it larger"):
        preflight.require_host_memory(run, tmp_path)
    bytes_needed = folders.state_bytes(run)
    monkeypatch.setattr(preflight.Disk, "free_bytes", lambda self, path: 2 * bytes_needed)
    preflight.require_host_memory(run, tmp_path)
    preflight.require_host_memory(run, tmp_path, nodes=2)  # half of it, a copy of another half, and two of each
    monkeypatch.setattr(preflight.Disk, "free_bytes", lambda self, path: 2 * bytes_needed - 1)
    with pytest.raises(InputError, match="in-memory checkpoints need"):
        preflight.require_host_memory(run, tmp_path, nodes=2)


@pytest.mark.parametrize(("term", "said"), [("xterm", "\r\x1b[2K\x1b[?25h."), ("dumb", ".")])
def test_a_terminal_is_given_back_after_ranks_that_were_killed(term, said, monkeypatch):
    monkeypatch.setenv("TERM", term)
    screen, terminal = os.openpty()
    with os.fdopen(screen, "rb", buffering=0) as shown, os.fdopen(terminal, "w") as people:
        train.leave_bar(people)
        print(".", end="", file=people, flush=True)
        text = ""
        while not text.endswith("."):  # a terminal hands on what is written in pieces of its own
            text += shown.read(100).decode()
    assert text == said


def test_a_pipe_is_given_nothing(capsys):
    train.leave_bar(sys.stdout)
    assert capsys.readouterr().out == ""
