"""Host memory that is made ahead, and files that several threads write."""

import errno
import os
import time

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import saved
from meshwright.checkpoint import copies, format, storage, write
from meshwright.checkpoint.copies import Copies, HostMemory
from meshwright.checkpoint.state import TensorShard
from meshwright.checkpoint.storage import Disk
from meshwright.verify import integrity


def test_arrays_begin_on_pages_and_never_share_a_byte(monkeypatch):
    monkeypatch.setattr(copies, "ARENA_BYTES", 3 * copies.PAGE)
    likes = [torch.full((length,), float(length)) for length in (1, 1024, 1025, 3000, 9, 5000)]
    memory = HostMemory([like.nbytes for like in likes], None)
    memory.begin()
    arrays = [memory.array(number, like) for number, like in enumerate(likes)]
    for array, like in zip(arrays, likes, strict=True):
        array.copy_(like)
    assert all(array.data_ptr() % copies.PAGE == 0 for array in arrays)
    assert all(torch.equal(array, like) for array, like in zip(arrays, likes, strict=True))
    memory.close()


def test_memory_that_cannot_be_made_is_the_savers_error_not_a_wait(monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(copies.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        HostMemory([10], None).array(0, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_copy_has_the_bits_of_its_source_whatever_its_strides(dtype):
    whole = torch.randn(6, 10).to(dtype).t()
    whole[0, 0] = torch.nan
    taken = Copies([TensorShard("w", (10, 6), ((0, 10), (0, 6)), whole, writes=True)])
    taken.take()
    (piece,) = taken.pieces()
    before = whole.clone()
    whole.zero_()
    assert torch.equal(piece.tensor.nan_to_num(7.0), before.nan_to_num(7.0))


def test_threads_write_the_same_chunk_as_one(tmp_path, monkeypatch):
    held = {f"weight/{number}": torch.randn(64, 65) for number in range(40)}
    for home, striped in ((tmp_path / "one", 2**40), (tmp_path / "many", 0)):
        monkeypatch.setattr(write, "STRIPED_BYTES", striped)
        monkeypatch.setattr(storage, "FLUSH_BYTES", 2**14)
        made = saved.saver(home, held, [])
        made.save(saved.progress(1))
        made.close()
    one, many = ((tmp_path / name / "step-1" / "chunk.rank0.safetensors") for name in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()
    assert format.read(one.parent) == format.read(many.parent)
    assert torch.equal(load_file(many)["weight/7[0:64,0:65]"], held["weight/7"])


def test_the_first_failure_of_threads_ends_the_rest():
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise OSError("the first")
        time.sleep(0.001)  # ten seconds in all: time for the failure to be noticed

    with pytest.raises(OSError, match="the first"):
        storage.side_by_side(work, range(10_000), 2)
    assert len(begun) < 10_000


def test_a_step_of_the_first_format_is_read_and_checked(tmp_path):
    """Its chunks carry the sha256 of the whole file."""
    saved.save(tmp_path / "checkpoints", 1)
    step = tmp_path / "checkpoints" / "step-1"
    manifest = format.read(step)
    old = format.Chunk(*(getattr(manifest.chunks[0], name) for name in format.Chunk.__struct_fields__))
    with storage.opened(step, old.file) as descriptor:
        old = format.msgspec.structs.replace(old, sha256=storage.file_sha256(descriptor))
    first = format.msgspec.structs.replace(manifest, format=format.WHOLE_FILE, chunks=(old,))
    (step / "manifest.json").write_bytes(format.encode(first))
    format.point(Disk(), step.parent, 1, format.read(step).sha256)
    assert integrity.verify(tmp_path, lambda text: None).sound
    wrong = format.msgspec.structs.replace(old, sha256="0" * 64)
    (step / "manifest.json").write_bytes(format.encode(format.msgspec.structs.replace(first, chunks=(wrong,))))
    (damage,) = integrity.verify_step(step).damages
    assert "of the file, though its slices match" in damage.text
