"""A save that still runs is not waited for: the next is postponed, at the same step on every rank."""

import errno
import os
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from trials import CPU, corpus_file, made, make_corpus, make_run, mesh_of
from waiting import HANG
from worlds import world

from meshwright.checkpoint import format
from meshwright.checkpoint.storage import Disk
from meshwright.runtime.failure import FailureError
from meshwright.train import ending, saving
from meshwright.train.loop import Stop, train
from meshwright.train.saving import BUSY, FAILED, Vote, counted

STEPS = (
    "steps=60", "checkpoint.every=2", "checkpoint.keep_last=99", "plan.replicate=2", "data.eval_fraction=0.0",
    "plan.precision=fp32",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def trained(folder, write_block, go):
    """Train on a disk that writes blocks in its own way; at step 7 whatever holds up its saves is told to end.

    Returns what was said, the steps that a save paused, and the records of saves.
    """
    run, mesh, state = made(make_run(folder, *STEPS), folder, CPU)
    said, paused, records = [], [], []
    state.say, state.note = said.append, records.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "SMALL_PATIENCE_SECONDS", 0.01)
        patch.setattr(Disk, "write_block", write_block)
        for result in train(run, state, mesh, folder / "run"):
            if result.step == 7:
                go.set()
            if result.save_seconds:
                paused.append(result.step)
    state.loader.close()
    return said, paused, records


@world(2)
def test_the_next_save_is_postponed_to_the_same_step_on_all_ranks(folder):
    """Rank 1's disk is stuck in the first save until step 7 is made."""
    go, write = threading.Event(), Disk.write_block

    def stuck(disk, descriptor, block):
        assert dist.get_rank() == 0 or go.wait(HANG)
        write(disk, descriptor, block)

    said, paused, records = trained(folder, stuck, go)
    told = [text for text in said if "postponed" in text]
    assert told[0] == (
        "the save of step 4 is postponed until after step-2, which is still being written: "
        "slower than saves come; raise checkpoint.every"
    )
    assert not [text for text in said if "warning" in text]
    first, second, *_ = found = format.present(folder / "run" / "checkpoints")
    assert (first, found[-1]) == (2, 60)
    assert 7 < second < 60
    assert paused == found
    mine = torch.tensor([*paused, *[0] * (60 - len(paused))])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs)
    assert [record.saved for record in records] == (found if dist.get_rank() == 0 else [])


@world(2)
def test_a_part_that_one_rank_cannot_write_ends_the_save_and_not_the_next(folder):
    room, write = threading.Event(), Disk.write_block

    def failing(disk, descriptor, block):
        if dist.get_rank() == 1 and not room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(disk, descriptor, block)

    said, _, _ = trained(folder, failing, room)
    told = [text for text in said if "warning" in text]
    assert told
    assert all("was not saved (rank 1: No space left on device); training continues" in text for text in told)
    found = format.present(folder / "run" / "checkpoints")
    assert min(found) > 2
    assert found[-1] == 60


@world(2)
def test_the_last_save_is_made_again_when_a_full_disk_has_room(folder):
    """There is room for two steps, of which the older one goes before the newest is written, where it must."""
    run, mesh, state = made(make_run(folder, *STEPS, "steps=6", "checkpoint.keep_last=2"), folder, CPU)
    state.say, (first, second) = (lambda text: None), (folder / "run" / "checkpoints" / f"step-{n}" for n in (2, 4))
    write_block = Disk.write_block

    def is_full():
        return first.exists() and second.exists()

    def refusing(disk, descriptor, block):
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_block(disk, descriptor, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "free_bytes", lambda disk, path: 0 if is_full() else 10**12)
        patch.setattr(Disk, "write_block", refusing)
        assert [result.step for result in train(run, state, mesh, folder / "run")] == [1, 2, 3, 4, 5, 6]
    state.loader.close()
    assert state.saved
    assert format.present(folder / "run" / "checkpoints") == [4, 6]


@world(2)
def test_what_a_run_leaves_is_written_when_there_is_room_and_not_waited_for_where_a_checkpoint_has_it(folder):
    mesh, said, tries, stop = mesh_of(make_run(folder, "plan.replicate=2").plan), list[str](), list[int](), Stop()

    def write():
        tries.append(mesh.rank)
        if mesh.rank == 0 and len(tries) % 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "AGAIN_SECONDS", 0.0)
        patch.setattr(ending, "LOOK_SECONDS", 0.01)
        surely = partial(ending.surely, "the model", write, folder, mesh=mesh, stop=stop, say=said.append)
        surely(7)
        assert (len(tries), len(said)) == (3, 1)
        assert "waiting for room" in said[0]
        stop.asked = mesh.rank == 1  # whichever it is
        with pytest.raises(FailureError, match="of step 7 could not be written") as lost:
            surely(7)
        assert "train again: there is no checkpoint" in lost.value.report.remedy
        dist.barrier()  # each has looked for checkpoints
        tries.clear()
        stop.asked = False
        if mesh.rank == 0:
            (folder / "checkpoints" / "step-7").mkdir(parents=True)
        with pytest.raises(FailureError) as kept:
            surely(7)
        assert "run the same command again to write it from the last checkpoint" in kept.value.report.remedy
        assert (len(tries), len(said), kept.value.report.code) == (1, 2, 11)


@world(2)
def test_a_rank_that_is_slow_to_see_its_note_named_does_not_fail_the_save(folder):
    """Whoever finds the note renames the folder it is in, or removes it, while the rank that wrote it is held up."""
    rename = Disk.rename

    def held_up(disk, old, new):
        rename(disk, old, new)
        if dist.get_rank() == 1:
            time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "rename", held_up)
        said, paused, _ = trained(folder, Disk.write_block, threading.Event())
    assert not [text for text in said if "warning" in text]
    assert paused == format.present(folder / "run" / "checkpoints")


@pytest.mark.parametrize("ranks", [1, 8, 65_535])
def test_votes_are_told_apart_however_many_ranks_cast_them(ranks):
    for stop in (0, 1, ranks):
        for busy in (0, 1, ranks):
            for failed in (0, 1, ranks):
                total = stop + busy * BUSY + failed * FAILED
                assert counted(total, 3) == Vote(bool(stop), bool(busy), bool(failed), 3)
