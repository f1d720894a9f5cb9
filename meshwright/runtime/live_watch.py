"""Attempts whose replicas can do without each other, on one machine or several: who is lost is started again alone."""

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from meshwright.runtime import failure
from meshwright.runtime.failure import RESTARTABLE, Exit, Failure
from meshwright.runtime.generations import Roster
from meshwright.runtime.heartbeat import HeartbeatReader
from meshwright.runtime.machines import MachineRoster
from meshwright.runtime.nodes import Lost
from meshwright.runtime.ranks import Ranks
from meshwright.runtime.watch import LOOK_SECONDS, Watch

if TYPE_CHECKING:
    from meshwright.runtime.supervise import Supervisor


class LiveWatch(Watch):
    """An attempt whose replicas can do without each other."""

    def __init__(self, ranks: Ranks, pulse: HeartbeatReader, supervisor: "Supervisor", roster: Roster) -> None:
        super().__init__(ranks, pulse, supervisor)
        self.roster = roster
        self.begun: set[int] = set()  # replicas of this machine that train, or have ended by themselves
        self.last: Failure | None = None  # that was survived

    def start(self, replicas: set[int]) -> None:
        """Have the ranks of replicas forked, for the first time or again."""
        for replica in sorted(replicas):
            started = self.supervisor.start(self.roster.ranks[replica], self.pulse.folder, self.roster.starts[replica])
            self.ranks.add(started)

    def _have_ended(self, codes: Mapping[int, int | None]) -> bool:
        """Whether all replicas that trained have ended by themselves; one that came too late is not waited for."""
        ended = {each for each in self.begun if all(codes[rank] is not None for rank in self.roster.ranks[each])}
        for replica in ended & self.roster.members:
            self.roster.leave(replica)
        return super()._have_ended(codes) or (bool(ended) and ended == self.begun)

    def _ended(self, codes: Mapping[int, int | None]) -> Failure | None:
        """None; or what took the replica that was to leave the model, though all others are done."""
        if Exit.PREEMPTED in codes.values() or self._is_done():
            return super()._ended(codes)
        return self.last

    def _survived(self, verdict: Failure, gone: set[int]) -> Failure | None:
        """Let the others go on, and start the replicas again that lost ranks; the verdict where that does not help."""
        roster, supervisor = self.roster, self.supervisor
        lost = {roster.replica_of[rank] for rank in gone}
        tired = [each for each in lost if roster.fruitless[each] > supervisor.run.faults.restarts]
        others = (roster.members & self.begun) - lost or roster.train_elsewhere()
        if verdict.kind not in RESTARTABLE or not others or tired:
            return verdict
        ranks = [rank for replica in sorted(lost) for rank in roster.ranks[replica]]
        self.ranks.remove(ranks)
        for rank in ranks:  # now that no victim can leave another
            (self.folder / f"failure.rank{rank}.json").unlink(missing_ok=True)
        before = set(roster.members)
        roster.lose(lost, lost & self.begun)
        self.begun -= lost
        self.seen = {rank: one for rank, one in self.seen.items() if rank not in ranks}
        failure.keep_end(verdict, self.folder, f"{supervisor.attempt_name}.{roster.number}")
        self.last = verdict
        which, taken = ", ".join(map(str, sorted(lost))), sorted(roster.members - before)
        how = f"spare {', '.join(map(str, taken))} takes its place" if taken else "the others go on"
        remedy = f"nothing: {how}, and replica {which} is started again"
        supervisor.say(str(msgspec.structs.replace(verdict, remedy=remedy)))
        self.start(lost)
        return None

    def _look(self) -> Failure | None:
        seen = [one for one in self.pulse.look() if one.state != "Z"]
        self.roster.look(time.monotonic(), self.begun)
        training = {one.rank for one in seen if one.beat.restored >= 0}
        members = self.roster.members & self.roster.here
        self.begun |= {each for each in members if training >= set(self.roster.ranks[each])}
        self.seen = {**self.seen, **{one.rank: one for one in seen}}
        # A spare that waits to be needed is no sign that all wait for each other.
        return self._judge([one for one in seen if self.roster.replica_of[one.rank] not in self.roster.idle])


class MachineWatch(LiveWatch):
    """The same on one machine of several, which does not see the others' ranks."""

    def __init__(self, ranks: Ranks, pulse: HeartbeatReader, supervisor: "Supervisor", roster: MachineRoster) -> None:
        super().__init__(ranks, pulse, supervisor, roster)
        self.among = roster
        self.waiting: set[int] = set()  # replicas that are started again once the others can be heard

    def until_end(self) -> Failure | None:
        """As of one machine; the others hear how this one ended, and end too if they cannot do without it."""
        verdict = super().until_end()
        code = Exit.DONE if verdict is None else verdict.code
        self.among.machines.close(code, verdict if verdict is not None and self._ends_all(verdict) else None)
        return verdict

    def _ends_all(self, verdict: Failure) -> bool:
        """Whether the others must end too: they need not for what took replicas of this machine alone."""
        is_own = not self.begun or verdict.kind in ("stopped", *RESTARTABLE)
        return not (is_own and self.among.train_elsewhere())

    def start(self, replicas: set[int]) -> None:
        self.waiting |= replicas
        if self.among.may_start():
            super().start(self.waiting)
            self.waiting = set()

    def _have_ended(self, codes: Mapping[int, int | None]) -> bool:
        if self.begun:
            return super()._have_ended(codes)
        return bool(self.among.ended_elsewhere())  # who comes too late has nobody to go on with

    def _ended(self, codes: Mapping[int, int | None]) -> Failure | None:
        """The same, once the others have ended too, one of whom leaves the model."""
        grace = self.supervisor.run.faults.grace_seconds if Exit.PREEMPTED in codes.values() else float("inf")
        deadline = time.monotonic() + grace  # one of them may have a save to finish
        while not self._is_done() and self.among.machines.of_job():
            if time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        if not self.begun and Exit.PREEMPTED in self.among.ended_elsewhere():
            return self._stopped()
        verdict = super()._ended(codes)
        is_whole = verdict is not None or self._is_done()
        return verdict if is_whole else _alone("the machine that was to leave the model is gone")

    def _look(self) -> Failure | None:
        if (verdict := self.among.replaced() or super()._look() or self.among.failed_elsewhere()) is not None:
            return verdict
        for lost in self.among.take_lost():
            if (verdict := self._lost(lost)) is not None:
                return verdict
        if out := self.among.left_out():
            which = ", ".join(map(str, sorted(out)))
            what = f"the others do not hear this machine, and go on without replica {which}"
            verdict = msgspec.structs.replace(_alone(what), cause="the network between the machines is cut, or was")
            ranks = {rank for replica in out for rank in self.among.ranks[replica]}
            if (verdict := self._survived(verdict, ranks)) is not None:
                return verdict
        if self.waiting:
            self.start(set())
        return None

    def _lost(self, lost: Lost) -> Failure | None:
        """Another machine is gone: say so; the verdict where nobody is left who has a state."""
        details = self.folder / "faults" / f"node-{time.time_ns()}"
        verdict = failure.of_lost(lost, list(self.seen.values()), details)
        if not self.begun and not self.among.train_elsewhere():
            return verdict
        remedy = "nothing: the others go on; start the same command there again, and it comes back"
        verdict = msgspec.structs.replace(verdict, remedy=remedy)
        failure.keep(verdict, {}, details)
        self.supervisor.say(str(verdict))
        return None


def _alone(what: str) -> Failure:
    return Failure(kind="killed", code=Exit.RESUMABLE, what=what, where=socket.gethostname(), remedy=failure.AGAIN)
