"""Which replicas train together: decided by the supervisor, heard by the ranks, in files of the folder where they meet.

A generation is a number and the replicas that are in it. Whoever is lost ends one, whoever comes back begins another.
In each, every rank says how far it has come before groups are made, so that who is behind can be given the state of
who is not. The folder may be one that several machines see (runtime/machines.py). No torch: the supervisor has none.
"""

import os
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec

from meshwright.runtime.files import replace_file
from meshwright.spec.plan import AXES, Plan

HICCUP_SECONDS = 1.0  # after which a group that broke is made again though nobody is gone


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that train together."""

    number: int
    members: tuple[int, ...]
    starts: tuple[int, ...] = ()  # how often each replica was started again before it was a member, now or at last

    def lost_since(self, before: "Generation") -> list[int]:
        """Members of an earlier generation that have gone since, though they may be back."""
        return [each for each in before.members if each not in self.members or self.starts[each] > before.starts[each]]

    def back_since(self, before: "Generation") -> list[int]:
        """Members that have no state: they were started again since."""
        return [each for each in self.members if each not in before.members or each in self.lost_since(before)]


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank has come when a generation begins."""

    step: int  # −1: it has no state yet
    evaluated: bool  # its validation loss has been taken, where one is due
    leads: bool  # its replica saves for all
    met: bool = True  # where replicas sync rarely, it has done so after this step, if that is due
    clock: float = 0.0  # what the calendar's clock is ahead of the monotonic one, which each machine has its own of
    facts: str = ""  # a digest of what must not differ between ranks: run file, code, versions

    @property
    def position(self) -> tuple[int, bool, bool]:
        return self.step, self.met, self.evaluated


def together(ranks: list[RankPosition]) -> RankPosition:
    """How far a replica has come: as far as the last of its ranks."""
    last = min(ranks, key=lambda each: each.position)
    return msgspec.structs.replace(last, leads=all(each.leads for each in ranks))


def replica_ranks(plan: Plan, spares: int = 0) -> list[list[int]]:
    """The ranks of each replica, in the order in which the replica numbers them itself; spares come behind all."""
    replicas: list[list[int]] = [[] for _ in range(plan.replicate)]
    places = product(*(range(getattr(plan, axis)) for axis in AXES))
    for rank, place in enumerate(places):
        replicas[place[AXES.index("replicate")]].append(rank)
    size = plan.world // plan.replicate
    first = [plan.world + number * size for number in range(spares)]
    return replicas + [list(range(rank, rank + size)) for rank in first]


def machine_replicas(plan: Plan, machine: int, machines: int, spares: int = 0) -> range:
    """The replicas of one of several machines, each of which has as many of them, whole; the last have the spares."""
    share = (plan.replicate + spares) // machines
    return range(machine * share, (machine + 1) * share)


def current(folder: Path, known: int = 0) -> Generation | None:
    """The newest generation; None if there is none after the one that is known."""
    found = None
    look_again(folder)
    while True:
        try:
            found = msgspec.json.decode(_numbered(folder, known + 1).read_bytes(), type=Generation)
        except OSError:
            return found
        known += 1


def publish(folder: Path, told: Generation) -> bool:
    """Begin a generation; False: somebody else has begun one of that number. Of two machines only one can."""
    draft = folder / f".generation.{secrets.token_hex(8)}"
    try:
        draft.write_bytes(msgspec.json.encode(told))
        os.link(draft, _numbered(folder, told.number))
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"generation.{number}"


def look_again(folder: Path) -> None:
    """Have a network's file system forget which files were not there: it asks the server when a folder is opened."""
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def ready_file(folder: Path, rank: int, start: int) -> Path:
    """Where a rank that was started again says that it has built its model."""
    return folder / f"ready.{rank}.{start}"


def broken_file(folder: Path, generation: int) -> Path:
    """Where ranks say that a group of theirs broke."""
    return folder / f"broken.{generation}"


def stand(folder: Path, generation: int, rank: int, standing: RankPosition) -> None:
    """Say how far a rank has come."""
    replace_file(_standing(folder, generation, rank), msgspec.json.encode(standing))


