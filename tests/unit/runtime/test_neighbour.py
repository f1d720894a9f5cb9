"""Parts of in-memory checkpoints on the next machine: two keepers on loopback, without ranks."""

import hashlib
import os
import random
import shutil
import socket
import stat
import threading
import time
from contextlib import suppress

import msgspec
import pytest

from meshwright.config.weights import CHECKPOINTS, RUN, present, step_name
from meshwright.runtime import parts
from meshwright.runtime.neighbour import MOST_STRANGERS, PartKeeper
from meshwright.runtime.parts import (
    COPIED,
    KEPT,
    PART,
    READY,
    SEAL_BYTES,
    KeeperAddress,
    MachinePart,
    PartCall,
    PartError,
    PartNote,
    SealedWire,
    answer_on,
    called,
    copy_note,
    decoded,
    fetch_file,
    files_of,
)

MASTER = "127.0.0.1", 29500
SECONDS = 120.0  # a hang, not a speed


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def save(memory, node, step, attempt=7, size=1000, nodes=2):
    """What the ranks of a machine leave in its memory: one chunk of a header and two slices."""
    content, header = random.Random(f"{node}/{step}").randbytes(size), 80
    middle = (header + size) // 2
    ranges = [(begin, end, sha256(content[begin:end])) for begin, end in ((header, middle), (middle, size))]
    name = f"chunk.rank{node}.safetensors"
    note = {
        "made": {
            "chunk": [name, size, "", header, sha256(content[:header])],
            "slices": [{"begin": begin, "end": end, "sha256": digest} for begin, end, digest in ranges],
        }
    }
    part = MachinePart(step=step, attempt=attempt, node=node, nodes=nodes, run="run", plan={}, notes=(note,))
    stump = memory / CHECKPOINTS / f".{step_name(step)}.partial"
    stump.mkdir(parents=True)
    (stump / name).write_bytes(content)
    (stump / PART).write_bytes(parts.encoded(part))
    stump.replace(memory / CHECKPOINTS / step_name(step))
    return content


def until(is_so):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN).touch()
    return tmp_path / "run"


@pytest.fixture
def machine(tmp_path, folder):
    """Starts the keeper of a machine; all end with the test."""
    started, said = [], []

    def start(node, nodes=2, **more):
        memory = tmp_path / f"memory{node}"
        shutil.rmtree(memory, ignore_errors=True)  # another machine in its place has nothing
        memory.mkdir()
        keeper = PartKeeper(memory, folder, node, nodes, MASTER, said.append, **more)
        keeper.said = said
        keeper.start()
        started.append(keeper)
        until((memory / READY).exists)
        until(lambda: KeeperAddress.read(folder, node) == keeper.where)
        return keeper

    yield start
    for keeper in started:
        keeper.close()
    assert not list(folder.glob(".memory*")), "no key stays behind"


def kept(keeper):
    return present(keeper.memory / KEPT / CHECKPOINTS)


def told(keeper, step, attempt=7):
    note = copy_note(keeper.memory)
    return note is not None and (note.step, note.attempt) == (step, attempt)


def test_the_next_machine_keeps_each_part_and_gives_it_back_to_whoever_takes_its_place(machine, folder):
    zero, one = machine(0), machine(1)
    contents = {step: save(zero.memory, 0, step) for step in (10,)}
    until(lambda: told(zero, 10))
    assert copy_note(zero.memory).failed == ""
    contents[20] = save(zero.memory, 0, 20)
    until(lambda: kept(one) == [10, 20])
    shutil.rmtree(zero.memory / CHECKPOINTS / step_name(10))  # 20 is whole on all machines
    save(zero.memory, 0, 30)
    until(lambda: kept(one) == [20, 30])  # never more than two
    until(lambda: told(zero, 30))
    assert not list((one.memory / KEPT / CHECKPOINTS).glob(".*"))
    zero.close()
    again = machine(0)
    assert present(again.own) == [20, 30]
    assert (again.own / step_name(20) / "chunk.rank0.safetensors").read_bytes() == contents[20]
    assert any("machine 0's part of step-30 is back from machine 1's memory: 1,000 bytes" in text for text in one.said)


