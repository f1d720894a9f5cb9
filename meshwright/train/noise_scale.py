"""The gradient noise scale, and AdaScale (Johnson et al. 2020), which sets the rate by what its meter measures.

The noise scale says by how much a step's batch could grow before larger steps stop paying (McCandlish 2018). A step's
gradient is a sum over n microbatches. With p the mean square norm of a microbatch's own gradient, taken as a mean over
its tokens, and q that of the whole step's,

    variance of a microbatch's   σ² = n (p − q) / (n − 1)
    square of the true gradient  μ² = (n q − p) / (n − 1)
    noise scale, in tokens       B  = σ² · tokens of a microbatch ÷ μ²

A batch far beneath B takes hardly more tokens to a loss than any smaller one, one far above it hardly fewer steps than
any larger one; a batch of B needs twice the tokens of the smallest and twice the steps of the largest.

AdaScale has a base batch for which the rate was tuned, S times smaller than the batch. With σ² the variance of the base
batch's gradient and μ² as above, a step is worth

    r = (σ² + μ²) ÷ (σ²/S + μ²)

of its steps, between 1 and S, and its rate is multiplied by r. σ² and μ² are moving averages that keep 1 − S/1000. The
gain of a step is that of the averages up to the step before, so that no host waits for a device; the first step's is 1.
The schedule runs over the run's own steps; τ, the sum of the gains, says how many of the base batch they were worth.

Gradients are measured where autograd hands them over, before anything is summed: one pass over each, into a buffer of
one number a parameter and microbatch. Left out are weights whose gradient is not that of one microbatch there: those
that tp leaves whole on ranks that see parts of a sequence, experts that ep's ranks share, and a tied embedding that
two stages hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.config.run import Run
from meshwright.optim.clip import square_share
from meshwright.parallel import fsdp
from meshwright.parallel.device import ArrivingNumbers
from meshwright.parallel.mesh import Mesh, local
from meshwright.runtime.records import StepRecord
from meshwright.spec.plan import Plan

LEAST_VARIANCE = 1e-6  # as the paper has it
STEPS = 100  # that are averaged, at most: the noise scale grows as the loss falls


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Of one step's gradient, on the host or on a device, the loss scale still in both."""

    parts: Tensor  # p: mean square norm of a microbatch's gradient
    whole: Tensor  # q: of the step's


def microbatches(plan: Plan) -> int:
    """In a step, over all ranks."""
    return plan.data * plan.grad_accum


class NoiseMeter:
    """Measures both norms in every step; nothing in it waits for the device."""

    def __init__(self, run: Run, chunks: Sequence[nn.Module], mesh: Mesh) -> None:
        self.chunks, self.mesh, self.count = chunks, mesh, microbatches(run.plan)
        self.names = [_measured(chunk, run.plan) for chunk in chunks]
        accum = torch.float64 if run.plan.precision == "fp64" else torch.float32
        self.norms = torch.zeros(run.plan.grad_accum, sum(map(len, self.names)), dtype=accum, device=mesh.device)
        self.cells = [row.unbind() for row in self.norms.unbind()]  # made once: a hook has little else to do
        self.seen = [0] * self.norms.shape[1]  # microbatches of this step, by parameter
        own = [weight for chunk, names in zip(chunks, self.names, strict=True)
               for name, weight in chunk.named_parameters() if name in names]  # fmt: skip
        self.places = {id(weight): place for place, weight in enumerate(own)}
        for chunk in chunks:
            sharded = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
            for module in sharded:
                module.register_forward_pre_hook(partial(self._gathered, fsdp.param_groups(module)))
            for weight in [] if sharded else own:
                weight.register_hook(partial(self._arrived, self.places[id(weight)]))

    def _gathered(self, groups: list[Any], module: nn.Module, arguments: Any) -> None:
        """What autograd knows of a sharded weight is its whole: made when it is first gathered, then kept."""
        for weight in (weight for group in groups for weight in group.fsdp_params):
            place = self.places.pop(id(weight.sharded_param), None)
            if place is not None:
                weight.unsharded_param.register_hook(partial(self._arrived, place))

    def _arrived(self, place: int, gradient: Tensor) -> None:
        norm = self.cells[self.seen[place]][place]
        self.seen[place] += 1
        torch.linalg.vector_norm(local(gradient), dtype=norm.dtype, out=norm)
        if isinstance(gradient, DTensor) and (alike := _holders(gradient)) > 1:
            norm /= math.sqrt(alike)  # each of them adds its share

    def measure(self) -> GradientNoise:
        """Both norms of the step whose gradients have just been summed: one collective of two numbers."""
        assert set(self.seen) <= {self.norms.shape[0]}, "every microbatch has a gradient of every weight"
        self.seen = [0] * len(self.seen)
        whole = [square_share([chunk], self.mesh, names) for chunk, names in zip(self.chunks, self.names, strict=True)]
        totals = torch.stack([self.norms.double().square().sum(), torch.stack(whole).sum()])
        if self.mesh.world > 1:
            dist.all_reduce(totals)
        # Each is weighed by the tokens of the whole step: n times that is the mean over its own.
        return GradientNoise(parts=totals[0] * self.count, whole=totals[1])


