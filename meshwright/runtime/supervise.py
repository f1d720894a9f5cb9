"""The supervisor of one machine's ranks: outside the collectives, so that it sees who is missing from them.

It starts ranks of its own and restarts them; a `Watch` looks after each attempt: who failed, who hangs, and what people
asked for. Under a `LiveWatch` replicas can do without each other, and who is lost is started again alone. Ranks that
torchrun or Slurm has started get a `Sidecar` instead.
"""

import contextlib
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from meshwright.config.run import Run
from meshwright.config.weights import CHECKPOINTS, present, step_name
from meshwright.runtime import failure, heartbeat, run_folder
from meshwright.runtime.failure import ASKS, RESTARTABLE, Exit, Failure
from meshwright.runtime.generations import Roster, machine_replicas, replica_ranks
from meshwright.runtime.heartbeat import Hang, HangDetector, HeartbeatReader, RankStatus, crossed
from meshwright.runtime.machines import MachineRoster, Machines
from meshwright.runtime.nodes import Lost
from meshwright.runtime.place import RankSpec, local
from meshwright.runtime.ranks import ForkServer, ForkServerError, Ranks
from meshwright.spec.problem import InputError
from meshwright.spec.units import plural

LOOK_SECONDS = 0.05
WORDS_SECONDS = 5.0  # that a survivor may take to say what it did
FALL_SECONDS = 0.2  # in which the victims of a failure say theirs
ENDED = (Exit.DONE, Exit.PREEMPTED)  # by themselves
INTERRUPTED = 2  # the second Ctrl-C does not wait for a save


@dataclass
class StopRequest:
    """What people asked of the launcher: SIGTERM saves and ends, so does Ctrl-C, a second Ctrl-C just ends."""

    stop: bool = False
    interrupts: int = 0

    def listen(self) -> "StopRequest":
        for number in (*ASKS, signal.SIGINT):
            signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        self.interrupts += number == signal.SIGINT


