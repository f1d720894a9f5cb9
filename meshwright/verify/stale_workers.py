"""The reference of asynchronous plans: one process that repeats what happened, gradient by gradient.

It reads which version of the weights every worker had in each of its steps, computes each gradient by those weights,
and makes an update of the sum of every step's, in the order of steps. The optimizer is that of one process.
"""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.data.prepare import prepare
from meshwright.optim.clip import grad_stats
from meshwright.optim.interface import learning_rate
from meshwright.optim.master_weights import given
from meshwright.runtime.place import Place
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.saving import whole_states
from meshwright.train.state import weights
from meshwright.train.step import choose
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence
from meshwright.verify.prove import VERSIONS


def record(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Repeat the run of the folder's versions, and leave the same evidence."""
    versions = msgspec.json.decode((folder / VERSIONS).read_bytes(), type=list[list[int]])
    workers = run.plan.replicate
    plan = Plan(microbatch=run.batch // workers, precision=run.plan.precision)
    one = msgspec.structs.replace(run, batch=plan.microbatch, plan=plan)
    mesh = lasting(one, place)
    corpus, evidence = prepare(run, cache, lambda text: None), Evidence(folder, mesh)
    state = build(one, corpus, mesh)
    loaders = [Loader(corpus, run, number, mesh.device) for number in range(workers)]
    forward_backward, one_time = choose(one, state.chunks, mesh), torch.ones((), dtype=torch.float64)
    held = dict(state.chunks[0].named_parameters())
    history = [{name: weight.data.clone() for name, weight in held.items()}]
    for step in range(run.steps):
        totals = {name: torch.zeros_like(weight.data) for name, weight in held.items()}
        losses, norms = list[Tensor](), list[Tensor]()
        for worker, loader in enumerate(loaders):
            _show(held, history[versions[worker][step]])
            state.optimizer.zero_grad()
            batch = loader.take(step)
            losses.append(forward_backward(batch.together, one_time) / batch.tokens)
            squares = [given(weight).double().square().sum() for weight in held.values()]
            norms.append(torch.stack(squares).sum().sqrt() * workers)
            for name, weight in held.items():
                totals[name] += given(weight)
        evidence.step(torch.stack(losses).mean(), torch.stack(norms).mean(), iter(totals.items()))
        _show(held, history[-1])
        for name, weight in held.items():
            weight.grad = totals[name]
        square = torch.stack([total.double().square().sum() for total in totals.values()]).sum()
        stats = grad_stats(one_time, square, one_time, run.optim.grad_clip)
        state.optimizer.step(learning_rate(run.optim, step, run.steps), stats)
        history.append({name: weight.data.clone() for name, weight in held.items()})
    if run.plan.precision == "fp64":
        evidence.states(whole_states(state, one, mesh))
    evidence.end(weights(state.chunks, one, mesh))
    for loader in (*loaders, state.loader):
        loader.close()


def _show(held: dict[str, torch.nn.Parameter], version: dict[str, Tensor]) -> None:
    """Put a version into the model."""
    for name, weight in held.items():
        weight.data.copy_(version[name])
