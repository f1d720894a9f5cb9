"""A run that was killed, from outside: the same command resumes, damage is named, and the bits are the same."""

import json
import shutil
import subprocess
from pathlib import Path

import forked
import pytest
from commands import environment, meshwright
from waiting import is_running, until

WORDS = (
    "train", "arch.preset=tiny", "arch.layers=2", "sequence=32", "batch=4", "steps=80", "eval.batches=1",
    "eval.sample_tokens=0", "data.source=my/*.txt", "checkpoint.every=4", "checkpoint.keep_last=2", "plan.microbatch=1",
    "plan.deterministic=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with text, a run that was never stopped, and one that was killed as soon as it had saved twice."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my").mkdir()
    lines = [f"line {line}: the quick brown fox jumps over {line * line} dogs" for line in range(800)]
    (folder / "my" / "text.txt").write_text("\n".join(lines))
    done = meshwright(*WORDS, "--ranks", "2", "--folder", "whole", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    kill_after(folder, "killed", saves=2)
    return folder


def kill_after(folder: Path, name: str, saves: int, *words: str, place: Path | None = None) -> None:
    """Train until so many steps are saved, or copied to another place, and kill the launcher."""
    launcher = forked.Program([*WORDS, *words, "--ranks", "2", "--folder", name], folder, environment(folder))
    home = (place or folder / name) / "checkpoints"
    until(
        lambda: len(list(home.glob("step-*/manifest.json"))) >= saves or launcher.poll() is not None,
        "nothing was saved",
    )
    assert launcher.poll() is None, launcher.communicate()
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    launcher.kill()
    launcher.communicate()
    until(lambda: not any(map(is_running, ranks)), "a rank outlived its launcher")
    assert not (folder / name / "summary.json").exists(), "it was done before it was killed"


def again(user: Path, name: str, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return meshwright(*WORDS, *words, "--ranks", str(ranks), "--folder", name, "--json", folder=user)


def newest(user: Path, name: str) -> list[Path]:
    folders = (user / name / "checkpoints").glob("step-*")
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def loss(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["loss"]


def test_the_same_command_goes_on_and_ends_with_the_same_bits_on_fewer_ranks_too(user):
    name = "on"
    shutil.copytree(user / "killed", user / name)
    step = newest(user, name)[-1].name
    done = again(user, name, ranks=1)
    whole = json.loads((user / "whole" / "summary.json").read_text())
    assert loss(done) == whole["loss"]
    assert f"({step}, saved under replicate=2)" in done.stderr
    assert (user / name / "model" / "model.safetensors").read_bytes() == (
        user / "whole" / "model" / "model.safetensors"
    ).read_bytes()


def test_the_newest_step_damaged_the_one_before_is_used_loudly(user):
    shutil.copytree(user / "killed", user / "hit")
    before, last = newest(user, "hit")[-2:]
    flip(last / "chunk.rank1.safetensors")
    done = again(user, "hit")
    assert loss(done) == json.loads((user / "whole" / "summary.json").read_text())["loss"]
    assert f"warning: {last.name} cannot be used" in done.stderr
    assert "chunk.rank1.safetensors, tensor " in done.stderr
    assert f"({before.name}, saved under" in done.stderr


def test_every_step_damaged_is_exit_12_with_the_file_named(user):
    shutil.copytree(user / "killed", user / "lost")
    assert newest(user, "lost")
    for folder in newest(user, "lost"):
        flip(folder / "chunk.rank0.safetensors")
    done = again(user, "lost")
    assert done.returncode == 12, done.stderr
    assert "chunk.rank0.safetensors" in done.stderr
    checked = meshwright("verify", "--checkpoint", "lost", "--json", folder=user)
    assert checked.returncode == 12
    steps = json.loads(checked.stdout)["steps"]
    assert [step["sound"] for step in steps] == [False] * len(newest(user, "lost"))  # two, and one about to be deleted
    assert all(damage["tensor"] and damage["end"] for step in steps for damage in step["damages"])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


def test_a_whole_run_folder_is_checked(user):
    done = meshwright("verify", "--checkpoint", "whole", folder=user)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("all sound") == 2


def test_a_machine_that_has_nothing_goes_on_from_the_copies_of_another(user):
    bucket = user / "bucket"
    word = f"checkpoint.remote=file://{bucket}"
    kill_after(user, "spot", 1, word, place=bucket)
    shutil.rmtree(user / "spot")  # with its machine
    done = again(user, "elsewhere", word)
    assert loss(done) == loss(again(user, "whole"))
    assert f"from file://{bucket}" in done.stderr
    assert "resuming from step" in done.stderr
    assert f"step-80 is at file://{bucket}" in done.stderr
    assert (bucket / "checkpoints" / "step-80" / "manifest.json").is_file()
    assert json.loads((user / "elsewhere" / "copies.json").read_text())["step"] == 80
    refused = again(user, "other", word, "seed=2")
    assert refused.returncode == 2
    assert "has the steps of another run" in refused.stderr
    converted = meshwright("convert", f"file://{bucket}", "converted", folder=user)
    assert converted.returncode == 0, converted.stderr
