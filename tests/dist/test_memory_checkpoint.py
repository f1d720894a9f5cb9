"""In-memory checkpoints: ranks that are started again resume from host memory, where the disk has nothing newer."""

import errno
import hashlib
import json
import os
import threading

import pytest
from commands import meshwright
from trials import CPU, corpus_file, made, make_corpus, make_run
from waiting import HANG
from worlds import world

from meshwright.checkpoint import format
from meshwright.checkpoint.storage import CorruptError, Disk
from meshwright.runtime.run_folder import HOST_MEMORY
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, restore

WORDS = (
    *("arch.preset=tiny", "arch.layers=2", "sequence=16", "batch=4", "steps=10", "data.eval_fraction=0.0"),
    *("eval.sample_tokens=0", "plan.shard=2", "plan.zero=3", "plan.microbatch=1", "plan.grad_accum=2"),
    *("plan.deterministic=true", "checkpoint.every=0"),
)


def test_a_plan_without_replicas_goes_on_from_host_memory(tmp_path):
    corpus_file(tmp_path)
    before = set(HOST_MEMORY.glob("meshwright-*"))
    words = (*WORDS, "data.source=text.jsonl", "--ranks", "2", "--json")
    meshwright("train", *words, "--folder", "plain", folder=tmp_path)
    mine = ("faults.memory_every=3", "--folder", "killed", "--inject", "kill:1:8:backward")
    done = meshwright("train", *words, *mine, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "restarting from step 6" in done.stderr
    assert "in host memory, saved under shard=2" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["attempts"] == 2
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "killed")]
    assert hashlib.sha256(models[0]).digest() == hashlib.sha256(models[1]).digest()
    assert not (tmp_path / "killed" / "checkpoints").exists()  # nothing else to resume from
    assert set(HOST_MEMORY.glob("meshwright-*")) <= before  # and nothing is left


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


@world(1)
def test_damage_in_host_memory_is_found_and_the_disk_is_used(folder):
    run = make_run(folder, "steps=8", "checkpoint.every=3", "faults.memory_every=4", "data.eval_fraction=0.0")
    said, digests, memory = list[str](), dict[int, str](), folder / "memory"
    _, mesh, state = made(run, folder, CPU)
    state.memory = memory
    for result in train(run, state, mesh, folder / "run"):
        digests[result.step] = digest_of(state, run, mesh)
        if result.step == 5:
            break
    state.loader.close()
    assert (format.present(folder / "run" / "checkpoints"), format.present(memory / "checkpoints")) == ([3], [4])

    def resumed() -> str:
        _, mesh, state = made(run, folder, CPU)
        state.memory = memory
        try:
            restored = restore(state, run, mesh, folder / "run", said.append)
            return restored.state if restored is not None else ""
        finally:
            state.loader.close()

    assert resumed() == digests[4]
    assert "in host memory" in said[-1]
    chunk = next((memory / "checkpoints" / format.name(4)).glob("*.safetensors"))
    bits = bytearray(chunk.read_bytes())
    bits[-9] ^= 0x10
    chunk.write_bytes(bits)
    assert resumed() == digests[3]
    assert any("cannot be used" in text for text in said)
    (folder / "run" / "checkpoints").rename(folder / "away")
    with pytest.raises(CorruptError):  # never from weights that were half filled
        resumed()


@world(1)
def test_a_save_to_the_disk_outlives_one_that_host_memory_has_no_room_for(folder):
    words = ("steps=9", "checkpoint.every=3", "faults.memory_every=1", "data.eval_fraction=0.0")
    run, said, go, write = make_run(folder, *words), list[str](), threading.Event(), Disk.write_block

    def write_block(self, descriptor, block):
        """A slow disk, and host memory that is full."""
        if "/memory/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert go.wait(HANG)
        write(self, descriptor, block)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Disk, "write_block", write_block)
        _, mesh, state = made(run, folder, CPU)
        state.memory, state.say = folder / "memory", said.append
        for result in train(run, state, mesh, folder / "run"):
            if result.step == 7:  # the save of step 3 is still being written
                go.set()
    state.loader.close()
    assert any("step-4 was not saved (No space left on device)" in text for text in said), said
    assert not any("step-3 was not saved" in text for text in said), said
    assert {3, 9} <= set(format.present(folder / "run" / "checkpoints")), said
