"""Machines that listen for each other, on loopback: what is heard, what is thrown away, and who is missed."""

import os
import random
import socket
import stat
import threading

import pytest
from commands import free_port

from meshwright.runtime import failure, nodes, sidecar
from meshwright.runtime.failure import Failure
from meshwright.runtime.heartbeat import Beat, RankStatus
from meshwright.runtime.nodes import (
    KEY,
    LATE_SECONDS,
    LOST_SECONDS,
    MOST_BYTES,
    Lost,
    Node,
    NodeList,
    NodeMessage,
    Nodes,
)

A, B = Node(first=0, ranks=4, host="a"), Node(first=4, ranks=4, host="b")
SECRET = b"k" * 32


def word(node=B, number=1, **rest):
    return NodeMessage(node=node, number=number, **rest)


def watched(seconds, *words, start=100.0):
    """Look twice a second for some time after some words came."""
    roll = NodeList()
    for each in words:
        roll.hear(each, start)
    found = None
    for look in range(int(2 * seconds) + 1):
        found = found or roll.missing(start + look / 2)
    return found


def test_a_machine_that_falls_silent_is_missed_with_the_time_since_it_was_heard():
    assert watched(LOST_SECONDS, word()) is None
    found = watched(LOST_SECONDS + 1, word())
    assert found is not None
    assert (found.node, found.said) == (B, "")
    assert LOST_SECONDS < found.seconds <= LOST_SECONDS + 0.5


def test_who_was_never_heard_is_not_missed_and_who_is_done_is_not_either():
    assert watched(60) is None
    assert watched(60, word(state="done")) is None


def test_who_failed_is_missed_at_once_with_its_words():
    found = watched(0, word(state="failed", said="rank 5 failed: KeyError"))
    assert found == Lost(node=B, seconds=0.0, said="rank 5 failed: KeyError")


def test_what_the_first_machine_knows_of_a_third_is_believed():
    lost = Lost(node=Node(first=8, ranks=4, host="c"), seconds=6.0)
    assert watched(0, word(A, lost=lost)) == lost


def test_a_machine_that_slept_itself_misses_nobody():
    roll = NodeList()
    roll.hear(word(), 100.0)
    assert roll.missing(100.5) is None
    assert roll.missing(101.0 + LATE_SECONDS + 3600) is None


def test_a_datagram_that_comes_twice_is_heard_once():
    roll = NodeList()
    assert roll.hear(word(number=7), 100.0)
    assert not roll.hear(word(number=7), 104.0)
    assert not roll.hear(word(number=6), 104.0)
    assert roll.missing(100.5) is None
    assert [at for _, at in roll.heard.values()] == [100.0]


def test_only_what_is_sealed_with_the_key_is_opened():
    datagram = nodes.sealed(word(), SECRET)
    assert nodes.opened(datagram, SECRET, NodeMessage) == word()
    assert nodes.opened(datagram, b"x" * 32, NodeMessage) is None
    assert nodes.opened(datagram, b"", NodeMessage) is None
    chance = random.Random(3)
    for _ in range(300):
        place = chance.randrange(len(datagram))
        flipped = bytearray(datagram)
        flipped[place] ^= 1 << chance.randrange(8)
        assert nodes.opened(bytes(flipped), SECRET, NodeMessage) is None
        assert nodes.opened(chance.randbytes(chance.randrange(MOST_BYTES + 10)), SECRET, NodeMessage) is None


@pytest.mark.parametrize("content", [b"", b"[]", b'{"node":1}', b"[" * 1100, b'{"number":1e400}', b"\xff"])
def test_a_sealed_word_that_makes_no_sense_is_thrown_away(content):
    import hmac

    assert nodes.opened(hmac.digest(SECRET, content, "sha256") + content, SECRET, NodeMessage) is None


def test_the_longest_word_has_room_in_a_datagram():
    longest = Node(first=10**7, ranks=10**3, host="h" * 64)
    full = NodeMessage(
        node=longest, number=2**63, state="failed", said="x" * nodes.MOST_TEXT,
        lost=Lost(node=longest, seconds=1 / 3, said="y" * nodes.MOST_TEXT),
    )  # fmt: skip
    assert len(nodes.sealed(full, SECRET)) < MOST_BYTES


