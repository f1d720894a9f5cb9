"""Saved steps at an address: whole or not there, copied beside training, fetched by their hashes."""

import errno
import json
import os
import threading

import fsspec
import msgspec
import pytest
from waiting import until

from checkpoint import saved
from meshwright.checkpoint import format, read, remote
from meshwright.checkpoint.remote import Mirror, bring, fetch, mirroring, place_of, send
from meshwright.checkpoint.storage import CorruptError
from meshwright.cli import preflight
from meshwright.cli.main import main
from meshwright.config import load
from meshwright.runtime.object_store import RemoteFolder, require_writable
from meshwright.spec.problem import InputError


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path):
    """A bucket of nobody else's: in memory, and on a disk by its address."""
    yield f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/bucket/run"
    fsspec.filesystem("memory").store.clear()


def run_at(address, *words):
    fixed = ["arch.preset=tiny", "checkpoint.every=1", "checkpoint.async=false", "plan.replicate=1"]
    return load.load(None, [*fixed, f"checkpoint.remote={address}", *words]).run


def made(folder, *steps, address, run=None):
    """A run folder with saved steps, which are copied as they are saved."""
    run = run or run_at(address)
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(load.write(run))
    with mirroring(run, folder, lambda text: None) as mirror:
        for step in steps:
            saved.save(folder / "checkpoints", step, run=run)
            mirror.send(step)
            until(mirror._is_idle, "it is not copied")
    return mirror


def fetched(folder, run, said):
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    fetch(run, folder / "checkpoints", saved.alone(), said.append)
    return format.present(folder / "checkpoints")


def test_a_step_is_copied_and_fetched_to_the_byte(tmp_path, address):
    mirror = made(tmp_path / "here", 1, 2, address=address)
    assert mirror.newest == 2
    assert not mirror.failures
    assert RemoteFolder(address).saved_steps() == [1, 2]
    said = []
    assert fetched(tmp_path / "there", run_at(address), said) == [2]
    here, there = (tmp_path / name / "checkpoints" / "step-2" for name in ("here", "there"))
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {
        file.name: file.read_bytes() for file in there.iterdir()
    }
    held = saved.tensors(0)
    manifest = read.newest(there.parent, run_at(address), saved.alone(), saved.holdings(held), said.append)
    assert manifest.progress.step == 2
    assert all((held[name] == tensor).all() for name, tensor in saved.tensors(2).items())
    assert said == [f"fetching step-2 from {address}"]  # and the pointer is right
    assert not [file for file in there.parent.iterdir() if file.name.startswith(".")]


def test_a_replica_that_fetches_the_same_step_later_leaves_the_first_ones(tmp_path, address, monkeypatch):
    """Replicas that can do without each other are worlds of their own, and all look before any has fetched."""
    made(tmp_path / "here", 1, address=address)
    assert fetched(tmp_path / "there", run_at(address), []) == [1]
    monkeypatch.setattr(remote.write, "number_of_first", lambda number, mesh: next(said))
    said = iter([0, 7, 1])  # nothing was saved, the attempt, the step
    before = (tmp_path / "there/checkpoints/step-1").stat().st_ino
    assert fetched(tmp_path / "there", run_at(address), []) == [1]
    assert (tmp_path / "there/checkpoints/step-1").stat().st_ino == before
    assert not list((tmp_path / "there/checkpoints").glob(".*"))


