"""Saving: what is on disk is complete at every moment, whatever cuts a save short."""

import errno
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from waiting import HANG

from checkpoint import saved
from meshwright.checkpoint import format, read, storage, write
from meshwright.checkpoint import write as save
from meshwright.checkpoint.storage import Disk
from meshwright.checkpoint.write import Saver
from meshwright.config import load
from meshwright.runtime import run_folder
from meshwright.spec.problem import InputError
from meshwright.verify import integrity

ONE = load.load(None, ["arch.preset=tiny", "checkpoint.keep_last=1", "checkpoint.async=false"]).run
BEHIND = load.load(None, ["arch.preset=tiny", "checkpoint.keep_last=1"]).run


class DeadError(BaseException):
    """The process has ended; nothing it does from here on happens."""


class Cut(Disk):
    """A disk of a process that is killed at its n-th operation; a block that it was writing is half there."""

    def __init__(self, operations: int) -> None:
        self.left = operations
        self.done: list[str] = []
        self.counting = threading.Lock()

    def _count(self, name: str) -> None:
        with self.counting:
            if self.left == 0:
                raise DeadError(name)
            self.left -= 1
            self.done.append(name)

    def make_folder(self, path):
        self._count("make_folder")
        super().make_folder(path)

    def write(self, path, blocks):
        self._count("write")
        super().write(path, blocks)
        self._count("synced")

    def write_parts(self, path, parts, threads):
        self._count("write_parts")
        super().write_parts(path, parts, threads)
        self._count("flushed")

    def write_block(self, descriptor, block):
        if self.left == 0:
            os.write(descriptor, memoryview(block)[: len(block) // 2])
        self._count("write_block")
        super().write_block(descriptor, block)

    def rename(self, old, new):
        self._count("rename")
        super().rename(old, new)

    def sync_folder(self, path):
        self._count("sync_folder")
        super().sync_folder(path)

    def remove(self, path):
        if path.is_dir():
            for entry in path.iterdir():  # a folder goes file by file
                self._count("remove")
                entry.unlink()
        self._count("remove")
        super().remove(path)


def advance(home: Path, step: int, disk: Disk, run=ONE) -> list[str]:
    """Save a step with its own numbers; what was said."""
    said: list[str] = []
    made = saved.saver(home, saved.tensors(step), said, disk, run)
    try:
        made.save(saved.progress(step))
        made.close()
    except DeadError:
        made.abandoned.set()  # the thread of a dead process would not go on polling
        made.threads.shutdown()
        raise
    return said


def loaded(home: Path) -> int:
    """The step that is gone on from; its numbers are checked."""
    held = {name: torch.full_like(x, torch.nan) for name, x in saved.tensors(0).items()}
    found = read.newest(home, saved.RUN, saved.alone(), saved.holdings(held), lambda text: None)
    assert found is not None
    assert all(torch.equal(held[name], x) for name, x in saved.tensors(found.progress.step).items())
    return found.progress.step


@pytest.fixture
def home(tmp_path):
    advance(tmp_path / "checkpoints", 1, Disk())
    return tmp_path / "checkpoints"


def test_any_reader_of_safetensors_can_open_a_chunk(home):
    content = load_file(home / "step-1" / "chunk.rank0.safetensors")
    for name, x in saved.tensors(1).items():
        region = "[" + ",".join(f"0:{length}" for length in x.shape) + "]"
        assert torch.equal(content[name + region], x)


@pytest.mark.parametrize("striped", [False, True], ids=["one thread", "threads"])
def test_a_kill_at_any_operation_leaves_the_step_before_or_the_new_one(home, tmp_path, monkeypatch, striped):
    if striped:
        monkeypatch.setattr(write, "STRIPED_BYTES", 0)
    whole = Cut(10**9)
    copy = tmp_path / "copy" / "checkpoints"
    shutil.copytree(home, copy)
    advance(copy, 2, whole)
    operations = {"make_folder", "write", "write_parts", "write_block", "synced", "flushed", "rename", "sync_folder"}
    assert operations | {"remove"} <= set(whole.done)
    seen = set()
    for operations in range(len(whole.done)):
        shutil.rmtree(copy)
        shutil.copytree(home, copy)
        with pytest.raises(DeadError):
            advance(copy, 2, Cut(operations))
        seen.add(loaded(copy))
        if operations % 5 == 0:
            assert advance(copy, 3, Disk()) == []  # and the next attempt cleans up
            assert sorted(os.listdir(copy)) == ["latest", "step-3"]
            assert integrity.verify(copy.parent, lambda text: None).sound
    assert seen == {1, 2}


class Full(Disk):
    """A disk with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write_block(self, descriptor, block):
        self.room -= len(block)
        if self.room < 0:
            super().write_block(descriptor, memoryview(block)[: self.room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_block(descriptor, block)


@pytest.mark.parametrize("room", [0, 10, 400, 600, 1500])
def test_a_full_disk_is_told_and_the_newest_good_step_stays(home, room):
    (said,) = advance(home, 2, Full(room))
    assert "step-2 was not saved (No space left on device)" in said
    assert "training continues" in said
    assert sorted(os.listdir(home)) == ["latest", "step-1"]  # no stump
    assert loaded(home) == 1
    assert advance(home, 3, Disk()) == []
    assert loaded(home) == 3


def test_however_far_a_save_comes_on_a_full_disk_the_reason_is_that_and_its_room_is_free_again(home):
    """An open file would keep its room though its name is gone."""
    opened, named = set(os.listdir("/proc/self/fd")), False
    for room in range(0, 4000, 50):
        said = advance(home, 2, Full(room))
        if not said:
            break
        assert "step-2 was not saved (No space left on device)" in said[0]
        named = named or 2 in format.present(home)
        left = ["latest", "step-1", *(["step-2"] if named else [])]
        assert sorted(set(os.listdir(home)) - {".latest.partial"}) == left
    assert not said
    assert set(os.listdir("/proc/self/fd")) == opened


class OfSize(Disk):
    """A disk that holds so many bytes of a folder."""

    def __init__(self, home: Path, room: int) -> None:
        self.home, self.room = home, room

    def free_bytes(self, path):
        return self.room - sum(file.stat().st_size for file in self.home.rglob("*") if file.is_file())

    def write_block(self, descriptor, block):
        if len(block) > self.free_bytes(self.home):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_block(descriptor, block)


@pytest.mark.parametrize(("saves", "kept"), [(2.5, [2, 3]), (1.5, [1, 2])], ids=["helps", "does not help"])
def test_where_a_disk_has_no_room_the_oldest_goes_before_the_next_save_if_that_helps(tmp_path, saves, kept):
    home, run = tmp_path / "checkpoints", load.load(None, ["arch.preset=tiny", "checkpoint.keep_best=false"]).run
    for step in (1, 2):
        advance(home, step, Disk(), run)
    size = save.folder_bytes(home / "step-1")
    said = list[str]()
    disk = OfSize(home, 10**9)
    made = saved.saver(home, saved.tensors(3), said, disk, run)
    disk.room = int(saves * size)
    made.save(saved.progress(3))
    assert not made.settle()
    assert made.may_try_again == (kept == [2, 3])
    assert (said[1:] == ["to make room for the next save, step-1 was removed"]) == made.may_try_again
    made.save(saved.progress(3))
    made.close()
    assert format.present(home) == kept
    assert loaded(home) == kept[-1]


class FailsOnce(Disk):
    """A disk of which the system says once, to whoever flushes next, that it could not be written."""

    def __init__(self, monkeypatch) -> None:
        self.failed, self.flush = threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", self._flushed)

    def _flushed(self, descriptor):
        if threading.current_thread().name == "flush" and not self.failed.is_set():
            self.failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.flush(descriptor)

    def write_block(self, descriptor, block):
        super().write_block(descriptor, block)
        if threading.current_thread().name.startswith("checkpoint") and len(block) == 4 * 3 * 4 * 2:  # the last tensor
            assert self.failed.wait(HANG)


def test_a_write_that_fails_between_is_told_though_the_last_flush_finds_nothing(home, monkeypatch):
    monkeypatch.setattr(storage, "FLUSH_BYTES", 1)
    monkeypatch.setattr(write, "STRIPED_BYTES", 0)
    (said,) = advance(home, 2, FailsOnce(monkeypatch))
    assert "step-2 was not saved (Input/output error)" in said
    assert sorted(os.listdir(home)) == ["latest", "step-1"]


class NeverReadAgain(Disk):
    """A disk that gives nothing back until nobody waits for it any more."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def forget_cache(self, descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            self.asked.set()
            assert self.go.wait(HANG)


def test_training_that_fails_before_a_step_is_read_again_leaves_it_its_name(home, monkeypatch):
    monkeypatch.setattr(save, "GRACE_SECONDS", 0.0)
    disk, said = NeverReadAgain(), []
    made = saved.saver(home, saved.tensors(2), said, disk, BEHIND)
    made.save(saved.progress(2))
    assert disk.asked.wait(HANG)
    while format.pointed(home)[0] == 1:
        time.sleep(0.01)
    monkeypatch.setattr(made.threads, "shutdown", lambda: disk.go.set() or ThreadPoolExecutor.shutdown(made.threads))
    made.abandon()
    assert sorted(os.listdir(home)) == ["latest", "step-1", "step-2"]
    assert format.pointed(home)[0] == loaded(home) == 2


def test_the_kernels_own_full_disk_raises():
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        Disk().write_block(file.fileno(), b"x")


class ReadOnly(Disk):
    def make_folder(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_disk_that_became_read_only_is_told(home):
    (said,) = advance(home, 2, ReadOnly())
    assert "Read-only file system" in said
    assert loaded(home) == 1


class Liar(Disk):
    """A disk that loses a bit of what it was given."""

    def write_block(self, descriptor, block):
        wrong = bytearray(block)
        wrong[-1] ^= 1
        super().write_block(descriptor, bytes(wrong))


def test_what_the_disk_gives_back_differently_is_no_checkpoint_and_removes_none(home):
    (said,) = advance(home, 2, Liar())
    assert "reads differently from what was just written" in said
    assert loaded(home) == 1


class LiarInOne(Disk):
    """A disk that loses a bit of one tensor, and gives back everything else."""

    def write_block(self, descriptor, block):
        wrong = bytearray(block)
        wrong[7] ^= len(block) == 4 * 5  # weight/norm.weight
        super().write_block(descriptor, bytes(wrong))


@pytest.mark.parametrize("earlier", [True, False])
def test_a_step_that_reads_differently_after_it_had_its_name_loses_it_again(home, earlier):
    if not earlier:
        shutil.rmtree(home)
    (said,) = advance(home, 2, LiarInOne())
    place = r"step-2\.\w+\.partial/chunk\.rank0\.safetensors, tensor weight/norm\.weight\[0:5\], bytes \d+–\d+"
    assert re.search(place + ": reads differently from what was just written", said)
    assert sorted(os.listdir(home)) == (["latest", "step-1"] if earlier else [])
    if earlier:
        assert format.pointed(home)[0] == loaded(home) == 1
        assert integrity.verify(home.parent, lambda text: None).sound


def test_a_save_says_how_fast_it_was_and_what_bound_it(home, monkeypatch):
    found = []
    share = format.slice_share
    for bound, disk_seconds, hash_seconds in (("disk", 0.02, 0.0), ("hashing", 0.0, 0.05)):
        made = saved.saver(home, saved.tensors(5), [], Slower(disk_seconds), ONE, note=found.append)
        monkeypatch.setattr(format, "slice_share", lambda *given, wait=hash_seconds: time.sleep(wait) or share(*given))
        made.save(saved.progress(5))
        made.close()
        assert found[-1].bound == bound
    size = (home / "step-5" / "chunk.rank0.safetensors").stat().st_size
    assert [(record.saved, record.bytes) for record in found] == [(5, size)] * 2
    assert all(record.seconds > 0.02 for record in found)


class Slower(Disk):
    """A disk that takes so long for every block."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write_block(self, descriptor, block):
        time.sleep(self.seconds)
        super().write_block(descriptor, block)


class Slow(Disk):
    """A disk that takes its time until it is told not to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write_block(self, descriptor, block):
        assert self.go.wait(HANG)
        super().write_block(descriptor, block)


def test_training_goes_on_while_a_slow_disk_writes_what_was_copied(home):
    disk, held, said = Slow(), saved.tensors(2), []
    made = saved.saver(home, held, said, disk, BEHIND)
    made.save(saved.progress(2))  # returns, though nothing can be written yet
    for tensor in held.values():
        tensor.zero_()  # the next step
    assert loaded(home) == 1
    disk.go.set()
    made.close()
    assert loaded(home) == 2


def test_saves_that_come_faster_than_the_disk_takes_them_are_told_of_once(home, monkeypatch):
    monkeypatch.setattr(save, "LONG_WAIT_SECONDS", 0.0)
    said = []
    made = saved.saver(home, saved.tensors(2), said, Disk(), BEHIND)
    for step in (2, 4, 6):
        made.save(saved.progress(step))
    made.close()
    (told,) = said
    assert "slower than saves come; raise checkpoint.every" in told


def test_in_place_nothing_is_copied_and_the_step_is_there_when_the_save_returns(home):
    held, said = saved.tensors(2), []
    made = Saver(home, BEHIND, saved.alone(), saved.holdings(held), said.append, in_place=True)
    assert made.copies.bytes == 0
    made.save(saved.progress(2))
    assert [host.data_ptr() for host in made.copies.hosts] == [tensor.data_ptr() for tensor in held.values()]
    for tensor in held.values():
        tensor.zero_()  # the next step
    assert loaded(home) == 2
    made.close()
    assert not said


class Small(Disk):
    def free_bytes(self, path):
        return 1000


def test_too_little_room_is_told_before_the_first_step(tmp_path):
    with pytest.raises(
        InputError, match=r"not enough disk for checkpoints: need [\d,]+ bytes \(3 of [\d,]+\), free 1,000"
    ):
        saved.saver(tmp_path / "checkpoints", saved.tensors(1), [], Small(), ONE)


class Tight(Disk):
    """Room for the save that is written and one more."""

    def free_bytes(self, path):
        return 2 * run_folder.state_bytes(ONE)


def test_a_disk_with_room_for_one_save_keeps_one_and_says_so(tmp_path):
    run, said = load.load(None, ["arch.preset=tiny", "checkpoint.keep_last=3", "checkpoint.async=false"]).run, []
    made = saved.saver(tmp_path / "checkpoints", saved.tensors(1), said, Tight(), run)
    for step in (1, 2, 3):
        made.save(saved.progress(step))
    made.close()
    assert format.present(tmp_path / "checkpoints") == [3]
    (told,) = said
    assert re.match(r"only the newest checkpoint is kept: .* need [\d,]+ bytes \(5 of [\d,]+\), and [\d,]+ are", told)


def test_a_short_run_needs_room_for_its_last_step(tmp_path):
    short = load.load(None, ["arch.preset=tiny", "steps=10", "checkpoint.every=100"]).run
    with pytest.raises(InputError, match=r"\(1 of [\d,]+\), free 1,000"):
        saved.saver(tmp_path / "checkpoints", saved.tensors(1), [], Small(), short)


def test_no_step_goes_before_the_next_is_good_and_some_never(tmp_path):
    run = load.load(None, ["arch.preset=tiny", "checkpoint.keep_last=2", "checkpoint.keep_every=4"]).run
    assert format.superfluous([1, 2], run.checkpoint) == []
    assert format.superfluous([1, 2, 3], run.checkpoint) == [1]
    assert format.superfluous([3, 4, 5, 6, 8, 9], run.checkpoint) == [3, 5, 6]
    assert format.superfluous([3, 5, 6, 7, 9, 10, 11, 12], run.checkpoint) == [3, 6, 7, 10]  # 4 and 8 were postponed
    left = list[int]()
    for step in (1, 2, 3, 5, 6, 7, 9, 10, 11, 13):
        left = [each for each in [*left, step] if each not in format.superfluous([*left, step], run.checkpoint)]
    assert left == [5, 9, 11, 13]
    saved.save(tmp_path / "checkpoints", *range(1, 11), run=run)
    assert format.present(tmp_path / "checkpoints") == [4, 8, 9, 10]
    assert format.pointed(tmp_path / "checkpoints")[0] == 10


@pytest.mark.parametrize(("keep_last", "left"), [(1, [3, 6]), (2, [2, 3, 6])])
def test_a_damaged_step_does_not_take_the_place_of_a_sound_one(tmp_path, keep_last, left):
    """Step 6 is damaged and the run has resumed from step 2: its next save is 3, then one beyond the damaged one."""
    run = load.load(None, ["arch.preset=tiny", f"checkpoint.keep_last={keep_last}", "checkpoint.async=false"]).run
    home = tmp_path / "checkpoints"
    saved.save(home, 2, 6, run=load.load(None, ["arch.preset=tiny", "checkpoint.async=false"]).run)
    (home / "step-6" / "chunk.rank0.safetensors").write_bytes(b"")
    saver = saved.saver(home, saved.tensors(3), [], run=run, begun=2)
    saver.save(saved.progress(3))
    assert format.present(home) == left
    assert loaded(home) == 3
    saver.save(saved.progress(7))
    saver.close()
    assert format.present(home) == [3, 7][-keep_last:]


def test_the_step_with_the_lowest_validation_loss_is_kept(tmp_path):
    words = ["arch.preset=tiny", "checkpoint.keep_last=1", "checkpoint.async=false"]
    run, home = load.load(None, words).run, tmp_path / "checkpoints"
    losses = {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5, 5: None, 6: 1.2}
    lines = [json.dumps({"kind": "held", "step": step, "loss": loss}) + "\n" for step, loss in losses.items()]
    (tmp_path / "steps.rank0.jsonl").write_text("".join(lines))
    saved.save(home, *range(1, 7), run=run)
    assert format.present(home) == [3, 6]
    saved.save(home, 7, run=load.load(None, [*words, "checkpoint.keep_best=false"]).run)
    assert format.present(home) == [7]


def test_a_damaged_step_is_replaced_when_its_number_comes_again(home):
    advance(home, 2, Disk())
    (home / "step-2" / "chunk.rank0.safetensors").write_bytes(b"")
    assert advance(home, 2, Disk()) == []
    assert loaded(home) == 2
    assert not [name for name in os.listdir(home) if name.startswith(".")]
