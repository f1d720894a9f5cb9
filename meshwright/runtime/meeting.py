"""The ranks of a job meet before any imports torch: who is here, on which machine, of which job, in which run folder.

Rank 0 listens where torch's store will be; the others say who they are, and are told who is beside them, or what is
wrong, all at once. Messages carry a digest whose key is a file that rank 0 has put into the run folder: a rank that
sees another folder, or belongs to another job, cannot make it. Torch's store then takes over the same socket.
"""

import hashlib
import hmac
import os
import resource
import secrets
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from meshwright.runtime import run_folder
from meshwright.runtime.files import replace_file
from meshwright.runtime.nodes import listening
from meshwright.runtime.place import Place
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, mistake

KEY = "meeting.key"
KEY_BYTES, SEAL_BYTES = 32, 32
MOST_BYTES = 1 << 20  # of a message; the largest names the ranks of one machine
LOOK_SECONDS = 0.1
SPARE_FILES = 1024  # that a rank opens besides
RETRY_SECONDS = 0.3
SAY_SECONDS = 10.0  # after which who is missing is named, and again and again
CALL_SECONDS = 10.0  # in which whoever is called answers
STRANGE_SECONDS = 75.0  # in which a rank may still find the key: NFS remembers for a minute that a file was not there
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine without power is known after 25 s
Say = Callable[[str], None]


class RankHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says of itself."""

    rank: int
    world: int
    job: str
    host: str
    node: str
    local_rank: int  # -1: nobody told it
    cores: tuple[int, ...]
    session: str  # of its launcher
    folder: str


class RankWelcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rank 0 answers: that it has heard, that all are here, or what is wrong."""

    word: Literal["heard", "go", "no"]
    ranks: tuple[int, ...] = ()  # of the same machine, in their order there
    session: str = ""  # that the ranks of the same machine share
    threads: int = 1
    problems: tuple[Problem, ...] = ()


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows when all have met."""

    place: Place
    ranks: tuple[int, ...]  # of this machine
    session: str


def meet(place: Place, folder: Path, session: str, patience: float, say: Say) -> Met:
    """Meet the other ranks, or raise what is wrong on all of them; `patience`: seconds without a newcomer."""
    told = place.local_rank if place.is_told_local else -1
    mine = RankHello(
        rank=place.rank,
        world=place.world,
        job=place.job,
        host=socket.gethostname()[:64],
        node=place.node,
        local_rank=told,
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else (),
        session=session,
        folder=str(folder.absolute()),
    )
    if place.rank == 0:
        answer, descriptor = Host(place, mine, folder, patience, say).gather()
    else:
        answer, descriptor = Guest(place, mine, folder, patience, say).join(), -1
    known = {"local_rank": answer.ranks.index(place.rank), "local_world": len(answer.ranks), "listener": descriptor}
    threads = place.threads if place.is_told_threads else answer.threads
    return Met(
        place=msgspec.structs.replace(place, **known, threads=threads), ranks=answer.ranks, session=answer.session
    )


class Host:
    """Rank 0's side."""

    def __init__(self, place: Place, mine: RankHello, folder: Path, patience: float, say: Say) -> None:
        self.place, self.patience, self.say = place, patience, say
        self.key, self.file = secrets.token_bytes(KEY_BYTES), folder / KEY
        self.here: dict[int, tuple[RankHello, socket.socket | None]] = {0: (mine, None)}
        self.strange: dict[int, tuple[RankHello, float]] = {}  # who could not show the key, and since when
        self.twice: list[Problem] = []
        self.reading: dict[socket.socket, bytes] = {}
        self.wires = (
            selectors.DefaultSelector()
        )  # which counts no further than there are ranks; select() stops at 1,024
        self.newest = self.said = time.monotonic()

    def gather(self) -> tuple[RankWelcome, int]:
        """Until all are here; the answer to rank 0 itself, and the socket that others will look for a store at."""
        listener = listen(self.place.address, self.place.port, self.patience)
        self.wires.register(listener, selectors.EVENT_READ)
        allow_files(self.place.world + SPARE_FILES)
        replace_file(self.file, self.key, mode=0o600)
        try:
            while len(self.here) < self.place.world:
                self._look(listener)
                if problems := self._problems():
                    raise InputError(problems)
            answers = introduced([hello for hello, _ in self.here.values()])
            for rank, (_, wire) in self.here.items():
                _send(wire, answers[rank], self.key)
            return answers[0], listener.detach()
        except InputError as error:
            for _, wire in self.here.values():
                _send(wire, RankWelcome(word="no", problems=tuple(error.problems)), self.key)
            raise
        finally:
            self.file.unlink(missing_ok=True)
            self.wires.close()
            for wire in (*self.reading, *(wire for _, wire in self.here.values() if wire is not None)):
                wire.close()
            listener.close()

    def _look(self, listener: socket.socket) -> None:
        for key, _ in self.wires.select(LOOK_SECONDS):
            if key.fileobj is listener:
                with suppress(OSError):
                    wire = kept_alive(listener.accept()[0])
                    self.reading[wire] = b""
                    self.wires.register(wire, selectors.EVENT_READ)
            else:
                self._read(cast(socket.socket, key.fileobj))
        now = time.monotonic()
        if now - max(self.newest, self.said) > SAY_SECONDS:
            self.said = now
            blind = sorted(rank for rank in self.strange if rank not in self.here)
            yet = f"; {named(blind)} cannot see {self.file.parent} yet" if blind else ""
            self.say(f"waiting for {named(self._missing())}; here: {self._present()}{yet}")

    def _read(self, wire: socket.socket) -> None:
        try:
            more = wire.recv(65536)
        except OSError:
            more = b""
        if wire not in self.reading:
            self._forget(wire, more)
            return
        self.reading[wire] += more
        is_over = not more or len(self.reading[wire]) > MOST_BYTES
        if is_over or b"\n" in self.reading[wire]:
            line = self.reading.pop(wire)
            if is_over or not self._hear(wire, line):
                self.wires.unregister(wire)
                wire.close()

    def _forget(self, wire: socket.socket, more: bytes) -> None:
        """A rank that was here has ended, and may be started again; before all are here, none has more to say."""
        if more:
            return
        self.wires.unregister(wire)
        rank = next(rank for rank, (_, known) in self.here.items() if known is wire)
        del self.here[rank]
        wire.close()
        self.newest = time.monotonic()

    def _hear(self, wire: socket.socket, line: bytes) -> bool:
        """Somebody at the door: one of ours, who stays, one of ours with another folder, or anybody."""
        hello, is_ours = opened(line, self.key, RankHello)
        if hello is not None and is_ours:
            self.strange.pop(hello.rank, None)
            first = self.here.get(hello.rank, (hello, None))[1]
            if first is not None and _has_left(first):
                self._forget(first, b"")
            if hello.rank in self.here:
                self.twice.append(self._twice(hello))
                _send(wire, RankWelcome(word="no", problems=tuple(self.twice)), self.key)
                return False
            self.newest = time.monotonic()
            self.here[hello.rank] = hello, wire
            _send(wire, RankWelcome(word="heard"), self.key)
            return True
        # Of a rank that is here already, whoever has no key is of another job, and changes nothing.
        if hello is not None and 0 < hello.rank < self.place.world and hello.rank not in self.here:
            since = self.strange.get(hello.rank, (hello, time.monotonic()))[1]
            self.strange[hello.rank] = hello, since
        return False

    def _twice(self, hello: RankHello) -> Problem:
        hosts = f"{self.here[hello.rank][0].host} and on {hello.host}"
        return Problem(f"two processes say that they are rank {hello.rank}, on {hosts}", "start every rank once")

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.place.world) if rank not in self.here]

    def _present(self) -> str:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank, (hello, _) in sorted(self.here.items()):
            hosts[hello.host].append(rank)
        return "; ".join(f"{named(ranks)} on {host}" for host, ranks in hosts.items())

    def _problems(self) -> list[Problem]:
        """What cannot heal by waiting."""
        found, now, mine = [*self.twice], time.monotonic(), self.here[0][0]
        for hello, _ in self.here.values():
            if hello.world != mine.world:
                what = f"rank {hello.rank} on {hello.host} was started as one of {hello.world}, rank 0 of {mine.world}"
                found.append(Problem(what, "start all ranks by one command"))
            elif hello.job != mine.job:
                jobs = f"{hello.job or 'another job'}, rank 0 to {mine.job or 'another'}"
                what = f"rank {hello.rank} on {hello.host} belongs to {jobs}"
                found.append(Problem(what, "wait for the other job, or set another MASTER_PORT"))
        for hello, since in self.strange.values():
            if now - since > STRANGE_SECONDS:
                what = f"rank {hello.rank} on {hello.host} does not see the run folder of rank 0, {mine.folder}"
                found.append(Problem(f"{what}: it has {hello.folder}", "name one --folder that all machines see"))
        if not found and not self.strange and now - self.newest > self.patience:
            what = f"{named(self._missing())} did not come within {self.patience:g} s; here: {self._present()}"
            where = f"{self.place.address}:{self.place.port}"
            remedy = f"see why they did not start, or cannot reach {where}, or raise faults.meet_seconds"
            found.append(Problem(what, remedy))
        return found