class Watch:
    """One attempt, looked at twenty times a second."""

    def __init__(self, ranks: Ranks, pulse: HeartbeatReader, supervisor: "Supervisor") -> None:
        self.ranks = ranks
        self.pulse = pulse
        self.supervisor = supervisor
        self.folder = supervisor.folder
        self.seen: Mapping[int, RankStatus] = {}
        self.stopping_since = 0.0  # when the ranks were asked to save and end
        self.rested = False

    def until_end(self) -> Failure | None:
        """Until all ranks have ended, or one has failed."""
        while True:
            codes = self.ranks.poll()
            if any(code not in (None, *ENDED) for code in codes.values()):
                report = self._failure()
                gone = {rank for rank, code in self.ranks.poll().items() if code not in (None, *ENDED)}
                if (report := self._survived(report, gone)) is not None:
                    return report
                continue
            if self._have_ended(codes):
                return self._ended(codes)
            if (report := self._look() or self._heed()) is not None:
                return report
            time.sleep(LOOK_SECONDS)

    def _is_done(self) -> bool:
        """Whether all that a run leaves is there; its last command may still run."""
        return (self.folder / run_folder.SUMMARY).exists()

    def _survived(self, report: Failure, gone: set[int]) -> Failure | None:
        """The report, unless others can do without these ranks."""
        return report

    def _have_ended(self, codes: Mapping[int, int | None]) -> bool:
        return None not in codes.values()

    def _ended(self, codes: Mapping[int, int | None]) -> Failure | None:
        """None; or what is missing though all ranks have ended by themselves."""
        return self._stopped() if Exit.PREEMPTED in codes.values() else None

    def _reports(self) -> list[Failure]:
        """The failure reports of ranks of this machine."""
        found = [*failure.read(self.folder), *failure.read(self.pulse.folder)]
        return [report for report in found if report.rank in self.supervisor.here]

    def _look(self) -> Failure | None:
        seen = self.pulse.look()
        self.seen = {one.rank: one for one in seen}
        # Who has ended by itself is not waited for: rank 0 may be at the last eval.command.
        return self._judge([one for one in seen if one.state != "Z"])

    def _judge(self, seen: list[RankStatus]) -> Failure | None:
        """Whether somebody hangs."""
        if not self.rested and seen and min(one.beat.steps_here for one in seen) > 1:
            self.supervisor.server.rest()
            self.rested = True
        hang = self.supervisor.judge.look(seen, time.monotonic())
        if hang is None or not heartbeat.confirmed(self.pulse, seen, hang.ranks):
            return None
        return self._survived(self._hang(hang, heartbeat.capture(self.pulse, seen)), set(hang.ranks))

    def _hang(self, hang: Hang, words: Mapping[int, str]) -> Failure:
        details = self.folder / "faults" / f"hang-{self.supervisor.attempt_name}"
        return report_hang(hang, self.seen, words, self.pulse, details)

    def _failure(self) -> Failure:
        """The first rank that failed. One killed from outside leaves no words, and is nobody's victim."""
        if self.supervisor.home.is_taken():  # and with it what ranks said
            return run_folder.gone(self.folder)
        ended = {rank: code for rank, code in self.ranks.poll().items() if code}
        if min(ended.values()) > 0:  # a process with much to give back ends after its victims have heard of it
            time.sleep(FALL_SECONDS)
            ended = {rank: code for rank, code in self.ranks.poll().items() if code}
        killed = [rank for rank, code in ended.items() if code < 0]
        if killed and failure.is_mismatch(killed[0], self.folder):
            return self._mismatch(killed)
        if killed:
            return failure.of_exit(killed[0], ended[killed[0]], self.seen.get(killed[0]), self.folder)
        if reports := self._reports():
            return min(reports, key=lambda report: report.at)
        rank, code = next((rank, code) for rank, code in self.ranks.poll().items() if code)
        return failure.of_exit(rank, code, self.seen.get(rank), self.folder)

    def _mismatch(self, killed: list[int]) -> Failure:
        """A collective broke because somebody was in another one; who died of it need not be who was wrong.

        Each survivor knows whether its own collectives were those of its last step. If all were, it was the dead one.
        """
        deadline = time.monotonic() + WORDS_SECONDS
        while None in self.ranks.poll().values() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        reports = {report.rank: report for report in self._reports() if report.rank is not None}
        ranks = tuple(sorted(rank for rank, report in reports.items() if report.deviated)) or tuple(killed)
        if not reports:
            ranks, _ = crossed(list(self.seen.values()))
        why = "left out a collective, or is in another than the others"
        hang = Hang(ranks=ranks, reason=why, seconds=0.0, limit=0.0)
        return self._hang(hang, {rank: "".join(report.stack) for rank, report in reports.items()})

    def _heed(self) -> Failure | None:
        """Pass on what people asked; enforce it when the time they gave is over."""
        asked, grace = self.supervisor.asked, self.supervisor.run.faults.grace_seconds
        if not asked.stop:
            return None
        if not self.stopping_since:
            self.stopping_since = time.monotonic()
            if all(one.beat.restored < 0 for one in self.seen.values()):
                return self._stopped()  # no step was begun: there is nothing to save
            what = "all steps are done; ending eval.command" if self._is_done() else "saving a checkpoint"
            self.ranks.signal(signal.SIGTERM)  # before anything is said, to a reader who may stand still
            self.supervisor.say(f"interrupted: {what}, within {grace:g} s")
        if asked.interrupts >= INTERRUPTED or time.monotonic() - self.stopping_since > grace:
            return self._stopped(saved=False)
        return None

    def _stopped(self, saved: bool = True) -> Failure:
        step = newest_step(self.folder)
        by_file = (self.folder / run_folder.STOP).exists()
        interrupted = self.supervisor.asked.interrupts > 0 or by_file
        how = "interrupted" if interrupted else "stopped by SIGTERM"
        what = f"checkpoint saved at step {step}" if saved and step >= 0 else "ended before a checkpoint was complete"
        remedy = failure.AGAIN
        if self._is_done():
            what, remedy = failure.OWED, failure.OWED_REMEDY
        return Failure(
            kind="stopped",
            code=Exit.INTERRUPTED if interrupted else Exit.PREEMPTED if saved else Exit.RESUMABLE,
            what=f"{f'stopped by the file {run_folder.STOP}' if by_file else how}, {what}",
            remedy=remedy,
            details=str(self.folder),
            step=step,
        )


