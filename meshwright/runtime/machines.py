"""Machines whose replicas can do without each other: who is there, who hears whom, and which of them decides.

Each machine keeps a file in the run folder, which all of them see, and writes it anew twice a second: its lease. Once a
job has begun they also send each other datagrams, so that a network that is cut is told from a machine that is gone. A
generation (runtime/generations.py) follows from the leases of those who are there. The lowest machine that is there
writes it down; should two think that they are the lowest, the file system lets one of them, and the other reads what
it wrote. So no machine must live for the others to go on, and none goes on that the others have given up.
"""

import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.runtime import generations
from meshwright.runtime.failure import Exit, Failure, this_session
from meshwright.runtime.files import replace_file, writing
from meshwright.runtime.generations import Generation, Roster, machine_replicas
from meshwright.runtime.links import own_address
from meshwright.runtime.meeting import named
from meshwright.runtime.nodes import (
    BEAT_SECONDS,
    KEY_BYTES,
    LATE_SECONDS,
    LOST_SECONDS,
    MOST_AT_ONCE,
    MOST_BYTES,
    Lost,
    Node,
    listening,
    opened,
    sealed,
)
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem, mistake

FOLDER, KEY, FOUNDERS, FAILED = ".machines", "key", "founders.json", "failed.json"
READ_SECONDS = 0.1  # between two looks at the others' leases
BROKEN_SECONDS = 3.0  # of silence of a machine when a group broke: then it is gone, and not merely late
SAY_SECONDS = 10.0  # after which who is missing is named, and again and again
HOLD_SECONDS = 1.0  # between two tries to hold the run folder
Say = Callable[[str], None]


class Seat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica on its machine."""

    replica: int
    start: int  # how often it was started again
    state: Literal["starting", "ready", "training", "ended"]


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine says of itself."""

    machine: int
    session: str  # of its launcher: another one is another life of the machine
    beat: int
    host: str
    life: int = 1  # of the machine: one more each time that it is started again
    address: str = ""  # where its datagrams are heard
    port: int = 0
    job: str = ""  # that it takes part in; "": it waits for one to begin
    seats: tuple[Seat, ...] = ()
    deaf_to: tuple[int, ...] = ()  # machines whose datagrams have ceased to come
    asks_out: tuple[int, ...] = ()  # by the one that decides: machines that are to leave, for others do not hear them
    ended: int | None = None  # its exit code
    failed: Failure | None = None  # for which all must end
    condemned: tuple[int, ...] = ()  # replicas that it knows to compute wrong numbers


class Founding(msgspec.Struct, frozen=True, kw_only=True):
    """With what a job began."""

    sessions: dict[str, str]  # of each machine
    condemned: tuple[int, ...] = ()  # replicas that have no part in it: their devices were found to be faulty


class MachineBeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A datagram: this machine can be heard."""

    machine: int
    session: str
    number: int  # grows: one that comes twice is heard once


class Neighbours:
    """What is known of the other machines, and since when. A lease that nobody renews is a file, and no machine."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.renewed: dict[int, float] = {}
        self.heard: dict[int, tuple[int, float]] = {}  # the number of the last datagram, and when
        self.looked: float | None = None
        self.disturbed = float("-inf")  # when a stranger's datagram came: few of them may take the room of ours

    def look(self, now: float) -> None:
        """Whoever was not looked at, because this machine itself slept, is not to blame."""
        if self.looked is not None and now - self.looked > LATE_SECONDS:
            self.renewed = dict.fromkeys(self.renewed, now)
            self.heard = {machine: (number, now) for machine, (number, _) in self.heard.items()}
        self.looked = now

    def read(self, lease: Lease, now: float) -> None:
        """A lease as it is now."""
        before = self.leases.get(lease.machine)
        if before is not None and (before.session, before.beat) != (lease.session, lease.beat):
            self.renewed[lease.machine] = now
        if before is not None and before.session != lease.session:
            self.heard.pop(lease.machine, None)
        self.leases[lease.machine] = lease

    def hear(self, beat: MachineBeat, now: float) -> None:
        """A datagram of a machine whose lease is known."""
        lease, last = self.leases.get(beat.machine), self.heard.get(beat.machine, (0, now))[0]
        if lease is not None and lease.session == beat.session and beat.number > last:
            self.heard[beat.machine] = beat.number, now

    def there(self, now: float, seconds: float = LOST_SECONDS) -> dict[int, Lease]:
        """Those of whom there was a sign not long ago, and who have not ended."""
        return {
            machine: lease
            for machine, lease in self.leases.items()
            if lease.ended is None and now - self._sign(machine) <= seconds
        }

    def silent_seconds(self, machine: int, now: float) -> float:
        """Since the last sign of a machine."""
        return now - self._sign(machine)

    def deaf_to(self, now: float) -> tuple[int, ...]:
        """Machines that are there, and whose datagrams have ceased to come; only who was heard once can be missed."""
        silent = {machine for machine, (_, at) in self.heard.items() if now - max(at, self.disturbed) > LOST_SECONDS}
        return tuple(sorted(silent & self.there(now).keys()))

    def _sign(self, machine: int) -> float:
        none = float("-inf")
        return max(self.renewed.get(machine, none), self.heard.get(machine, (0, none))[1])


