"""`meshwright train`, from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from commands import SMALL, environment, meshwright
from waiting import HANG, is_running, until

from meshwright.runtime.records import StepRecord, read_line


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A user's folder with a little text, and a cache that the tests of this file share."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my").mkdir()
    for number in range(4):
        lines = [f"line {line} of {number}: the quick brown fox jumps over {line * number} dogs" for line in range(200)]
        (folder / "my" / f"{number}.txt").write_text("\n".join(lines))
    return folder


def small(text: Path, *words: str) -> list[str]:
    return ["train", *SMALL, "data.source=my/*.txt", *words]


def test_a_run_in_a_pipe_ends_with_one_object_and_leaves_its_folder(text):
    done = meshwright(*small(text, "log.every=1"), "--json", "--folder", "first", folder=text)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1
    wanted = {
        "step",
        "first_loss",
        "loss",
        "validation_loss",
        "tokens_per_second",
        "seconds_to_first_loss",
        "peak_bytes",
        "folder",
    }
    assert summary.keys() >= wanted
    assert summary["step"] == 3
    assert summary["ranks"] == 2
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert sum(line.startswith("step ") for line in done.stderr.splitlines()) == 3

    folder = text / "first"
    assert {"run.toml", "env.json", "summary.json", "steps.rank0.jsonl", "steps.rank1.jsonl"} <= set(os.listdir(folder))
    records = [[read_line(line) for line in (folder / f"steps.rank{rank}.jsonl").open("rb")] for rank in (0, 1)]
    steps = [[record for record in rank if isinstance(record, StepRecord)] for rank in records]
    assert [record.loss for record in steps[0]] == [record.loss for record in steps[1]]
    assert [record.step for record in steps[0]] == [1, 2, 3]
    assert steps[0][-1].loss == summary["loss"]


def test_the_same_command_again_says_it_is_finished_and_fresh_sets_it_aside(text):
    words = [*small(text), "--json", "--folder", "first"]
    first = json.loads(meshwright(*words, folder=text).stdout.splitlines()[-1])
    again = meshwright(*words, folder=text)
    assert again.returncode == 0
    assert "--fresh" in again.stderr
    assert json.loads(again.stdout.splitlines()[-1]) == first
    fresh = meshwright(*words, "--fresh", folder=text)
    assert fresh.returncode == 0
    assert json.loads(fresh.stdout.splitlines()[-1])["loss"] == first["loss"]  # the same run, to the last bit
    assert (text / "first.1" / "summary.json").exists()


def test_a_run_that_lacks_only_its_ending_makes_it(text):
    words = [*small(text, "checkpoint.every=3"), "--json", "--folder", "ended"]
    first = json.loads(meshwright(*words, folder=text).stdout)
    (text / "ended" / "summary.json").unlink()
    again = meshwright(*words, folder=text)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["validation_loss"] == first["validation_loss"]


def test_a_run_of_which_nothing_is_held_out_ends_too(text):
    words = ("data.eval_fraction=0.0", "eval.temperature=1e-40")
    done = meshwright(*small(text, *words), "--json", "--folder", "all", folder=text)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["validation_loss"] is None
    assert summary["sample"]


def test_a_reader_that_leaves_does_not_end_training(text):
    command = [sys.executable, "-m", "meshwright", *small(text, "log.every=1"), "--folder", "unheard"]
    training = subprocess.Popen(command, cwd=text, env=environment(text), stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    assert "3 steps" in training.stdout.readline()
    training.stdout.close()
    assert training.wait(HANG) == 0
    assert (text / "unheard" / "summary.json").exists()


def test_another_run_in_the_folder_is_refused_with_the_difference(text):
    meshwright(*small(text), "--folder", "first", folder=text)
    before = (text / "first" / "run.toml").read_bytes()
    refused = meshwright(*small(text, "seed=7"), "--folder", "first", folder=text)
    assert refused.returncode == 2
    assert "seed 1 → 7" in refused.stderr
    assert (text / "first" / "run.toml").read_bytes() == before


def test_one_rank_and_two_make_the_same_run(text):
    words = [*small(text, "plan.precision=fp64"), "--json"]
    losses = []
    for ranks in ("1", "2"):
        done = meshwright(*words, "--ranks", ranks, "--folder", f"ranks{ranks}", folder=text)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_torchrun_starts_the_same_run(text):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwright"]
    command += [*small(text), "--json", "--folder", "torchrun"]
    done = subprocess.run(
        command, cwd=text, env=environment(text), capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    reference = meshwright(*small(text), "--json", "--folder", "first", folder=text)
    assert summary["loss"] == json.loads(reference.stdout.splitlines()[-1])["loss"]


def test_srun_starts_the_same_run(text):
    names = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}
    done = meshwright(
        *small(text), "--json", "--folder", "slurm", folder=text, SLURM_STEP_NODELIST="127.0.0.1", **names
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ranks"] == 1


def test_a_trained_model_becomes_a_hugging_face_folder_and_a_new_beginning(text):
    meshwright(*small(text), "--folder", "first", folder=text)
    done = meshwright("convert", "first", "theirs", "--json", folder=text)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(text / "theirs"))
    trained = json.loads((text / "first" / "summary.json").read_text())
    words = [
        *small(text, "init.from=theirs", "data.tokenizer=theirs", "optim.lr=1e-6"),
        "--json",
        "--folder",
        "second",
    ]
    second = meshwright(*words, folder=text)
    assert second.returncode == 0, second.stderr
    begun = json.loads(second.stdout.splitlines()[-1])
    assert begun["first_loss"] < trained["first_loss"] - 0.01  # it begins where the other ended


def start(text: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", *small(text, "steps=100000"), *words],
        cwd=text,
        env=environment(text),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A suite that runs in the background ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(folder: Path) -> None:
    file = folder / "steps.rank0.jsonl"
    until(lambda: file.exists() and file.stat().st_size, "no step was made")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 10), (signal.SIGKILL, -9)])
def test_when_the_launcher_ends_its_ranks_do_too(text, number, code):
    folder = f"ended-by-{number.name}"
    launcher = start(text, "--folder", folder)
    wait_for_step(text / folder)
    ranks = children(launcher.pid)
    assert len(ranks) == 3  # and the fork server that they were forked from
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=HANG)
    assert launcher.returncode == code
    saved = (text / folder / "checkpoints").exists()
    assert saved == (number != signal.SIGKILL)
    assert ("saved at step" in errors) == saved
    until(lambda: not any(map(is_running, ranks)), "a rank outlived its launcher")


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank, by the name it gives itself."""
    return next(pid for pid in children(launcher) if Path(f"/proc/{pid}/comm").read_text().strip() == f"rank{rank}")


