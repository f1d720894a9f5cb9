"""Who hangs: the rank that everybody else waits for, not the one that noticed."""

from collections.abc import Sequence

import msgspec

from meshwright.launch.heartbeat import Seen
from meshwright.spec.beat import PHASES

SAFETY = 5.0  # limit ÷ the longest stillness that turned out to be none
BUSY = 4.0  # a rank that uses its processor may be still for so much longer
FIRST_SECONDS = 120.0  # of a process's first two steps, in which anything may be made, compiled or fetched
LEAST_SECONDS = {"start": 300.0, "compile": 600.0, "end": 300.0, "save": 60.0, "eval": 30.0}  # else faults.hang_seconds
LATE_SECONDS = 2.0  # between two looks of our own: then the machine slept, and no rank is to blame
BUSY_SHARE = 0.2  # of one processor
STOPPED = "Tt"


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that hang, and why they are thought to."""

    ranks: tuple[int, ...]
    reason: str
    seconds: float
    limit: float


class Judge:
    """Learns how long each phase may be still, and accuses who is still for much longer."""

    def __init__(self, hang_seconds: float, world: int) -> None:
        self.hang_seconds = hang_seconds
        self.world = world  # ranks of the job; those of other machines are not seen
        self.longest: dict[str, float] = {}  # stillness by phase, "waiting" among them
        self.last: dict[int, Seen] = {}
        self.still_cpu: dict[int, float] = {}  # processor seconds when the stillness began
        self.all_wait = 0.0  # seconds for which everybody has been waiting
        self.forgiven = 0.0  # stillness before this moment does not count

    def forget(self) -> None:
        """New processes; what was learnt of their work stays."""
        self.last, self.still_cpu = {}, {}

    def look(self, seen: Sequence[Seen], now: float) -> Hang | None:
        """One look at all ranks; an accusation when there is one to make."""
        if self.last and now - max(one.now for one in self.last.values()) > LATE_SECONDS:
            self.forgiven = now
        for one in seen:
            self._learn(one)
        self.last = {one.rank: one for one in seen}
        return self._stuck(seen) or self._crossed(seen)

    def still(self, one: Seen) -> float:
        """How long a rank has been where it is."""
        return one.now - max(one.still_since, self.forgiven)

    def limit(self, one: Seen) -> float:
        """How long it may be."""
        if one.state in STOPPED:
            return self.hang_seconds  # whatever it was doing
        kind = _kind(one)
        least = LEAST_SECONDS.get(kind, self.hang_seconds)
        if kind not in LEAST_SECONDS and one.beat.steps_here < 2:
            least = max(least, FIRST_SECONDS)
        learnt = SAFETY * self.longest.get(kind, 0.0)
        return max(least, learnt) * (BUSY if self._busy(one) else 1.0)

    def _stuck(self, seen: Sequence[Seen]) -> Hang | None:
        """A rank that waits for nobody and does not move."""
        late = [one for one in seen if (one.silent or not one.beat.waiting) and self.still(one) > self.limit(one)]
        if not late:
            return None
        worst = max(late, key=self.still)
        return Hang(ranks=(worst.rank,), reason=reason(worst), seconds=self.still(worst), limit=self.limit(worst))

    def _crossed(self, seen: Sequence[Seen]) -> Hang | None:
        """Everybody waits: somebody is in the wrong collective, or left one out."""
        if len(seen) < max(self.world, 2):
            return None  # the one that all wait for may be on another machine
        together = min(map(self.still, seen)) if all(one.beat.waiting for one in seen) else 0.0
        if together < self.all_wait:
            self.longest["waiting"] = max(self.longest.get("waiting", 0.0), self.all_wait)
        self.all_wait = together
        if together <= max(map(self.limit, seen)):
            return None
        ranks, why = crossed(seen)
        return Hang(ranks=ranks, reason=why, seconds=min(map(self.still, seen)), limit=max(map(self.limit, seen)))

    def _learn(self, one: Seen) -> None:
        before = self.last.get(one.rank)
        if before is None or before.beat.moved != one.beat.moved:
            self.still_cpu[one.rank] = one.cpu_seconds
            kind = "" if before is None else _kind(before)
            if before is not None and kind != "waiting" and before.beat.steps_here >= 2:
                self.longest[kind] = max(self.longest.get(kind, 0.0), self.still(before))

    def _busy(self, one: Seen) -> bool:
        used = one.cpu_seconds - self.still_cpu.get(one.rank, one.cpu_seconds)
        return one.state in "RD" or used > BUSY_SHARE * max(one.now - one.still_since, 1.0)


def crossed(seen: Sequence[Seen]) -> tuple[tuple[int, ...], str]:
    """Of ranks that all wait, the one that went on without the others, or waits where none ever did."""
    newest = [one for one in seen if one.beat.step == max(other.beat.step for other in seen)]
    if len(newest) < len(seen):  # nobody can finish a step whose last collective another has not entered
        return tuple(one.rank for one in newest), "left out a collective that the others wait in"
    novel = [one for one in seen if one.beat.novel]
    if novel and len(novel) < len(seen):
        return tuple(one.rank for one in novel), "is in another collective than the others"
    skipped = [one for one in seen if any(_passed(one, other) for other in seen)]
    if skipped and len(skipped) < len(seen):
        return tuple(one.rank for one in skipped), "left out a collective that the others wait in"
    totals = [sum(one.beat.counts) for one in seen]
    behind = [one for one, total in zip(seen, totals, strict=True) if total < max(totals)]
    if behind and len(behind) < len(seen):
        return tuple(one.rank for one in behind), "has begun fewer collectives than the others"
    return tuple(one.rank for one in seen), "wait in different collectives"


def reason(one: Seen) -> str:
    """What keeps a rank that waits for nobody."""
    if one.state in STOPPED:
        return "is stopped (SIGSTOP or a debugger)"
    if one.silent:
        return "does not let go of Python's lock"
    return "does not move"


def _kind(one: Seen) -> str:
    return "waiting" if one.beat.waiting and not one.silent else one.beat.phase


def _passed(one: Seen, other: Seen) -> bool:
    """Further on in the program, with no more collectives behind it."""
    no_more = any(mine <= theirs for mine, theirs in zip(one.beat.counts, other.beat.counts, strict=False) if theirs)
    return no_more and _position(one) > _position(other)


def _position(one: Seen) -> tuple[int, int]:
    return one.beat.step, PHASES.index(one.beat.phase)
