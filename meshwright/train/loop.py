"""The loop: a generator that training, benchmarks and tests drive alike."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.optim import clip
from meshwright.optim.interface import learning_rate
from meshwright.parallel import compile, deterministic, precision
from meshwright.parallel.device import Moment, moment
from meshwright.parallel.expert import update_load_bias
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.failure import ASKS
from meshwright.runtime.run_folder import STOP, FolderWatch
from meshwright.train import dpo
from meshwright.train.noise_scale import GradientNoise
from meshwright.train.saving import Pause, Save, Vote, Votes, saving
from meshwright.train.state import MovedError, State
from meshwright.train.step import choose, evaluating, held_loss, moe_layers

FOLDER_SECONDS = 1.0  # between two looks into the run folder, for the stop file


class Stop:
    """Whether somebody has asked this rank to save and end."""

    def __init__(self, folder: FolderWatch | None = None) -> None:
        self.signalled = False
        self.folder = folder  # one rank looks for all
        self.looked = 0.0
        self.interrupts = 0
        self.saved = True  # what was done until the end is on the disk
        self.owes = False  # the last eval.command, which was cut off: all else is done

    @property
    def asked(self) -> bool:
        """By a signal, or under every launcher by a file in the run folder, which is looked into once a second."""
        if not self.signalled and self.folder is not None and time.monotonic() - self.looked > FOLDER_SECONDS:
            self.looked = time.monotonic()
            self.folder.require()
            self.signalled = (self.folder.folder / STOP).exists()
        return self.signalled

    @asked.setter
    def asked(self, is_so: bool) -> None:
        self.signalled = is_so

    def require_folder(self) -> None:
        """End a run whose folder was taken away, before what it leaves is written."""
        if self.folder is not None:
            self.folder.require()

    def listen(self) -> "Stop":
        """Let signals ask. A second one asks the same, for a save that has begun is not cut short, but by Ctrl-C."""
        for number in ASKS:
            signal.signal(number, self._hear)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # whose launcher does not hear it for all
            signal.signal(signal.SIGINT, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            raise KeyboardInterrupt


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
    load: Tensor | None  # MoE: this rank's mean balance loss, and its busiest and idlest expert's load
    noise: GradientNoise | None  # where it is measured
    preference: Tensor | None  # DPO: the mean reward margin, and the share of pairs whose chosen answer is ahead
    staleness: int | None  # updates that the weights were behind, where a parameter server has them
    rate: float
    tokens: int
    span: float  # mean over positions of the document that each is in, which attention is counted by
    wait_seconds: float  # of the host, for the loader
    compile_seconds: float  # that torch.compile took of it
    recovery_seconds: float  # until replicas went on without one that was lost
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
    save_by = saving if state.live is None else state.live.saving
    with save_by(run, state, mesh, folder) as save:
        yield from steps(run, state, mesh, save, stop or Stop())
        state.optimizer.settle()  # whoever reads weights afterwards sees them moved


def steps(run: Run, state: State, mesh: Mesh, save: Save, stop: Stop) -> Iterator[StepResult | EvalResult]:
    preferences = dpo.step_of(run, state, mesh)
    forward_backward = preferences or choose(run, state.chunks, mesh)
    live, votes, outer = state.live, Votes(), state.outer
    measure = clip.choose(run.plan) if live is None else live.measure
    between = partial(evaluations, run, state, mesh) if live is None else live.between
    if live is not None:
        yield from live.evaluations()  # of a replica that comes back, or as below
    elif state.step == run.steps and is_due(run, state):  # resumed from the last step: only the ending was missing
        yield evaluate(run, state, mesh)
    while state.step < run.steps and not state.stopped:
        state.optimizer.zero_grad()
        began, compiled = moment(mesh.device), compile.seconds()
        batch = state.loader.take(state.step)
        fed = moment(mesh.device)
        outer.pull(state.step + 1)
        scale, is_plain = state.scale.value, outer.calendar.is_plain(state.step + 1)
        loss_sum = forward_backward(batch.together if is_plain else batch, scale)
        outer.sum_gradients(state.step + 1)
        ballot = save.vote(state.step + 1).number(stop.asked)
        try:
            loss, square, total = measure(state.chunks, loss_sum, mesh, ballot)
        except MovedError:
            yield from moved(state, save, between)
            continue
        stats = clip.grad_stats(loss, square, scale, run.optim.grad_clip)
        noise = state.meter.measure() if state.meter is not None else None
        rate = learning_rate(run.optim, state.step, run.steps)
        if state.adascale is not None:
            rate *= state.adascale.gain(noise, scale)
        stall = save.hold_update()
        outer.begin(state.step + 1)
        state.optimizer.step(rate, stats)
        update_load_bias(state.chunks, run.arch, mesh, stats.finite)
        state.scale.update(stats.finite)
        state.step += 1
        try:
            met = outer.meet(state.step, stats.loss, batch.tokens, total)
        except MovedError:
            yield from moved(state, save, between)
            continue
        heard = Vote()
        if met and met.votes is not None:
            heard = votes.heard(met.votes, met.said or state.step, at_once=met.at_once or not is_plain)
        state.stopped = heard.stop and state.step < run.steps
        updated = moment(mesh.device)
        save.hear(heard)
        save_seconds = save(state)  # before the yield: whoever iterates may stop there
        yield StepResult(
            step=state.step,
            loss=met.loss if met and is_plain else stats.loss / batch.tokens,
            mean_loss=met.loss if met and not is_plain else None,
            norm=met.norm if met and met.norm is not None else stats.norm,
            finite=stats.finite,
            loss_scale=scale,
            load=expert_load(state),
            preference=preferences.told(batch.pairs) if preferences else None,
            noise=noise,
            staleness=outer.staleness,
            rate=rate,
            tokens=batch.job_tokens,
            span=batch.span,
            wait_seconds=batch.wait_seconds,
            compile_seconds=compile.seconds() - compiled,
            recovery_seconds=0.0 if live is None else live.take_lost_seconds(),
            pause=Pause(save_seconds, stall),
            began=began,
            fed=fed,
            updated=updated,
            ended=moment(mesh.device) if save_seconds else updated,
        )
        yield from between()
    if live is not None:
        live.part()


def moved(state: State, save: Save, between: Callable[[], Iterator[EvalResult]]) -> Iterator[EvalResult]:
    """After a step that a replica did not finish: it was behind, and has the state of another now."""
    save(state)
    yield from between()


def evaluations(run: Run, state: State, mesh: Mesh) -> Iterator[EvalResult]:
    """The validation loss that is due after a step, if one is."""
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
    sums, tokens = held_sums(run, state, mesh, state.loader)
    loss = deterministic.total(sums, run.plan, mesh).sum() / tokens
    ended = moment(mesh.device)
    return EvalResult(step=state.step, loss=loss, tokens=tokens, seconds=ended.at - began.at, began=began, ended=ended)


def held_sums(run: Run, state: State, mesh: Mesh, loader: Loader) -> tuple[Tensor, int]:
    """A rank's part of the losses of each global batch that is never trained on, and all their tokens, or pairs."""
    sums: list[Tensor] = []
    tokens, preferences = 0, dpo.step_of(run, state, mesh)
    held = preferences.held if preferences else partial(held_loss, state.chunks, run, mesh)
    with evaluating(state.chunks):
        for number in range(run.eval.batches):
            batch = loader.held(number)
            tokens += batch.pairs or batch.job_tokens
            tree = deterministic.Tree(len(batch.microbatches))
            parts = [tree.add(held(each).double()) for each in batch.microbatches]
            assert parts[-1] is not None, "the last microbatch completes the sum"
            sums.append(parts[-1] / run.plan.tp)
    return torch.stack(sums), tokens


def expert_load(state: State) -> Tensor | None:
    """How evenly the experts of this rank's last microbatch share its tokens: three numbers, 1 where they do.

    The mean balance loss of its layers, and of all their experts the largest and the smallest load ÷ an even share.
    """
    seen = [layer.statistics for chunk in state.chunks for layer in moe_layers(chunk)]
    values = [statistics for statistics in seen if statistics is not None]
    if not values:
        return None
    told = torch.stack(values)
    loads = told[:, 1:] * (told.shape[1] - 1)
    return torch.stack([told[:, 0].mean(), loads.max(), loads.min()])
