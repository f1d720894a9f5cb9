"""The references of plans whose workers have gradients of their own: one process that is each of them in turn.

**Compressed** (1-bit Adam, 0/1 Adam, 1-bit LAMB): it has one model, computes each worker's gradient by itself, and does
to whole tensors what the papers say, as every worker and every server. With optim/ it shares the calendar of a run, and
nothing else. **Asynchronous**: it reads which version of the weights every worker had in each of its steps, computes
each gradient by those weights, and makes an update of the sum of every step's, in the order of steps.
"""

import math
from collections.abc import Mapping
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
from meshwright.spec.communication import exchange_of, variance_steps
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.saving import whole_states
from meshwright.train.state import weights
from meshwright.train.step import choose
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence
from meshwright.verify.prove import VERSIONS

Named = dict[str, Tensor]


def record(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Do what the plan's ranks would, in one process, and leave the same evidence."""
    replicas = run.plan.replicate
    plan = Plan(microbatch=run.batch // replicas, precision=run.plan.precision)
    plain = msgspec.structs.replace(run.optim, name="adamw")  # whose states are not used
    one = msgspec.structs.replace(run, batch=plan.microbatch, plan=plan, optim=plain)
    mesh = lasting(one, place)
    corpus, evidence = prepare(run, cache, lambda text: None), Evidence(folder, mesh)
    state = build(one, corpus, mesh)
    loaders = [Loader(corpus, run, number, mesh.device) for number in range(replicas)]
    forward_backward, unscaled = choose(one, state.chunks, mesh), torch.ones((), dtype=torch.float64)
    held = {name: weight.data for name, weight in state.chunks[0].named_parameters()}
    replays = ALGORITHMS[run.optim.name](run, held)
    for step in range(1, run.steps + 1):
        gradients, loss, tokens = list[Named](), torch.zeros((), dtype=torch.float64), 1
        for number, loader in enumerate(loaders):
            replays.show(number)
            state.optimizer.zero_grad()
            batch = loader.take(step - 1).together
            loss, tokens = loss + forward_backward(batch, unscaled), batch.tokens
            gradients.append({name: given(weight) * replicas for name, weight in state.chunks[0].named_parameters()})
        whole = {name: _mean([each[name] for each in gradients]) for name in held}
        exchange = exchange_of(run.optim, step, run.steps)
        lengths = [_length(whole)] if exchange == "exact" else [_length(each) for each in gradients]
        norm = math.sqrt(sum(length**2 for length in lengths) / len(lengths))
        evidence.step(loss / tokens, torch.tensor(norm, dtype=torch.float64), iter(whole.items()))
        shrink = min(1.0, run.optim.grad_clip / norm) if run.optim.grad_clip else 1.0
        clipped = [{name: each[name] * shrink for name in held} for each in gradients]
        replays.update(step, exchange, clipped)
    replays.show(0)
    evidence.states(iter(replays.saved().items()))
    evidence.end(weights(state.chunks, one, mesh))
    for loader in (*loaders, state.loader):
        loader.close()


def _mean(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0]) / len(tensors)


def _length(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


class Signs:
    """Every worker's and every server's memory of what it left out of one weight."""

    def __init__(self, like: Tensor, replicas: int) -> None:
        self.length = 8 * math.ceil(like.numel() / 8 / replicas)
        self.worker = [torch.zeros_like(like).flatten() for _ in range(replicas)]
        self.server = torch.zeros_like(like).flatten()  # of all servers, one after another

    def mean(self, values: list[Tensor]) -> Tensor:
        """What all receive of the mean of the workers' values."""
        sent = list[Tensor]()
        for value, error in zip(values, self.worker, strict=True):
            wanted = value.flatten() + error
            sent.append(self._compressed(wanted))
            error.copy_(wanted - sent[-1])
        wanted = _mean(sent) + self.server
        received = self._compressed(wanted)
        self.server.copy_(wanted - received)
        return received.view(values[0].shape)

    def _compressed(self, flat: Tensor) -> Tensor:
        found = torch.empty_like(flat)
        for begin in range(0, len(flat), self.length):
            chunk = flat[begin : begin + self.length]
            scale = (chunk.abs().sum() / len(chunk)).float().to(chunk.dtype)
            found[begin : begin + self.length] = torch.where(chunk < 0, -scale, scale)
        return found


class Replay:
    """What the three have in common; a weight's memory is made from its name."""

    def __init__(self, run: Run, held: Named) -> None:
        self.run, self.optim, self.held, self.count = run, run.optim, held, 0
        self.replicas = run.plan.replicate
        self.signs = {name: Signs(weight, self.replicas) for name, weight in held.items()}
        self.first = {name: torch.zeros_like(weight) for name, weight in held.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in held.items()}

    def show(self, worker: int) -> None:
        """Put a worker's weights into the model: the same for all, unless they take local steps."""

    def update(self, step: int, exchange: str, gradients: list[Named]) -> None:
        """One update from the workers' clipped gradients."""
        self.count += 1
        rate = learning_rate(self.optim, step - 1, self.run.steps)
        for name, weight in self.held.items():
            mine, decay = [each[name] for each in gradients], self.optim.weight_decay if weight.ndim > 1 else 0.0
            self.move(name, weight, mine, (step, exchange, rate, decay))

    def move(self, name: str, weight: Tensor, mine: list[Tensor], at: tuple[int, str, float, float]) -> None:
        """The same of one weight."""
        raise NotImplementedError

    def beside(self, momentum: Tensor, variance: Tensor) -> Tensor:
        """Adam's direction; nothing where there is no variance."""
        return torch.where(variance > 0, momentum / (variance.sqrt() + self.optim.eps), torch.zeros_like(momentum))

    def momenta(self, name: str, mine: list[Tensor]) -> list[Tensor]:
        """Each worker's momentum from its own gradient."""
        beta = self.optim.beta1
        return [beta * self.first[name] + (1 - beta) * gradient for gradient in mine]

    def exactly(self, name: str, mine: list[Tensor]) -> None:
        """Both moments from the sum of all gradients."""
        beta1, beta2, gradient = self.optim.beta1, self.optim.beta2, _mean(mine)
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2

    def unbiased(self, name: str) -> Tensor:
        """The momentum divided by its bias."""
        return self.first[name] / (1 - self.optim.beta1**self.count)

    def saved(self) -> Named:
        """States as a checkpoint would name them, of the first worker and of all servers."""
        kinds = {"first": self.first, "second": self.second}
        found = {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}
        for name, each in self.signs.items():
            shape = self.held[name].shape
            found |= {
                f"worker_error/{name}": each.worker[0].view(shape),
                f"server_error/{name}": each.server.view(shape),
            }
        return found


class OneBitAdam(Replay):
    """1-bit Adam."""

    def move(self, name: str, weight: Tensor, mine: list[Tensor], at: tuple[int, str, float, float]) -> None:
        step, exchange, rate, decay = at
        variance = self.second[name]
        if exchange == "exact":
            self.exactly(name, mine)
            variance = self.second[name] / (1 - self.optim.beta2**self.count)
        else:
            self.first[name] = self.signs[name].mean(self.momenta(name, mine))
        weight.copy_(weight - rate * decay * weight - rate * self.beside(self.unbiased(name), variance))
        if step == self.optim.freeze_step:
            self.second[name] = variance


class OneBitLamb(Replay):
    """1-bit LAMB."""

    def __init__(self, run: Run, held: Named) -> None:
        super().__init__(run, held)
        self.ratio = dict.fromkeys(held, 0.0)
        self.factor = dict.fromkeys(held, 1.0)
        self.fresh = dict[str, Tensor]()

    def move(self, name: str, weight: Tensor, mine: list[Tensor], at: tuple[int, str, float, float]) -> None:
        step, exchange, rate, decay = at
        before, variance = self.first[name], self.second[name]
        if exchange == "exact":
            self.exactly(name, mine)
            variance = self.second[name] / (1 - self.optim.beta2**self.count)
        else:
            self.first[name] = self.signs[name].mean(self.momenta(name, mine))
        plain = self.beside(self.unbiased(name), variance)
        direction = plain + decay * weight
        trust = 1.0
        if weight.ndim > 1 and exchange == "exact":
            trust = (weight.norm() / direction.norm()).item() if direction.norm() > 0 and weight.norm() > 0 else 1.0
            self.ratio[name] = 0.9 * self.ratio[name] + 0.1 * trust
        elif weight.ndim > 1:
            trust = self._frozen(name, before, plain, direction)
        weight.copy_(weight - rate * trust * direction)
        if step == self.optim.freeze_step:
            self.second[name], self.fresh[name] = variance, variance.clone()
            self.ratio[name] /= 1 - 0.9**self.count

    def _frozen(self, name: str, before: Tensor, plain: Tensor, direction: Tensor) -> float:
        optim = self.optim
        gradient = (self.first[name] - optim.beta1 * before) / (1 - optim.beta1)
        self.fresh[name] = optim.beta2 * self.fresh[name] + (1 - optim.beta2) * gradient**2
        roots = [tensor.sqrt() + optim.eps for tensor in (self.second[name], self.fresh[name])]
        share = min(1.0, (plain.norm() / direction.norm()).item())
        factor = (roots[0] / roots[1]).max().item() * share + 1 - share
        factor = min(max(factor, 0.5), 4.0)
        last = self.factor[name]
        self.factor[name] = min(max(factor, 0.9 * last), 1.1 * last)
        return self.ratio[name] * self.factor[name]


class ZeroOneAdam(Replay):
    """0/1 Adam: after the freeze every worker has weights and a momentum of its own until the next sync."""

    def __init__(self, run: Run, held: Named) -> None:
        super().__init__(run, held)
        workers = range(self.replicas)
        self.synced = {name: weight.clone() for name, weight in held.items()}
        self.weights = [{name: weight.clone() for name, weight in held.items()} for _ in workers]
        self.moments = [dict[str, Tensor]() for _ in workers]
        self.local = {name: [torch.zeros_like(weight) for _ in workers] for name, weight in held.items()}
        self.rates = dict.fromkeys(held, 0.0)
        self.paces = dict.fromkeys(held, 0.0)

    def show(self, worker: int) -> None:
        for name, weight in self.weights[worker].items():
            self.held[name].copy_(weight)

    def move(self, name: str, weight: Tensor, mine: list[Tensor], at: tuple[int, str, float, float]) -> None:
        step, exchange, rate, decay = at
        optim, now = self.optim, self.weights[0][name]
        if step > optim.freeze_step:
            self._alone(name, mine, rate, decay)
            if exchange == "compressed":
                self._sync(name, decay)
            return
        if exchange == "exact":
            self.exactly(name, mine)
        else:
            self.first[name] = optim.beta1 * self.first[name] + (1 - optim.beta1) * self.signs[name].mean(mine)
        made = len([each for each in variance_steps(optim.freeze_step, optim.var_update_scaler) if each <= step])
        variance = self.second[name] / (1 - optim.beta2**made)
        now = now - rate * decay * now - rate * self.beside(self.unbiased(name), variance)
        if step == optim.freeze_step:
            self.second[name], self.signs[name] = variance, Signs(weight, self.replicas)
        self.synced[name] = now
        for number in range(self.replicas):
            self.weights[number][name], self.moments[number][name] = now, self.first[name]

    def _alone(self, name: str, mine: list[Tensor], rate: float, decay: float) -> None:
        beta = self.optim.beta1
        bias = 1 - beta**self.count
        self.rates[name] += rate
        self.paces[name] += rate / bias
        for number, gradient in enumerate(mine):
            moment = beta * self.moments[number][name] + (1 - beta) * gradient
            self.moments[number][name] = moment
            self.local[name][number] += rate * moment / bias
            moved = rate * self.beside(moment / bias, self.second[name])
            self.weights[number][name] = self.weights[number][name] - moved - rate * decay * self.synced[name]

    def _sync(self, name: str, decay: float) -> None:
        mean = self.signs[name].mean(self.local[name])
        self.first[name] = mean / self.paces[name]
        now = self.synced[name] * (1 - decay * self.rates[name]) - self.beside(mean, self.second[name])
        self.synced[name], self.rates[name], self.paces[name] = now, 0.0, 0.0
        for number in range(self.replicas):
            self.weights[number][name], self.moments[number][name] = now, self.first[name]
            self.local[name][number].zero_()


ALGORITHMS = {"onebit_adam": OneBitAdam, "onebit_lamb": OneBitLamb, "zero_one_adam": ZeroOneAdam}


def record_stale(place: Place, run: Run, cache: Path, folder: Path) -> None:
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