def decided(current: Generation, leases: Mapping[int, Lease], most: int) -> Generation | None:
    """The generation that follows from the leases of those who are there; None: the one there is, or nobody's.

    Who was dropped is let in again only after another start: so one that the others have given up does not come back
    with what it had. Of those who are ready as many are let in as there are places, until somebody has ended.
    """
    every = [seat for lease in leases.values() for seat in lease.seats]
    seats = [seat for seat in every if seat.state in ("ready", "training")]
    most = 0 if any(seat.state == "ended" for seat in every) else most
    stay = [each for each in seats if each.replica in current.members and each.start == current.starts[each.replica]]
    ready = sorted((each for each in seats if each.start > current.starts[each.replica]), key=lambda each: each.replica)
    members, starts = [*stay, *ready[: max(most - len(stay), 0)]], list(current.starts)
    for seat in members:
        starts[seat.replica] = seat.start
    there = tuple(sorted(seat.replica for seat in members))
    told = Generation(number=current.number + 1, members=there, starts=tuple(starts))
    return None if not members or (told.members, told.starts) == (current.members, current.starts) else told


def apart(leases: Mapping[int, Lease]) -> set[int]:
    """Machines to do without so that all others hear each other: as few as can be found, the higher numbers first."""

    def hears(one: int, other: int) -> bool:
        return other not in leases[one].deaf_to and one not in leases[other].deaf_to

    best = set[int]()
    for first in sorted(leases):
        together = {first}
        for other in sorted(leases):
            if all(hears(other, each) for each in together):
                together.add(other)
        best = together if len(together) > len(best) else best
    return set(leases) - best


