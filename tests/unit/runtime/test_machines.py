"""Machines that go on without one another: who is there, who hears whom, and what follows for the generations."""

import errno
import socket
import threading

import msgspec
import pytest
from waiting import until

from meshwright.runtime import generations, machines
from meshwright.runtime.failure import Exit, Failure
from meshwright.runtime.generations import Generation, machine_replicas
from meshwright.runtime.machines import (
    FOLDER,
    Lease,
    MachineBeat,
    MachineRoster,
    Machines,
    Neighbours,
    Seat,
    apart,
    decided,
)
from meshwright.runtime.nodes import LATE_SECONDS, LOST_SECONDS
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, mistake

NOBODY = Generation(number=0, members=(), starts=(-1, -1, -1, -1))


def lease(machine, *seats, **about):
    own = tuple(Seat(replica=replica, start=start, state=state) for replica, start, state in seats)
    return Lease(**{"machine": machine, "session": "a", "beat": 1, "host": "h", "job": "j", "seats": own} | about)


FIRST = lease(0, (0, 0, "ready"), (1, 0, "ready"))
SECOND = lease(1, (2, 0, "ready"), (3, 0, "ready"))


def test_all_who_are_there_begin_and_nothing_follows_from_the_same_leases():
    begun = decided(NOBODY, {0: FIRST, 1: SECOND}, 4)
    assert (begun.number, begun.members, begun.starts) == (1, (0, 1, 2, 3), (0, 0, 0, 0))
    assert decided(begun, {1: SECOND, 0: FIRST}, 4) is None


def test_a_machine_that_is_gone_takes_its_replicas_and_comes_back_only_after_another_start():
    begun = decided(NOBODY, {0: FIRST, 1: SECOND}, 4)
    alone = decided(begun, {1: SECOND}, 4)
    assert (alone.members, alone.starts) == ((2, 3), (0, 0, 0, 0))
    assert decided(alone, {0: FIRST, 1: SECOND}, 4) is None  # it has what it had, and the others went on without it
    again = decided(alone, {0: lease(0, (0, 1, "starting"), (1, 1, "ready")), 1: SECOND}, 4)
    assert (again.members, again.starts) == ((1, 2, 3), (0, 1, 0, 0))


def test_a_replica_that_was_started_again_before_anybody_looked_is_another_one():
    begun = decided(NOBODY, {0: FIRST, 1: SECOND}, 4)
    after = decided(begun, {0: FIRST, 1: lease(1, (2, 0, "training"), (3, 1, "ready"))}, 4)
    assert after.members == begun.members
    assert after.lost_since(begun) == after.back_since(begun) == [3]


def test_who_cannot_be_heard_is_done_without_and_most_stay_together():
    assert apart({0: FIRST, 1: SECOND}) == set()
    deaf = msgspec.structs.replace(SECOND, deaf_to=(0,))
    assert apart({0: FIRST, 1: deaf}) == {1}
    assert apart({0: FIRST, 1: deaf, 2: lease(2, deaf_to=(0,))}) == {0}


def test_a_lease_that_nobody_renews_is_no_machine():
    known = Neighbours()
    known.read(SECOND, 0.0)
    assert not known.there(0.0)
    known.read(msgspec.structs.replace(SECOND, beat=2), 1.0)
    assert list(known.there(1.0)) == [1]
    assert not known.there(1.1 + LOST_SECONDS)
    known.read(msgspec.structs.replace(SECOND, beat=3, ended=0), 2.0)
    assert not known.there(2.0)


def test_a_machine_that_is_there_and_no_longer_heard_is_told_from_one_that_never_was():
    known = Neighbours()
    for now in range(1, 2 + int(2 * LOST_SECONDS)):
        known.look(float(now))
        for machine in (SECOND, lease(2)):
            known.read(msgspec.structs.replace(machine, beat=now), float(now))
        if now < LOST_SECONDS:
            known.hear(MachineBeat(machine=1, session="a", number=now), float(now))
    assert known.deaf_to(float(now)) == (1,)
    known.hear(MachineBeat(machine=1, session="another", number=99), float(now))
    known.hear(MachineBeat(machine=1, session="a", number=1), float(now))  # which was heard before
    assert known.deaf_to(float(now)) == (1,)


