"""The reference of plans whose communication is lossy: one process that rounds as their ranks do.

The gradient of every rank is computed by itself, microbatch by microbatch where each is reduced, and what becomes of it
is written here once more, on whole tensors and as the papers have it: nothing is shared with parallel/grad_reduce.py,
powersgd.py and zeropp.py but the length of a block and the first factors.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.data.prepare import Corpus, prepare
from meshwright.optim.outer import Meeting, NoOuterLoop
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.powersgd import first_factor
from meshwright.runtime.place import Place
from meshwright.spec.communication import factors
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import whole_states
from meshwright.train.state import State, gradients, weights
from meshwright.train.step import in_turn
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence
from meshwright.verify.replicas import alone, rounded

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
    """PowerSGD over replicas."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.owed = defaultdict[tuple[str, int], Tensor | float](float)
        self.factors: Tensors = {}

    def __call__(self, name: str, ranks: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of what each replica has of its microbatches."""
        own = [torch.stack(list(rank)).sum(0) for rank in ranks]
        shape = factors(tuple(own[0].shape), self.run.plan.powersgd)
        if shape is None:
            return sum(own, torch.zeros_like(own[0]))
        due = [gradient + self.owed[name, number] for number, gradient in enumerate(own)]
        turned = [each.mT if shape.turned else each for each in due]
        if name not in self.factors:
            first = first_factor(self.run.seed, name, shape)
            self.factors[name] = first.to(due[0]).view(*due[0].shape[:-2], shape.long, shape.rank)
        basis, _ = torch.linalg.qr(sum(each @ self.factors[name] for each in turned))
        self.factors[name] = torch.stack([each.mT @ basis for each in turned]).sum(0)
        total = basis @ self.factors[name].mT
        total = total.mT if shape.turned else total
        for number, each in enumerate(due):
            if self.run.plan.error_feedback:
                self.owed[name, number] = each - total / len(own)
        return total
