"""One rank's run of anyone's model under a plan, kept as evidence."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.optim import clip
from meshwright.optim.adamw import AdamW
from meshwright.parallel import pipeline, precision, tensor
from meshwright.parallel.anatomy import Anatomy
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.pipeline import Pipeline, Streams
from meshwright.spec.place import Place
from meshwright.spec.plan import Plan
from meshwright.spec.run import Optim, Run
from meshwright.train.gather import Home, gathered, gradient
from meshwright.train.step import accumulated
from meshwright.train.world import world
from meshwright.verify.compare import Evidence

Batch = tuple[Tensor, ...] | Mapping[str, Tensor]
Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]
START, BATCHES = "start.safetensors", "batches.safetensors"
OPTIM = Optim(rate=1e-2, schedule="constant")  # as the verb's: every step moves weights far enough to be seen


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a proof."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proved: the functions by name, the tensors in a folder."""

    make_model: Callable[[], nn.Module]
    loss: Loss
    anatomy: Anatomy
    folder: Path
    is_named: bool  # batches are dicts

    def model(self, plan: Plan, device: torch.device) -> nn.Module:
        """The plain model with the first weights."""
        model = self.make_model()
        start = safetensors.torch.load_file(self.folder / START)
        with torch.no_grad():
            for name, held in state_of(model):
                held.copy_(start[name])
        return model.to(device=device, dtype=precision.weight_dtype(plan))

    def batches(self, plan: Plan, mesh: Mesh) -> list[Batch]:
        """This rank's rows of every batch, its floats in the precision of the arithmetic."""
        steps: dict[int, dict[str, Tensor]] = {}
        rows = plan.microbatch * plan.accumulate
        for key, whole in safetensors.torch.load_file(self.folder / BATCHES).items():
            step, _, name = key.partition(".")
            mine = whole[mesh.data_rank * rows :][:rows].to(mesh.device)
            steps.setdefault(int(step), {})[name] = (
                mine.to(precision.compute_dtype(plan)) if mine.is_floating_point() else mine
            )
        return [self._as_given(steps[step]) for step in sorted(steps)]

    def _as_given(self, tensors: dict[str, Tensor]) -> Batch:
        """In the order in which it was given, which the file does not keep: the keys begin with it."""
        ordered = {key.partition(".")[2]: tensors[key] for key in sorted(tensors, key=_position)}
        return ordered if self.is_named else tuple(ordered.values())


def named(batch: Batch) -> dict[str, Tensor]:
    """A batch's tensors by position and name."""
    pairs = batch.items() if isinstance(batch, Mapping) else ((str(number), x) for number, x in enumerate(batch))
    return {f"{position}.{name}": x for position, (name, x) in enumerate(pairs)}


def _position(key: str) -> int:
    return int(key.partition(".")[0])


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers, those too that a model does not save."""
    return ((name, x.detach()) for name, x in chain(model.named_parameters(), model.named_buffers()))


def record(place: Place, trial: Trial, subject: Subject, folder: Path) -> None:
    """Run to the last batch as one rank; the first writes the evidence."""
    plan = trial.plan
    with world(cast(Run, trial), place) as mesh:  # of a run, only the plan is read there
        model, batches = subject.model(plan, mesh.device), subject.batches(plan, mesh)
        homes, streams = homes_of(model, plan, subject.anatomy), streams_of(model, plan, subject.anatomy)
        chunks = apply(model, plan, mesh, subject.anatomy)
        step = Step(chunks, plan, mesh, subject.loss, streams)
        optimizer = AdamW(OPTIM, chain.from_iterable(chunk.parameters() for chunk in chunks), plan)
        evidence, measure = Evidence(folder, mesh), clip.choose(plan)
        for batch in batches:
            optimizer.zero_grad()
            loss_sum, count = step(batch)
            loss, square, _ = measure(chunks, loss_sum, mesh, False)
            # Gradients are of the sum. Its divisor, known only now, is taken out as a loss scale would be.
            verdict = clip.judge(loss, square, count, OPTIM.clip)
            optimizer.step(OPTIM.rate, verdict)
            evidence.step(loss / count, verdict.norm, gathered(chunks, homes, mesh, gradient))
        evidence.end(gathered(chunks, homes, mesh, lambda weight: weight))


class Step:
    """Forward and backward of one rank's rows, in turn or through a pipeline. Microbatches are told by their rows."""

    def __init__(self, chunks: list[nn.Module], plan: Plan, mesh: Mesh, loss: Loss, streams: Streams) -> None:
        self.model, self.plan, self.mesh, self.loss = chunks[0], plan, mesh, loss
        self.pipeline = Pipeline(chunks, plan, mesh, self._loss_sum, streams) if plan.pp > 1 else None
        self.batch: Batch = ()
        self.count = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.one = torch.ones((), dtype=torch.float64, device=mesh.device)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This rank's share of the sum of losses, and the count over the whole job."""
        self.batch, self.count = batch, torch.zeros_like(self.count)
        x = _first(batch)
        rows = torch.arange(len(x), device=x.device)
        if self.pipeline is None:
            microbatches = rows.split(self.plan.microbatch)
            total = accumulated(self.model, self.plan, microbatches, self._forward)
        else:
            with tensor.loss_context(self.plan):
                total = self.pipeline.step(x, {}, rows, self.one) / self.plan.tp
        count = self.count / self.plan.tp  # every rank of tp has it
        dist.all_reduce(count)
        return total, count

    def _forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        loss = self._loss_sum(self.model(_first(self.batch)[rows]), rows)
        return loss, loss

    def _loss_sum(self, outputs: Any, rows: Tensor) -> Tensor:
        total, count = self.loss(outputs, _rows(self.batch, rows))
        self.count += count
        return local(total)


def _first(batch: Batch) -> Tensor:
    return next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]


def _rows(batch: Batch, rows: Tensor) -> Batch:
    if isinstance(batch, Mapping):
        return {name: x[rows] for name, x in batch.items()}
    return tuple(x[rows] for x in batch)


def homes_of(model: nn.Module, plan: Plan, anatomy: Anatomy) -> list[Home]:
    """The pipeline rank of every weight."""
    ranks = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    if plan.pp > 1:
        for stage, rank in enumerate(pipeline.placement(plan)):
            part = pipeline.part(model, plan, stage, anatomy)
            ranks |= dict.fromkeys((name for name, _ in part.named_parameters()), rank)
    return [Home(name, tuple(weight.shape), ranks[name]) for name, weight in model.named_parameters()]


def streams_of(model: nn.Module, plan: Plan, anatomy: Anatomy) -> Streams:
    """What travels between the stages of a plain model, found by running it once."""
    parts = [pipeline.part(model, plan, stage, anatomy) for stage in range(len(plan.stages))]
    return partial(_stream, parts, plan)


@torch.no_grad()
def _stream(parts: list[nn.Module], plan: Plan, x: Tensor, stage: int) -> Tensor:
    if stage == 0:
        return x
    wide = x.to(precision.weight_dtype(plan)) if x.is_floating_point() else x
    for part in parts[:stage]:
        wide = part(wide)
    device = x.device if stage < len(parts) else "meta"
    return torch.empty(wide.shape, dtype=precision.compute_dtype(plan), device=device, requires_grad=stage < len(parts))
