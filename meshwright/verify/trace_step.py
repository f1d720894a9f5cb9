"""One optimizer step of the real model under the real plan, without the world and without memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from meshwright.cost.traffic_collective import Axis, Collective
from meshwright.data.loader import Batch, StepBatch
from meshwright.models.decoder import Decoder
from meshwright.optim import clip, rounding
from meshwright.optim.adamw import AdamW
from meshwright.parallel import shadow
from meshwright.parallel.apply import apply
from meshwright.parallel.decoder import DECODER
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan
from meshwright.spec.run import Run
from meshwright.train.scale import LossScale
from meshwright.train.step import ForwardBackward, choose
from meshwright.verify.observe import Calls, implied, observing, ranks_of
from meshwright.verify.trace_live import Live, following, stored
from meshwright.verify.trace_stand_in import Voting, standing_in
from meshwright.verify.trace_world import fake_tensors, fake_world

RATE = 1e-3  # of learning: any, the weights have no values


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank did and held in one step."""

    calls: Calls
    said: Calls  # the arithmetic's, with the ranks of this rank's axes
    axes: dict[tuple[int, ...], str]  # ranks by the axis on which this one meets them
    place: dict[str, int]  # this rank's, on each axis
    states: dict[str, int]  # bytes: weights, gradients, moments
    live_bytes: int  # at the peak
    phase: str  # in which it was


Collectives = Callable[[dict[str, int]], Sequence[Collective]]  # of the rank in some place


def traceable(plan: Plan) -> Plan:
    """The plan as it can be traced: by plain kernels, not compiled (torch's compiler ends the process here), with all
    that it keeps on the device and as it is.
    """
    here = {"compress": "none", "activations": "device", "offload": "none"}
    return msgspec.structs.replace(plan, kernels="plain", compile=False, **here)


def trace_step(run: Run, rank: int, collectives: Collectives) -> Seen:
    """The second step of a rank: what is made at first use is there, and what a step leaves behind too."""
    run = msgspec.structs.replace(run, plan=traceable(run.plan))
    with fake_world(run.plan, rank) as mesh, ExitStack() as stack:
        with torch.device("meta"):
            model = Decoder(run.arch).to(rounding.weight_dtype(run.optim, run.plan))
        chunks = apply(model, run.plan, mesh, DECODER)
        forward_backward = choose(run, chunks, mesh)
        stack.enter_context(fake_tensors())
        live = stack.enter_context(following())
        stack.enter_context(standing_in(chunks))
        step = _Step(run, mesh, chunks, live, forward_backward)
        with Voting():
            step.run_once()
        live.peak = live.bytes
        with observing() as calls:
            step.run_once()
        planned = collectives(mesh.place)
        return Seen(
            calls=Counter(calls),
            said=implied(planned, run.plan, mesh),
            axes=_axes(planned, run.plan, mesh),
            place=mesh.place,
            states=step.states(),
            live_bytes=live.peak,
            phase=live.peak_phase,
        )


def _axes(planned: Sequence[Collective], plan: Plan, mesh: Mesh) -> dict[tuple[int, ...], str]:
    """The names of groups of ranks; where two axes have the same ranks, the one that was planned."""
    named: list[Axis] = [each.axis for each in planned if each.axis != "world"]  # the name of last resort
    axes: tuple[Axis, ...] = ("world", "pp", "cp", "tp", "shard", "replicate", *named)
    return {ranks_of(axis, plan, mesh): axis for axis in axes}


class _Step:
    """The trainer's own step, with a batch that has no content."""

    def __init__(
        self, run: Run, mesh: Mesh, chunks: list[nn.Module], live: Live, forward_backward: ForwardBackward
    ) -> None:
        self.run, self.mesh, self.chunks, self.live = run, mesh, chunks, live
        for chunk in chunks:
            chunk.to_empty(device=mesh.device)
            chunk.train()
        shadow.attach(chunks, run.plan)
        rounding.attach(chunks, run)
        self.weights = [weight for chunk in chunks for weight in chunk.parameters()]
        self.optimizer = AdamW(run.optim, self.weights, run.plan)
        if run.optim.rounding != "master":  # by blocks that suit a cache: of large weights too many to follow
            self.optimizer.update = lambda indices, rate, decay, verdict: None
        self.scale = LossScale(run.plan, mesh.device)
        self.forward_backward = forward_backward
        self.measure = clip.choose(run.plan)

    def run_once(self) -> None:
        """As train/loop.py has it."""
        self.optimizer.zero_grad()
        self.live.phase = "forward and backward"
        loss_sum = self.forward_backward(_batch(self.run), self.scale.value)
        self.live.phase = "the optimizer's step"
        loss, square, _ = self.measure(self.chunks, loss_sum, self.mesh, False)
        verdict = clip.judge(loss, square, self.scale.value, self.run.optim.clip)
        self.optimizer.step(RATE, verdict)
        self.scale.update(verdict.finite)

    def states(self) -> dict[str, int]:
        """Bytes of what stays from step to step, and of the gradients, which are there until the next begins."""
        return {
            "weights": stored(self.optimizer.wide),
            "gradients": stored(weight.grad for weight in self.weights),
            "moments": stored([*self.optimizer.first, *self.optimizer.second]),
        }


def _batch(run: Run) -> StepBatch:
    """Microbatches of the right shapes."""
    return StepBatch(tuple(_microbatch(run) for _ in range(run.plan.accumulate)), run.tokens, 0.0)


def _microbatch(run: Run) -> Batch:
    tokens, targets, positions, index, documents = (
        torch.zeros(run.plan.microbatch, run.sequence, dtype=torch.int64) for _ in range(5)
    )
    return Batch(tokens, targets, positions, documents if run.data.mask_documents else None, index)