def standings(folder: Path, generation: int, ranks: list[int]) -> dict[int, RankPosition] | None:
    """What these ranks have said; None until all have."""
    found = {}
    look_again(folder)
    for rank in ranks:
        try:
            found[rank] = msgspec.json.decode(_standing(folder, generation, rank).read_bytes(), type=RankPosition)
        except OSError:
            return None
    return found


def _standing(folder: Path, generation: int, rank: int) -> Path:
    return folder / f"standing.{generation}.{rank}"


class Roster:
    """The supervisor's side: who is in, who is being started again, and how often each was started."""

    def __init__(self, folder: Path, plan: Plan, spares: int = 0, without: Collection[int] = ()) -> None:
        self.folder = folder
        self.ranks = replica_ranks(plan, spares)
        self.replica_of = {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}
        self.here = set(range(len(self.ranks))) - set(without)  # replicas of this machine, spares among them
        self.most = plan.replicate  # that train at a time
        self.starts = [0] * len(self.ranks)
        self.fruitless = [0] * len(self.ranks)  # starts in a row that never came to train
        self.members: set[int] = set()
        self.away: set[int] = set()  # on their way to be ready
        self.idle: set[int] = set()  # ready, and not needed
        self.broken_since = 0.0
        self.number = 0

    def begin(self) -> None:
        """All are there, and have never been lost; a spare is as one that was started again, and has no state."""
        self.members = set(sorted(self.here)[: self.most])
        self.away = self.here - self.members
        self.starts = [int(each in self.away) for each in range(len(self.ranks))]
        self._publish()

    def lose(self, replicas: set[int], trained: set[int]) -> None:
        """These are gone, of which some have trained since they were started; they are to be started again."""
        for replica in replicas:
            self.fruitless[replica] = 0 if replica in trained else self.fruitless[replica] + 1
            self.starts[replica] += 1
        self.away |= replicas
        self.idle -= replicas
        self._drop(replicas)

    def leave(self, replica: int) -> None:
        """This one has ended by itself; the others need not wait for it."""
        self.members.discard(replica)
        self.most = len(self.members)  # nobody comes in any more
        if self.members:
            self._publish()

    def look(self, now: float, begun: set[int]) -> list[int]:
        """Let those in who are ready, and make groups again that broke for no known reason; who came in."""
        ready = set(self._ready())
        self.away -= ready
        self.idle |= ready
        entered = self._fill()
        if entered or self._is_broken(now):
            self._publish()
        return entered

    def train_elsewhere(self) -> bool:
        """Whether a replica of another machine trains."""
        return False

    def _publish(self) -> None:
        self.number += 1
        self.broken_since = 0.0
        members = tuple(sorted(self.members))
        publish(self.folder, Generation(number=self.number, members=members, starts=tuple(self.starts)))

    def _drop(self, replicas: set[int]) -> None:
        is_new = bool(self.members & replicas)
        self.members -= replicas
        if is_new and self.members:
            self._fill()
            self._publish()

    def _fill(self) -> list[int]:
        """Have those who are ready take the places that are free; who did."""
        entered = sorted(self.idle)[: max(self.most - len(self.members), 0)]
        self.members |= set(entered)
        self.idle -= set(entered)
        return entered

    def _ready(self) -> list[int]:
        look_again(self.folder)
        return [replica for replica in sorted(self.away) if self._is_ready(replica)]

    def _is_ready(self, replica: int) -> bool:
        return all(ready_file(self.folder, rank, self.starts[replica]).exists() for rank in self.ranks[replica])

    def _is_broken(self, now: float) -> bool:
        """Whether a group broke a while ago, and nobody was found to be gone since."""
        if not broken_file(self.folder, self.number).exists():
            return False
        self.broken_since = self.broken_since or now
        return now - self.broken_since > HICCUP_SECONDS


LOOK_SECONDS = 0.005


def pause() -> None:
    """Between two looks of a rank that waits for others; a watcher knows a rank in here to be waiting."""
    time.sleep(LOOK_SECONDS)


def touch(file: Path) -> None:
    """Leave a file without words."""
    with suppress(FileExistsError):
        file.touch()