class Guest:
    """The side of every other rank."""

    def __init__(self, place: Place, mine: RankHello, folder: Path, patience: float, say: Say) -> None:
        self.place, self.mine, self.patience, self.say = place, mine, patience, say
        self.file = folder / KEY
        self.began = time.monotonic()
        self.strange_since = 0.0  # when somebody first answered who is not our rank 0
        self.why = ""

    def join(self) -> RankWelcome:
        """Until rank 0 says that all are here."""
        while True:
            answer = self._try()
            if answer is not None and answer.word == "no":
                raise InputError(list(answer.problems))
            if answer is not None:
                return answer
            now = time.monotonic()
            began, patience = (
                (self.strange_since, STRANGE_SECONDS) if self.strange_since else (self.began, self.patience)
            )
            if now - began > patience:
                where = f"{self.place.address}:{self.place.port}{_is_here(self.place.address)}"
                what = f"rank {self.place.rank} on {self.mine.host} does not meet rank 0 at {where}: {self.why}"
                raise self._alone(what)
            time.sleep(RETRY_SECONDS)

    def _alone(self, what: str) -> InputError:
        """What to do about a rank 0 that is not met: in a folder that somebody holds it may have been refused."""
        remedy = "set MASTER_ADDR to a name of rank 0's machine that all others can reach"
        if holder := run_folder.holder(self.file.parent):
            what = f"{what}; {self.file.parent} is in use by {holder}"
            remedy = f"if that is another job, wait for it or name another --folder; else {remedy}"
        return mistake(what, remedy)

    def _try(self) -> RankWelcome | None:
        """One call: the last answer; None: nobody was there, and why."""
        key = b""
        with suppress(OSError):
            key = self.file.read_bytes()[:KEY_BYTES]
        try:
            wire = kept_alive(socket.create_connection((self.place.address, self.place.port), timeout=CALL_SECONDS))
        except OSError as error:
            if not self.strange_since:
                is_name = isinstance(error, socket.gaierror)
                self.why = "that name cannot be resolved" if is_name else (error.strerror or str(error)).lower()
            return None
        with wire, suppress(OSError):
            wire.sendall(sealed(self.mine, key))
            return self._answer(wire, key)
        self.why = self.why or "the connection broke"
        return None

    def _answer(self, wire: socket.socket, key: bytes) -> RankWelcome | None:
        """What rank 0 says, however long it waits for others; it must be heard to be ours soon."""
        lines, is_known = b"", False
        while True:
            try:
                more = wire.recv(65536)
            except OSError as error:
                if is_known and isinstance(error, TimeoutError):
                    continue
                more = b""  # who closes the door on a message has not understood it
            lines += more
            while b"\n" in lines:
                line, _, lines = lines.partition(b"\n")
                answer, is_ours = opened(line, key, RankWelcome)
                if answer is None or not is_ours:
                    more = b""
                elif answer.word != "heard":
                    return answer
                else:
                    # Should rank 0 go, patience begins anew.
                    is_known, self.began, self.strange_since = True, time.monotonic(), 0.0
            if not more:
                self.why = "rank 0 left" if is_known else self._strange()
                return None

    def _strange(self) -> str:
        self.strange_since = self.strange_since or time.monotonic()
        return f"who answers there does not see this rank's run folder, {self.mine.folder}, or is of another job"


