"""Optimizers that compress to one bit (1-bit Adam, 0/1 Adam, 1-bit LAMB), and what they have in common.

Replicas do not add up their gradients in the backward. A worker's gradient is its own samples' share of the loss times
the number of replicas, so that the mean over workers is the gradient of the whole batch, however unlike their numbers
of tokens are. An exact step sums gradients after the backward; in any other the momentum that each worker makes of its
own gradient travels by a `SignExchange`: a mean over replicas in one bit an element each way, with error feedback,

    worker i    c_i = C(x_i + e_i)      e_i ← x_i + e_i − c_i       all-to-all: to every server its rows of c_i
    server s    c = C(mean of c_i + e)  e ← mean of c_i + e − c     all-gather: of its rows of c

C keeps the signs and, of each of as many chunks of a weight as there are replicas, one scale, the mean of its
magnitudes (EF-signSGD, Karimireddy et al. 2019): whatever the numbers, what C leaves out is then shorter than what it
was given. A root mean square, which the code of 1-bit Adam's authors takes, is longer where most numbers are near zero,
as the momenta of an embedding are. Each weight has scales of its own, so that weights whose momenta differ by orders of
magnitude can travel together.

A worker is a replica, of one rank or of many. Ranks that share its weights (shard, tp, ep, pp) each exchange the signs
of their own part with the ranks that have the same part of other replicas. Chunks are of whole weights: ranks that have
parts of one add up the magnitudes in it, by an all-gather of a number for each weight and chunk, before the worker's
signs are scaled and before the server's are. So a weight's scales, and with them every number, are those of replicas
of one rank each.

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
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config.run import Optim, Run
from meshwright.optim.interface import Optimizer, UpdateTerms, WeightShard, WholeTensorRule, reduced
from meshwright.optim.master_weights import given
from meshwright.optim.outer import Meeting, NoOuterLoop
from meshwright.parallel.mesh import CUT_AXES, Cut, Mesh, all_gather, cuts, join, local
from meshwright.spec.communication import (
    SERVER_ERROR,
    WORKER_ERROR,
    Exchange,
    exchange_of,
    serving,
    variance_updates,
)
from meshwright.spec.optimizers import Statistic

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
        return self.signs.mean(shards, values, worker, server, finite)

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
        """Exact in the warm-up; then bucket by bucket, an all-to-all and an all-gather each."""
        if self.exchange == "exact":
            self.warm_up(shards, terms)
            return
        for bucket in buckets(shards):
            own = [self.momentum(shard, shard.gradient()) for shard in bucket]
            for shard, first in zip(bucket, self.mean(bucket, own, terms.finite > 0), strict=True):
                self.compressed(shard, first, terms)
        self.end(shards, terms)

    @abstractmethod
    def warm_up(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """The exact update of all weights."""

    @abstractmethod
    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """What becomes of one weight by the momentum that all workers received."""

    def end(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """What is left to do when all momenta are there."""
        return None


def buckets(shards: Sequence[WeightShard]) -> list[list[WeightShard]]:
    """Weights that travel together: those of a block, under ep its experts apart, and those outside the blocks."""
    found: dict[tuple[str, bool], list[WeightShard]] = {}
    for shard in shards:
        found.setdefault(_bucket(shard.name, shard.cuts), []).append(shard)
    return list(found.values())


def _bucket(name: str, held: Sequence[Cut]) -> tuple[str, bool]:
    """The block that a weight is in, and whether it is of experts that ranks of ep share out."""
    return name.split(".")[1] if name.startswith("blocks.") else "", any(cut.axis == "ep" for cut in held)


class CompressingReplicas(NoOuterLoop):
    """What a step does with gradients that no backward has summed."""

    def __init__(self, run: Run, chunks: Sequence[nn.Module], optimizer: Optimizer, mesh: Mesh) -> None:
        super().__init__(run)
        self.run, self.mesh, self.rule = run, mesh, rule_in(optimizer)
        self.rule.meet(mesh)
        groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for name, weight in (pair for chunk in chunks for pair in chunk.named_parameters()):
            groups.setdefault(_bucket(name, cuts(weight)), []).append(weight)
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
    """The replicas of a plan, of which this rank is in one: a worker, and the server of some rows of every weight."""

    def __init__(self, group: dist.ProcessGroup | None, replicas: int = 1, number: int = 0) -> None:
        self.group, self.replicas, self.number = group, replicas, number
        self.forms: dict[tuple[object, ...], _Form] = {}

    def mean(
        self,
        shards: Sequence[WeightShard],
        values: Sequence[Tensor],
        worker: Sequence[Tensor],
        server: Sequence[Tensor],
        finite: Tensor,
    ) -> list[Tensor]:
        """The mean of something of each weight as all replicas receive it.

        Errors of worker and server are written, unless something is not finite.
        """
        form, everyone, mine = self._form(shards, values[0]), range(self.replicas), range(self.number, self.number + 1)
        wanted = [value + error for value, error in zip(values, worker, strict=True)]
        rows = form.rows(wanted)
        sums = form.totals(form.sums(rows, everyone), everyone)
        message = _message(form.of_servers(sums, everyone), rows)
        del rows
        sent = form.tensors(form.decoded(message, everyone), values)
        for whole, kept, error in zip(wanted, sent, worker, strict=True):
            error.copy_(torch.where(finite, whole.sub_(kept), error))
        del wanted, sent
        received = torch.empty_like(message)
        if self.group is None:
            received.copy_(message)
        else:
            dist.all_to_all_single(received, message, group=self.group)
        chunk = form.decoded(received, self.number).mean(0, keepdim=True)
        form.add(chunk, server)
        message = _message(form.sums(chunk, mine), chunk)
        gathered = message.new_empty(self.replicas, message.shape[1])
        if self.group is None:
            gathered.copy_(message)
        else:
            all_gather(gathered, message, group=self.group)
        sums = form.totals(form.sums_in(gathered), everyone)
        rows = form.decoded(gathered, everyone, form.of_servers(sums, everyone))
        left = chunk.sub_(rows[mine.start : mine.stop])
        for error, new in zip(server, left[0].split(form.lengths), strict=True):
            error.copy_(torch.where(finite, new[: error.numel()].view(error.shape), error))
        del chunk, left
        return form.tensors(rows, values)

    def _form(self, shards: Sequence[WeightShard], like: Tensor) -> "_Form":
        key = (like.dtype, *((shard.shape, shard.region, shard.cuts) for shard in shards))
        if key not in self.forms:
            self.forms[key] = _Form(shards, self.replicas, like)
        return self.forms[key]


class _Form:
    """The messages of some weights that travel together: a row for each server, its rows of one weight after another.

    Each begins with sums of magnitudes. Of every weight there are as many as the server with rows of most chunks needs.
    """

    def __init__(self, shards: Sequence[WeightShard], replicas: int, like: Tensor) -> None:
        self.replicas, self.dtype = replicas, like.dtype
        self.served = [serving(shard.shape, shard.region, replicas) for shard in shards]
        self.lengths = [each.length for each in self.served]
        self.begins = [0, *accumulate(each.sums for each in self.served)]  # of each weight's sums in a row, and the end
        # By axis, the weights that ranks along it have other parts of.
        self.cut: list[tuple[Tensor, dist.ProcessGroup]] = []
        for axis in CUT_AXES:
            groups = {i: cut.group for i, shard in enumerate(shards) for cut in shard.cuts if cut.axis == axis}
            if groups:
                self.cut.append((torch.tensor(list(groups), device=like.device), next(iter(groups.values()))))
        # Which of all weights' chunks each sum in a server's row is of; one beyond them, where there is none.
        none, places = len(shards) * replicas, list[list[int]]()
        for server in range(replicas):
            row = list[int]()
            for weight, each in enumerate(self.served):
                chunks = [weight * replicas + chunk for chunk, _ in each.pieces[server]]
                row += [*chunks, *[none] * (each.sums - len(chunks))]
            places.append(row)
        counts = [max(count, 1) for each in self.served for count in each.counts]
        self.places = torch.tensor(places, device=like.device)
        self.counts = torch.tensor([*counts, 1], dtype=like.dtype, device=like.device)

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """The messages' elements, filled up with zeros."""
        rows = tensors[0].new_zeros(self.replicas, sum(self.lengths))
        for part, tensor, each in zip(rows.split(self.lengths, 1), tensors, self.served, strict=True):
            if tensor.numel() == 0:
                continue
            by_server = tensor.unflatten(each.dim, (self.replicas, -1)).movedim(each.dim, 0) if each.dim else tensor
            flat = by_server.reshape(-1)
            full = len(flat) // each.elements
            part[:full, : each.elements].copy_(flat[: full * each.elements].view(full, each.elements))
            if full < self.replicas:  # the rows of a weight that do not come out even
                part[full, : len(flat) - full * each.elements].copy_(flat[full * each.elements :])
        return rows

    def tensors(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors whose rows these are."""
        found = list[Tensor]()
        for part, tensor, each in zip(rows.split(self.lengths, 1), like, self.served, strict=True):
            flat = part[:, : each.elements].reshape(-1)
            if each.dim:
                size, dim = list(tensor.shape), each.dim
                size[dim] //= self.replicas
                found.append(flat.view(self.replicas, *size).movedim(0, dim).reshape(tensor.shape))
            else:
                found.append(flat[: tensor.numel()].view(tensor.shape))
        return found

    def add(self, chunk: Tensor, errors: Sequence[Tensor]) -> None:
        """Add what a server has of each weight to its row."""
        for part, error in zip(chunk.split(self.lengths, 1), errors, strict=True):
            part[0, : error.numel()].add_(error.reshape(-1))

    def sums(self, rows: Tensor, servers: range) -> Tensor:
        """Sums of magnitudes in rows, which are of some servers, over each chunk that they have something of."""
        found = list[Tensor]()
        for part, each in zip(rows.split(self.lengths, 1), self.served, strict=True):
            if each.sums == 1:
                found.append(part.abs().sum(1, keepdim=True))
                continue
            some = part.new_zeros(len(servers), each.sums)
            for number, server in enumerate(servers):
                for place, piece in enumerate(_pieces(part[number], each.pieces[server])):
                    some[number, place] = piece.abs().sum()
            found.append(some)
        return torch.cat(found, 1)

    def totals(self, sums: Tensor, servers: range) -> Tensor:
        """The same over whole weights, chunk by chunk: of all servers, and of all ranks that have parts of them.

        Added in the order of ranks, so that all replicas have the same bits.
        """
        spread = sums.new_zeros(len(servers), len(self.counts)).scatter_(1, self._places(servers), sums)
        totals = spread.sum(0)
        table = totals[:-1].view(len(self.served), self.replicas)
        for weights, group in self.cut:
            table[weights] = join(table[weights][None], 0, group).sum(0)
        return totals

    def of_servers(self, totals: Tensor, servers: range) -> Tensor:
        """As they stand in the rows of some servers."""
        return totals[self._places(servers)]

    def _places(self, servers: range | int) -> Tensor:
        """Those of some servers, or of one for every worker."""
        if isinstance(servers, int):
            return self.places[servers].expand(self.replicas, -1)
        return self.places[servers.start : servers.stop]

    def sums_in(self, message: Tensor) -> Tensor:
        """The sums that messages begin with."""
        held = message[:, : self.begins[-1] * self.dtype.itemsize]
        return held.clone(memory_format=torch.contiguous_format).view(self.dtype)

    def decoded(self, message: Tensor, servers: range | int, sums: Tensor | None = None) -> Tensor:
        """The rows that messages stand for, by the sums that they begin with or by others.

        Of some servers, or of one by all workers.
        """
        sums = self.sums_in(message) if sums is None else sums
        scales = (sums / self.counts[self._places(servers)]).float().to(self.dtype)
        shifts = torch.arange(BITS, dtype=torch.uint8, device=message.device)
        bits = message[:, self.begins[-1] * self.dtype.itemsize :, None]
        signs = (bits >> shifts).bitwise_and_(1).view(len(message), -1).to(self.dtype)
        signs.mul_(2).sub_(1)
        for part, each, begin in zip(signs.split(self.lengths, 1), self.served, self.begins, strict=False):
            if each.sums == 1:
                part.mul_(scales[:, begin : begin + 1])
            for number, server in enumerate([servers] * self.replicas if isinstance(servers, int) else servers):
                pieces = each.pieces[server]
                if each.sums > 1:
                    for place, piece in enumerate(_pieces(part[number], pieces)):
                        piece.mul_(scales[number, begin + place])
                if (size := sum(size for _, size in pieces)) < each.length:
                    part[number, size:] = 0.0  # what fills up the row has a sign too
        return signs


def _pieces(row: Tensor, pieces: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """A server's row of one weight by the chunks that it is of."""
    sizes = [size for _, size in pieces]
    return row[: sum(sizes)].split(sizes)


def _message(sums: Tensor, rows: Tensor) -> Tensor:
    """Sums, and the signs of rows, in bytes."""
    weights = 2 ** torch.arange(BITS, dtype=torch.uint8, device=rows.device)
    bits = (rows >= 0).view(len(rows), -1, BITS).to(torch.uint8).mul_(weights).sum(2, dtype=torch.uint8)
    return torch.cat([sums.contiguous().view(torch.uint8), bits], 1)


class OneBitAdamRule(MomentumRule):
    """The update of 1-bit Adam."""

    def warm_up(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """AdamW, whose variance is freed of its bias at the end."""
        for shard in shards:
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
TOTAL, LARGEST = Statistic(shape="tensor"), Statistic(shape="tensor", op="max")  # over all parts of a weight


class OneBitLambRule(MomentumRule):
    """The update of 1-bit LAMB."""

    def warm_up(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """LAMB, with a running mean of its ratios; one reduction, of the squares of weights and directions."""
        for shard in shards:
            gradient = shard.gradient()
            shard.keep({"first": self.momentum(shard, gradient), "second": self.variance(shard, gradient)}, terms)
        matrices = [shard for shard in shards if "ratio" in shard.states]
        sizes = [(shard, TOTAL, shard.value().square().sum()) for shard in matrices]
        lengths = [(shard, TOTAL, self._direction(shard, terms).square_().sum()) for shard in matrices]
        whole = reduced([*sizes, *lengths])
        ratios = {
            id(shard): torch.where((size > 0) & (length > 0), (size / length).sqrt(), 1.0)
            for shard, size, length in zip(matrices, whole, whole[len(matrices) :], strict=False)
        }
        for shard in shards:
            move = self._direction(shard, terms)
            if (ratio := ratios.get(id(shard))) is not None:
                shard.keep({"ratio": shard.states["ratio"] * RATIO_BETA + ratio * (1 - RATIO_BETA)}, terms)
                move.mul_(ratio)
            shard.write(shard.value() - move.mul_(terms.rate))
            if self.freezes:
                self._freeze(shard, terms)

    def _freeze(self, shard: WeightShard, terms: UpdateTerms) -> None:
        """What stays as it is from here on, divided by its bias."""
        states = shard.states
        states["second"].div_(self.bias(self.optim.beta2, terms, states["second"]))
        if "ratio" in states:
            states["fresh"].copy_(states["second"])
            states["ratio"].div_(self.bias(RATIO_BETA, terms, states["ratio"]))
            states["factor"].fill_(1.0)

    def _direction(self, shard: WeightShard, terms: UpdateTerms, decays: bool = True) -> Tensor:
        """AdamW's step of length one from the states as they are now, decay included or not."""
        first, second = shard.states["first"], shard.states["second"]
        if self.exchange == "exact":
            second = second / self.bias(self.optim.beta2, terms, second)
        move = self.direction(first / self.bias(self.optim.beta1, terms, first), second)
        return move.add_(shard.value() * shard.decay) if decays and shard.decay else move

    def compressed(self, shard: WeightShard, first: Tensor, terms: UpdateTerms) -> None:
        """The momentum that all received, and the variance that it tells of."""
        if "fresh" in shard.states:
            beta1, beta2 = self.optim.beta1, self.optim.beta2
            rebuilt = (first - shard.states["first"] * beta1).div_(1 - beta1)
            fresh = (shard.states["fresh"] * beta2).add_(rebuilt.square_(), alpha=1 - beta2)
            shard.keep({"fresh": fresh}, terms)
        shard.keep({"first": first}, terms)

    def end(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """The frozen ratio, corrected; one reduction, of how the variances changed and of what decay has of a move."""
        matrices = [shard for shard in shards if "ratio" in shard.states]
        plain = [(shard, TOTAL, self._direction(shard, terms, decays=False).square_().sum()) for shard in matrices]
        moves = [(shard, TOTAL, self._direction(shard, terms).square_().sum()) for shard in matrices]
        changes = [(shard, LARGEST, self._change(shard)) for shard in matrices]
        whole, count = reduced([*plain, *moves, *changes]), len(matrices)
        of_each = zip(matrices, whole, whole[count:], whole[2 * count :], strict=False)
        for shard, without, length, change in of_each:
            shard.keep({"factor": self._factor(shard.states["factor"], without, length, change)}, terms)
        for shard in shards:
            move = self._direction(shard, terms)
            if "ratio" in shard.states:
                move.mul_(shard.states["ratio"] * shard.states["factor"])
            shard.write(shard.value() - move.mul_(terms.rate))

    def _change(self, shard: WeightShard) -> Tensor:
        """The largest root of a frozen variance beside that of the fresh one."""
        frozen, fresh, eps = shard.states["second"], shard.states["fresh"], self.optim.eps
        if frozen.numel() == 0:  # of fewer rows than there are ranks
            return frozen.new_zeros(())
        return ((frozen.sqrt() + eps) / (fresh.sqrt() + eps)).amax()

    def _factor(self, last: Tensor, plain: Tensor, length: Tensor, change: Tensor) -> Tensor:
        """By how much the frozen ratio is corrected; squares of a move without its decay, and with it."""
        share = torch.where(length > 0, (plain / length).sqrt(), 1.0).clamp(max=1.0)
        factor = (change * share + (1 - share)).clamp(LEAST, MOST)
        return torch.minimum(torch.maximum(factor, last * (1 - DRIFT)), last * (1 + DRIFT))