class Machines:
    """This machine among the others: its lease, which a thread renews, and what is known of theirs."""

    def __init__(
        self, machine: int, count: int, folder: Path, address: str, port: int, condemned: Collection[int] = ()
    ) -> None:
        self.machine, self.count, self.home = machine, count, folder / FOLDER
        self.neighbours, self.guard = Neighbours(), threading.Lock()
        own = own_address(address, port) or address
        # A machine may know its own name by a loopback address, where the others do not find it.
        is_named = ip_address(own.partition("%")[0]).is_loopback if _is_number(own) else False
        told = address if is_named and not _is_number(address) else own
        self.socket = _bound(told, port)
        self.file = self.home / f"machine.{machine}.json"
        before = self._require_alone()
        self.lease = Lease(
            machine=machine,
            session=f"{this_session()}:{secrets.token_hex(4)}",  # a pod may be the same process twice
            beat=1,
            host=socket.gethostname()[:64],
            life=before.life + 1 if before is not None else 1,
            address=told,
            port=self.socket.getsockname()[1],
            condemned=tuple(sorted(condemned)),
        )
        self.key, self.count_sent, self.next_beat = b"", 0, 0.0
        self.successor: Lease | None = None  # this machine is somebody else's now, who speaks for it
        self.closed = threading.Event()
        with writing(folder, "name another --folder"):
            self.home.mkdir(parents=True, exist_ok=True)
            self._write()
        self.thread = threading.Thread(target=self._live, name="lease", daemon=True)
        self.thread.start()

    def _require_alone(self) -> Lease | None:
        """Refuse to be a machine that is there already; what an earlier life of it has left."""
        before, deadline = _lease(self.file), time.monotonic() + 3 * BEAT_SECONDS
        while before is not None and before.ended is None and time.monotonic() < deadline:
            now = _lease(self.file)
            if now is not None and now.beat != before.beat:
                what = f"machine {self.machine} is there already, on {now.host}, and trains in {self.home.parent}"
                raise mistake(what, "give each machine a --node-rank of its own, or end the other one first")
            time.sleep(READ_SECONDS)
        return before

    def replaced(self) -> Problem | None:
        """That another process is this machine now: it was started while this one slept, or twice at once."""
        if (now := self.successor) is None:
            return None
        what = f"machine {self.machine} was started again on {now.host}, which trains in its place"
        return Problem(what, "nothing, where this one was given up; else give each machine a --node-rank of its own")

    @property
    def job(self) -> Path:
        """Where the machines of this job leave words."""
        return self.home / self.lease.job

    def tell(self, **changed: object) -> None:
        """Say something else of this machine, at once; on a disk that is full, with the next beat that finds room."""
        with self.guard:
            changed_lease = msgspec.structs.replace(self.lease, **changed)
            if changed_lease != self.lease:
                self.lease = changed_lease
                with suppress(OSError):
                    self._write()

    def others(self, seconds: float = LOST_SECONDS) -> dict[int, Lease]:
        """Machines that are there."""
        with self.guard:
            return self.neighbours.there(time.monotonic(), seconds)

    def of_job(self, seconds: float = LOST_SECONDS) -> dict[int, Lease]:
        """Those of them that take part in this job."""
        return {machine: each for machine, each in self.others(seconds).items() if each.job == self.lease.job}

    def meet(
        self, patience: float, claim: Callable[[], None], say: Say, after: str = "",
        is_over: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Begin a job when all are there, or join the one that is under way; whether it begins here.

        `patience`: seconds without a newcomer. `claim` is called by the one that begins it, before the others hear.
        `after`: a job that is over for all, though some may yet have to leave it. `is_over`: somebody has asked to end.
        """
        newest = said = time.monotonic()
        known: set[int] = set()
        while True:
            others, now = self.others(), time.monotonic()
            others = {each: lease for each, lease in others.items() if not after or lease.job != after}
            if (replaced := self.replaced()) is not None:
                raise InputError([replaced])
            if is_over():
                raise mistake("stopped while the machines met again", "run the same command again to resume")
            jobs = {lease.job for lease in others.values() if lease.job}
            if jobs:
                with suppress(OSError):  # it has just ended, and its key is gone
                    return self._join(sorted(jobs)[0])
            if refused := next((lease.failed for lease in self._failed() if lease.machine == 0), None):
                raise InputError([Problem(refused.what, refused.remedy)])
            if self.machine == 0 and len(others) == self.count - 1 and not jobs:
                claim()
                self._found(others)
                return True
            newest, known = (now, known | others.keys()) if others.keys() - known else (newest, known)
            missing = [each for each in range(self.count) if each not in others and each != self.machine]
            if now - newest > patience and missing:
                what = f"machine {', '.join(map(str, missing))} did not come within {patience:g} s"
                where = self.home.parent.absolute()
                raise mistake(what, f"start it with the same run folder ({where}), or raise faults.meet_seconds")
            if now - newest > patience and jobs:
                what = f"machine {', '.join(map(str, others))} trains, and its key in {self.home} is gone"
                raise mistake(what, "stop it (it saves a checkpoint), and start all machines again")
            if now - said > SAY_SECONDS and missing:
                said = now
                say(f"waiting for machine {', '.join(map(str, missing))} of {self.count}")
            time.sleep(READ_SECONDS)

    def refuse(self, error: InputError) -> None:
        """What is wrong with the run, to those who wait for it to begin."""
        text, remedy = ("; ".join(getattr(each, name) for each in error.problems) for name in ("text", "remedy"))
        self.tell(failed=Failure(kind="input", code=Exit.INPUT, what=text, remedy=remedy))

    def close(self, code: int, failed: Failure | None = None) -> None:
        """This machine has ended; `failed`: so must all others. Closing twice is no mistake."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.thread.join()
        with suppress(OSError):
            if failed is not None and self.lease.job:  # who begins anew at once has another lease before others look
                replace_file(self.job / FAILED, msgspec.json.encode(failed))
            self.tell(ended=code, failed=failed or self.lease.failed)
            with self.guard:  # who ended in the same moment: the last of them takes the key away
                self._read(time.monotonic())
            if self.lease.job and not self.of_job() and self.successor is None:
                (self.job / KEY).unlink(missing_ok=True)
            if not self.lease.job and not self.lease.failed and self.successor is None:
                self._leave_nothing()
        self.socket.close()

    def _leave_nothing(self) -> None:
        """Of a machine that no job ever had; the folders go with the last one's lease, unless they are a run's."""
        self.file.unlink(missing_ok=True)
        self.home.rmdir()
        self.home.parent.rmdir()

    def _failed(self) -> list[Lease]:
        with self.guard:
            # What an earlier start has left is no word of this one.
            known = [lease for machine, lease in self.neighbours.leases.items() if machine in self.neighbours.renewed]
            return [lease for lease in known if lease.failed and not lease.job]

    def _found(self, others: Mapping[int, Lease]) -> None:
        """Begin a job of those who are there. What earlier ones have left goes."""
        job = self.lease.session
        for entry in self.home.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
        place = self.home / job
        place.mkdir(mode=0o700)
        self.key = secrets.token_bytes(KEY_BYTES)
        replace_file(place / KEY, self.key, mode=0o600)
        leases = (self.lease, *others.values())
        condemned = tuple(sorted({each for lease in leases for each in lease.condemned}))
        sessions = {str(lease.machine): lease.session for lease in leases}
        replace_file(place / FOUNDERS, msgspec.json.encode(Founding(sessions=sessions, condemned=condemned)))
        self.tell(job=job, condemned=condemned)

    def _join(self, job: str) -> bool:
        place = self.home / job
        generations.look_again(place)
        self.key = (place / KEY).read_bytes()
        began = msgspec.json.decode((place / FOUNDERS).read_bytes(), type=Founding)
        self.tell(job=job, condemned=began.condemned)
        return began.sessions.get(str(self.machine)) == self.lease.session

    def _live(self) -> None:
        while not self.closed.wait(READ_SECONDS):
            now = time.monotonic()
            with suppress(OSError), self.guard:  # a file system that is away for a while: so are we
                self.neighbours.look(now)
                self._read(now)
                self._hear(now)
                self.lease = msgspec.structs.replace(self.lease, deaf_to=self.neighbours.deaf_to(now))
                if now >= self.next_beat:
                    self.next_beat = now + BEAT_SECONDS
                    self._send()
                    self._write()

    def _write(self) -> None:
        """Of two that are this machine the later life stays: the earlier one was given up, and slept."""
        there = _lease(self.file)
        if there is not None and (there.life, there.session) > (self.lease.life, self.lease.session):
            self.successor = there
        if self.successor is not None:
            return
        self.lease = msgspec.structs.replace(self.lease, beat=self.lease.beat + 1)
        replace_file(self.file, msgspec.json.encode(self.lease))

    def _read(self, now: float) -> None:
        generations.look_again(self.home)
        for machine in range(self.count):
            if machine == self.machine:
                continue
            if (lease := _lease(self.home / f"machine.{machine}.json")) is not None:
                self.neighbours.read(lease, now)

    def _hear(self, now: float) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                datagram, _ = self.socket.recvfrom(MOST_BYTES + 1)
            except OSError:
                return
            if (beat := opened(datagram, self.key, MachineBeat)) is not None:
                self.neighbours.hear(beat, now)
            else:
                self.neighbours.disturbed = now

    def _send(self) -> None:
        self.count_sent += 1
        beat = MachineBeat(machine=self.machine, session=self.lease.session, number=self.count_sent)
        for lease in self.neighbours.leases.values() if self.key else ():
            if lease.job == self.lease.job and lease.ended is None:
                with suppress(OSError):  # no way there: silence says so
                    self.socket.sendto(sealed(beat, self.key), (lease.address, lease.port))


def _is_number(address: str) -> bool:
    try:
        ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


def _lease(file: Path) -> Lease | None:
    """What is in a file; None: nothing that makes sense."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Lease)
    except (OSError, msgspec.DecodeError):
        return None


def _bound(address: str, port: int) -> socket.socket:
    """Where this machine hears datagrams: at its address and the job's port, or another one if that is taken."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        wire, place = socket.socket(family, socket.SOCK_DGRAM), listening(address, where)
        wire.setblocking(False)
        with suppress(OSError):
            wire.bind(place)
            return wire
        wire.bind((place[0], 0, *place[2:]))
        return wire
    except OSError as error:
        what = f"there is no way from this machine to {address}: {(error.strerror or str(error)).lower()}"
        raise mistake(what, "set --master to a name of the first machine that all others can reach") from None


class MachineRoster(Roster):
    """The roster of a machine of several: it speaks for its own replicas, and for all while it is the lowest there."""

    def __init__(self, machines: Machines, plan: Plan, hold: Callable[[], None], spares: int = 0) -> None:
        super().__init__(machines.job, plan, spares)
        self.machines, self.hold, self.held_at = machines, hold, 0.0
        self.generation = Generation(number=0, members=(), starts=(-1,) * len(self.ranks))
        able = set(range(len(self.ranks))) - set(machines.lease.condemned)
        self.here = able & set(machine_replicas(plan, machines.machine, machines.count, spares))
        self.first = sorted(able)[: self.most]  # who begin, with the state of a checkpoint or none
        self.begun, self.ended = set[int](), set[int]()  # of these
        self.lost: list[Lost] = []  # machines, to be told of
        self.missed: set[tuple[int, str]] = set()  # those that were

    def begin(self) -> None:
        """All are there: each says so of its own, and one of them for all; spares are yet to be ready."""
        self.away = self.here - set(self.first)
        self.starts = [int(each not in self.first) for each in range(len(self.ranks))]
        self._tell()
        self._follow()

    def join(self) -> None:
        """These have been here before, and come back without a state."""
        self._follow()
        if not self.number:  # the others wait for this machine's word to begin
            self.begin()
            return
        for replica in self.here:
            self.starts[replica] = self.generation.starts[replica] + 1
            # An earlier life that was never let in has left a file under its number.
            while self._is_ready(replica):
                self.starts[replica] += 1
        self.away = set(self.here)
        self._tell()

    def leave(self, replica: int) -> None:
        self.ended.add(replica)
        self._tell()

    def look(self, now: float, begun: set[int]) -> list[int]:
        """Hear who trains together, say what has become of this machine's replicas, and decide where that is ours."""
        self._follow()
        self.begun = set(begun)
        ready = self._ready()
        self.away -= set(ready)
        self.idle = self.here - self.away - self.members - self.ended if self.number else set()
        self._tell()
        self._miss(now)
        there = self.machines.of_job(BROKEN_SECONDS if self._has_broken() else LOST_SECONDS)
        is_over = not self.begun and bool(self.ended_elsewhere())
        if not is_over and (not there or self.machines.machine < min(there)):
            self._decide({**there, self.machines.machine: self.machines.lease}, now)
        else:
            self.machines.tell(asks_out=())
        return ready

    def left_out(self) -> set[int]:
        """Replicas of this machine that the others go on without, though they are here."""
        here = {each for each in self.here - self.away - self.ended if self.number}
        asked = any(self.machines.machine in lease.asks_out for lease in self.machines.of_job().values())
        dropped = {each for each in here - self.members if self.starts[each] == self.generation.starts[each]}
        return dropped | (here & self.members if asked else set())

    def may_start(self) -> bool:
        """Whether all who are there hear each other, as far as this machine is concerned."""
        own, others = self.machines.machine, self.machines.of_job()
        deaf = [each for each in others.values() if own in each.deaf_to or own in each.asks_out]
        return not deaf and not self.machines.lease.deaf_to

    def train_elsewhere(self) -> bool:
        return any(seat.state == "training" for lease in self.machines.of_job().values() for seat in lease.seats)

    def replaced(self) -> Failure | None:
        """That this machine is another process by now."""
        problem = self.machines.replaced()
        return problem and Failure(kind="input", code=Exit.INPUT, what=problem.text, remedy=problem.remedy)

    def failed_elsewhere(self) -> Failure | None:
        """What ended another machine, and ends all."""
        with self.machines.guard:
            leases = list(self.machines.neighbours.leases.values())
        told = [lease.failed for lease in leases if lease.failed and lease.job == self.machines.lease.job]
        with suppress(OSError, msgspec.DecodeError):
            told.append(msgspec.json.decode((self.folder / FAILED).read_bytes(), type=Failure))
        return next(iter(told), None)

    def ended_elsewhere(self) -> list[int]:
        """The exit codes of machines of this job, once none of them is left; nothing before."""
        if self.machines.of_job():
            return []
        with self.machines.guard:
            leases = self.machines.neighbours.leases.values()
            return [each.ended for each in leases if each.ended is not None and each.job == self.machines.lease.job]

    def take_lost(self) -> list[Lost]:
        """Machines that have gone since this was last asked."""
        lost, self.lost = self.lost, []
        return lost

    def _drop(self, replicas: set[int]) -> None:
        self._tell()

    def _follow(self) -> None:
        """Hear of the newest generation."""
        if (newest := generations.current(self.folder, self.number)) is not None:
            self.generation, self.number = newest, newest.number
            self.members, self.broken_since = set(newest.members), 0.0

    def _tell(self) -> None:
        """Say how the replicas of this machine are."""
        seats = tuple(
            Seat(replica=each, start=self.starts[each], state=self._state(each)) for each in sorted(self.here)
        )
        self.machines.tell(seats=seats)

    def _state(self, replica: int) -> Literal["starting", "ready", "training", "ended"]:
        if replica in self.ended:
            return "ended"
        if replica in self.away:
            return "starting"
        return "training" if replica in self.begun else "ready"

    def _has_broken(self) -> bool:
        return generations.broken_file(self.folder, self.number).exists()

    def _miss(self, now: float) -> None:
        """Note machines of this job that have gone without a word."""
        there = self.machines.of_job()
        with self.machines.guard:
            known, neighbours = dict(self.machines.neighbours.leases), self.machines.neighbours
            for machine, lease in known.items():
                is_ours = lease.job == self.machines.lease.job and lease.ended is None
                if not is_ours or machine in there or (machine, lease.session) in self.missed:
                    continue
                self.missed.add((machine, lease.session))
                self.lost.append(Lost(node=self._node(lease), seconds=neighbours.silent_seconds(machine, now)))

    def _node(self, lease: Lease) -> Node:
        ranks = sorted(rank for seat in lease.seats for rank in self.ranks[seat.replica])
        return Node(first=ranks[0], ranks=len(ranks), host=lease.host, listed=named(ranks))

    def _decide(self, there: Mapping[int, Lease], now: float) -> None:
        """Begin the generation that follows from the leases, once who cannot be heard has left."""
        if now - self.held_at > HOLD_SECONDS:
            self.held_at = now
            self.hold()
        with_members = {each: lease for each, lease in there.items() if self._has_member(lease.seats)}
        self.machines.tell(asks_out=tuple(sorted(apart(with_members))))
        told = decided(self.generation, there, self.most)
        if told is None and self._is_broken(now) and not self._is_anybody_late(there):
            told = msgspec.structs.replace(self.generation, number=self.number + 1)
        # The first one waits for all who have a state.
        if told is not None and (self.number or told.members == tuple(self.first)):
            with suppress(OSError):  # no room: the same follows when there is
                generations.publish(self.folder, told)
            self._follow()

    def _has_member(self, seats: Collection[Seat]) -> bool:
        return any(seat.replica in self.members and seat.state in ("ready", "training") for seat in seats)

    def _is_anybody_late(self, there: Mapping[int, Lease]) -> bool:
        """Whether a machine has been silent for longer than usual: it may be what broke the group."""
        return there.keys() != {*self.machines.of_job(3 * BEAT_SECONDS), self.machines.machine}
