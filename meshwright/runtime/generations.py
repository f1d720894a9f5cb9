"""Which replicas train together: decided by the supervisor, heard by the ranks, in files of the folder where they meet.

A generation is a number and the replicas that are in it. Whoever is lost ends one, whoever comes back begins another.
In each, every rank says how far it has come before groups are made, so that who is behind can be given the state of
who is not. No torch: the supervisor has none.
"""

import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec

from meshwright.runtime.files import replace_file
from meshwright.spec.plan import AXES, Plan

CURRENT = "generation.json"
HICCUP_SECONDS = 1.0  # after which a group that broke is made again though nobody is gone


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that train together."""

    number: int
    members: tuple[int, ...]
    starts: tuple[int, ...] = ()  # how often each replica was started again, member or not

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

    @property
    def position(self) -> tuple[int, bool, bool]:
        return self.step, self.met, self.evaluated


def together(ranks: list[RankPosition]) -> RankPosition:
    """How far a replica has come: as far as the last of its ranks."""
    last = min(ranks, key=lambda each: each.position)
    return msgspec.structs.replace(last, leads=all(each.leads for each in ranks))


def replica_ranks(plan: Plan) -> list[list[int]]:
    """The ranks of each replica, in the order in which the replica numbers them itself."""
    replicas: list[list[int]] = [[] for _ in range(plan.replicate)]
    places = product(*(range(getattr(plan, axis)) for axis in AXES))
    for rank, place in enumerate(places):
        replicas[place[AXES.index("replicate")]].append(rank)
    return replicas


def current(folder: Path) -> Generation | None:
    """The newest generation; None before the first."""
    try:
        return msgspec.json.decode((folder / CURRENT).read_bytes(), type=Generation)
    except OSError:
        return None


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

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.ranks = replica_ranks(plan)
        self.replica_of = {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}
        self.starts = [0] * plan.replicate
        self.fruitless = [0] * plan.replicate  # starts in a row that never came to train
        self.members = set(range(plan.replicate))
        self.away: set[int] = set()
        self.broken_since = 0.0
        self.number = 0
        self.publish()

    def publish(self) -> None:
        """Begin a generation."""
        self.number += 1
        self.broken_since = 0.0
        told = Generation(number=self.number, members=tuple(sorted(self.members)), starts=tuple(self.starts))
        replace_file(self.folder / CURRENT, msgspec.json.encode(told))

    def lose(self, replicas: set[int], trained: set[int]) -> None:
        """These are gone, of which some have trained since they were started; they are to be started again."""
        for replica in replicas:
            self.fruitless[replica] = 0 if replica in trained else self.fruitless[replica] + 1
            self.starts[replica] += 1
        is_new = bool(self.members & replicas)
        self.members -= replicas
        self.away |= replicas
        if is_new:
            self.publish()

    def leave(self, replica: int) -> None:
        """This one has ended by itself; the others need not wait for it."""
        self.members.discard(replica)
        if self.members:
            self.publish()

    def look(self, now: float) -> list[int]:
        """Let those in who are ready, and make groups again that broke for no known reason; who came in."""
        ready = [replica for replica in sorted(self.away) if self._is_ready(replica)]
        if ready:
            self.members |= set(ready)
            self.away -= set(ready)
            self.publish()
        elif broken_file(self.folder, self.number).exists():
            self.broken_since = self.broken_since or now
            if now - self.broken_since > HICCUP_SECONDS:
                self.publish()
        return ready

    def _is_ready(self, replica: int) -> bool:
        return all(ready_file(self.folder, rank, self.starts[replica]).exists() for rank in self.ranks[replica])


LOOK_SECONDS = 0.005


def pause() -> None:
    """Between two looks of a rank that waits for others; a watcher knows a rank in here to be waiting."""
    time.sleep(LOOK_SECONDS)


def touch(file: Path) -> None:
    """Leave a file without words."""
    with suppress(FileExistsError):
        file.touch()