def report_hang(
    hang: Hang, seen: Mapping[int, RankStatus], words: Mapping[int, str], pulse: HeartbeatReader, details: Path
) -> Failure:
    """The failure report, and the stacks it rests on, in the run folder."""
    report = failure.of_hang(hang, seen, words, pulse.phase_table(hang.ranks[0]), details)
    failure.keep(report, words, details)
    return report


def set_aside(folder: Path, good_until: int) -> None:
    """Rename checkpoints whose state is in doubt, so that no run resumes from them and nothing is lost."""
    for step in present(home := folder / CHECKPOINTS):
        if step > good_until:
            with contextlib.suppress(FileNotFoundError):  # another machine has done it
                (home / step_name(step)).rename(home / f"suspect-{step_name(step)}")


def newest_step(folder: Path) -> int:
    """The newest step that was saved, −1 if none. A step has its name only once it is complete."""
    return max(present(folder / CHECKPOINTS), default=-1)


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

    def _survived(self, report: Failure, gone: set[int]) -> Failure | None:
        """Let the others go on, and start the replicas again that lost ranks; the report where that does not help."""
        roster, supervisor = self.roster, self.supervisor
        lost = {roster.replica_of[rank] for rank in gone}
        tired = [each for each in lost if roster.fruitless[each] > supervisor.run.faults.restarts]
        others = (roster.members & self.begun) - lost or roster.train_elsewhere()
        if report.kind not in RESTARTABLE or not others or tired:
            return report
        ranks = [rank for replica in sorted(lost) for rank in roster.ranks[replica]]
        self.ranks.remove(ranks)
        for rank in ranks:  # now that no victim can leave another
            (self.folder / f"failure.rank{rank}.json").unlink(missing_ok=True)
        before = set(roster.members)
        roster.lose(lost, lost & self.begun)
        self.begun -= lost
        self.seen = {rank: one for rank, one in self.seen.items() if rank not in ranks}
        failure.keep_end(report, self.folder, f"{supervisor.attempt_name}.{roster.number}")
        self.last = report
        which, taken = ", ".join(map(str, sorted(lost))), sorted(roster.members - before)
        how = f"spare {', '.join(map(str, taken))} takes its place" if taken else "the others go on"
        remedy = f"nothing: {how}, and replica {which} is started again"
        supervisor.say(str(msgspec.structs.replace(report, remedy=remedy)))
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
        report = super().until_end()
        code = Exit.DONE if report is None else report.code
        self.among.machines.close(code, report if report is not None and self._ends_all(report) else None)
        return report

    def _ends_all(self, report: Failure) -> bool:
        """Whether the others must end too: they need not for what took replicas of this machine alone."""
        is_own = not self.begun or report.kind in ("stopped", *RESTARTABLE)
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
        report = super()._ended(codes)
        is_whole = report is not None or self._is_done()
        return report if is_whole else _alone("the machine that was to leave the model is gone")

    def _look(self) -> Failure | None:
        if (report := self.among.replaced() or super()._look() or self.among.failed_elsewhere()) is not None:
            return report
        for lost in self.among.take_lost():
            if (report := self._lost(lost)) is not None:
                return report
        if out := self.among.left_out():
            which = ", ".join(map(str, sorted(out)))
            what = f"the others do not hear this machine, and go on without replica {which}"
            report = msgspec.structs.replace(_alone(what), cause="the network between the machines is cut, or was")
            ranks = {rank for replica in out for rank in self.among.ranks[replica]}
            if (report := self._survived(report, ranks)) is not None:
                return report
        if self.waiting:
            self.start(set())
        return None

    def _lost(self, lost: Lost) -> Failure | None:
        """Another machine is gone: say so; the report where nobody is left who has a state."""
        details = self.folder / "faults" / f"node-{time.time_ns()}"
        report = failure.of_lost(lost, list(self.seen.values()), details)
        if not self.begun and not self.among.train_elsewhere():
            return report
        remedy = "nothing: the others go on; start the same command there again, and it comes back"
        report = msgspec.structs.replace(report, remedy=remedy)
        failure.keep(report, {}, details)
        self.supervisor.say(str(report))
        return None


def _alone(what: str) -> Failure:
    return Failure(kind="killed", code=Exit.RESUMABLE, what=what, where=socket.gethostname(), remedy=failure.AGAIN)


