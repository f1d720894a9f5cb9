"""The loop: a generator that training, benchmarks and tests drive alike."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.optim import clip
from meshwright.optim.interface import learning_rate
from meshwright.parallel import compile, deterministic, precision
from meshwright.parallel.mesh import Mesh
from meshwright.train.noise_scale import GradientNoise
from meshwright.train.saving import Pause, Save, Vote, Votes, saving
from meshwright.train.state import State
from meshwright.train.step import choose, evaluating, held_loss, mixtures
from meshwright.train.timeline import Moment, moment


class Stop:
    """Whether somebody has asked this rank to save and end."""

    def __init__(self) -> None:
        self.asked = False
        self.saved = True  # what was done until the end is on the disk

    def listen(self) -> "Stop":
        """Let SIGTERM ask. A second one asks the same: a save that has begun is never cut short."""
        signal.signal(signal.SIGTERM, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A validation loss."""

    step: int  # after which it was taken
    loss: Tensor
    tokens: int
    seconds: float
    began: Moment
    ended: Moment


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, as device scalars: whoever needs a number waits for it, the loop does not."""

    step: int  # counts from 1
    loss: Tensor  # sum of token losses ÷ valid tokens, of all ranks that made the update together
    mean_loss: Tensor | None  # where replicas that sync rarely have met: over all their tokens since they last did
    norm: Tensor
    finite: Tensor
    loss_scale: Tensor
    balance: Tensor | None  # mixtures: this rank's mean balance loss
    noise: GradientNoise | None  # where it is measured
    rate: float
    tokens: int
    span: float  # mean over positions of the document that each is in, which attention is counted by
    wait_seconds: float  # of the host, for the loader
    compile_seconds: float  # that torch.compile took of it
    pause: Pause  # by a save: this step's, on the host, or the one's before, on the device
    began: Moment  # its batch was asked for
    fed: Moment  # and was there
    updated: Moment  # what follows is the save
    ended: Moment

    @property
    def save_seconds(self) -> float:
        """That saves paused training for. Waits for the step's update."""
        return self.pause.seconds()


def train(
    run: Run, state: State, mesh: Mesh, folder: Path | None = None, stop: Stop | None = None
) -> Iterator[StepResult | EvalResult]:
    """Run the plan. Yields one result a step, and validation losses between; whoever iterates decides what to do.

    With a folder the state is saved there when it is due. When any rank is asked to stop, all save at the same step and
    this ends there, with `state.stopped`.
    """
    deterministic.pin(run.plan, mesh.device)
    precision.pin(run.plan, mesh.device)
    with saving(run, state, mesh, folder) as save:
        yield from steps(run, state, mesh, save, stop or Stop())
        state.optimizer.settle()  # whoever reads weights afterwards sees them moved


def steps(run: Run, state: State, mesh: Mesh, save: Save, stop: Stop) -> Iterator[StepResult | EvalResult]:
    forward_backward = choose(run, state.chunks, mesh)
    measure, votes, outer = clip.choose(run.plan), Votes(), state.outer
    if state.step == run.steps and is_due(run, state):  # resumed from the last step: only the ending was missing
        yield evaluate(run, state, mesh)
    while state.step < run.steps and not state.stopped:
        state.optimizer.zero_grad()
        began, compiled = moment(mesh.device), compile.seconds()
        batch = state.loader.take(state.step)
        fed = moment(mesh.device)
        scale, is_plain = state.scale.value, outer.calendar.is_plain(state.step + 1)
        loss_sum = forward_backward(batch.together if is_plain else batch, scale)
        outer.sum_gradients(state.step + 1)
        ballot = save.vote(state.step + 1).number(stop.asked)
        loss, square, total = measure(state.chunks, loss_sum, mesh, ballot)
        verdict = clip.grad_stats(loss, square, scale, run.optim.grad_clip)
        noise = state.meter.measure() if state.meter is not None else None
        rate = learning_rate(run.optim, state.step, run.steps)
        if state.adascale is not None:
            rate *= state.adascale.gain(noise, scale)
        stall = save.hold_update()
        outer.begin(state.step + 1)
        state.optimizer.step(rate, verdict)
        state.scale.update(verdict.finite)
        state.step += 1
        met = outer.meet(state.step, verdict.loss, batch.tokens, total)
        heard = votes.heard(met.votes, state.step, at_once=not is_plain) if met else Vote()
        state.stopped = heard.stop and state.step < run.steps
        updated = moment(mesh.device)
        save.hear(heard)
        save_seconds = save(state)  # before the yield: whoever iterates may stop there
        yield StepResult(
            step=state.step,
            loss=met.loss if met and is_plain else verdict.loss / batch.tokens,
            mean_loss=met.loss if met and not is_plain else None,
            norm=verdict.norm,
            finite=verdict.finite,
            loss_scale=scale,
            balance=balance(state),
            noise=noise,
            rate=rate,
            tokens=batch.job_tokens,
            span=batch.span,
            wait_seconds=batch.wait_seconds,
            compile_seconds=compile.seconds() - compiled,
            pause=Pause(save_seconds, stall),
            began=began,
            fed=fed,
            updated=updated,
            ended=moment(mesh.device) if save_seconds else updated,
        )
        if is_due(run, state) and not state.stopped:
            yield evaluate(run, state, mesh)


def is_due(run: Run, state: State) -> bool:
    """Whether a validation loss follows this step; the last step always has one, if there are validation samples.

    Of replicas that sync rarely it is taken where they meet.
    """
    if not state.loader.holds_out:  # a share of the samples may still be none of them
        return False
    return state.step == run.steps or state.outer.calendar.has_come(state.step, run.eval.every)


def evaluate(run: Run, state: State, mesh: Mesh) -> EvalResult:
    """The loss over samples that are never trained on, under the same plan."""
    began = moment(mesh.device)
    sums: list[Tensor] = []  # of each global batch, this rank's part
    tokens = 0
    with evaluating(state.chunks):
        for number in range(run.eval.batches):
            batch = state.loader.held(number)
            tokens += batch.job_tokens
            tree = deterministic.Tree(len(batch.microbatches))
            parts = [tree.add(held_loss(state.chunks, run, mesh, each).double()) for each in batch.microbatches]
            assert parts[-1] is not None, "the last microbatch completes the sum"
            sums.append(parts[-1] / run.plan.tp)
    loss = deterministic.total(torch.stack(sums), run.plan, mesh).sum() / tokens
    ended = moment(mesh.device)
    return EvalResult(step=state.step, loss=loss, tokens=tokens, seconds=ended.at - began.at, began=began, ended=ended)


def balance(state: State) -> Tensor | None:
    """How evenly the experts of this rank's last microbatch share its tokens: 1 is even."""
    seen = [mixture.statistics for chunk in state.chunks for mixture in mixtures(chunk)]
    values = [statistics[0] for statistics in seen if statistics is not None]
    return torch.stack(values).mean() if values else None
