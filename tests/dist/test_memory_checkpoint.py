"""In-memory checkpoints: ranks that are started again resume from host memory, where the disk has nothing newer."""

import errno
import hashlib
import json
import os
import shutil
import threading
import time

import pytest
import torch.distributed as dist
from commands import meshwright
from trials import CPU, corpus_file, made, make_corpus, make_run
from waiting import HANG
from worlds import world

from meshwright.checkpoint import format
from meshwright.checkpoint.storage import CorruptError, Disk
from meshwright.config.weights import RUN
from meshwright.runtime.neighbour import PartKeeper
from meshwright.runtime.parts import KEPT
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


class Machine:
    """What is outside the ranks of one of two machines: its memory, and its keeper, which the first of them has."""

    def __init__(self, folder, node, is_first):
        self.folder, self.node, self.is_first, self.said = folder, node, is_first, list[str]()
        self.memory = folder / f"memory{node}"
        self.keeper = None
        self.start()

    def start(self):
        if self.is_first:
            self.memory.mkdir()
            master = ("127.0.0.1", 29500)
            self.keeper = PartKeeper(self.memory, self.folder / "run", self.node, 2, master, self.said.append)
            self.keeper.start()

    def close(self):
        if self.keeper is not None:
            self.keeper.close()

    def lose(self):
        """Another machine comes in its place, with nothing."""
        self.close()
        if self.is_first:
            shutil.rmtree(self.memory)
        self.start()

    def holds(self):
        """Steps of its own, and of the machine before it."""
        return tuple(format.present(self.memory / below / "checkpoints") for below in (".", KEPT))


def flip(memory, step):
    """One bit of a part in host memory."""
    chunk = next((memory / "checkpoints" / format.name(step)).glob("*.safetensors"))
    bits = bytearray(chunk.read_bytes())
    bits[-9] ^= 0x10
    chunk.write_bytes(bits)


class Job:
    """One of the ranks of two machines."""

    def __init__(self, folder, *words):
        self.folder, self.rank, per_node = folder, dist.get_rank(), dist.get_world_size() // 2
        self.node = self.rank // per_node
        self.beside = range(self.node * per_node, (self.node + 1) * per_node)
        self.run = make_run(folder, *words, "data.eval_fraction=0.0")
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / RUN).touch()
        self.here = Machine(folder, self.node, self.rank == self.beside[0])
        self.said, self.digests = list[str](), dict[int, str]()

    def made(self):
        _, mesh, state = made(self.run, self.folder, CPU)
        state.memory, state.beside, state.say = self.here.memory, self.beside, self.said.append
        return mesh, state

    def train(self, last):
        mesh, state = self.made()
        for result in train(self.run, state, mesh, self.folder / "run"):
            self.digests[result.step] = digest_of(state, self.run, mesh)
            if result.step == last:
                break
        state.loader.close()
        until(lambda: self.here.holds() == ([4], [4]))
        dist.barrier()

    def resumed(self):
        self.said.clear()
        mesh, state = self.made()
        try:
            restored = restore(state, self.run, mesh, self.folder / "run", self.said.append)
            return None if restored is None else (restored.step, restored.state)
        finally:
            state.loader.close()
            dist.barrier()


@world(4)
def test_a_machine_that_is_lost_gets_its_part_from_the_next_ones_memory(folder):
    """Two machines of two ranks, with ZeRO-3 shards of which nobody else has a copy."""
    job = Job(folder, "plan.shard=4", "plan.zero=3", "steps=12", "checkpoint.every=3", "faults.memory_every=4")
    here, said, digests, is_lost = job.here, job.said, job.digests, job.node == 1
    try:
        job.train(5)
        if is_lost:
            here.lose()
        dist.barrier()
        assert job.resumed() == (4, digests[4]), said
        assert "in host memory" in said[-1]
        assert job.rank != 2 or any("part of step-4 is back from machine 0's memory" in text for text in here.said)
        until(lambda: here.holds() == ([4], [4]))  # and machine 0's part has its copy again
        dist.barrier()
        if job.rank == 0:  # whoever takes the copy back finds it
            flip(here.memory / KEPT, 4)
        dist.barrier()
        if is_lost:
            here.lose()
        dist.barrier()
        assert job.resumed() == (3, digests[3]), said
        assert any("step-4 in host memory cannot be used: rank" in text for text in said), said
        assert any("no in-memory checkpoint can be used; there is step-3 on the disk" in text for text in said)
        here.lose()  # both at once
        dist.barrier()
        assert job.resumed() == (3, digests[3])
        assert not any("warning" in text for text in said), said
    finally:
        here.close()


@world(2)
def test_replicas_that_share_the_writing_fetch_what_the_other_machine_wrote(folder):
    job = Job(folder, "plan.replicate=2", "steps=12", "checkpoint.every=0", "faults.memory_every=4")
    try:
        job.train(5)
        assert job.resumed() == (4, job.digests[4]), job.said
        assert not list(job.here.memory.glob(".view*"))
        if job.rank == 0:  # its own part is damaged, and the copy of it is not
            flip(job.here.memory, 4)
        dist.barrier()
        assert job.resumed() == (4, job.digests[4]), job.said
        assert any("step-4 in host memory cannot be used: rank" in text for text in job.said), job.said
        if job.rank == 0:
            shutil.rmtree(job.here.memory / "checkpoints")
            shutil.rmtree(job.here.memory / KEPT)
        dist.barrier()
        assert job.resumed() == (4, job.digests[4]), job.said  # all of it is on the other machine
        shutil.rmtree(job.here.memory / "checkpoints", ignore_errors=True)
        dist.barrier()
        assert job.resumed() is None
        assert any("no machine has the part of machine 1" in text for text in job.said), job.said
        assert any("there is nothing on the disk" in text for text in job.said), job.said
    finally:
        job.here.close()


def until(is_so):
    deadline = time.monotonic() + HANG
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
