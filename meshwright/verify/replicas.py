"""The reference of plans whose replicas sync rarely: one process that trains them one after another, and syncs them.

Every replica is a plain run of one process over its own samples. What happens at a sync is written here once more, on
whole tensors and as the papers have it, so that it shares nothing with optim/outer.py but the length of a block.
"""

from collections.abc import Iterator
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
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.place import Place
from meshwright.spec.communication import block_length
from meshwright.spec.params import params
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.loop import EvalResult, StepResult, train
from meshwright.train.state import State, gradients, weights
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence

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


def record(place: Place, run: Run, cache: Path, folder: Path) -> None:
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
