"""The supervisor of one machine's ranks: outside the collectives, so that it sees who is missing from them.

It starts ranks of its own and restarts them; a `Watch` looks after each attempt. Ranks that torchrun or Slurm has
started get a `Sidecar` instead.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from meshwright.config.run import Run
from meshwright.runtime import failure, run_folder
from meshwright.runtime.failure import RESTARTABLE, Exit, Failure
from meshwright.runtime.generations import Roster, machine_replicas, replica_ranks
from meshwright.runtime.heartbeat import HangDetector, HeartbeatReader
from meshwright.runtime.live_watch import LiveWatch, MachineWatch
from meshwright.runtime.machines import MachineRoster, Machines
from meshwright.runtime.place import RankSpec, local
from meshwright.runtime.ranks import ForkServer, ForkServerError, Ranks
from meshwright.runtime.watch import StopRequest, Watch, newest_step, set_aside
from meshwright.spec.problem import InputError
from meshwright.spec.units import plural


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
                verdict = self._attempt()
            except ForkServerError as error:
                return failure.of_fork_server(str(error), self.folder)
            if verdict is None:
                return None
            verdict = self._noted(verdict)
            if self.asked.stop:
                return verdict
            if (replaced := self._condemn(verdict)) is not None:
                self.saved = self.newest_step()
                remedy = f"nothing: restarting {self._from()}; a spare takes the place of replica {replaced}"
                remedy += ", which is not started again: take its device out when you can"
            elif verdict.kind not in RESTARTABLE or self.machines is not None:
                return verdict  # who starts several machines starts them again
            elif self._is_futile():
                remedy = (
                    f"{plural(self.run.faults.restarts, 'restart')} in a row brought no newer checkpoint "
                    "(faults.restarts): find the cause, then run the same command again to resume"
                )
                return msgspec.structs.replace(verdict, remedy=remedy)
            else:
                charged = (
                    f"; {self.wasted} of {plural(self.run.faults.restarts, 'attempt')} brought no newer checkpoint"
                )
                remedy = f"nothing: restarting {self._from()}{charged if self.wasted else ''}"
            self.say(str(msgspec.structs.replace(verdict, remedy=remedy)))
            if not self._met_again():
                return verdict

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

    def _noted(self, verdict: Failure) -> Failure:
        """Keep what ended an attempt, and set aside what it puts in doubt."""
        if verdict.kind not in ("input", "stopped") and not self.home.is_taken():
            failure.keep_end(verdict, self.folder, self.attempt_name)
        if verdict.good_until is not None:
            for home in self.homes():
                set_aside(home, verdict.good_until)
        if verdict.kind == "input" and self.number > 1:  # it was there when the run began
            return msgspec.structs.replace(verdict, kind="data", code=Exit.RESUMABLE)
        return verdict

    def _is_futile(self) -> bool:
        """Whether too many attempts in a row left no newer checkpoint; only those are charged."""
        before, self.saved = self.saved, self.newest_step()
        self.wasted = 0 if self.saved > before else self.wasted + 1
        return self.wasted > self.run.faults.restarts

    def _from(self) -> str:
        return f"from step {self.saved}" if self.saved >= 0 else "from the beginning"

    def _condemn(self, verdict: Failure) -> int | None:
        """The replica that was found to compute wrong numbers, where a spare is left for it; it is not started again.

        What it computed has reached the others, so they go back to what was saved before.
        """
        replicas = replica_ranks(self.run.plan, self.run.faults.spares)
        suspects = verdict.suspects
        if verdict.kind == "matmul" and verdict.rank is not None:  # told by the rank itself
            suspects = tuple(number for number, ranks in enumerate(replicas) if verdict.rank in ranks)
        left = len(replicas) - len(self.condemned) - self.run.plan.replicate
        if verdict.code != Exit.HARDWARE or len(suspects) != 1 or left < 1:
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
            self.server.close()
            self.server = self.fork_server()
        return self.server.start([self.order_of(rank, meeting, start) for rank in ranks])

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
