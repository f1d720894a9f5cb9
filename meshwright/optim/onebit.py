"""Optimizers that compress to one bit (1-bit Adam, 0/1 Adam, 1-bit LAMB), and what they have in common.

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

1-bit Adam (Tang et al. 2021): Adam until the variance is stable, then momentum in one bit with the variance frozen.

    warm-up     m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  w ← (1 − ηλ)w − η · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
    after it    m_i = β₁m + (1 − β₁)g_i on each worker,  m ← their mean in one bit, with error feedback both ways
                w ← (1 − ηλ)w − η · m/(1 − β₁ᵗ) / (√v + ε)

The warm-up, `optim.freeze_step` steps, is AdamW over the sum of all gradients. At its end v is divided by its bias.
The paper has no weight decay and its code no correction of the bias: both are as in AdamW here.

0/1 Adam (Lu et al. 2022): no warm-up, but a variance that is updated more and more rarely; then local steps.

Until `optim.freeze_step`, in `variance_steps` (spec/communication.py: so many, as many at half the rate, …)
gradients are summed exactly and update both moments; in the others a mean gradient of one bit updates the first. Then:

    m_i ← β₁m_i + (1 − β₁)g_i,  u_i ← u_i + η · m_i,  w_i ← w_i − η · m_i / (√v + ε)          on each worker alone
    at a sync:  u ← mean of u_i in one bit, with error feedback,  m ← u ÷ Ση
                w ← x − u / (√v + ε)  with x the weights as last synced,  u_i ← 0,  x ← w

The steps between two syncs double every `optim.local_step_scaler` steps up to `optim.local_step_clipper`. Errors begin
anew at the freeze, as in the code of its authors, who undo a worker's steps to get x: x is kept here, so that replicas
have the same bits. Moments are divided by their bias, and decay is ηλx, which is the same on all replicas.

1-bit LAMB (Li et al. 2021): LAMB until the variance is stable, then momentum in one bit and frozen trust ratios.

    warm-up     as LAMB, with  c ← 0.9c + 0.1 · ‖w‖/‖r‖  of each matrix, divided by its bias at the end
    after it    m ← mean of β₁m + (1 − β₁)g_i in one bit,  g̃ = (m − β₁m′)/(1 − β₁) with m′ the momentum before
                ṽ ← β₂ṽ + (1 − β₂)g̃²,  p = m/(1 − β₁ᵗ) / (√v + ε),  r = p + λw
                f = max of (√v + ε)/(√ṽ + ε), of which decay takes its part,  0.5 ≤ f ≤ 4,  within 10 % of the last f
                w ← w − η · f · c · r

The frozen ratio follows how the variance has changed since the freeze, as the momentum that all received tells it. The
paper scales momenta of layers to one size before it compresses them together: here each has scales of its own. Vectors
have no ratio and no decay, as in `optim/lamb.py`.
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
from meshwright.spec.communication import (
    SCALE_BYTES,
    SERVER_ERROR,
    WORKER_ERROR,
    Exchange,
    chunk_length,
    exchange_of,
    variance_updates,
)

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


class OneBitAdamRule(MomentumRule):
    """The update of 1-bit Adam."""

    def warm_up(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """AdamW, whose variance is freed of its bias at the end."""
        gradient = shard.gradient()
        shard.keep({"first": self.momentum(shard, gradient), "second": self.variance(shard, gradient)}, terms)
        second = shard.states["second"] / self.bias(self.optim.beta2, terms, gradient)
        self._move(shard, second, terms)
        if self.freezes:
            shard.states["second"].copy_(second)

    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The momentum that all received, beside the frozen variance."""
        shard.keep({"first": first}, terms)
        self._move(shard, shard.states["second"], terms)

    def _move(self, shard: WeightShard, second: Tensor, terms: UpdateTerms) -> None:
        first = shard.states["first"] / self.bias(self.optim.beta1, terms, second)
        move = self.direction(first, second).mul_(terms.rate)
        shard.write(shard.value() * (1 - terms.rate * shard.decay) - move)