def allow_files(count: int) -> None:
    """Raise the limit of open files as far as is needed and allowed: here and in torch's store each rank has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def resolved(address: str, port: int, patience: float) -> tuple[int, Any]:
    """The family and the place of an address that may take a while to be known."""
    deadline = time.monotonic() + patience
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return family, where
        except socket.gaierror as error:  # a pod's name is known a while after the pod is there
            if time.monotonic() > deadline:
                what = f"MASTER_ADDR = {address} cannot be resolved on {socket.gethostname()}: {error.strerror}"
                raise mistake(what, "set it to a name of rank 0's machine that all others know") from None
            time.sleep(RETRY_SECONDS)


def listen(address: str, port: int, patience: float) -> socket.socket:
    """A socket at the job's own address alone, where the machine has it; torch's store will take it over."""
    family, where = resolved(address, port, patience)
    taken = None
    for place in (listening(address, where), ("", *where[1:])):  # behind a balancer the name may be none of ours
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(4096)
            return listener
        except OSError as error:
            listener.close()
            taken = error
    assert taken is not None
    what = f"rank 0 cannot listen at {address}:{port}: {(taken.strerror or str(taken)).lower()}"
    raise mistake(what, "another job may be there: set MASTER_PORT to a free port, the same for all ranks") from None


def introduced(hellos: Sequence[RankHello]) -> dict[int, RankWelcome]:
    """For each rank who is on the same machine, in the order of their numbers there, and how many threads it may use.

    A machine is known by its name and the launcher's number of it. Where two ranks of one name both have the same
    number there, the name belongs to several machines, whose ranks are then one after another.
    """
    machines: dict[tuple[str, str, int], list[RankHello]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[RankHello]] = defaultdict(list)
    for hello in sorted(hellos, key=lambda one: one.rank):
        by_name[hello.host, hello.node].append(hello)
    for (host, node), there in by_name.items():
        told = [one.local_rank for one in there if one.local_rank >= 0]
        is_several = len(set(told)) < len(told)
        for one in there:
            machines[host, node, one.rank - one.local_rank if is_several else 0].append(one)
    answers = {}
    for there in machines.values():
        ranks = tuple(one.rank for one in sorted(there, key=lambda one: (max(one.local_rank, 0), one.rank)))
        for one in there:
            sharing = [other for other in there if other.cores == one.cores]  # bound ones have cores of their own
            threads = max(len(one.cores) // len(sharing), 1)
            first = next(other for other in there if other.rank == ranks[0])
            answers[one.rank] = RankWelcome(word="go", ranks=ranks, session=first.session, threads=threads)
    return answers


def named(ranks: Iterable[int]) -> str:
    """Some ranks in words: rank 3; ranks 1, 4 to 7."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return f"{'rank' if len(spans) == 1 and len(spans[0]) == 1 else 'ranks'} {', '.join(texts)}"


def sealed(message: RankHello | RankWelcome, key: bytes) -> bytes:
    """A line: the digest and the message."""
    content = msgspec.json.encode(message)
    return hmac.digest(key, content, hashlib.sha256).hex().encode() + content + b"\n"


Kind = TypeVar("Kind", RankHello, RankWelcome)


def opened(line: bytes, key: bytes, kind: type[Kind]) -> tuple[Kind | None, bool]:
    """The message of a line (None: it is none), and whether its digest is that of the key."""
    seal, content = line[: 2 * SEAL_BYTES], line.strip()[2 * SEAL_BYTES :]
    try:
        message = msgspec.json.decode(content, type=kind)
    except (*UNDECODABLE, RecursionError):
        return None, False
    expected = hmac.digest(key, content, hashlib.sha256).hex().encode()
    return message, bool(key) and hmac.compare_digest(seal, expected)


def _is_here(address: str) -> str:
    """That a name leads to whoever asks, for the end of a sentence; "" where it does not."""
    with suppress(OSError):
        found = str(socket.getaddrinfo(address, None)[0][4][0])
        return f" ({found}, this machine itself)" if ip_address(found.partition("%")[0]).is_loopback else ""
    return ""


def kept_alive(wire: socket.socket) -> socket.socket:
    """A connection whose other end is missed, should its machine lose its power or the way to it."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if hasattr(socket, name):  # not everywhere has all of them
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return wire


def _has_left(wire: socket.socket) -> bool:
    try:
        return not wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(wire: socket.socket | None, answer: RankWelcome, key: bytes) -> None:
    if wire is not None:
        with suppress(OSError):
            wire.sendall(sealed(answer, key))