def test_what_is_saved_here_is_gone_on_from(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    saved.save(tmp_path / "there" / "checkpoints", 1, run=run_at(address))
    assert fetched(tmp_path / "there", run_at(address), []) == [1]


def test_without_a_manifest_a_step_is_not_there(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    RemoteFolder(address).remove(place_of(2, "manifest.json"))
    assert fetched(tmp_path / "there", run_at(address), []) == [1]


def test_a_copy_that_is_cut_short_is_never_taken_for_a_whole_one(tmp_path, address, monkeypatch):
    """Not even where a step of that number was there before: its manifest goes first."""
    made(tmp_path / "here", 1, 2, address=address)
    before = RemoteFolder.write

    def cut(self, name, content):
        raise OSError("the network is gone")

    monkeypatch.setattr(RemoteFolder, "write", cut)
    with pytest.raises(OSError, match="network"):
        send(RemoteFolder(address), tmp_path / "here", tmp_path / "here/checkpoints/step-2", 2, lambda size: None)
    monkeypatch.setattr(RemoteFolder, "write", before)
    assert RemoteFolder(address).saved_steps() == [1]


def test_damage_at_the_address_is_named_and_the_step_before_is_used(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    folder, name = RemoteFolder(address), place_of(2, "chunk.rank0.safetensors")
    folder.write(name, folder.read(name)[:-1] + b"!")
    said = []
    assert fetched(tmp_path / "there", run_at(address), said) == [1]
    assert any("step-2" in text and "checksum mismatch (sha256)" in text for text in said)
    folder.write(place_of(1, "manifest.json"), b"{}")
    with pytest.raises(CorruptError, match="no step in it can be used"):
        fetched(tmp_path / "again", run_at(address), said)


def test_a_step_that_is_in_doubt_here_is_not_fetched(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    (tmp_path / "there" / "checkpoints" / f"{remote.SUSPECT}step-2").mkdir(parents=True)
    assert fetched(tmp_path / "there", run_at(address), []) == [1]


def test_what_is_kept_here_is_kept_there(tmp_path, address):
    made(tmp_path / "here", 1, 2, 3, 4, address=address)
    assert RemoteFolder(address).saved_steps() == [3, 4]
    assert not RemoteFolder(address).names(place_of(1))


def test_a_copy_that_fails_is_said_and_recorded_and_the_next_one_is_made(tmp_path, address, monkeypatch):
    run, real = run_at(address), RemoteFolder.send

    def flaky(self, file, name, count):
        if "step-1" in name:
            raise PermissionError("no right to write there")
        real(self, file, name, count)

    monkeypatch.setattr(RemoteFolder, "send", flaky)
    said = []
    with mirroring(run, tmp_path, said.append) as mirror:
        for step in (1, 2):
            saved.save(tmp_path / "checkpoints", step, run=run)
            mirror.send(step)
            until(mirror._is_idle, "it is not done")
        assert [failed.step for failed in mirror.take_events()] == [1]
    assert said == [f"step-2 is at {address}"]
    record = json.loads((tmp_path / remote.COPIES).read_text())
    assert record["step"] == 2
    assert "no right to write there" in record["failures"][0]["text"]


def test_a_full_store_keeps_nothing_of_a_copy_that_fails_and_has_room_for_the_next(tmp_path, address, monkeypatch):
    """And nothing of one whose sender was killed, once another is there."""
    sent, write = RemoteFolder.send, RemoteFolder.write

    def full(self, file, name, count=lambda size: None):
        sent(self, file, name, count)  # a part of the step is there before
        if "/step-2/" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RemoteFolder, "send", full)
    mirror = made(tmp_path / "here", 1, 2, address=address)
    assert [failed.step for failed in mirror.failures] == [2]
    assert RemoteFolder(address).cut_short() == []
    assert not RemoteFolder(address).names("checkpoints/step-2")
    monkeypatch.setattr(RemoteFolder, "send", sent)
    write(RemoteFolder(address), "checkpoints/step-3/chunk.rank0.safetensors", b"half of one")
    assert RemoteFolder(address).cut_short() == [3]
    mirror = made(tmp_path / "here", 4, address=address)
    assert not mirror.failures
    assert (RemoteFolder(address).cut_short(), RemoteFolder(address).saved_steps()) == ([], [1, 4])


def test_a_step_that_is_retired_while_it_is_sent_is_sent_whole(tmp_path, address, monkeypatch):
    """And of steps that wait meanwhile only the newest is sent."""
    run, real, go = run_at(address), RemoteFolder.send, threading.Event()

    def slow(self, file, name, count):
        go.wait()
        real(self, file, name, count)

    monkeypatch.setattr(RemoteFolder, "send", slow)
    mirror, saver = Mirror(run, tmp_path), saved.saver(tmp_path / "checkpoints", saved.tensors(0), [], run=run)
    for step in (1, 2, 3, 4):
        saver.save(saved.progress(step))
        mirror.send(step)
        until(lambda: mirror.busy, "it does not begin")
    saver.close()
    assert not (tmp_path / "checkpoints" / "step-1").exists()
    go.set()
    mirror.finish(lambda text: None)
    mirror.close()
    assert RemoteFolder(address).saved_steps() == [1, 4]
    assert [failed.step for failed in mirror.failures] == [2, 3]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_run_that_was_asked_to_end_does_not_wait_for_long(tmp_path, monkeypatch):
    address, go = f"file://{tmp_path}/bucket", threading.Event()
    monkeypatch.setattr(RemoteFolder, "send", lambda self, file, name, count: go.wait())
    run = run_at(address, "faults.grace_seconds=0.2")
    saved.save(tmp_path / "checkpoints", 1, run=run)
    said = []
    with mirroring(run, tmp_path, said.append, lambda: True) as mirror:
        mirror.send(1)
    go.set()
    assert said == [f"warning: step-1 was not copied to {address}: the run was stopped, and 0.1 s were not enough"]


def test_an_address_of_another_run_and_fresh_ones_are_refused(tmp_path, address):
    run = run_at(address)
    preflight.require_remote(run, tmp_path, fresh=True)
    assert not RemoteFolder(address).names()  # the trial has left nothing
    made(tmp_path / "here", 1, address=address)
    preflight.require_remote(run, tmp_path, fresh=False)
    with pytest.raises(InputError, match="which --fresh would resume from"):
        preflight.require_remote(run, tmp_path, fresh=True)
    with pytest.raises(InputError, match="has the steps of another run"):
        preflight.require_remote(msgspec.structs.replace(run, seed=2), tmp_path, fresh=False)


def test_a_run_that_goes_on_with_other_settings_keeps_its_address(tmp_path, address):
    made(tmp_path / "here", 1, address=address)
    longer = msgspec.structs.replace(run_at(address), steps=1000)
    preflight.require_remote(longer, tmp_path / "here", fresh=False)  # whose run file is still the shorter one's
    with pytest.raises(InputError, match="has the steps of another run"):
        preflight.require_remote(longer, tmp_path / "elsewhere", fresh=False)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.1.toml").write_text(load.write(run_at(address)))
    assert fetched(tmp_path / "there", longer, []) == [1]


def test_a_damaged_manifest_there_keeps_no_run_from_starting(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    RemoteFolder(address).write(place_of(2, "manifest.json"), b'{"run": "x')
    preflight.require_remote(run_at(address), tmp_path, fresh=False)
    said = []
    assert fetched(tmp_path / "there", run_at(address), said) == [1]
    assert "step-2 of" in said[1]
    assert "is not a manifest" in said[1]
    with pytest.raises(InputError, match="has the steps of another run"):
        preflight.require_remote(run_at(address, "seed=2"), tmp_path, fresh=False)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3://bucket/run", "needs s3fs to be read; run: pip install s3fs"),
        ("what://bucket/run", "is of a kind that fsspec does not know"),
        ("file:///proc/no/such", "cannot be reached"),
    ],
)
def test_an_address_that_takes_nothing_is_refused_before_ranks_start(address, told, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(InputError, match=told):
        require_writable(address)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["checkpoint.remote=s3://key:secret@bucket/a"], "checkpoint.remote has a password or a signature in it"),
        (["data.source=https://host/a.jsonl?token=secret"], "data.source has a password or a signature in it"),
        (["checkpoint.remote=bucket/a"], "checkpoint.remote = 'bucket/a' is not an address"),
        (["init.from=s3://bucket/run"], "fetch them first: meshwright convert s3://bucket/run FOLDER"),
    ],
)
def test_bad_addresses_are_refused_and_no_secret_is_shown_or_kept(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "arch.preset=tiny", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "secret" not in said.err + said.out
    assert not list(tmp_path.iterdir())


def test_a_step_at_an_address_is_a_run_folder_here(tmp_path, address):
    made(tmp_path / "here", 1, 2, address=address)
    said = []
    assert bring(f"{address}@1", tmp_path / "one", said.append) == f"{tmp_path / 'one'}@1"
    assert bring(address, tmp_path / "newest", said.append) == f"{tmp_path / 'newest'}@2"
    assert format.read(tmp_path / "one/checkpoints/step-1").progress.step == 1
    assert (tmp_path / "newest" / "run.toml").read_text() == load.write(run_at(address))
    with pytest.raises(InputError, match="saved are 1, 2"):
        bring(f"{address}@3", tmp_path / "none", said.append)
