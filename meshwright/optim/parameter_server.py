"""Asynchronous data parallelism with bounded staleness: a parameter server in host memory, sharded over the ranks.

Each rank is a worker, whose model is on its device, and the server of some rows of every weight: their master copy and
optimizer states, in host memory, moved by a thread of its own. In its step t, counted from 0, a worker

    pulls    the newest weights that its host has, and waits only while they are older than version t − N
    computes its gradient by them, and pushes it, in the background: to every server its rows

A server makes update t when all workers' gradients of step t are there: their sum, clipped by the norm over all
servers, moves its rows, which are then sent to every host as version t + 1. So a worker runs ahead of the slowest by N
steps at most, an update has gradients of weights that are up to N versions old (stale synchronous parallel, Ho et al.
2013), and with N = 0 it is plain training. There are as many updates as steps, at the same learning rates, for every N.

Pushes are all-to-alls that nobody waits for but the server; servers all-reduce four numbers and all-gather rows, in
step with each other. Each of the two has a group of its own, in which only one thread speaks.
"""

import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config.run import Run
from meshwright.optim import clip
from meshwright.optim.clip import GradStats
from meshwright.optim.interface import Optimizer
from meshwright.optim.master_weights import given
from meshwright.optim.outer import Meeting, NoOuterLoop
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel.mesh import Mesh, all_gather, local
from meshwright.spec.communication import TOLD, served_rows

HOST = torch.device("cpu")
LAST_SECONDS = 5.0  # that a server may take at the end


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of one step on its way."""

    step: int  # from 0
    rate: float
    told: Tensor  # this worker's loss, votes and tokens
    work: dist.Work
    sent: Tensor  # kept until it has arrived
    received: Tensor  # a row from each worker


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What all servers know of an update."""

    loss: Tensor  # the mean over all tokens
    votes: Tensor
    norm: Tensor


