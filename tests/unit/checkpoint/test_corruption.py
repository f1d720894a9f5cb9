"""Whatever happens to a saved step is seen, named, and never loaded."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from checkpoint import saved
from meshwright.checkpoint import format
from meshwright.checkpoint import format as manifests
from meshwright.checkpoint import read as restore
from meshwright.checkpoint.storage import CorruptError
from meshwright.verify import integrity

FLIPS = 200


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Three saved steps; none is changed, tests change copies."""
    home = tmp_path_factory.mktemp("run") / "checkpoints"
    run = saved.load.load(None, ["arch.preset=tiny", "checkpoint.keep_last=3", "checkpoint.async=false"]).run
    saved.save(home, 1, 2, 3, run=run)
    return home


@pytest.fixture
def home(original, tmp_path):
    shutil.copytree(original, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def load(home: Path) -> tuple[int | None, list[str]]:
    """The step that is gone on from, its numbers checked, and what was said."""
    held, said = {name: torch.full_like(x, torch.nan) for name, x in saved.tensors(0).items()}, []
    found = restore.newest(home, saved.RUN, saved.alone(), saved.holdings(held), said.append)
    if found is None:
        return None, said
    step = found.progress.step
    assert all(torch.equal(held[name], x) for name, x in saved.tensors(step).items())
    return step, said


def sound(home: Path) -> bool:
    return integrity.verify(home.parent, lambda text: None).sound


def test_what_is_whole_is_loaded_without_a_word(home):
    assert sound(home)
    assert load(home) == (3, [])


def test_each_of_two_hundred_flipped_bits_is_seen(original, tmp_path):
    random_bits = random.Random(1)
    home = tmp_path / "checkpoints"
    files = [path.relative_to(original) for path in original.rglob("*") if path.is_file() and "step-1" not in str(path)]
    newest = [file for file in files if "step-2" not in str(file)]
    assert len(newest) == 3  # chunk, manifest, latest
    shutil.copytree(original, home)
    for _ in range(FLIPS):
        file = home / random_bits.choice(newest)
        before = file.read_bytes()
        place = random_bits.randrange(8 * len(before))
        after = bytearray(before)
        after[place // 8] ^= 1 << place % 8
        file.write_bytes(after)
        found = integrity.verify(home.parent, lambda text: None)
        assert not found.sound
        named = [*found.damages, *(damage for step in found.steps for damage in step.damages)]
        assert any(damage.file == str(file) for damage in named)
        step, said = load(home)
        assert said, (file, place)
        assert file.name in said[0]
        assert step == (3 if file.name == "latest" else 2)
        file.write_bytes(before)
    assert load(home) == (3, [])


def test_a_flip_is_named_with_its_tensor_and_bytes(home):
    manifest = manifests.read(home / "step-3")
    hit = manifest.slices[1]
    file = home / "step-3" / manifest.chunks[0].file
    content = bytearray(file.read_bytes())
    content[hit.begin + 5] ^= 1
    file.write_bytes(content)
    found = integrity.verify_step(home / "step-3")
    (damage,) = found.damages
    assert damage.tensor == manifest.tensors[hit.tensor].name + "[0:7,0:6]"
    assert (damage.begin, damage.end) == (hit.begin, hit.end)
    _, said = load(home)
    assert f"{file}, tensor {damage.tensor}, bytes {hit.begin}–{hit.end}" in said[0]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("name", ["chunk.rank0.safetensors", "manifest.json"])
def test_a_truncated_file_is_seen(home, name, share):
    file = home / "step-3" / name
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    assert not sound(home)
    step, said = load(home)
    assert step == 2
    assert name in said[0]


def test_a_byte_more_is_seen(home):
    with open(home / "step-3" / "chunk.rank0.safetensors", "ab") as file:
        file.write(b"\0")
    assert not sound(home)
    assert load(home)[0] == 2


@pytest.mark.parametrize("name", ["chunk.rank0.safetensors", "manifest.json"])
def test_a_missing_file_is_seen(home, name):
    (home / "step-3" / name).unlink()
    assert not sound(home)
    step, said = load(home)
    assert step == 2
    assert f"{name}: is missing" in said[0]


@pytest.mark.parametrize("name", ["chunk.rank0.safetensors", "manifest.json"])
def test_a_file_of_another_step_is_seen(home, name):
    shutil.copyfile(home / "step-2" / name, home / "step-3" / name)
    assert not sound(home)
    assert load(home)[0] == 2


def test_a_step_under_another_number_is_seen(home):
    shutil.rmtree(home / "step-3")
    shutil.copytree(home / "step-2", home / "step-3")
    assert not sound(home)
    step, said = load(home)
    assert step == 2
    assert "is the manifest of step 2" in said[0]


def test_swapped_slices_of_equal_size_are_seen(home):
    manifest = manifests.read(home / "step-3")
    file = home / "step-3" / manifest.chunks[0].file
    begin, content = manifest.slices[1].begin, bytearray(file.read_bytes())
    content[begin : begin + 4], content[begin + 4 : begin + 8] = (
        content[begin + 4 : begin + 8],
        content[begin : begin + 4],
    )
    file.write_bytes(content)
    assert not sound(home)
    assert load(home)[0] == 2


def test_a_stale_pointer_is_said_and_the_newest_whole_step_is_used(home):
    digest = manifests.read(home / "step-2").sha256
    (home / "latest").write_text(f"step-2\n{digest}\n")
    assert not sound(home)
    step, said = load(home)
    assert step == 3
    assert "points to step-2; the newest whole step is step-3" in said[0]


def test_the_pointer_itself_can_be_asked(home):
    (found,) = integrity.verify(home / "latest", lambda text: None).steps
    assert found.step == 3
    assert (home / "latest").read_text().splitlines()[0] == "step-3"


def test_a_pointer_to_nothing_is_said(home):
    shutil.rmtree(home / "step-3")
    assert not sound(home)
    step, said = load(home)
    assert step == 2
    assert "points to step-3" in said[0]


def test_a_key_that_comes_twice_is_seen(home):
    file = home / "step-3" / "manifest.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'{"format":', b'{"run":"aaaaaaaa","format":', 1))
    with pytest.raises(CorruptError, match="not what was written"):
        manifests.read(home / "step-3")


def test_a_file_that_nobody_wrote_is_seen(home):
    (home / "step-3" / "extra.bin").write_bytes(b"x")
    assert not sound(home)


def test_a_step_of_another_run_is_not_gone_on_from(home):
    other = saved.load.load(None, ["arch.preset=tiny", "seed=9"]).run
    held = saved.tensors(0)
    with pytest.raises(CorruptError, match="is of another run"):
        restore.newest(home, other, saved.alone(), saved.holdings(held), lambda text: None)


def test_when_every_step_is_damaged_nothing_is_loaded(home):
    for step in format.present(home):
        (home / format.name(step) / "chunk.rank0.safetensors").write_bytes(b"")
    with pytest.raises(CorruptError, match="no step in it can be used") as error:
        load(home)
    assert error.value.code == 12


def test_a_disk_that_fails_while_it_is_read_is_named(home, monkeypatch):
    read = os.preadv

    def fail(descriptor, buffers, offset):
        if os.fstat(descriptor).st_size == size and offset > 400:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    size = (home / "step-3" / "chunk.rank0.safetensors").stat().st_size
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptError, match=r"chunk\.rank0\.safetensors, tensor .*cannot be read: Input/output error"):
        load(home)
    assert not sound(home)


def test_nothing_saved_is_not_damage(tmp_path):
    assert load(tmp_path / "checkpoints") == (None, [])