def test_nobody_is_missed_by_a_machine_that_slept_itself():
    known = Neighbours()
    for beat, now in ((1, 0.0), (2, 1.0)):
        known.look(now)
        known.read(msgspec.structs.replace(SECOND, beat=beat), now)
    known.look(2.0 + LATE_SECONDS + LOST_SECONDS)
    assert known.there(2.0 + LATE_SECONDS + LOST_SECONDS)


def test_machines_have_whole_replicas():
    assert list(machine_replicas(Plan(microbatch=1, replicate=4, shard=2), 1, 2)) == [2, 3]
    assert list(machine_replicas(Plan(microbatch=1, replicate=4), 2, 3, spares=2)) == [4, 5]


def test_nobody_comes_in_once_somebody_has_ended():
    begun = decided(NOBODY, {0: FIRST, 1: SECOND}, 4)
    ended = lease(0, (0, 0, "ended"), (1, 0, "training"))
    after = decided(begun, {0: ended, 1: lease(1, (2, 0, "training"), (3, 1, "ready"))}, 4)
    assert after.members == (1, 2)


def meeting(machine, tmp_path, met_as, **after):
    """A machine that waits for the others in a thread of its own; what became of it is in `met_as`."""
    own = Machines(machine, 2, tmp_path, "127.0.0.1", 0, condemned=after.pop("condemned", ()))

    def meet():
        try:
            met_as[machine] = own.meet(60.0, lambda: None, lambda text: None, **after)
        except InputError as error:
            met_as[machine] = str(error)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    return own, thread


def test_machines_begin_again_without_what_one_of_them_knows_to_be_faulty(tmp_path):
    """One has left the job and waits; the other finds the failure in the job's folder, for its lease says no more."""
    began, again = {}, {}
    (first, one), (second, other) = (meeting(machine, tmp_path, began) for machine in (0, 1))
    one.join()
    other.join()
    assert began == {0: True, 1: True}
    plan, job = Plan(microbatch=1, replicate=1), first.lease.job
    roster = MachineRoster(first, plan, lambda: None, spares=1)
    assert (roster.here, roster.first) == ({0}, [0])
    failed = Failure(kind="matmul", code=Exit.HARDWARE, what="rank 0 computes wrong matmuls", rank=0)
    second.close(Exit.HARDWARE, failed)
    second, other = meeting(1, tmp_path, again, after=job, condemned={0})
    until(lambda: 1 in first.others(), "it is there again")
    assert other.is_alive()  # the first is still in the job that is over
    assert roster.failed_elsewhere() == failed
    first.close(Exit.HARDWARE, failed)
    first, one = meeting(0, tmp_path, again, after=job)
    one.join()
    other.join()
    assert again == {0: True, 1: True}
    assert first.lease.job == second.lease.job != job
    rosters = [MachineRoster(each, plan, lambda: None, spares=1) for each in (first, second)]
    assert [(each.here, each.first) for each in rosters] == [(set(), [1]), ({1}, [1])]
    assert rosters[0].failed_elsewhere() is None
    for each in (first, second):
        each.close(Exit.DONE)


def test_machines_that_meet_again_heed_a_request_to_end(tmp_path):
    found = {}
    alone, thread = meeting(0, tmp_path, found, after="j", is_over=lambda: True)
    thread.join()
    alone.close(Exit.FAILED)
    assert "stopped while the machines met again" in found[0]