def test_a_machine_that_comes_back_empty_is_sent_the_part_again(machine):
    zero, one = machine(0), machine(1)
    save(zero.memory, 0, 10)
    until(lambda: kept(one) == [10])
    one.close()
    again = machine(1)
    until(lambda: kept(again) == [10])


def test_three_machines_keep_for_the_one_before_each(machine):
    keepers = [machine(node, 3) for node in range(3)]
    for node, keeper in enumerate(keepers):
        save(keeper.memory, node, 10, nodes=3)
    until(lambda: all(kept(keeper) == [10] for keeper in keepers))
    for node, keeper in enumerate(keepers):
        part = decoded((keeper.kept / step_name(10) / PART).read_bytes(), PartNote)
        assert part.node == (node - 1) % 3
    with pytest.raises(PartError, match="machine 2 keeps nothing of machine 0"), called(
        keepers[2].where, PartCall(word="part", node=0, step=10)
    ) as wire:  # fmt: skip
        answer_on(wire)


def test_whoever_lacks_the_key_is_not_heard(machine, folder):
    zero = machine(0)
    save(zero.memory, 0, 10)
    file = KeeperAddress.file(folder, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    stranger = msgspec.structs.replace(zero.where, key="00" * 32)
    for call in (PartCall(word="part", node=0, step=10), PartCall(word="held", node=1)):
        with pytest.raises(OSError), called(stranger, call) as wire:  # noqa: PT011 - however it is cut off
            answer_on(wire)
    with socket.create_connection((zero.where.address, zero.where.port), timeout=5) as plain:
        with suppress(OSError):  # a flood, without a handshake
            plain.sendall(os.urandom(1 << 20))
        plain.settimeout(5)
        with suppress(OSError):
            heard = b"".join(iter(lambda: plain.recv(4096), b""))
            assert len(heard) == 32  # its nonce, and no more
    assert kept(zero) == []
    with called(zero.where, PartCall(word="held", node=1)) as wire:
        assert answer_on(wire).steps == ()


def test_strangers_who_say_nothing_keep_nobody_out(machine, folder, monkeypatch):
    """As many as there is room for, and more: ours are heard at once, and who has waited longest is sent away."""
    monkeypatch.setattr(parts, "CALL_SECONDS", 10 * SECONDS)  # none of them goes by itself
    first, second = machine(0), machine(1)
    until(lambda: KeeperAddress.read(folder, 1) is not None)
    silent = [socket.create_connection((second.where.address, second.where.port)) for _ in range(MOST_STRANGERS + 8)]
    try:
        content = save(first.memory, 0, 5)
        until(lambda: present(second.kept) == [5])
        assert (second.kept / "step-5" / "chunk.rank0.safetensors").read_bytes() == content
        assert len(second.strangers) <= MOST_STRANGERS
        silent[0].settimeout(SECONDS)
        while silent[0].recv(SEAL_BYTES):  # what every connection is told, and then its end
            continue
    finally:
        for wire in silent:
            wire.close()
    until(lambda: not second.strangers)


def test_a_message_of_another_connection_or_place_in_it_is_refused():
    one, other = socket.socketpair()
    sides = []
    thread = threading.Thread(target=lambda: sides.append(SealedWire(other, b"k" * 32, is_caller=False)))
    thread.start()
    mine = SealedWire(one, b"k" * 32, is_caller=True)
    thread.join()
    theirs = sides[0]
    mine.send(b"first")
    assert theirs.hear() == b"first"
    mine.sent = 0  # the same again
    mine.send(b"first")
    with pytest.raises(parts.StrangerError):
        theirs.hear()
    one.close()
    other.close()


def test_a_part_that_is_damaged_or_cut_short_gets_no_name(machine):
    zero, one = machine(0), machine(1)
    save(zero.memory, 0, 10)
    until(lambda: kept(one) == [10])
    zero.ended.set()  # it sends no more by itself
    save(zero.memory, 0, 20, size=9_000_000)
    step = zero.own / step_name(20)
    content = (step / PART).read_bytes()
    call = PartCall(word="keep", node=0, step=20, steps=(10, 20))
    chunk = step / "chunk.rank0.safetensors"
    bits = bytearray(chunk.read_bytes())
    bits[5_000_000] ^= 1
    chunk.write_bytes(bits)
    files = files_of(decoded(content, PartNote))
    with called(one.where, call) as wire:
        wire.send(content)
        answer_on(wire)
        parts.send(wire, step, files)
        with pytest.raises(PartError, match=r"chunk.rank0.safetensors, bytes .* checksum mismatch"):
            answer_on(wire)
    with called(one.where, call) as wire:
        wire.send(content)
        answer_on(wire)
        wire.wire.sendall(bits[:1_000_000])  # and the machine is gone
    with called(one.where, call) as wire:
        wire.send(content[:-3] + b"}}}")
        with pytest.raises(PartError, match=r"checksum mismatch .* of the list"):
            answer_on(wire)
    until(lambda: not list(one.kept.glob(".*")))
    assert kept(one) == [10]  # the one before it is as it was


def test_a_list_that_leaves_bytes_unchecked_or_names_other_files_is_refused(tmp_path):
    save(tmp_path, 0, 10)
    good = decoded((tmp_path / CHECKPOINTS / step_name(10) / PART).read_bytes(), PartNote)
    made = good.notes[0].made
    name, size, whole, header, digest = made.chunk
    for chunk, slices in (
        ((name, size + 1, whole, header, digest), made.slices),
        ((name, size, whole, header, digest), made.slices[1:]),
        (("../../run.toml", size, whole, header, digest), made.slices),
    ):
        bad = msgspec.structs.replace(made, chunk=chunk, slices=slices)
        with pytest.raises(PartError):
            files_of(msgspec.structs.replace(good, notes=(PartNote(made=bad),)))
    with pytest.raises(PartError, match="twice"):
        files_of(msgspec.structs.replace(good, notes=good.notes * 2))


def test_memory_that_is_full_refuses_and_the_ranks_are_told(machine):
    zero, one = machine(0), machine(1, room=lambda memory: 999)
    save(zero.memory, 0, 10)
    until(lambda: told(zero, 10))
    why = "it needs 1,000 bytes of host memory, and 999 are free on machine 1"
    assert copy_note(zero.memory).failed == why
    assert kept(one) == []
    assert sum(why in text for text in one.said) == 1  # however often it is tried


def test_a_machine_that_is_not_there_holds_nobody_up(machine, folder):
    zero = machine(0)
    save(zero.memory, 0, 10)
    until(lambda: told(zero, 10))
    assert "has not said where it listens" in copy_note(zero.memory).failed
    one = machine(1)
    until(lambda: kept(one) == [10])
    until(lambda: copy_note(zero.memory).failed == "")
    one.ended.set()
    one.listener.shutdown(socket.SHUT_RDWR)  # killed: its address is still in the folder
    one.listener.close()
    save(zero.memory, 0, 20)
    until(lambda: told(zero, 20))
    assert "machine 1 does not answer" in copy_note(zero.memory).failed


def test_an_address_that_makes_no_sense_is_none_and_is_said_anew(machine, folder):
    """As a disk leaves it that lost power: who would call there goes on, and copies when it is right again."""
    zero, one = machine(0), machine(1)
    file = KeeperAddress.file(folder, 1)
    for nonsense in ({"key": "zz"}, {"key": "00"}, {"port": 1 << 20}):
        file.write_bytes(msgspec.json.encode(msgspec.to_builtins(one.where) | nonsense))
        assert KeeperAddress.read(folder, 1) is None
    file.write_bytes(b'{"address":"\xff"}')
    assert KeeperAddress.read(folder, 1) is None
    save(zero.memory, 0, 10)
    until(lambda: kept(one) == [10])


def test_a_chunk_is_fetched_by_whoever_needs_it(machine, tmp_path):
    zero, one = machine(0), machine(1)
    content = save(zero.memory, 0, 10)
    until(lambda: kept(one) == [10])
    for keeper in (zero, one):  # from its own machine, or from the next
        target = tmp_path / f"fetched{keeper.node}" / "chunk.rank0.safetensors"
        target.parent.mkdir()
        fetch_file(keeper.where, 0, 10, target)
        assert target.read_bytes() == content
    with pytest.raises(PartError, match="is no chunk"), called(
        zero.where, PartCall(word="file", node=0, step=10, file="../../run.toml")
    ) as wire:  # fmt: skip
        answer_on(wire)
    assert (zero.memory / COPIED).exists()
