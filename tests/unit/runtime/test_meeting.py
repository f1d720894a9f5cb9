"""Ranks that meet before torch is imported: who is beside whom, and what is said of one who is missing or strange."""

import os
import socket
import threading
import time

import msgspec
import pytest
from commands import free_port

from meshwright.runtime import meeting, run_folder
from meshwright.runtime.meeting import RankHello, RankWelcome, introduced, meet, named, opened, sealed
from meshwright.runtime.place import ALONE
from meshwright.spec.problem import InputError

KEY = b"k" * 32


def hello(rank, host="a", node="", local_rank=-1, cores=(0, 1), **rest):
    told = {"world": 4, "job": "", "session": f"{host}:{rank}", "folder": "/run"} | rest
    return RankHello(rank=rank, host=host, node=node, local_rank=local_rank, cores=cores, **told)


def gather(folders, patience=5.0, world=None, **changed):
    """Ranks in threads, one for each folder, and what each found or was told."""
    port, found = free_port(), {}

    def be(rank, folder):
        here = msgspec.structs.replace(
            ALONE, rank=rank, world=world or len(folders), address="127.0.0.1", port=port, launcher="mpi",
            is_told_local=False, is_told_threads=False, job=changed.get(f"job{rank}", ""),
        )  # fmt: skip
        said = []
        try:
            found[rank] = meet(here, folder, f"session{rank}", patience, said.append)
        except InputError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=be, args=one) for one in enumerate(folders) if one[1] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for met in found.values():
        if not isinstance(met, str) and met.place.listener >= 0:
            socket.socket(fileno=met.place.listener).close()
    return found


def test_ranks_of_one_machine_learn_their_numbers_there_and_rank_0_keeps_listening(tmp_path):
    found = gather([tmp_path] * 3)
    assert [found[rank].ranks for rank in range(3)] == [(0, 1, 2)] * 3
    assert [found[rank].place.local_rank for rank in range(3)] == [0, 1, 2]
    assert {found[rank].session for rank in range(3)} == {"session0"}
    assert [found[rank].place.listener >= 0 for rank in range(3)] == [True, False, False]
    assert not list(tmp_path.iterdir())  # the key is gone


def test_a_rank_that_never_starts_is_named_on_all_others(tmp_path):
    found = gather([tmp_path, tmp_path, None], patience=1.0)
    assert found[0] == found[1]
    assert "rank 2 did not come within 1 s; here: ranks 0 to 1 on" in found[0]


def test_another_run_folder_is_refused_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "STRANGE_SECONDS", 0.5)
    (tmp_path / "other").mkdir()
    found = gather([tmp_path, tmp_path / "other"])
    assert "rank 1 on" in found[0]
    assert f"it has {tmp_path / 'other'}" in found[0]
    assert "does not see this rank's run folder" in found[1]


def test_ranks_of_two_jobs_do_not_mix(tmp_path):
    found = gather([tmp_path, tmp_path], job0="slurm 7.0", job1="slurm 7.1")
    assert "rank 1 on" in found[0]
    assert "belongs to slurm 7.1, rank 0 to slurm 7.0" in found[0]
    assert found[1] == found[0]


def test_a_name_that_nobody_knows_is_told_by_every_rank(tmp_path):
    for rank in (0, 1):
        here = msgspec.structs.replace(ALONE, rank=rank, world=2, address="no.such.host.invalid", port=1)
        with pytest.raises(InputError, match="cannot be resolved"):
            meet(here, tmp_path, "", 0.2, print)


def test_a_name_that_leads_to_the_wrong_machine_is_told(tmp_path):
    """Many a machine's own list of hosts has a loopback address."""
    here = msgspec.structs.replace(ALONE, rank=1, world=2, address="localhost", port=free_port())
    with pytest.raises(
        InputError, match=r"does not meet rank 0 at localhost:\d+ \(.*, this machine itself\): .*refused"
    ):
        meet(here, tmp_path, "", 0.2, print)


def test_a_rank_whose_first_one_was_refused_the_folder_says_who_has_it(tmp_path):
    with run_folder.locked(tmp_path):  # by another job, so that rank 0 of this one has left
        told = gather([None, tmp_path], patience=0.5)[1]
    assert f"refused; {tmp_path} is in use by process {os.getpid()} on " in told
    assert "wait for it or name another --folder; else set MASTER_ADDR to" in told
    assert "in use" not in gather([None, tmp_path], patience=0.5)[1]