def test_a_spare_machine_waits_until_there_is_a_place():
    spare = lease(2, (4, 1, "ready"), (5, 1, "ready"))
    nobody = msgspec.structs.replace(NOBODY, starts=(-1,) * 6)
    begun = decided(nobody, {0: FIRST, 1: SECOND, 2: spare}, 4)
    assert begun.members == (0, 1, 2, 3)
    assert decided(begun, {0: FIRST, 1: SECOND, 2: spare}, 4) is None
    after = decided(begun, {1: SECOND, 2: spare}, 4)
    assert (after.members, after.starts) == ((2, 3, 4, 5), (0, 0, 0, 0, 1, 1))
    back = lease(0, (0, 1, "ready"), (1, 1, "ready"))
    assert decided(after, {0: back, 1: SECOND, 2: spare}, 4) is None  # it is the spare now


@pytest.fixture
def two(tmp_path):
    both = [Machines(number, 2, tmp_path, "127.0.0.1", 0) for number in (0, 1)]
    yield both
    for machine in both:
        machine.close(1)


def met(both):
    """As two launchers meet: the first begins the job, the other hears of it."""
    claimed = list[bool]()
    both[0].meet(60.0, lambda: claimed.append(True), print)
    assert claimed
    return [both[1].meet(60.0, lambda: None, print)]


def test_the_lowest_machine_decides_and_the_next_one_when_it_is_gone(two, tmp_path):
    assert met(two) == [True]
    plan = Plan(microbatch=1, replicate=2)
    held = list[int]()
    first, second = (MachineRoster(each, plan, lambda each=each: held.append(each.machine)) for each in two)
    for roster in (first, second):
        roster.begin()
    until(lambda: first.look(9.0, {0}) or first.number == 1, "the first generation")
    until(lambda: second.look(9.0, {1}) or second.members == {0, 1}, "the other hears of it")
    assert not first.left_out() | second.left_out()
    assert first.may_start()
    until(first.train_elsewhere, "the second trains")
    two[0].close(11)  # as when it is gone, but at once
    until(lambda: second.look(9.0, {1}) or second.members == {1}, "the second decides")
    assert held[-1] == 1
    assert second.generation.starts == (0, 0)
    back = Machines(0, 2, tmp_path, "127.0.0.1", 0)
    try:
        assert back.meet(60.0, lambda: None, print) is False
        returned = MachineRoster(back, plan, lambda: None)
        returned.join()
        assert returned.starts[0] == 1
        generations.touch(generations.ready_file(returned.folder, 0, 1))
        until(lambda: returned.look(9.0, set()) or returned.members == {0, 1}, "it is let in again")
        assert returned.generation.starts == (1, 0)
    finally:
        back.close(0)


def test_who_was_left_out_is_told_and_asked_to_leave(two):
    met(two)
    plan = Plan(microbatch=1, replicate=2)
    first, second = (MachineRoster(each, plan, lambda: None) for each in two)
    for roster in (first, second):
        roster.begin()
    until(lambda: first.look(9.0, {0}) or first.number == 1, "the first generation")
    second.look(9.0, {1})
    two[0].tell(asks_out=(1,))
    until(second.left_out, "the second is asked to leave")
    assert second.left_out() == {1}
    assert not second.may_start()
    two[0].tell(asks_out=())
    generations.publish(second.folder, Generation(number=second.number + 1, members=(0,), starts=(0, 0)))
    second.look(9.0, {1})
    assert second.left_out() == {1}
    second.lose({1}, trained={1})
    assert not second.left_out()


def test_a_machine_that_does_not_come_is_named(tmp_path):
    alone = Machines(0, 2, tmp_path, "127.0.0.1", 0)
    try:
        with pytest.raises(InputError, match=r"machine 1 did not come within 0\.2 s"):
            alone.meet(0.2, lambda: None, print)
    finally:
        alone.close(2)


def test_what_the_first_machine_refuses_is_told_on_all(two):
    until(two[1].others, "the second knows of the first")
    two[0].refuse(mistake("the folder is in use", "wait for it"))
    two[0].close(2)
    with pytest.raises(InputError, match="the folder is in use"):
        two[1].meet(60.0, lambda: None, print)


