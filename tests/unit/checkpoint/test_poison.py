"""Loading never runs code: the interpreter itself reports what is done."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import saved
from checkpoint.tiny import weights_of
from meshwright.checkpoint.model_folder import save_native
from meshwright.config import load
from meshwright.config.weights import describe
from meshwright.spec.problem import InputError
from meshwright.verify import integrity

AUDITED = """
import sys
from pathlib import Path
from checkpoint import saved
from meshwright.checkpoint import read
from meshwright.checkpoint.storage import CorruptError
from meshwright.checkpoint.model_folder import open_folder
from meshwright.config import load
from meshwright.spec.problem import InputError
from meshwright.verify import integrity

def everything(folder):
    held = saved.tensors(0)
    for action in (
        lambda: read.newest(folder / "checkpoints", saved.RUN, saved.alone(), saved.holdings(held), print),
        lambda: integrity.verify(folder, print),
        lambda: open_folder(folder / "model"),
        lambda: load.load(folder / "run.toml"),
        lambda: load.load(None, [f"init.from={folder / 'model.pt'}"]),
    ):
        try:
            action()
            print("accepted")
        except (CorruptError, InputError) as error:
            print("refused:", str(error).splitlines()[0])

good, bad = Path(sys.argv[1]), Path(sys.argv[2])
everything(good)  # whatever is imported by first use is imported now
everything(bad)
FORBIDDEN = ("pickle.", "exec", "compile", "os.system", "os.exec", "os.posix", "os.fork", "subprocess.", "socket.")
seen, armed = [], [True]

def hear(event, arguments):
    if armed[0] and event.startswith(FORBIDDEN):
        seen.append((event, arguments))

sys.addaudithook(hear)
everything(good)
everything(bad)
armed[0] = False
print("events:", seen)
"""


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def run_folder(folder: Path) -> Path:
    saved.save(folder / "checkpoints", 1, 2)
    arch = load.load(None, ["arch.preset=tiny", "arch.layers=1"]).run.arch
    save_native(folder / "model", arch, weights_of(arch).items(), None)
    (folder / "run.toml").write_text(load.write(saved.RUN))
    return folder


def test_poisoned_files_are_refused_and_nothing_of_them_runs(tmp_path):
    good, bad, canary = run_folder(tmp_path / "good"), run_folder(tmp_path / "bad"), tmp_path / "canary"
    poison = poisoned(canary)
    targets = ["checkpoints/latest", "checkpoints/step-2/manifest.json", "checkpoints/step-1/chunk.rank0.safetensors"]
    for name in [*targets, "model/model.safetensors", "run.toml", "model.pt"]:
        (bad / name).write_bytes(poison)
    (good / "model.pt").write_bytes(poison)
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, good, bad],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    verdicts = [line.split(":")[0] for line in lines if line == "accepted" or line.startswith("refused")]
    assert verdicts[:5] == ["accepted"] * 4 + ["refused"]
    assert verdicts[5:10].count("refused") == 4  # integrity answers with a verdict, the others refuse
    assert "events: []" in lines
    assert not canary.exists()


def poisoned(canary: Path) -> bytes:
    content = pickle.dumps(Payload(canary))
    pickle.loads(content)
    assert canary.exists()  # it would work
    canary.unlink()
    return content


def test_a_foreign_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    file = tmp_path / "model.pt"
    torch.save({"x": torch.zeros(2)}, file)
    with pytest.raises(InputError, match="is a pickle"):
        integrity.verify(file, print)
    with pytest.raises(InputError, match=r"is a pickle.*\n    import torch, safetensors") as error:
        describe(file)
    recipe = "\n".join(line.strip() for line in str(error.value).splitlines()[1:])
    done = subprocess.run([sys.executable, "-c", recipe], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # the two lines do it
    assert (tmp_path / "model.safetensors").exists()
