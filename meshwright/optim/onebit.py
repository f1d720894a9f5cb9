"""What optimizers that compress have in common: gradients that stay each replica's own, and the phases of a run.

Replicas do not add up their gradients in the backward. A worker's gradient is its own samples' share of the loss times
the number of replicas, so that the mean over workers is the gradient of the whole batch, however unlike their numbers
of tokens are. An exact step sums gradients after the backward; in any other the momentum that each worker makes of its
own gradient travels by `optim/sign_exchange.py`.

The norm that clips is the gradient's in an exact step. In others nobody has the mean: it is the root mean square over
the workers of their gradients' norms, which is never below that of the mean.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config.run import Optim, Run
from meshwright.optim.interface import Optimizer, UpdateTerms, WeightShard, WholeTensorRule
from meshwright.optim.master_weights import given
from meshwright.optim.outer import Meeting, NoOuterLoop
from meshwright.optim.sign_exchange import SignExchange
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.communication import SERVER_ERROR, WORKER_ERROR, Exchange, exchange_of


class CompressingRule(WholeTensorRule):
    """One optimizer's arithmetic on whole weights, of which every replica has a copy and a momentum of its own."""

    def __init__(self, optim: Optim) -> None:
        super().__init__(optim)
        self.signs = SignExchange(None)
        self.step = 1
        self.exchange: Exchange = "exact"

    def meet(self, mesh: Mesh) -> None:
        """Let the replicas of a mesh exchange momenta."""
        if mesh.apart > 1:
            self.signs = SignExchange(mesh.group("replicate"), mesh.apart, mesh.part)

    @property
    def freezes(self) -> bool:
        """Whether this step is the last that updates the variance."""
        return self.step == self.optim.freeze_step

    def mean(self, shards: Sequence[WeightShard], values: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        """The mean over the workers of something of each weight, one bit an element."""
        worker, server = ([shard.states[kind] for shard in shards] for kind in (WORKER_ERROR, SERVER_ERROR))
        return self.signs.mean(values, worker, server, finite)

    def momentum(self, shard: WeightShard, gradient: Tensor) -> Tensor:
        """The first moment after a gradient."""
        return (shard.states["first"] * self.optim.beta1).add_(gradient, alpha=1 - self.optim.beta1)

    def variance(self, shard: WeightShard, gradient: Tensor) -> Tensor:
        """The second moment after a gradient."""
        return (shard.states["second"] * self.optim.beta2).add_(gradient.square(), alpha=1 - self.optim.beta2)

    def bias(self, beta: float, terms: UpdateTerms, like: Tensor) -> Tensor:
        """What a running mean that began at zero is divided by; 1 before the first update, when there is none."""
        return torch.where(terms.count > 0, 1 - beta ** terms.count.double(), 1.0).to(like.dtype)

    def direction(self, first: Tensor, second: Tensor) -> Tensor:
        """A momentum beside the root of a variance.

        Signs have no zero: what no gradient had reached when the variance was frozen would move by rounding alone, and
        far, as it is divided by nothing. It stays.
        """
        return torch.where(second > 0, first / second.sqrt().add_(self.optim.eps), 0.0)


class MomentumRule(CompressingRule):
    """Exact for a while; from then on the momentum travels in one bit at every step."""

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """Exact in the warm-up; then bucket by bucket, two collectives each."""
        if self.exchange == "exact":
            for shard in shards:
                self.warm_up(shard, terms)
            return
        for bucket in buckets(shards):
            own = [self.momentum(shard, shard.gradient()) for shard in bucket]
            for shard, first in zip(bucket, self.mean(bucket, own, terms.finite > 0), strict=True):
                self.compressed(shard, first, terms)

    @abstractmethod
    def warm_up(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """The exact update of one weight."""

    @abstractmethod
    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The update of one weight by the momentum that all workers received."""


def buckets(shards: Sequence[WeightShard]) -> list[list[WeightShard]]:
    """Weights that travel together: those of a block, and those outside the blocks."""
    found: dict[str, list[WeightShard]] = {}
    for shard in shards:
        found.setdefault(layer_of(shard.name), []).append(shard)
    return list(found.values())


def layer_of(name: str) -> str:
    """The block that a weight is in."""
    return name.split(".")[1] if name.startswith("blocks.") else ""


class CompressingReplicas(NoOuterLoop):
    """What a step does with gradients that no backward has summed."""

    def __init__(self, run: Run, chunks: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh) -> None:
        super().__init__(run)
        self.run, self.mesh, self.rule = run, mesh, rule_in(optimizer)
        self.rule.meet(mesh)
        groups: dict[str, list[nn.Parameter]] = {}
        for name, weight in (pair for chunk in chunks for pair in chunk.named_parameters()):
            groups.setdefault(layer_of(name), []).append(weight)
        self.groups = list(groups.values())

    @torch.no_grad()
    def sum_gradients(self, step: int) -> None:
        """Sum them over the replicas where the step is exact; else make each worker's its own, in full."""
        exchange = exchange_of(self.run.optim, step, self.run.steps)
        self.rule.step, self.rule.exchange = step, exchange
        for weights in self.groups:
            gradients = [local(given(weight)) for weight in weights]
            if exchange != "exact":
                torch._foreach_mul_(gradients, float(self.mesh.apart))
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self.mesh.group("replicate"))
            parts = flat.split([gradient.numel() for gradient in gradients])
            pairs = zip(parts, gradients, strict=True)
            torch._foreach_copy_(gradients, [part.view(gradient.shape) for part, gradient in pairs])

    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        """Every step agrees on its loss; a wish to stop is heard where replicas have the same weights."""
        at_once = not self.calendar.meets(step + 1)  # a local step hears nothing
        return Meeting(votes if self.calendar.meets(step) else None, loss / tokens, at_once)


def rule_in(optimizer: Optimizer) -> CompressingRule:
    """The rule of an optimizer that compresses."""
    rule = getattr(optimizer, "compressing", None)
    assert isinstance(rule, CompressingRule), "the optimizer compresses"
    return rule


def described(run: Run) -> list[str]:
    """A line for the log; none of an optimizer that does not compress."""
    if not run.compresses:
        return []
    spec, freeze = run.optim.name, run.optim.freeze_step
    local_steps = ", then after local steps" if spec == "zero_one_adam" else ""
    return [
        f"{spec}: gradients are summed exactly up to step {freeze}, from then on {run.plan.replicate} replicas "
        f"exchange momenta in one bit an element{local_steps}; norms are then the root mean square of the replicas' own"
    ]