def test_a_machine_that_is_there_already_is_not_started_twice(two, tmp_path):
    with pytest.raises(InputError, match="machine 1 is there already"):
        Machines(1, 2, tmp_path, "127.0.0.1", 0)
    with pytest.raises(InputError, match=r"no way from this machine to nowhere\.invalid"):
        Machines(0, 2, tmp_path / "other", "nowhere.invalid", 0)


def test_of_two_that_are_one_machine_the_later_life_stays(two, tmp_path):
    """As when one slept until it was given up and started elsewhere; or both were started at once."""
    met(two)
    file = tmp_path / FOLDER / "machine.1.json"
    later = lease(1, life=2, session="later", host="elsewhere")
    file.write_bytes(msgspec.json.encode(later))
    until(two[1].replaced, "it hears of the other")
    with pytest.raises(InputError, match="machine 1 was started again on elsewhere"):
        two[1].meet(60.0, lambda: None, print)
    two[1].tell(host="here")
    two[1].close(0)
    assert msgspec.json.decode(file.read_bytes(), type=Lease) == later
    assert two[0].replaced() is None


def test_a_full_disk_is_waited_for(two, tmp_path, monkeypatch):
    met(two)
    roster = MachineRoster(two[0], Plan(microbatch=1, replicate=2), lambda: None)
    other = MachineRoster(two[1], Plan(microbatch=1, replicate=2), lambda: None)

    def refuse(*about, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(machines, "replace_file", refuse)
        full.setattr(generations, "publish", refuse)
        for each in (roster, other):
            each.begin()
        roster.look(9.0, set())
        assert roster.number == 0
    until(lambda: roster.look(9.0, set()) or roster.number == 1, "what was to be said is said when there is room")


def test_strangers_datagrams_make_nobody_deaf(two):
    """They may take the room of a machine's own: that it is not heard among them is no sign that it is cut off."""
    neighbours = Neighbours()
    for beat in (1, 2):
        neighbours.read(lease(1, beat=beat), 0.1 * beat)
    neighbours.hear(MachineBeat(machine=1, session="a", number=1), 0.2)
    neighbours.read(lease(1, beat=3), LOST_SECONDS)
    assert neighbours.deaf_to(LOST_SECONDS + 1) == (1,)
    neighbours.disturbed = LOST_SECONDS
    assert neighbours.deaf_to(LOST_SECONDS + 1) == ()
    assert not neighbours.there(2 * LOST_SECONDS + 1)  # nor is it a sign of life
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x", (two[0].lease.address, two[0].lease.port))
        until(lambda: two[0].neighbours.disturbed > 0, "it hears of a stranger")


def test_a_job_whose_key_is_gone_is_not_joined(two, tmp_path):
    met(two)
    (two[1].job / "key").unlink()
    two[0].close(0)
    late = Machines(0, 2, tmp_path, "127.0.0.1", 0)
    try:
        until(late.others, "the other is there")
        with pytest.raises(InputError, match=r"machine 1 trains, and its key .* is gone"):
            late.meet(0.2, pytest.fail, print)
    finally:
        late.close(0)


def test_one_generation_of_a_number_is_begun_whoever_tries(tmp_path):
    told = Generation(number=1, members=(0,), starts=(0,))
    assert generations.publish(tmp_path, told)
    assert not generations.publish(tmp_path, msgspec.structs.replace(told, members=()))
    assert generations.current(tmp_path) == told
    assert [file.name for file in tmp_path.iterdir()] == ["generation.1"]


def test_no_secret_stays_in_the_run_folder(two, tmp_path):
    met(two)
    assert list((tmp_path / FOLDER).glob("*/key"))
    for machine in two:
        machine.close(0)
    assert not list((tmp_path / FOLDER).glob("*/key"))
