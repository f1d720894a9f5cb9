"""Reading stays in its folder, and refuses what is hostile cheaply: no claim of a file is believed or allocated."""

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpoint import saved
from meshwright.checkpoint import format, read, storage
from meshwright.checkpoint import format as manifests
from meshwright.checkpoint.model_folder import Reader
from meshwright.checkpoint.storage import CorruptError
from meshwright.spec.problem import InputError
from meshwright.verify import integrity

MEMORY = 64 * 2**20  # bytes that refusing may take


@pytest.fixture
def home(tmp_path):
    saved.save(tmp_path / "run" / "checkpoints", 1, 2)
    return tmp_path / "run" / "checkpoints"


def load(home: Path) -> int | None:
    found = read.newest(home, saved.RUN, saved.alone(), saved.holdings(saved.tensors(0)), lambda text: None)
    return found.progress.step if found else None


def signed(values: dict[str, Any]) -> bytes:
    """A manifest by somebody who knows how to sign one."""
    bare = msgspec.json.encode({**values, "sha256": ""})
    return msgspec.json.encode({**values, "sha256": manifests.sha256(bare)}) + b"\n"


def forge(home: Path, change) -> None:
    file = home / "step-2" / "manifest.json"
    values = msgspec.json.decode(file.read_bytes())
    change(values)
    file.write_bytes(signed(values))


def test_a_forger_who_changes_nothing_is_believed(home):
    forge(home, lambda values: None)
    assert load(home) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../step-1/chunk.rank0.safetensors", "/etc/passwd", "..", ".", "", "chunk.rank0.safetensors\0", "file:///etc/passwd",
        "chunk.rank0.safetensors/", "CHUNK.rank0.safetensors", "x" * 300, "chunk.rank" + "9" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_a_manifest_names_no_file_outside(home, name):
    forge(home, lambda values: values["chunks"][0].__setitem__(0, name))
    with pytest.raises(CorruptError):
        manifests.read(home / "step-2")
    assert load(home) == 1
    with pytest.raises(CorruptError), storage.opened(home / "step-2", name):
        pass


def replace(file: Path, make) -> None:
    file.unlink()
    make(file)


STRANGE = {
    "a link to the right bytes": lambda file: file.symlink_to(file.parent.parent / "step-1" / file.name),
    "a link to a device": lambda file: file.symlink_to("/dev/zero"),
    "a pipe that nobody writes to": os.mkfifo,
    "a folder": Path.mkdir,
    "a link in a circle": lambda file: file.symlink_to(file),
}


