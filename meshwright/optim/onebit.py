"""What optimizers that compress have in common: gradients that stay each replica's own, and the phases of a run.

Replicas do not add up their gradients in the backward. A worker's gradient is its own samples' share of the loss times
the number of replicas, so that the mean over workers is the gradient of the whole batch, however unlike their numbers
of tokens are. An exact step sums gradients after the backward; in any other the momentum that each worker makes of its
own gradient travels by a `SignExchange`: a mean over replicas in one bit an element each way, with error feedback,

    worker i    c_i = C(x_i + e_i)      e_i ← x_i + e_i − c_i       all-to-all: to every server its chunk of c_i
    server s    c = C(mean of c_i + e)  e ← mean of c_i + e − c     all-gather: of its chunk of c

C keeps the signs of a chunk and one scale, the mean of its magnitudes (EF-signSGD, Karimireddy et al. 2019): whatever
the numbers, what C leaves out is then shorter than what it was given. A root mean square, which the code of 1-bit
Adam's authors takes, is longer where most numbers are near zero, as the momenta of an embedding are. Each weight has
scales of its own, so that weights whose momenta differ by orders of magnitude can travel together.

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
from meshwright.parallel.mesh import Mesh, all_gather, local
from meshwright.spec.communication import SCALE_BYTES, SERVER_ERROR, WORKER_ERROR, Exchange, chunk_length, exchange_of

BITS = 8  # in a byte


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


class SignExchange:
    """The replicas of a plan, of which this rank is one: a worker, and the server of one chunk of every weight."""

    def __init__(self, group: dist.ProcessGroup | None, replicas: int = 1, number: int = 0) -> None:
        self.group, self.replicas, self.number = group, replicas, number

    def mean(
        self, values: Sequence[Tensor], worker: Sequence[Tensor], server: Sequence[Tensor], finite: Tensor
    ) -> list[Tensor]:
        """The mean of some tensors as all replicas receive it; errors are written, unless something is not finite."""
        sizes = [value.numel() for value in values]
        wanted = [value + error for value, error in zip(values, worker, strict=True)]
        message = self._encoded(self._rows(wanted), sizes, range(self.replicas))
        sent = self._tensors(self._decoded(message, wanted[0].dtype, sizes), values)
        for whole, kept, error in zip(wanted, sent, worker, strict=True):
            error.copy_(torch.where(finite, whole.sub_(kept), error))
        del wanted, sent
        received = torch.empty_like(message)
        if self.group is None:
            received.copy_(message)
        else:
            dist.all_to_all_single(received, message, group=self.group)
        chunk = self._decoded(received, values[0].dtype, sizes).mean(0, keepdim=True)
        self._clear_padding(chunk, sizes)
        chunk.add_(torch.cat(list(server)))
        message = self._encoded(chunk, sizes, range(self.number, self.number + 1))
        left = chunk.sub_(self._decoded(message, chunk.dtype, sizes))
        self._clear_padding(left, sizes)
        for error, new in zip(server, left[0].split(self._lengths(sizes)), strict=True):
            error.copy_(torch.where(finite, new, error))
        del chunk, left
        gathered = message.new_empty(self.replicas, message.shape[1])
        if self.group is None:
            gathered.copy_(message)
        else:
            all_gather(gathered, message, group=self.group)
        return self._tensors(self._decoded(gathered, values[0].dtype, sizes), values)

    def _lengths(self, sizes: Sequence[int]) -> list[int]:
        return [chunk_length(size, self.replicas) for size in sizes]

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """A row for each server: its chunks of all tensors, one after another."""
        lengths = self._lengths([tensor.numel() for tensor in tensors])
        rows = tensors[0].new_zeros(self.replicas, sum(lengths))
        for part, tensor, length in zip(rows.split(lengths, 1), tensors, lengths, strict=True):
            whole = tensor.reshape(-1)
            full = tensor.numel() // length
            part[:full].copy_(whole[: full * length].view(full, length))
            if full < self.replicas:
                part[full, : tensor.numel() - full * length].copy_(whole[full * length :])
        return rows

    def _tensors(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors whose chunks the servers' rows have."""
        lengths = self._lengths([tensor.numel() for tensor in like])
        parts = zip(rows.split(lengths, 1), like, strict=True)
        return [part.reshape(-1)[: tensor.numel()].view(tensor.shape) for part, tensor in parts]

    def _encoded(self, rows: Tensor, sizes: Sequence[int], servers: range) -> Tensor:
        """Bytes of each row, which is of one server: a scale for each tensor, and the signs of all."""
        lengths = self._lengths(sizes)
        sums = [part.abs().sum(1) for part in rows.split(lengths, 1)]
        counts = [
            [max(min(size - server * length, length), 1) for server in servers]
            for size, length in zip(sizes, lengths, strict=True)
        ]
        scales = torch.stack(sums, 1) / torch.tensor(counts, dtype=rows.dtype, device=rows.device).T
        weights = 2 ** torch.arange(BITS, dtype=torch.uint8, device=rows.device)
        bits = (rows >= 0).view(len(rows), -1, BITS).to(torch.uint8).mul_(weights).sum(2, dtype=torch.uint8)
        return torch.cat([scales.float().contiguous().view(torch.uint8), bits], 1)

    def _decoded(self, message: Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        """The rows that bytes stand for."""
        lengths, width = self._lengths(sizes), SCALE_BYTES * len(sizes)
        scales = message[:, :width].clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
        shifts = torch.arange(BITS, dtype=torch.uint8, device=message.device)
        signs = (message[:, width:, None] >> shifts).bitwise_and_(1).view(len(message), -1).to(dtype)
        signs.mul_(2).sub_(1)
        for number, part in enumerate(signs.split(lengths, 1)):
            part.mul_(scales[:, number : number + 1])
        return signs

    def _clear_padding(self, chunk: Tensor, sizes: Sequence[int]) -> None:
        """Zero what fills up this server's chunks: it has a sign too."""
        for part, size in zip(chunk.split(self._lengths(sizes), 1), sizes, strict=True):
            part[:, max(size - self.number * part.shape[1], 0) :] = 0
