"""The references of plans whose communication is lossy or rare: one process that does what their ranks do.

**Rounded**: the gradient of every rank is computed by itself, microbatch by microbatch where each is reduced. **Rare**:
replicas are trained one after another, each a plain run over its own samples, and synced. What becomes of a gradient,
and what happens at a sync, is written here once more, on whole tensors and as the papers have it: nothing is shared
with parallel/grad_reduce.py, parallel/zeropp.py and optim/outer.py but the length of a block and the first factors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.loader import Loader, StepBatch
from meshwright.data.prepare import Corpus, prepare
from meshwright.optim.interface import learning_rate
from meshwright.optim.outer import Meeting, NoOuterLoop
from meshwright.parallel.grad_reduce import first_factor
from meshwright.parallel.mesh import Mesh, local
from meshwright.runtime.place import Place
from meshwright.spec.communication import block_length, factors
from meshwright.spec.params import params
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.loop import EvalResult, StepResult, train
from meshwright.train.saving import whole_states
from meshwright.train.state import State, gradients, weights
from meshwright.train.step import in_turn
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = dict[str, Tensor]


def record(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Do what the plan's ranks would, in one process, and leave the same evidence."""
    plain = alone(run, run.batch)
    mesh = lasting(plain, place)
    corpus, evidence = prepare(run, cache, lambda text: None), Evidence(folder, mesh)
    state = build(plain, corpus, mesh)
    state.outer = rounding = LossyCommunication(run, state, corpus, mesh)
    for result in train(plain, state, mesh):
        assert isinstance(result, StepResult), "nothing is held out in a proof"
        evidence.step(result.loss, result.norm, gradients(state.chunks, plain, mesh))
    rounding.close()
    if run.plan.precision == "fp64" and run.optim.state_dtype == "fp32":
        evidence.states(whole_states(state, plain, mesh))
    evidence.end(weights(state.chunks, plain, mesh))
    state.loader.close()


class LossyCommunication(NoOuterLoop):
    """What stands between the ranks of a plan: their gradients and weights are rounded on the way."""

    def __init__(self, run: Run, state: State, corpus: Corpus, mesh: Mesh) -> None:
        plain = alone(run, run.batch)
        super().__init__(plain)
        self.run, self.plain, self.state, self.mesh = run, plain, state, mesh
        self.exact: Tensors = {}
        self.loaders: list[Loader] = []
        if run.plan.reduces_lossily:
            self.loaders = [Loader(corpus, run, rank, mesh.device) for rank in range(run.plan.data)]
        self.sums = FactoredSum(run) if run.plan.powersgd else RoundedSum(run)
        self._round_weights()

    @property
    def weights(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self.state.chunks[0].named_parameters())

    def sum_gradients(self, step: int) -> None:
        """In the place of the whole batch's gradient, what ranks would have of theirs."""
        if not self.loaders:
            return
        by_rank = [self._gradients(loader, step) for loader in self.loaders]
        for name, weight in self.weights.items():
            assert weight.grad is not None
            total = self.sums(name, [[each[name] for each in microbatches] for microbatches in by_rank])
            local(weight.grad).copy_(total)

    def _gradients(self, loader: Loader, step: int) -> list[Tensors]:
        """Those of each microbatch of a rank."""
        batch, found = loader.take(step - 1).together, list[Tensors]()
        for microbatch in batch.microbatches:
            self.state.optimizer.zero_grad()
            one = replace(batch, microbatches=[microbatch])
            in_turn(self.state.chunks[0], self.plain.plan, self.mesh, one, self.state.scale.value)
            pairs = self.weights.items()
            found.append({name: local(weight.grad).clone() for name, weight in pairs if weight.grad is not None})
        return found

    @torch.no_grad()
    def _round_weights(self) -> None:
        if self.run.plan.gather == "default":
            return
        for name, weight in self.weights.items():
            held = local(weight)
            self.exact[name] = held.clone()
            held.copy_(rounded(held, self.run.plan.gather))

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """The optimizer updates weights as they were before they were rounded for a gather."""
        for name, exact in self.exact.items():
            local(self.weights[name]).copy_(exact)

    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        self._round_weights()
        return super().meet(step, loss, tokens, votes)

    def close(self) -> None:
        """The weights as the optimizer left them."""
        self.begin(0)
        for loader in self.loaders:
            loader.close()