@pytest.mark.parametrize("name", ["chunk.rank0.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", STRANGE)
def test_only_plain_files_are_read(home, name, kind):
    replace(home / "step-2" / name, STRANGE[kind])
    assert load(home) == 1
    assert not integrity.verify(home.parent, lambda text: None).sound


def test_a_step_that_is_a_link_is_not_followed(home, tmp_path):
    (home / "step-2").rename(tmp_path / "elsewhere")
    (home / "step-2").symlink_to(tmp_path / "elsewhere")
    assert load(home) == 1


def test_checkpoints_that_are_a_link_are_not_written_through(home, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to(home)
    with pytest.raises(CorruptError, match="is a link"):
        format.home(tmp_path / "other")


def test_removing_a_link_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / ".step-9.partial").symlink_to(tmp_path / "precious")
    storage.Disk().remove(tmp_path / ".step-9.partial")
    assert (tmp_path / "precious" / "file").exists()
    assert not (tmp_path / ".step-9.partial").is_symlink()


# Hostile manifests and headers. What they claim is never allocated.


def set_in(path: tuple[Any, ...], value: Any):
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


HOSTILE = {
    "a header of 2^63": set_in(("chunks", 0, 3), 2**63),
    "a header larger than any": set_in(("chunks", 0, 3), 2**31),
    "a chunk of an exabyte": set_in(("chunks", 0, 1), 2**60),
    "negative bytes": set_in(("chunks", 0, 1), -1),
    "slices that overlap in the file": set_in(("slices", 1, 3), 0),
    "a slice of an exabyte": set_in(("slices", 0, 4), 2**60),
    "a slice of a tensor that is not there": set_in(("slices", 0, 0), 99),
    "a slice of a tensor before the first": set_in(("slices", 0, 0), -1),
    "a slice in a chunk that is not there": set_in(("slices", 0, 2), 99),
    "a slice beyond its tensor": set_in(("slices", 1, 1), [[7, 14], [0, 6]]),
    "a slice that runs backwards": set_in(("slices", 1, 1), [[7, 0], [6, 0]]),
    "a slice of another number of dims": set_in(("slices", 1, 1), [[0, 42]]),
    "a slice of a tensor of a million dims": set_in(("tensors", 1, 2), [1] * 1_000_000),
    "a tensor of another type": set_in(("tensors", 1, 1), "F64"),
    "a tensor of no type": set_in(("tensors", 1, 1), "I32"),
    "a tensor of another shape": set_in(("tensors", 1, 2), [6, 7]),
    "a tensor of 2^62 rows": set_in(("tensors", 1, 2), [2**62, 6]),
    "a tensor of negative size": set_in(("tensors", 1, 2), [-7, -6]),
    "a chunk's digest that is not its slices'": set_in(("chunks", 0, 2), "0" * 64),
    "another format": set_in(("format",), "meshwright checkpoint 3"),
    "a key that is not one": set_in(("extra",), 1),
    "a step that is text": set_in(("progress", "step"), "2"),
    "a step before the first": set_in(("progress", "step"), -2),
    "samples that were never seen": set_in(("progress", "samples"), 1),
    "another seed": set_in(("progress", "seed"), 2),
    "another plan": set_in(("plan",), {"tp": 10**30}),
    "two tensors of one name": set_in(("tensors", 1, 0), "first/stack"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_forged_manifest_is_refused_and_costs_little(home, kind):
    forge(home, HOSTILE[kind])
    assert cost_of(lambda: load(home)) == 1


def cost_of(action) -> Any:
    """What an action returns; it may not take much memory."""
    tracemalloc.start()
    try:
        answer = action()
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return answer


def test_a_hole_that_no_slice_covers_is_refused(home):
    forge(home, lambda values: values["slices"].pop(0))
    assert load(home) == 1


def test_a_million_tensors_are_refused_unread(home):
    file = home / "step-2" / "manifest.json"
    entry = b'["weight/a-name-of-some-length","F32",[1]],'
    with file.open("wb") as out:
        out.write(b'{"format":"meshwright checkpoint 1","tensors":[')
        for _ in range(100):
            out.write(entry * 10_000)
    with pytest.raises(CorruptError, match="more than the"):
        cost_of(lambda: manifests.read(home / "step-2"))


@pytest.mark.parametrize(
    "text", [b"[" * 10**6, b'{"plan":' * 10**5, b'{"plan":' + b"[" * 10**6], ids=["lists", "keys", "plan"]
)
def test_json_deeper_than_any_is_refused(home, text):
    (home / "step-2" / "manifest.json").write_bytes(text)
    assert cost_of(lambda: load(home)) == 1


def test_a_file_that_is_all_hole_is_not_read(home):
    """A terabyte of nothing takes no room on disk, and must take none in memory."""
    chunk = home / "step-2" / "chunk.rank0.safetensors"
    os.truncate(chunk, 2**40)
    forge(home, HOSTILE["a chunk of an exabyte"])
    assert cost_of(lambda: load(home)) == 1


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 1, 10**9, 8, 0])
def test_a_model_file_with_a_lying_header_is_refused(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 6)
    if length == 8:
        assert Reader(tmp_path).names == frozenset()  # the one that does not lie
        return
    with pytest.raises(InputError, match="cannot be used"):
        cost_of(lambda: Reader(tmp_path))


# The fuzzer.

VALUES = (None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, "", "x", "../x", "\0", "é", [], {}, [[0, 1]], {"a": 1})


def mutated(values: Any, chance: random.Random) -> Any:
    """The same tree with one node changed, gone, twice, or in another place."""
    nodes = list(places(values))
    parent, key = chance.choice(nodes)
    match chance.randrange(4):
        case 0:
            parent[key] = chance.choice(VALUES)
        case 1:
            del parent[key]
        case 2 if isinstance(parent, list):
            parent.insert(key, parent[key])
        case _:
            other, place = chance.choice(nodes)
            parent[key] = msgspec.json.decode(msgspec.json.encode(other[place]))
    return values


def places(node: Any):
    for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(child, dict | list):
            yield from places(child)


def test_no_forged_manifest_does_more_than_be_refused(home):
    chance, file = random.Random(1), home / "step-2" / "manifest.json"
    original, expected, refused = file.read_bytes(), saved.tensors(2), 0
    for _ in range(400):
        values = msgspec.json.decode(original)
        for _ in range(chance.randint(1, 3)):
            values = mutated(values, chance)
        file.write_bytes(signed(values))
        held = saved.tensors(0)
        found = read.newest(home, saved.RUN, saved.alone(), saved.holdings(held), lambda text: None)
        assert found is not None
        refused += found.progress.step == 1
        if found.progress.step == 2:  # what was changed is said only to people: the plan, the state's digest
            assert all(torch.equal(held[name], x) for name, x in expected.items())
    assert refused > 200


def test_no_noise_does_more_than_be_refused(home):
    chance, file = random.Random(2), home / "step-2" / "manifest.json"
    original = file.read_bytes()
    for _ in range(300):
        content = bytearray(original)
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(content))
            content[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        if bytes(content) != original:
            file.write_bytes(content)
            assert load(home) == 1