def _measured(chunk: nn.Module, plan: Plan) -> frozenset[str]:
    twice = getattr(chunk, "tied_across_stages", frozenset())
    return frozenset(name for name, weight in chunk.named_parameters() if name not in twice and _counts(weight, plan))


def _counts(weight: Tensor, plan: Plan) -> bool:
    """Whether a weight's gradient on a rank is that of one microbatch, or a part of it that no other rank has."""
    if not weight.requires_grad or not isinstance(weight, DTensor):
        return weight.requires_grad
    names = weight.device_mesh.mesh_dim_names or ()
    cut = dict(zip(names, weight.placements, strict=True))
    return "ep" not in names and (plan.tp == 1 or isinstance(cut.get("tp"), Shard))


def _holders(gradient: DTensor) -> int:
    """Ranks that have all of it: of an embedding under tp, before it is scattered."""
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if isinstance(placement, Replicate))


class Averages(NamedTuple):
    """Moving averages over the steps so far."""

    tau: float = 0.0  # steps of the base batch that they were worth
    steps: float = 0.0  # that were averaged
    variance: float = 0.0  # σ² of the base batch
    square: float = 0.0  # μ²

    def with_step(self, parts: float, whole: float, count: int, scale: float) -> "Averages":
        """With one step more, which a gradient that is not finite does not count."""
        variance, square = estimate(parts, whole, count)
        variance *= scale / count  # of the base batch, not of a microbatch
        if not math.isfinite(variance + square):
            return self
        keep, steps = max(1 - scale / 1000, 0.0), self.steps + 1
        weight = (1 - keep) / (1 - keep**steps)  # so that the first step's is 1
        return self._replace(
            steps=steps,
            variance=self.variance + weight * (variance - self.variance),
            square=self.square + weight * (square - self.square),
        )

    def gain(self, scale: float) -> float:
        """The gain, by estimates that chance may have made negative."""
        if not self.steps:
            return 1.0
        variance, square = max(self.variance, LEAST_VARIANCE), max(self.square, 0.0)
        return (variance + square) / (variance / scale + square)


class AdaScale:
    """The gain of each step. `kept` is saved with the state, and the norms of the newest step, which the next reads."""

    def __init__(self, run: Run) -> None:
        self.count = microbatches(run.plan)
        self.scale = run.batch / (run.optim.adascale_batch or run.plan.microbatch)
        self.kept = Averages()
        self.newest: Tensor | None = None  # p and q
        self.arriving: ArrivingNumbers | None = None  # they

    def gain(self, noise: GradientNoise | None, loss_scale: Tensor) -> float:
        """How many steps of the base batch this step is worth, by those before it; its own norms are the next one's."""
        assert noise is not None, "there is a meter"
        if self.arriving is not None:
            parts, whole = self.arriving.read()  # of the step before, not of this one
            self.kept = self.kept.with_step(parts, whole, self.count, self.scale)
        self._take(torch.stack([noise.parts, noise.whole]) / loss_scale.double().square())
        gain = self.kept.gain(self.scale)
        self.kept = self.kept._replace(tau=self.kept.tau + gain)
        return gain

    def _take(self, norms: Tensor) -> None:
        self.newest, self.arriving = norms, ArrivingNumbers(norms)

    def resume(self, saved: Sequence[float], device: torch.device) -> None:
        """As it was when a step was saved."""
        if saved:
            self.kept = Averages(*saved[:4])
            self._take(torch.tensor(saved[4:], dtype=torch.float64, device=device))


class NoiseScale(msgspec.Struct, frozen=True, kw_only=True):
    """What the last steps of a run say."""

    tokens: float  # B
    sequences: float  # the same in sequences of the run's length
    steps: int  # that were averaged


def estimate(parts: float, whole: float, count: int) -> tuple[float, float]:
    """σ² of a microbatch's gradient, and μ², by the two square norms; either may be negative by chance."""
    return count * (parts - whole) / (count - 1), (count * whole - parts) / (count - 1)


def noise_scale(records: Sequence[StepRecord], batch: int) -> NoiseScale | None:
    """Of a run that measured it; None where it did not, or where chance leaves no gradient beside the noise.

    Both parts of the ratio are averaged by themselves: a mean of ratios would be far off.
    """
    measured = [record for record in records if record.gradient_square is not None and not record.skipped][-STEPS:]
    square = sum(record.gradient_square or 0.0 for record in measured)
    variance = sum(record.gradient_variance or 0.0 for record in measured)
    if not measured or square <= 0 or variance <= 0:
        return None
    tokens = variance / square
    each = sum(record.tokens for record in measured) / len(measured) / batch  # of a sequence
    return NoiseScale(tokens=tokens, sequences=tokens / each, steps=len(measured))