class ZeroOneAdamRule(CompressingRule):
    """The update of 0/1 Adam."""

    writes_always = True  # a sync is one also where this step's gradient is not finite

    def __init__(self, optim: Optim) -> None:
        super().__init__(optim)
        # Since the last sync: the sum of rates, and of rates ÷ the momentum's bias.
        self.rates: Tensor | None = None
        self.paces: Tensor | None = None

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """Until the freeze as Adam, with gradients that are exact or of one bit; then local steps and syncs."""
        if self.step <= self.optim.freeze_step:
            self._until_frozen(shards, terms)
            return
        if self.rates is None or self.paces is None:
            self.rates = self.paces = torch.zeros_like(terms.finite)
        bias = self.bias(self.optim.beta1, terms, terms.finite)
        self.rates = self.rates + terms.finite * terms.rate
        self.paces = self.paces + terms.finite * terms.rate / bias
        for bucket in buckets(shards):
            for shard in bucket:
                self._local(shard, bias, terms)
            if self.exchange == "compressed":
                self._sync(bucket, self.rates, self.paces)
        if self.exchange == "compressed":
            self.rates = self.paces = None

    def _until_frozen(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        for bucket in buckets(shards):
            gradients = [shard.gradient() for shard in bucket]
            if self.exchange == "compressed":
                gradients = self.mean(bucket, gradients, terms.finite > 0)
            for shard, gradient in zip(bucket, gradients, strict=True):
                if self.exchange == "exact":
                    shard.keep({"second": self.variance(shard, gradient)}, terms)
                shard.keep({"first": self.momentum(shard, gradient)}, terms)
                self._move(shard, terms)

    def _move(self, shard: WeightShard, terms: UpdateTerms) -> None:
        optim, finite = self.optim, terms.finite > 0
        made = variance_updates(optim.freeze_step, optim.var_update_scaler, self.step)
        second = shard.states["second"] / (1 - optim.beta2**made)
        first = shard.states["first"] / self.bias(optim.beta1, terms, second)
        move = self.direction(first, second).mul_(terms.rate)
        value = shard.value()
        shard.write(torch.where(finite, value * (1 - terms.rate * shard.decay) - move, value))
        if self.freezes:
            shard.states["second"].copy_(second)
            shard.states["synced"].copy_(shard.value())
            for kind in (WORKER_ERROR, SERVER_ERROR):
                shard.states[kind].zero_()

    def _local(self, shard: WeightShard, bias: Tensor, terms: UpdateTerms) -> None:
        """A step of this worker alone."""
        states = shard.states
        shard.keep({"first": self.momentum(shard, shard.gradient())}, terms)
        scaled = (states["first"] / bias.to(states["first"].dtype)).mul_(
            terms.rate * terms.finite.to(states["first"].dtype)
        )
        states["local"].add_(scaled)
        moved = shard.value() - self.direction(scaled, states["second"])
        decay = (terms.rate * shard.decay * terms.finite).to(moved.dtype)
        shard.write(moved - states["synced"] * decay)

    def _sync(self, bucket: Sequence[WeightShard], rates: Tensor, paces: Tensor) -> None:
        """All workers go on from one weight and one momentum."""
        always = torch.ones_like(rates) > 0
        means = self.mean(bucket, [shard.states["local"] for shard in bucket], always)
        for shard, mean in zip(bucket, means, strict=True):
            states, dtype = shard.states, mean.dtype
            first = torch.where(paces > 0, mean / paces.clamp(min=1e-300).to(dtype), states["first"])
            states["first"].copy_(first)
            kept = (1 - shard.decay * rates).to(dtype)
            states["synced"].mul_(kept).sub_(self.direction(mean, states["second"]))
            states["local"].zero_()
            shard.write(states["synced"])


RATIO_BETA = 0.9  # of the running mean of ratios
LEAST, MOST, DRIFT = 0.5, 4.0, 0.1  # of the factor, and how far it may move in a step


class OneBitLambRule(MomentumRule):
    """The update of 1-bit LAMB."""

    def warm_up(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """LAMB, with a running mean of its ratios."""
        gradient = shard.gradient()
        shard.keep({"first": self.momentum(shard, gradient), "second": self.variance(shard, gradient)}, terms)
        second = shard.states["second"] / self.bias(self.optim.beta2, terms, gradient)
        move = self._direction(shard, shard.states["first"], second, terms)
        if "ratio" in shard.states:
            value = shard.value()
            size, length = value.norm(), move.norm()
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
            mean = shard.states["ratio"] * RATIO_BETA + ratio * (1 - RATIO_BETA)
            shard.keep({"ratio": mean}, terms)
            move = move * ratio
        shard.write(shard.value() - move * terms.rate)
        if self.freezes:
            shard.states["second"].copy_(second)
            if "ratio" in shard.states:
                shard.states["fresh"].copy_(second)
                shard.states["ratio"].div_(self.bias(RATIO_BETA, terms, second))
                shard.states["factor"].fill_(1.0)

    def _direction(self, shard: WeightShard, first: Tensor, second: Tensor, terms: UpdateTerms) -> Tensor:
        """AdamW's step of length one, decay included."""
        move = self.direction(first / self.bias(self.optim.beta1, terms, first), second)
        return move.add_(shard.value() * shard.decay) if shard.decay else move

    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The momentum that all received, with the frozen ratio corrected."""
        second = shard.states["second"]
        move = self._direction(shard, first, second, terms)
        if "ratio" in shard.states:
            beta1, beta2 = self.optim.beta1, self.optim.beta2
            rebuilt = (first - shard.states["first"] * beta1).div_(1 - beta1)
            fresh = (shard.states["fresh"] * beta2).add_(rebuilt.square_(), alpha=1 - beta2)
            factor = self._factor(shard, first, fresh, move, terms)
            shard.keep({"fresh": fresh, "factor": factor}, terms)
            move = move * (shard.states["ratio"] * factor)
        shard.keep({"first": first}, terms)
        shard.write(shard.value() - move * terms.rate)

    def _factor(self, shard: WeightShard, first: Tensor, fresh: Tensor, move: Tensor, terms: UpdateTerms) -> Tensor:
        """By how much the frozen ratio is corrected."""
        eps, last = self.optim.eps, shard.states["factor"]
        factor = ((shard.states["second"].sqrt() + eps) / (fresh.sqrt() + eps)).amax()
        if shard.decay:
            prelim = self.direction(first / self.bias(self.optim.beta1, terms, first), shard.states["second"])
            share = (prelim.norm() / move.norm()).clamp(max=1.0)
            factor = factor * share + (1 - share)
        factor = factor.clamp(LEAST, MOST)
        return torch.minimum(torch.maximum(factor, last * (1 - DRIFT)), last * (1 + DRIFT))