class RoundedSum:
    """Over the ranks that shard a weight, for every microbatch that they reduce; then over replicas."""

    def __init__(self, run: Run) -> None:
        self.plan = run.plan
        self.owed = defaultdict[tuple[str, str, int], Tensor | float](float)

    def __call__(self, name: str, ranks: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of what each rank (replica by replica) has of each microbatch."""
        shards, sums = self.plan.shards, list[Tensor]()
        for first in range(0, len(ranks), shards):
            total = torch.zeros_like(ranks[0][0])
            for number in range(len(ranks[0])):
                total += self._over_shards(name, first, [rank[number] for rank in ranks[first : first + shards]])
            sums.append(total)
        if len(sums) == 1:
            return sums[0]
        parts = [self._sent(each, (name, "replica", number)) for number, each in enumerate(sums)]
        return self._sent(torch.stack(parts).sum(0), (name, "sum", 0))

    def _over_shards(self, name: str, first: int, parts: Sequence[Tensor]) -> Tensor:
        """Each rank rounds what it has; in two levels, every node the sum of its ranks once more."""
        if len(parts) == 1:
            return parts[0]
        sent = [self._sent(part, (name, "shard", first + rank)) for rank, part in enumerate(parts)]
        if (node := self.plan.grad_reduce_node) > 1:
            sums = [torch.stack(sent[begin : begin + node]).sum(0) for begin in range(0, len(sent), node)]
            sent = [self._sent(each, (name, "node", first // node + number)) for number, each in enumerate(sums)]
        return torch.stack(sent).sum(0)

    def _sent(self, gradient: Tensor, place: tuple[str, str, int]) -> Tensor:
        due = gradient + self.owed[place]
        cast = CASTS.get(self.plan.grad_reduce)
        sent = due.to(cast).to(due.dtype) if cast else rounded(due, self.plan.grad_reduce)
        if self.plan.error_feedback:
            self.owed[place] = due - sent
        return sent


class FactoredSum:
    """PowerSGD over replicas, whatever ranks each of them is."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.owed = defaultdict[tuple[str, int], Tensor | float](float)
        self.factors: Tensors = {}

    def __call__(self, name: str, ranks: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of what each replica has, which is that of its ranks and their microbatches."""
        each = len(ranks) // self.run.plan.replicate
        replicas = [ranks[first : first + each] for first in range(0, len(ranks), each)]
        own = [torch.stack([part for rank in replica for part in rank]).sum(0) for replica in replicas]
        shape = factors(tuple(own[0].shape), self.run.plan.powersgd)
        if shape is None:
            return sum(own, torch.zeros_like(own[0]))
        due = [gradient + self.owed[name, number] for number, gradient in enumerate(own)]
        oriented = [each.mT if shape.transposed else each for each in due]
        if name not in self.factors:
            first = first_factor(self.run.seed, name, shape)
            self.factors[name] = first.to(due[0]).view(*due[0].shape[:-2], shape.long, shape.rank)
        basis, _ = torch.linalg.qr(sum(each @ self.factors[name] for each in oriented))
        self.factors[name] = torch.stack([each.mT @ basis for each in oriented]).sum(0)
        total = basis @ self.factors[name].mT
        total = total.mT if shape.transposed else total
        for number, each in enumerate(due):
            if self.run.plan.error_feedback:
                self.owed[name, number] = each - total / len(own)
        return total


LARGEST = {"int8": 127, "int4": 7, "fp8": 448}  # codes
E4M3_DIGITS, E4M3_LEAST = 3, -6  # bits behind the first, and the exponent from which on there is no first bit


@dataclass
class Replica:
    """One of the replicas, with its place in its own run."""

    state: State
    steps: Iterator[StepResult | EvalResult]
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {name: weight.data for name, weight in self.state.chunks[0].named_parameters()}

    def step(self) -> StepResult:
        """The next one."""
        result = next(self.steps)
        assert isinstance(result, StepResult), "nothing is held out in a proof"
        return result


class OwnLoader(Loader):
    """The samples of one replica, of which nobody else's tokens are counted."""

    def take(self, step: int) -> StepBatch:
        batch = super().take(step)
        return replace(batch, job_tokens=batch.tokens)


def record_replicas(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Do what the plan's ranks would, in one process, and leave the same evidence."""
    mesh = lasting(alone(run, run.batch), place)
    corpus, evidence = prepare(run, cache, lambda text: None), Evidence(folder, mesh)
    replicas = [_replica(run, corpus, mesh, number) for number in range(run.plan.replicate)]
    first = replicas[0]
    if run.optim.sync_warmup:
        _warm_up(run, corpus, mesh, replicas, evidence)
    outer = Sync(run, first.weights)
    for step in range(run.optim.sync_warmup + 1, run.steps + 1):
        results = [replica.step() for replica in replicas]
        loss, norm = (torch.stack([getattr(each, name) for each in results]).mean() for name in ("loss", "norm"))
        evidence.step(loss, norm, gradients(first.state.chunks, alone(run, run.batch), mesh))
        outer.after(step, [replica.weights for replica in replicas])
    evidence.end(weights(first.state.chunks, alone(run, run.batch), mesh))
    for replica in replicas:
        replica.state.loader.close()


def alone(run: Run, batch: int) -> Run:
    """The same mathematics on one rank, without an outer loop."""
    plan = Plan(microbatch=batch, precision=run.plan.precision)
    optim = msgspec.structs.replace(run.optim, sync_warmup=0)
    return msgspec.structs.replace(run, batch=batch, plan=plan, optim=optim)


def _replica(run: Run, corpus: Corpus, mesh: Mesh, number: int) -> Replica:
    mine = alone(run, run.batch // run.plan.replicate)
    state = build(mine, corpus, mesh)
    state.loader.close()
    state.loader = OwnLoader(corpus, run, number, mesh.device)
    state.step = run.optim.sync_warmup
    return Replica(state, train(mine, state, mesh))


def _warm_up(run: Run, corpus: Corpus, mesh: Mesh, replicas: list[Replica], evidence: Evidence) -> None:
    """Plain training of whole batches; every replica goes on from where it ends."""
    whole = alone(run, run.batch)
    state = build(whole, corpus, mesh)
    steps = train(whole, state, mesh)
    with closing(state.loader):
        for _, result in zip(range(run.optim.sync_warmup), steps, strict=False):
            assert isinstance(result, StepResult)
            evidence.step(result.loss, result.norm, gradients(state.chunks, whole, mesh))
    for replica in replicas:
        ours, theirs = replica.state.optimizer, state.optimizer
        for name, weight in state.chunks[0].named_parameters():
            replica.weights[name].copy_(weight.data)
        for kind, tensors in theirs.states().items():
            torch._foreach_copy_(ours.states()[kind], tensors)
        ours.count.copy_(theirs.count)


class Sync:
    """What a sync does, whole tensor by whole tensor."""

    def __init__(self, run: Run, begin: dict[str, Tensor]) -> None:
        self.run = run
        self.anchor = {name: weight.clone() for name, weight in begin.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in begin.items()}
        self.layers = {param.name: max(param.layer, 0) for param in params(run.arch)}
        self.since = dict.fromkeys(begin, run.optim.sync_warmup)  # the step at which each was synced

    def after(self, step: int, replicas: list[dict[str, Tensor]]) -> None:
        """Sync the weights that are due."""
        for name in self.anchor:
            if self._is_due(step, name):
                self._sync(name, [replica[name] for replica in replicas])
                self.since[name] = step

    def _is_due(self, step: int, name: str) -> bool:
        plan, steps = self.run.plan, self.run.steps
        fragment = self.layers[name] % plan.outer_fragments
        offset = fragment * plan.sync_every // plan.outer_fragments
        return step == steps or (step - self.run.optim.sync_warmup - offset) % plan.sync_every == 0

    def _sync(self, name: str, held: list[Tensor]) -> None:
        plan, optim, x = self.run.plan, self.run.optim, self.anchor[name]
        delta = sum((rounded(x - weight, plan.outer_quant) for weight in held), torch.zeros_like(x)) / len(held)
        if plan.outer == "average":
            x = x - delta
        elif plan.outer == "slowmo":
            rate = learning_rate(optim, self.since[name], self.run.steps)
            slow = optim.outer_momentum * self.momentum[name] + delta / rate
            self.momentum[name] = slow
            x = x - optim.outer_lr * rate * slow
        else:
            buffer = optim.outer_momentum * self.momentum[name] + delta
            self.momentum[name] = buffer
            x = x - optim.outer_lr * (delta + optim.outer_momentum * buffer)
        self.anchor[name] = x
        for weight in held:
            weight.copy_(x)


def nearest_e4m3(values: Tensor) -> Tensor:
    """The nearest numbers of FP8's e4m3, by arithmetic; of two as near the even one. It is cast to from fp32."""
    held = values.clamp(-LARGEST["fp8"], LARGEST["fp8"]).float().double()
    exponent = (torch.frexp(held).exponent - 1).clamp(min=E4M3_LEAST)
    step = torch.ldexp(torch.ones_like(held), exponent - E4M3_DIGITS)
    return ((held / step).round() * step).to(values.dtype)


def rounded(delta: Tensor, quant: str) -> Tensor:
    """What is left of a delta when it is sent in few bits: block by block of every row of a matrix."""
    if quant == "none" or delta.ndim < 2:
        return delta
    block, most = block_length(delta.shape[-1]), LARGEST[quant]
    found = torch.empty_like(delta)
    for begin in range(0, delta.shape[-1], block):
        part = delta[..., begin : begin + block]
        scale = (part.abs().amax(-1, keepdim=True) / most).float().to(delta.dtype)
        codes = torch.where(scale > 0, part / scale, 0.0)
        codes = nearest_e4m3(codes) if quant == "fp8" else codes.round().clamp(-most, most)
        found[..., begin : begin + block] = codes * scale
    return found
