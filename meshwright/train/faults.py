"""What a rank watches for in its own numbers while it trains."""

import time

from meshwright.parallel.mesh import Mesh
from meshwright.spec.exits import Exit
from meshwright.spec.record import EventRecord, StepRecord
from meshwright.spec.run import Run
from meshwright.spec.verdict import FaultError, Verdict
from meshwright.train.heartbeat import Heart
from meshwright.train.log import Recorder
from meshwright.train.nonfinite import culprit
from meshwright.train.replicas import Replicas
from meshwright.train.spikes import Spikes
from meshwright.train.state import State
from meshwright.train.stragglers import Stragglers
from meshwright.train.witness import Witness


class Faults:
    """Looks at each step once its numbers are on the host: on every rank at the same step, so that ranks may confer."""

    def __init__(self, run: Run, state: State, mesh: Mesh, recorder: Recorder, heart: Heart) -> None:
        self.run = run
        self.state = state
        self.mesh = mesh
        self.recorder = recorder
        self.spikes = Spikes(run.faults.spike)
        self.stragglers = Stragglers(run.faults.straggler, mesh, heart)
        self.replicas = Replicas(run.faults.compare_every, state, mesh)
        self.witness = Witness(run, state, mesh, recorder.folder)
        self.looked = state.step
        self.streak = 0  # steps in a row whose gradient was not finite

    def look(self) -> None:
        """One look after each result."""
        record = self.recorder.settled()
        if record is None or record.step <= self.looked:
            return
        self.looked = record.step
        # Under fp16 a loss scale that is too high comes down first, by itself.
        if record.skipped and not (self.run.plan.precision == "fp16" and record.loss_scale > 1.0):
            self._not_finite(record)
            return
        self.streak = 0
        if words := self.spikes.add(record.loss, record.norm):
            self._tell("spike", record.step, words)
        if found := self.stragglers.look(record.step):
            self._tell("straggler", record.step, str(found), found.rank)
        if told := self.witness.look(self.replicas, record.step):
            self._tell("replicas", record.step, told[1], told[0])

    def _not_finite(self, record: StepRecord) -> None:
        """The first of a row is looked into; too long a row ends the run."""
        self.streak += 1
        text = "the gradient is not finite again"
        rank = None
        if self.streak == 1:
            found = culprit(self.run, self.state, self.mesh, record.step, self.recorder.folder)
            text, rank = str(found), found.rank
        self._tell("not-finite", record.step, text, rank)
        if self.streak > self.run.faults.not_finite:
            raise FaultError(self._verdict(record.step, text, rank))

    def _verdict(self, step: int, text: str, rank: int | None) -> Verdict:
        return Verdict(
            kind="not-finite",
            code=Exit.NOT_FINITE,
            what=f"{self.streak} gradients in a row were not finite (faults.not_finite = {self.run.faults.not_finite})",
            where=text,
            since=f"step {step - self.streak + 1}",
            cause="a learning rate too high, a damaged weight, or data that the model cannot take",
            remedy="lower optim.rate or mend the data; the same command goes on from the newest checkpoint",
            details=str(self.recorder.folder / "faults"),
            rank=rank,
            step=step,
        )

    def _tell(self, what: str, step: int, text: str, rank: int | None = None) -> None:
        self.recorder.tell(EventRecord(what=what, step=step, text=text, rank=rank, at=time.monotonic()))  # type: ignore