@dataclass
class Supervisor:
    """Starts ranks, watches them, says what went wrong, and starts them again where that helps."""

    run: Run
    folder: Path
    fork_server: Callable[[], ForkServer]  # makes one, at the start and should it be lost
    order: RankSpec  # of rank 0; the others' differ in their place
    say: Callable[[str], None]
    wasted: int = 0  # attempts in a row that left no newer checkpoint
    number: int = 0
    asked: StopRequest = field(default_factory=StopRequest)
    machines: Machines | None = None  # where this one is one of several
    is_new: bool = True  # the job begins with it, and is not joined
    # Begin another job with the other machines, without such replicas, unless somebody asks to end.
    meet_again: Callable[[set[int], str, Callable[[], bool]], tuple[Machines, bool]] | None = None
    hold: Callable[[], None] = lambda: None  # have the run folder, where it is free
    judge: HangDetector = field(init=False)
    here: list[int] = field(init=False)  # ranks of this machine, of spares too
    condemned: set[int] = field(default_factory=set)  # replicas whose devices were found to be faulty

    def __post_init__(self) -> None:
        plan, machines = self.run.plan, self.machines
        replicas, spares = replica_ranks(plan, self.run.faults.spares), self.run.faults.spares
        if machines is not None:
            replicas = [replicas[each] for each in machine_replicas(plan, machines.machine, machines.count, spares)]
        self.here = sorted(rank for ranks in replicas for rank in ranks)
        self.judge = HangDetector(self.run.faults.hang_seconds, plan.world)
        self.home = run_folder.FolderWatch(self.folder)
        run_folder.sweep()
        run_folder.sweep(run_folder.HOST_MEMORY)
        # Outside the ranks, so that it is there when they are gone.
        self.memory = run_folder.in_host_memory() if self.run.faults.memory_every else None
        self.saved = self.newest_step()
        self.server = self.fork_server()

    def supervise(self, asked: StopRequest) -> Failure | None:
        """Until the run is done (None), or cannot continue."""
        self.asked = asked
        while True:
            try:
                report = self._attempt()
            except ForkServerError as error:
                return failure.of_fork_server(str(error), self.folder, error.is_lost)
            if report is None:
                return None
            report = self._noted(report)
            if self.asked.stop:
                return report
            if (replaced := self._condemn(report)) is not None:
                self.saved = self.newest_step()
                remedy = f"nothing: restarting {self._from()}; a spare takes the place of replica {replaced}"
                remedy += ", which is not started again: take its device out when you can"
            elif report.kind not in RESTARTABLE or self.machines is not None:
                return report  # who starts several machines starts them again
            elif self._is_futile():
                remedy = (
                    f"{plural(self.run.faults.restarts, 'restart')} in a row brought no newer checkpoint "
                    "(faults.restarts): find the cause, then run the same command again to resume"
                )
                return msgspec.structs.replace(report, remedy=remedy)
            else:
                charged = (
                    f"; {self.wasted} of {plural(self.run.faults.restarts, 'attempt')} brought no newer checkpoint"
                )
                remedy = f"nothing: restarting {self._from()}{charged if self.wasted else ''}"
            self.say(str(msgspec.structs.replace(report, remedy=remedy)))
            if not self._met_again():
                return report

    def _met_again(self) -> bool:
        """Whether all machines are there to begin once more, where there are several."""
        if self.machines is None or self.meet_again is None:
            return True
        try:
            self.machines, self.is_new = self.meet_again(
                self.condemned, self.machines.lease.job, lambda: self.asked.stop
            )
        except InputError as error:
            self.say(str(error))
            return False
        self.order = msgspec.structs.replace(self.order, session=self.machines.lease.job)
        return True

    def _noted(self, report: Failure) -> Failure:
        """Keep what ended an attempt, and set aside what it puts in doubt."""
        if report.kind not in ("input", "stopped") and not self.home.is_taken():
            failure.keep_end(report, self.folder, self.attempt_name)
        if report.good_until is not None:
            for home in self.homes():
                set_aside(home, report.good_until)
        if report.kind == "input" and self.number > 1:  # it was there when the run began
            return msgspec.structs.replace(report, kind="data", code=Exit.RESUMABLE)
        return report

    def _is_futile(self) -> bool:
        """Whether too many attempts in a row left no newer checkpoint; only those are charged."""
        before, self.saved = self.saved, self.newest_step()
        self.wasted = 0 if self.saved > before else self.wasted + 1
        return self.wasted > self.run.faults.restarts

    def _from(self) -> str:
        return f"from step {self.saved}" if self.saved >= 0 else "from the beginning"

    def _condemn(self, report: Failure) -> int | None:
        """The replica that was found to compute wrong numbers, where a spare is left for it; it is not started again.

        What it computed has reached the others, so they go back to what was saved before.
        """
        replicas = replica_ranks(self.run.plan, self.run.faults.spares)
        suspects = report.suspects
        if report.kind == "matmul" and report.rank is not None:  # told by the rank itself
            suspects = tuple(number for number, ranks in enumerate(replicas) if report.rank in ranks)
        left = len(replicas) - len(self.condemned) - self.run.plan.replicate
        if report.code != Exit.HARDWARE or len(suspects) != 1 or left < 1:
            return None
        self.condemned.add(suspects[0])
        return suspects[0]

    @property
    def attempt_name(self) -> str:
        """Of this launcher, which is one of a job's where there are several machines."""
        return f"{failure.this_session()}-{self.number}"

    def close(self) -> None:
        """Leave no process behind, and no copy of the state in host memory."""
        self.server.close()
        self.home.close()
        if self.memory is not None:
            self.memory.cleanup()

    def homes(self) -> list[Path]:
        """Where checkpoints are: on the disk, and in host memory."""
        return [self.folder, *([Path(self.memory.name)] if self.memory is not None else [])]

    def newest_step(self) -> int:
        """The newest step that was saved anywhere, −1 if none."""
        return max(newest_step(home) for home in self.homes())

    def _attempt(self) -> Failure | None:
        self.number += 1
        for rank in self.here:
            (self.folder / f"failure.rank{rank}.json").unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=run_folder.prefix()) as name:
            meeting, ranks = Path(name), Ranks({})
            pulse = HeartbeatReader(meeting, self.here)
            try:
                return self._watch(ranks, pulse).until_end()
            finally:
                ranks.end()
                pulse.close()
                self.judge.forget()

    def _watch(self, ranks: Ranks, pulse: HeartbeatReader) -> Watch:
        """Start the ranks; who looks after them."""
        if self.machines is not None:
            roster = MachineRoster(self.machines, self.run.plan, self.hold, self.run.faults.spares)
            roster.begin() if self.is_new else roster.join()
            watch = MachineWatch(ranks, pulse, self, roster)
        elif self.run.faults.live:
            roster = Roster(pulse.folder, self.run.plan, self.run.faults.spares, self.condemned)
            roster.begin()
            watch = LiveWatch(ranks, pulse, self, roster)
        else:
            ranks.add(self.start(self.here, pulse.folder))
            return Watch(ranks, pulse, self)
        watch.start(roster.here)
        return watch

    def start(self, ranks: Sequence[int], meeting: Path, start: int = 0) -> dict[int, int]:
        """Have ranks forked; `start`: how often their replica was started before, while the others trained."""
        if not self.server.is_alive():
            self._replace_server()
        orders = [self.order_of(rank, meeting, start) for rank in ranks]
        for _ in range(self.run.faults.restarts):
            try:
                return self.server.start(orders)
            except ForkServerError as error:
                if not error.is_lost:
                    raise
                self.say(f"warning: {error}; another is started")
                self._replace_server()
        return self.server.start(orders)

    def _replace_server(self) -> None:
        self.server.close()
        self.server = self.fork_server()

    def order_of(self, rank: int, meeting: Path, start: int) -> RankSpec:
        """What a rank is told."""
        logs, beside = self.folder / "logs", {"local_rank": self.here.index(rank), "local_world": len(self.here)}
        logs.mkdir(exist_ok=True)
        place = local(rank, self.run.plan.world, meeting / "store", self.order.place.threads)
        return msgspec.structs.replace(
            self.order,
            place=msgspec.structs.replace(place, **beside),
            beats=str(meeting),
            shared=str(self.machines.job if self.machines is not None else meeting),
            log=str(logs / f"rank{rank}.txt"),
            speaks=rank == 0,
            attempt=self.number,
            inject=self.order.inject if self.number == 1 and not start else "",
            start=start,
            memory="" if self.memory is None else self.memory.name,
        )