def test_a_port_that_another_has_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = msgspec.structs.replace(ALONE, world=2, address="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(InputError, match=r"rank 0 cannot listen at .*: address already in use"):
            meet(here, tmp_path, "", 1.0, print)


def test_strangers_at_the_door_do_not_hold_the_ranks_up(tmp_path):
    port, stop = free_port(), threading.Event()

    def knock():
        while not stop.is_set():
            with socket.socket() as wire:
                if wire.connect_ex(("127.0.0.1", port)) == 0:
                    wire.sendall(b"GET / HTTP/1.1\r\n\r\n" + sealed(hello(1), b"x" * 32))
            time.sleep(0.01)

    stranger = threading.Thread(target=knock)
    stranger.start()
    try:
        places = [msgspec.structs.replace(ALONE, rank=rank, world=2, address="127.0.0.1", port=port) for rank in (0, 1)]
        found = []
        ranks = [
            threading.Thread(target=lambda one=one: found.append(meet(one, tmp_path, "", 20.0, print)))
            for one in places
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    finally:
        stop.set()
        stranger.join()
    assert sorted(met.place.rank for met in found) == [0, 1]
    socket.socket(fileno=max(met.place.listener for met in found)).close()


def call(place, folder):
    """A rank that says who it is and waits to be heard, by hand."""
    key = folder / meeting.KEY
    while not key.exists():
        time.sleep(0.01)
    wire = socket.create_connection((place.address, place.port))
    wire.sendall(sealed(hello(place.rank, world=place.world, folder=str(folder)), key.read_bytes()))
    return wire


def test_a_rank_that_ends_while_others_are_awaited_may_be_started_again(tmp_path):
    places = [
        msgspec.structs.replace(ALONE, rank=rank, world=3, address="127.0.0.1", port=port)
        for port in [free_port()]
        for rank in range(3)
    ]
    found = {}
    first = threading.Thread(target=lambda: found.update({0: meet(places[0], tmp_path, "", 20.0, print)}))
    first.start()
    with call(places[1], tmp_path) as wire:
        assert b"heard" in wire.recv(4096)
    others = [
        threading.Thread(target=lambda one=one: found.update({one.rank: meet(one, tmp_path, "", 20.0, print)}))
        for one in places[1:]
    ]
    for other in others:
        other.start()
    for thread in (first, *others):
        thread.join()
    assert sorted(found) == [0, 1, 2]
    socket.socket(fileno=found[0].place.listener).close()


def test_two_of_one_number_are_told_to_all_three(tmp_path):
    port, found = free_port(), {}

    def be(rank, name):
        here = msgspec.structs.replace(ALONE, rank=rank, world=3, address="127.0.0.1", port=port)
        try:
            meet(here, tmp_path, "", 20.0, print)
        except InputError as error:
            found[name] = str(error)

    ranks = [threading.Thread(target=be, args=one) for one in ((0, "first"), (1, "one"), (1, "two"))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 3
    assert all("two processes say that they are rank 1" in said for said in found.values())


def test_a_folder_that_is_seen_late_is_waited_for_longer_than_a_missing_rank(tmp_path):
    """A machine may remember for a minute that there was no such folder."""
    real, late = tmp_path / "real", tmp_path / "late"
    real.mkdir()
    threading.Timer(2.0, late.symlink_to, [real]).start()
    found = gather([real, late], patience=0.5)
    assert [found[rank].ranks for rank in range(2)] == [(0, 1)] * 2


def test_machines_are_told_apart_however_ranks_are_numbered():
    cyclic = introduced([hello(rank, host="ab"[rank % 2], local_rank=rank // 2) for rank in range(4)])
    assert [cyclic[rank].ranks for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    one_host = introduced([hello(rank, node=str(rank // 2), local_rank=rank % 2) for rank in range(4)])
    assert [one_host[rank].ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    one_name = introduced([hello(rank, local_rank=rank % 2) for rank in range(4)])
    assert [one_name[rank].ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    pods = introduced([hello(rank, host="ab"[rank // 2]) for rank in range(4)])
    assert [pods[rank].ranks for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert pods[3].session == "b:2"


def test_bound_cores_are_a_ranks_own_and_shared_ones_are_divided():
    bound = introduced([hello(rank, cores=tuple(range(12 * rank, 12 * rank + 12))) for rank in range(4)])
    assert [bound[rank].threads for rank in range(4)] == [12] * 4
    shared = introduced([hello(rank, cores=tuple(range(12))) for rank in range(4)])
    assert [shared[rank].threads for rank in range(4)] == [3] * 4


def test_only_the_key_opens_a_message():
    line = sealed(RankWelcome(word="go", ranks=(0,)), KEY)
    assert opened(line, KEY, RankWelcome) == (RankWelcome(word="go", ranks=(0,)), True)
    assert opened(line, b"x" * 32, RankWelcome)[1] is False
    assert opened(sealed(RankWelcome(word="go"), b""), b"", RankWelcome)[1] is False  # no key is none
    assert opened(b"\xff" * 99, KEY, RankWelcome) == (None, False)


def test_ranks_in_words():
    assert [named([3]), named([4, 1, 6, 5, 7]), named([0, 1])] == ["rank 3", "ranks 1, 4 to 7", "ranks 0 to 1"]
