"""Another process holds most of the card: it is named, and what is advised needs less."""

import os
import subprocess
import sys

import pytest
import torch
from commands import meshwright

from meshwright.runtime.devices import processes
from meshwright.spec.units import GIB
from meshwright.train.oom import card_use

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEFT = 4 * GIB  # for whoever comes later
HOLD = f"""
import torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - {LEFT}, dtype=torch.uint8, device="cuda")
print("held", flush=True)
input()
"""
SHAPE = (
    "sequence=1024", "batch=64", "plan.microbatch=64", "plan.precision=bf16", "data.eval_fraction=0.0",
    "eval.sample_tokens=0", "checkpoint.every=0",
)  # fmt: skip


@pytest.fixture
def holder():
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.communicate(b"\n")


def test_the_holder_is_seen(holder):
    use = card_use(torch.device("cuda", 0))
    assert use.is_shared
    assert abs(use.other_bytes - (use.total_bytes - LEFT)) < 4 * GIB
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    listed = processes(uuid)
    if any(
        process.pid == holder.pid for process in listed
    ):  # else the driver numbers processes otherwise, or hides them
        assert holder.pid in [process.pid for process in use.holders]
        assert os.getpid() not in [process.pid for process in use.holders]


@pytest.mark.parametrize("verb", [("bench", "--steps", "2"), ("train", "steps=4")])
def test_it_is_named_and_the_exit_code_is_3(holder, tmp_path, verb):
    name, *words = verb
    data = ("gpt2",) if name == "bench" else ("arch.preset=gpt2", "data.source=text.txt")
    (tmp_path / "text.txt").write_text("some words to learn from, and some more. " * 40_000)
    done = meshwright(name, *data, *SHAPE, *words, "--folder", str(tmp_path / "here"), folder=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert "other processes hold" in said
    assert "end them, or take another card" in said
    assert not [line for line in said.splitlines() if line.endswith("…")]
    assert not [line for line in said.splitlines() if line.startswith("torch.OutOfMemoryError") and name == "bench"]