@pytest.mark.parametrize(
    ("address", "found", "heard_at"),
    [
        ("node-1", "10.0.0.7", "10.0.0.7"),
        ("node-1", "127.0.1.1", ""),  # by its own list of hosts: the others would not reach it there
        ("node-1", "::1", ""),
        ("localhost", "127.0.0.1", "127.0.0.1"),  # all of them are on one machine
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("10.0.0.7", "10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_first_machine_listens_where_the_others_can_reach_it(address, found, heard_at):
    assert nodes.listening(address, (found, 29500)) == (heard_at, 29500)


@pytest.fixture
def pair(tmp_path):
    port = free_port()
    (tmp_path / KEY).write_bytes(b"of an attempt before this one")
    second = Nodes(B, "127.0.0.1", port, tmp_path)  # it may come first
    second.look(0.0)
    first = Nodes(A, "127.0.0.1", port, tmp_path)
    yield first, second
    first.close()
    second.close()


def meet(first, second, now=0.0):
    """A few looks of each, as the watchers take them."""
    for look in range(4):
        second.look(now + look)
        first.look(now + look)


def test_two_machines_hear_each_other_and_the_key_is_nobody_elses(pair, tmp_path):
    first, second = pair
    meet(first, second)
    assert list(first.roll.heard) == [4]
    assert list(second.roll.heard) == [0]
    assert stat.S_IMODE(os.stat(tmp_path / KEY).st_mode) == 0o600
    first.close()
    assert not (tmp_path / KEY).exists()


def test_garbage_and_a_flood_of_it_change_nothing(pair, monkeypatch):
    first, second = pair
    read, opened = [], nodes.opened
    monkeypatch.setattr(nodes, "opened", lambda *args: read.append(args) or opened(*args))
    meet(first, second)
    chance = random.Random(1)
    place = first.socket.getsockname()
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(2000):
        stranger.sendto(chance.randbytes(chance.randrange(1, 2000)), place)
    stranger.sendto(nodes.sealed(word(Node(first=8, ranks=1, host="x")), b"guessed" * 4), place)
    stranger.close()
    read.clear()
    with monkeypatch.context() as few:
        few.setattr(nodes, "MOST_AT_ONCE", 16)
        first.look(4.0)
    assert len(read) == 16  # at one look, however many wait
    meet(first, second, now=4.5)
    assert list(first.roll.heard) == list(first.others) == [4]
    assert first.roll.missing(8.0) is None


def test_a_farewell_tells_whether_the_work_was_done(pair):
    first, second = pair
    meet(first, second)
    second.leave("rank 4 failed: KeyError")
    lost = first.look(5.0)
    assert lost is not None
    assert lost.said == "rank 4 failed: KeyError"
    first.pass_on(lost)
    assert second.look(5.0) == lost


def seen(still_seconds):
    return RankStatus(rank=0, beat=Beat(pid=1, tick=100.0, moved=100.0 - still_seconds), now=100.0)


def test_a_silent_machine_is_no_fault_while_the_ranks_here_get_on():
    assert not sidecar.is_still([seen(0.1), seen(60.0)], 100.0)
    assert sidecar.is_still([seen(3.0), seen(60.0)], 100.0)
    assert sidecar.is_still([], 100.0)


def test_one_machine_listens_to_nobody(tmp_path):
    post = sidecar.SidecarSpec(
        beats=str(tmp_path), folder=str(tmp_path), ranks=[0, 1], world=2, hang_seconds=5.0, address="127.0.0.1", port=1
    )
    assert sidecar._nodes(post) is None


def test_an_address_that_is_not_ours_is_told_and_the_watch_goes_on(tmp_path, capfd):
    post = sidecar.SidecarSpec(
        beats=str(tmp_path), folder=str(tmp_path), ranks=[0], world=2, hang_seconds=5.0, address="203.0.113.9", port=9
    )
    assert sidecar._nodes(post) is None
    assert "the loss of a machine will not be seen" in capfd.readouterr().err


def test_a_port_that_the_watcher_before_has_not_left_yet_is_waited_for(tmp_path, capfd):
    port = free_port()
    post = sidecar.SidecarSpec(
        beats=str(tmp_path), folder=str(tmp_path), ranks=[0], world=2, hang_seconds=5.0, address="127.0.0.1", port=port
    )
    before = Nodes(A, "127.0.0.1", port, tmp_path)
    threading.Timer(0.3, before.close).start()
    found = sidecar._nodes(post)
    assert found is not None
    found.close()
    assert not capfd.readouterr().err


def test_a_watcher_ends_with_the_rank_beside_it_and_says_how(tmp_path):
    port = free_port()
    post = sidecar.SidecarSpec(
        beats=str(tmp_path / "beats"),
        folder=str(tmp_path),
        ranks=[4],
        world=5,
        hang_seconds=5.0,
        address="127.0.0.1",
        port=port,
    )
    first = Nodes(A, "127.0.0.1", port, tmp_path)
    for words, state in ((sidecar.DONE, "done"), (b"", "failed")):
        reading, writing = os.pipe()
        os.write(writing, words)
        os.close(writing)
        report = sidecar.watch(post, reading)
        assert report is None if state == "done" else "rank 4 was killed" in report.what
        first.roll.heard.clear()
        first.look(0.0)
        assert [heard.state for heard, _ in first.roll.heard.values()] == [state]
        os.close(reading)
    first.close()


class Looks:
    """What a watcher sees, one look after another."""

    def __init__(self, *states):
        self.states = list(states)

    def look(self):
        state, left = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [
            RankStatus(rank=0, beat=Beat(pid=1, left=True), now=100.0),
            RankStatus(rank=1, beat=Beat(pid=2, left=left), now=100.0, state=state),
        ]


@pytest.mark.parametrize(
    ("said", "looks", "gone"),
    [
        ("RuntimeError: Connection reset by peer", [("R", False), ("R", False), ("Z", False)], 1),
        ("RuntimeError: Connection reset by peer", [("R", False), ("S", True), ("Z", True)], None),  # it said goodbye
        ("KeyError: 'x'", [("R", False), ("Z", False)], None),  # nobody waits: the first rank's own error ended it
    ],
)
def test_a_killed_rank_whose_process_is_still_going_is_waited_for(tmp_path, said, looks, gone):
    """Its connections break first, so that the rank beside the watcher may end before the process is gone."""
    post = sidecar.SidecarSpec(beats=str(tmp_path), folder=str(tmp_path), ranks=[0, 1], world=2, hang_seconds=5.0)
    failure.write(tmp_path, Failure(kind="killed", code=11, what=said, remedy="", details="", rank=0))
    found = sidecar._gone_soon(post, Looks(*looks))
    assert (None if found is None else found.rank) == gone