class ParameterServer:
    """The rows of one rank, and the thread that moves them."""

    def __init__(self, run: Run, named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh) -> None:
        self.run, self.mesh, self.weights = run, mesh, [weight for _, weight in named]
        assert run.plan.staleness is not None, "a plan with a parameter server"
        self.bound, workers = run.plan.staleness, run.plan.replicate
        self.rows = [[served_rows(len(weight), workers, each) for weight in self.weights] for each in range(workers)]
        held = [local(weight.detach()) for weight in self.weights]
        self.sizes = [
            sum(len(range(*part)) * each[0].numel() for part, each in zip(rows, held, strict=True))
            for rows in self.rows
        ]
        mine = [
            (name, weight, each[slice(*part)])
            for (name, weight), part, each in zip(named, self.rows[mesh.part], held, strict=True)
            if len(range(*part))
        ]
        self.shards = {id(weight): nn.Parameter(rows.to(HOST, copy=True)) for _, weight, rows in mine}
        plain = msgspec.structs.replace(run.plan, kernels="plain")
        self.optimizer = ResidentOptimizer(run.optim, self.shards.values(), plain, [name for name, *_ in mine])
        self.front, self.back = (held[0].new_empty(workers, max(self.sizes), device=HOST) for _ in range(2))
        self.pushing, self.serving = (_group(name, mesh) for name in ("push", "serve"))
        self.version = self.pushed = self.pulled = 0  # updates made, gradients pushed, and the version of our weights
        self.results: dict[int, UpdateResult] = {}
        self.news = threading.Condition()
        self.pushes: queue.SimpleQueue[Push | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, name="parameter-server", daemon=True)
        self.thread.start()

    @torch.no_grad()
    def push(self, rate: float, loss: Tensor, votes: Tensor, tokens: int) -> None:
        """Send this worker's gradient to the servers, without waiting for anybody."""
        gradients = [local(given(weight)) for weight in self.weights]
        rows = [
            gradient[slice(*part)].reshape(-1)
            for server in self.rows
            for gradient, part in zip(gradients, server, strict=True)
        ]
        sent = torch.cat(rows).to(HOST)
        size = self.sizes[self.mesh.part]
        received = sent.new_empty(len(self.sizes), size)
        flat = received.view(-1)
        work = dist.all_to_all_single(
            flat, sent, [size] * len(self.sizes), self.sizes, group=self.pushing, async_op=True
        )
        assert work is not None, "it was asked to be asynchronous"
        told = torch.stack(
            [loss.double().cpu(), votes.double().cpu(), torch.tensor(float(tokens), dtype=torch.float64)]
        )
        self.pushes.put(Push(self.pushed, rate, told, work, sent, received))
        self.pushed += 1

    def pull(self) -> int:
        """Take the newest weights, once they are no older than allowed; returns how old they are."""
        return self.pushed - self._take(self.pushed - self.bound)

    def settle(self) -> None:
        """Wait until every gradient that was pushed is in the weights."""
        self._take(self.pushed)

    @torch.no_grad()
    def _take(self, least: int) -> int:
        with self.news:
            while self.version < least and self.error is None:
                self.news.wait()
            if self.error is not None:
                # With its cause: whoever reads the text learns whether another rank is gone.
                raise RuntimeError(f"the parameter server of this rank has ended: {self.error}") from self.error
            if self.pulled < self.version:
                self._unpack(self.front)
                self.pulled = self.version
        return self.pulled

    def _unpack(self, buffer: Tensor) -> None:
        """Weights from the rows of all servers."""
        for rows, flat, size in zip(self.rows, buffer, self.sizes, strict=True):
            parts = [local(weight.detach())[slice(*part)] for weight, part in zip(self.weights, rows, strict=True)]
            pieces = flat[:size].split([part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.view(part.shape))

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while (push := self.pushes.get()) is not None:
                self._update(push)
        except BaseException as error:  # whoever pulls is told
            with self.news:
                self.error = error
                self.news.notify_all()

    def _update(self, push: Push) -> None:
        push.work.wait()
        total = push.received.sum(0)
        shards = list(self.shards.values())
        for shard, piece in zip(shards, total.split([shard.numel() for shard in shards]), strict=True):
            shard.grad = piece.view(shard.shape)
        square = (
            clip.square_norm([given(shard) for shard in shards]) if shards else torch.zeros((), dtype=torch.float64)
        )
        told = torch.cat([square.double()[None], push.told])
        assert told.numel() == TOLD, "what the planner counts"
        dist.all_reduce(told, group=self.serving)
        square, loss, votes, tokens = told.unbind()
        stats = clip.grad_stats(loss, square, torch.ones_like(square), self.run.optim.grad_clip)
        self.optimizer.step(push.rate, stats)
        self.optimizer.zero_grad()
        self._publish(push.step + 1, UpdateResult(loss / tokens, votes, stats.norm))

    def _publish(self, version: int, result: UpdateResult | None) -> None:
        """Send this server's rows to every host, and tell the worker here."""
        mine = self.back.new_zeros(self.back.shape[1])
        mine[: self.sizes[self.mesh.part]] = torch.cat([shard.detach().reshape(-1) for shard in self.shards.values()])
        all_gather(self.back.view(-1), mine, group=self.serving)
        with self.news:
            self.front, self.back, self.version = self.back, self.front, version
            if result is not None:
                self.results[version - 1] = result
                self.results.pop(version - 3 - self.bound, None)
            self.news.notify_all()

    def resume(self, step: int) -> None:
        """Go on from rows that were read from a checkpoint: no gradient is on its way."""
        self.pushed, self.pulled = step, -1
        with torch.no_grad():
            self._publish(step, None)
        self._take(step)

    def close(self) -> None:
        """End the thread, once it has made the updates that were pushed; after a fault of others it may never."""
        self.pushes.put(None)
        self.thread.join(LAST_SECONDS)


def _group(name: str, mesh: Mesh) -> dist.ProcessGroup:
    """A group of all ranks on their hosts, made once: it costs threads and sockets."""
    key = (name, ())
    if key not in mesh.groups:
        made = dist.new_group(backend="gloo", group_desc=f"parameter_server_{name}")
        assert isinstance(made, dist.ProcessGroup), "every rank is in it"
        mesh.groups[key] = made
    return mesh.groups[key]


class ServedOptimizer(Optimizer):
    """The worker's side of an optimizer whose states are on the servers."""

    def __init__(self, run: Run, named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh) -> None:
        super().__init__(run.optim)
        self.server = ParameterServer(run, named, mesh)
        self.weights, self.rate, self.norm = self.server.weights, 0.0, torch.zeros(())

    @property
    def count(self) -> Tensor:
        return self.server.optimizer.count

    def states(self) -> Mapping[str, list[Tensor]]:
        return self.server.optimizer.states()

    def held(self) -> dict[int, dict[str, Tensor]]:
        rows = self.server.optimizer.held()
        return {id(weight): rows.get(id(self.server.shards.get(id(weight))), {}) for weight in self.weights}

    def region(self, weight: Tensor) -> tuple[tuple[int, int], ...] | None:
        begin, end = served_rows(len(weight), self.server.run.plan.replicate, self.server.mesh.part)
        return ((begin, end), *((0, size) for size in weight.shape[1:]))

    def step(self, rate: float, stats: GradStats) -> None:
        """The servers do it, when they have all gradients of this step."""
        # This worker's gradient is a share of the sum: as many times as much is comparable with that of all.
        self.rate, self.norm = rate, stats.norm * self.server.run.plan.replicate

    def settle(self) -> None:
        self.server.settle()

    def close(self) -> None:
        self.server.close()


class AsynchronousReplicas(NoOuterLoop):
    """What a worker does in a step beside computing its gradient."""

    def __init__(self, run: Run, optimizer: ServedOptimizer) -> None:
        super().__init__(run)
        self.run, self.optimizer, self.server = run, optimizer, optimizer.server
        self.staleness: int | None = 0
        self.versions: list[int] = []  # of the weights of each step
        self.histogram = Counter[int]()

    def pull(self, step: int) -> None:
        self.staleness = self.server.pull()
        self.versions.append(self.server.pushed - self.staleness)
        self.histogram[self.staleness] += 1

    def resume(self, step: int, has_states: bool) -> None:
        self.server.resume(step)

    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        """Push, and hear what all have said in the newest update that every worker is sure to have seen."""
        self.server.push(self.optimizer.rate, loss, votes, tokens)
        bound, newest = self.server.bound, step - 1
        evaluates = step == self.run.steps or self.calendar.has_come(step, self.run.eval.every)
        if bound == 0 or evaluates:
            self.server.settle()
        if bound == 0:
            found = self.server.results[newest]
            return Meeting(found.votes, found.loss, True, found.norm, step)
        found = self.server.results.get(newest - 1 - bound)
        own = loss / tokens
        if found is None:
            return Meeting(None, own, norm=self.optimizer.norm)
        return Meeting(found.votes, own, True, self.optimizer.norm, step - 1 - bound)


def described(run: Run) -> list[str]:
    """A line for the log; none without a parameter server."""
    if run.plan.staleness is None:
        return []
    return [
        f"parameter server: in host memory, sharded over {run.plan.replicate} ranks; a gradient is of weights at most "
        f"{run.plan.staleness} updates old. Losses and norms are those of a rank's own samples"
        + ("" if run.plan.staleness else ", but with staleness = 0, where they are of all")
    ]