def start_copy(text: Path, *words: str) -> forked.Program:
    return forked.Program(small(text, "steps=100000", *words), text, environment(text))


def test_a_killed_rank_is_named_and_replaced(text):
    launcher = start_copy(text, "checkpoint.every=1", "--folder", "killed")
    wait_for_step(text / "killed")
    killed = rank_of(launcher.pid, 1)
    os.kill(killed, signal.SIGKILL)
    file = text / "killed" / "steps.rank0.jsonl"
    until(lambda: file.read_bytes().count(b'"kind":"attempt"') >= 2, "training did not go on")
    launcher.terminate()
    said = "".join(launcher.communicate())
    assert launcher.returncode == 10
    assert "what:    rank 1 was ended by signal SIGKILL" in said
    assert f"process {killed}" in said


def test_a_second_launcher_on_one_folder_is_refused_by_name(text):
    launcher = start_copy(text, "--folder", "owned")
    wait_for_step(text / "owned")
    second = meshwright(*small(text, "steps=100000"), "--folder", "owned", folder=text)
    assert second.returncode == 2
    assert f"in use by process {launcher.pid}" in second.stderr
    launcher.terminate()
    launcher.communicate()


@pytest.mark.parametrize("taken_by", ["removed", "renamed", "removed and made again"])
def test_a_run_whose_folder_is_taken_away_says_so_and_leaves_none(text, taken_by):
    folder = text / f"taken-{taken_by[:6]}{taken_by[8:9]}"
    launcher = start(text, "--folder", folder.name)
    wait_for_step(folder)
    aside = folder.rename(text / f"{folder.name}-aside")
    if taken_by != "renamed":
        shutil.rmtree(aside)
    if taken_by == "removed and made again":
        folder.mkdir()
        (folder / "run.toml").write_text("a run file of somebody else's")
    said, errors = launcher.communicate(timeout=HANG)
    assert launcher.returncode == 1  # nobody is to start it again unasked
    assert f"what:    the run folder {folder.name} is gone: it was removed or renamed while" in errors
    assert "done:" not in said
    assert not (folder / "summary.json").exists()
    left = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    assert left == ({"run.toml"} if taken_by == "removed and made again" else set())


@pytest.mark.parametrize("at", ["meshwright.cli.main", "msgspec"])
def test_ctrl_c_while_the_program_is_imported_is_a_sentence(text, tmp_path, at):
    (tmp_path / "sitecustomize.py").write_text(TERMINATED.format(at=at).replace("SIGTERM", "SIGINT"))
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "models"],
        env=environment(text) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        preexec_fn=heed_interrupts,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n"), "interrupted" in done.stderr) == (130, 1, True), done.stderr


TERMINATED = """
import atexit, os, signal, sys
def heard(event, found, at={at!r}):
    if event == "import" and found[0] == at:
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(heard)
if {at!r} == "fork" and "meshwright.runtime.ranks" in sys.orig_argv:
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
if {at!r} == "exit":
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
"""


@pytest.mark.parametrize(
    ("at", "words", "code", "told"),
    [
        ("meshwright.cli.main", (), 10, "stopped by SIGTERM"),  # the first of our modules
        ("msgspec", (), 10, "stopped by SIGTERM"),
        ("meshwright.cli.preflight", (), 10, "stopped by SIGTERM"),  # the launcher is at work
        ("fork", (), 10, "stopped by SIGTERM"),  # of a rank
        ("exit", ("stepz=3",), 2, "did you mean steps?"),  # all is said
    ],
)
def test_sigterm_when_nobody_listens_is_heard_when_somebody_does(text, tmp_path, at, words, code, told):
    (tmp_path / "sitecustomize.py").write_text(TERMINATED.format(at=at))
    command = [sys.executable, "-m", "meshwright", *small(text, *words), "--ranks", "1", "--folder", f"early-{at}"]
    around = environment(text) | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=text, env=around, capture_output=True, text=True, timeout=HANG, check=False)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_ended_in_its_last_command_makes_up_for_it(text, number):
    folder, begun, may_end = (text / f"commanded-{name}{number.name}" for name in ("", "begun-", "go-"))
    (text / "judge.py").write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[2]).touch()\n"
        "while not pathlib.Path(sys.argv[3]).exists():\n    time.sleep(0.1)\n"
        "print('{\"files\": ' + str(len(list(pathlib.Path(sys.argv[1]).iterdir()))) + '}')\n"
    )
    command = f"eval.command={sys.executable} {text / 'judge.py'} {{folder}} {begun} {may_end}"
    words = (command, "--ranks", "1", "--folder", folder.name)
    launcher = start(text, "steps=2", *words)
    until(begun.exists, "the command did not begin")
    launcher.send_signal(number)
    said = launcher.communicate(timeout=HANG)[1]
    owed = "stopped by SIGTERM, all steps are done, and the last eval.command is not"
    assert (launcher.returncode, owed in said) == ((-9, False) if number == signal.SIGKILL else (10, True))
    may_end.touch()
    again = [meshwright(*small(text, "steps=2", *words), folder=text) for _ in range(2)]
    assert [done.returncode for done in again] == [0, 0]
    assert "eval.command of step 2: files 4" in again[0].stdout
    assert "eval.command of" not in again[1].stdout  # it has ended by now
    assert not (folder / "evals" / "step-2" / "model-hf").exists()


def test_a_tracker_is_named_in_one_word(text):
    done = meshwright(*small(text, "log.writers=tensorboard"), "--folder", "tracked", folder=text)
    assert done.returncode == 0, done.stderr
    assert list((text / "tracked" / "tensorboard").glob("events*"))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert line.startswith("data: my/*.txt: 4 .txt read; ")
    assert "steps per epoch" in line


BAD = [
    (["stepz=3"], "did you mean steps?"),
    (["batch=5"], "batch = 5 is not microbatch"),
    (["data.source=nowhere/*.txt"], "nowhere"),
    (["data.tokenizer=absent.json"], "absent.json"),
    (["init.from=absent"], "absent"),
    (["log.writers=wandb"], "pip install wandb"),
    (["goal.cluster=64xh100"], "this machine has no GPU"),
    (["absent.toml"], "absent.toml"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_input_starts_nothing_and_leaves_nothing(text, words, told):
    before = set(os.listdir(text))
    base = words if words[0].endswith(".toml") else [*small(text)[1:], *words]
    done = meshwright("train", *base, folder=text)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert set(os.listdir(text)) <= before | {"cache"}
