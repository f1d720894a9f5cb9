"""Parity of anyone's model: a plain module under plans, beside the same module in one process."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from meshwright.config import check, schema
from meshwright.config.check import how_blocks_run
from meshwright.config.run import Optim, Run
from meshwright.optim import clip
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel import pipeline, precision, tensor
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import ModelSpec, unanswered, unmatched
from meshwright.parallel.pipeline import Pipeline, Streams
from meshwright.runtime.place import Place
from meshwright.runtime.ranks import SERVER
from meshwright.spec.plan import AXES, Plan, even_stages
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.schedule import default_chunks, misfits
from meshwright.train.state import ParamLocation, gathered, gradient
from meshwright.train.step import accumulated
from meshwright.train.world import lasting
from meshwright.verify.evidence import Evidence
from meshwright.verify.prove import ParityResult, beside, fields

Batch = tuple[Tensor, ...] | Mapping[str, Tensor]
Loss = Callable[[Any, Any], tuple[Tensor, Tensor | int]]
START, BATCHES = "start.safetensors", "batches.safetensors"
OPTIM = Optim(lr=1e-2, schedule="constant")  # as the verb's: every step moves weights far enough to be seen


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a proof."""

    plan: Plan
    compresses: bool = False  # as a run may, and AdamW does not


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proved: the functions by name, the tensors in a folder."""

    make_model: Callable[[], nn.Module]
    loss: Loss
    model_spec: ModelSpec
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
        rows = plan.microbatch * plan.grad_accum
        for key, whole in safetensors.torch.load_file(self.folder / BATCHES).items():
            step, _, name = key.partition(".")
            mine = whole[mesh.data_rank * rows :][:rows].to(mesh.device)
            steps.setdefault(int(step), {})[name] = (
                mine.to(precision.compute_dtype(plan)) if mine.is_floating_point() else mine
            )
        given: list[Batch] = []
        for _, tensors in sorted(steps.items()):  # in the order that keys begin with: the file does not keep it
            keys = sorted(tensors, key=lambda key: int(key.partition(".")[0]))
            ordered = {key.partition(".")[2]: tensors[key] for key in keys}
            given.append(ordered if self.is_named else tuple(ordered.values()))
        return given


def decided(plans: Sequence[str | Plan], rows: int, layers: int, model_spec: ModelSpec) -> list[tuple[str, Plan]]:
    """Each plan by its name, complete; raises everything that is wrong with any of them."""
    tables = {str(plan): _table(plan, rows, layers) for plan in plans}
    problems = [problem for table in tables.values() for problem in schema.misfits(table, Plan, "plan.")]
    if problems:
        raise InputError(problems)
    made = [(name, msgspec.convert(table, Plan)) for name, table in tables.items()]
    for name, plan in made:
        found = [*_shape(plan, rows, layers), *unanswered(model_spec, plan), *_beyond(plan)]
        found += [*how_blocks_run(plan), *check.missing(plan)]
        problems += [msgspec.structs.replace(problem, where=f"plan {name}") for problem in found]
    if len({plan.precision for _, plan in made}) > 1:
        problems.append(Problem("the plans name different precisions", "prove one precision at a time"))
    if not made:
        problems.append(Problem("there is no plan to prove", 'name some, such as "shard=2,zero=3"'))
    if problems:
        raise InputError(problems)
    return made


def _table(plan: str | Plan, rows: int, layers: int) -> dict[str, Any]:
    """A plan's fields, with what its words leave open: a pipeline has twice as many microbatches as ranks."""
    if isinstance(plan, Plan):
        return msgspec.structs.asdict(plan)
    given: dict[str, Any] = {"precision": "fp64", **fields(plan)}
    for key, text in given.items():  # as a run file would hold it
        given[key] = int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)
    pp, data = _count(given, "pp"), _count(given, "replicate") * _count(given, "shard")
    given.setdefault("grad_accum", 2 * pp if pp > 1 else 1)
    given.setdefault("microbatch", max(rows // (data * _count(given, "grad_accum")), 1))
    if pp > 1:
        given.setdefault("chunks", default_chunks(given.get("schedule", "1f1b")))
        given.setdefault("stages", even_stages(layers, pp * _count(given, "chunks")))
    return given


def _count(given: dict[str, Any], key: str) -> int:
    """A count, or one where what stands there is none; the rules say so."""
    value = given.get(key, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _shape(plan: Plan, rows: int, layers: int) -> Iterator[Problem]:
    """A plan beside the batch and the model's blocks."""
    for name in (*AXES, "ep", "chunks", "microbatch", "grad_accum"):
        if (value := getattr(plan, name)) < 1:
            yield Problem(f"plan.{name} = {value} is not a count", "use whole numbers of at least 1", f"plan.{name}")
    if plan.batch != rows:
        parts = f"microbatch {plan.microbatch} × grad_accum {plan.grad_accum} × {plan.data} data ranks"
        remedy = f"use batches of a multiple of {plan.data * plan.grad_accum} rows"
        yield Problem(f"batches of {rows} rows are not {parts}", remedy, "plan.microbatch")
    if plan.zero == 0 and plan.shard > 1:
        yield Problem(f"plan.shard = {plan.shard} with plan.zero = 0 shards nothing", "set plan.zero to 1, 2 or 3")
    if plan.pp == 1:
        return
    stages = plan.pp * plan.chunks
    if stages > layers:
        yield Problem(f"{stages} stages are more than the model's {layers} blocks", f"use at most {layers} stages")
    elif len(plan.stages) != stages or sum(plan.stages) != layers or min(plan.stages) < 1:
        what = f"plan.stages = {list(plan.stages)} is not {stages} stages of {layers} blocks in total"
        yield Problem(what, "leave plan.stages out to have the blocks shared evenly", "plan.stages")
    for misfit in misfits(plan.schedule, plan.pp, plan.chunks, plan.grad_accum):
        yield Problem(misfit.text, misfit.remedy, misfit.key)


def _beyond(plan: Plan) -> Iterator[Problem]:
    """What no answer of a model spec can give: it takes the layers of our own decoder."""
    if plan.cp > 1:
        what = f"plan.cp = {plan.cp} puts another attention into the model, which only meshwright's own layers let it"
        yield Problem(what, "leave plan.cp at 1, or share the work of a long sequence with plan.tp", "plan.cp")
    if plan.ep > 1:
        what = f"plan.ep = {plan.ep} shares out the experts of an MoE layer, which only meshwright's own layers let it"
        yield Problem(what, "leave plan.ep at 1, or cut the experts with plan.tp and a split table", "plan.ep")
    if plan.sync_every > 1:
        what = f"plan.sync_every = {plan.sync_every} is of meshwright's own trainer, whose replicas sync rarely"
        yield Problem(what, "leave it out: parity is of plain training", "plan.sync_every")
    for name in ("grad_reduce", "powersgd", "grad_reduce_node", "gather", "secondary_shard"):
        if plan.uses(name):
            what = f"plan.{name} = {getattr(plan, name)} is of how the ranks of meshwright's own trainer communicate"
            yield Problem(what, "leave it out: parity is of plain training", f"plan.{name}")
    if plan.is_served:
        what = f"plan.staleness = {plan.staleness} is of meshwright's own trainer, which has a parameter server"
        yield Problem(what, "leave it out: parity is of plain training", "plan.staleness")
    if plan.deterministic:
        what = "plan.deterministic fixes the order of sums over the ranks of meshwright's own trainer"
        yield Problem(what, "leave it out: parity allows for rounding", "plan.deterministic")


def named(batch: Batch) -> dict[str, Tensor]:
    """A batch's tensors by position and name."""
    pairs = batch.items() if isinstance(batch, Mapping) else ((str(number), x) for number, x in enumerate(batch))
    return {f"{position}.{name}": x for position, (name, x) in enumerate(pairs)}


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers, those too that a model does not save."""
    return ((name, x.detach()) for name, x in chain(model.named_parameters(), model.named_buffers()))


def record(place: Place, trial: Trial, subject: Subject, folder: Path) -> None:
    """Run to the last batch as one rank; the first writes the evidence."""
    plan = trial.plan
    mesh = lasting(cast(Run, trial), place)  # of a run, no more is read there
    model, batches = subject.model(plan, mesh.device), subject.batches(plan, mesh)
    locations, streams = locations_of(model, plan, subject.model_spec), streams_of(model, plan, subject.model_spec)
    chunks = apply(model, plan, mesh, subject.model_spec)
    step = ModuleStep(chunks, plan, mesh, subject.loss, streams)
    optimizer = ResidentOptimizer(OPTIM, chain.from_iterable(chunk.parameters() for chunk in chunks), plan)
    evidence, measure = Evidence(folder, mesh), clip.choose(plan)
    for batch in batches:
        optimizer.zero_grad()
        loss_sum, count = step(batch)
        loss, square, _ = measure(chunks, loss_sum, mesh, False)
        # Gradients are of the sum. Its divisor, known only now, is taken out as a loss scale would be.
        stats = clip.grad_stats(loss, square, count, OPTIM.grad_clip)
        optimizer.step(OPTIM.lr, stats)
        evidence.step(loss / count, stats.norm, gathered(chunks, locations, mesh, gradient))
    evidence.end(gathered(chunks, locations, mesh, lambda weight: weight))


class ModuleStep:
    """Forward and backward of one rank's rows, in turn or through a pipeline. Microbatches are known by their rows."""

    def __init__(self, chunks: list[nn.Module], plan: Plan, mesh: Mesh, loss: Loss, streams: Streams) -> None:
        self.model, self.plan, self.mesh, self.loss = chunks[0], plan, mesh, loss
        self.pipeline = Pipeline(chunks, plan, mesh, self._loss_sums, streams) if plan.pp > 1 else None
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
        return self._loss_sums(self.model(_first(self.batch)[rows]), rows)

    def _loss_sums(self, outputs: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What is trained is what is reported."""
        return (loss := self._loss_sum(outputs, rows)), loss

    def _loss_sum(self, outputs: Any, rows: Tensor) -> Tensor:
        if isinstance(self.batch, Mapping):
            cut = {name: x[rows] for name, x in self.batch.items()}
        else:
            cut = tuple(x[rows] for x in self.batch)
        total, count = self.loss(outputs, cut)
        self.count += count
        return local(total)


def _first(batch: Batch) -> Tensor:
    return next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]


def locations_of(model: nn.Module, plan: Plan, model_spec: ModelSpec) -> list[ParamLocation]:
    """The pipeline rank of every weight."""
    ranks = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    if plan.pp > 1:
        for stage, rank in enumerate(pipeline.placement(plan)):
            part = pipeline.part(model, plan, stage, model_spec)
            ranks |= dict.fromkeys((name for name, _ in part.named_parameters()), rank)
    return [ParamLocation(name, tuple(weight.shape), ranks[name]) for name, weight in model.named_parameters()]


def streams_of(model: nn.Module, plan: Plan, model_spec: ModelSpec) -> Streams:
    """What travels between the stages of a plain model, found by running it once."""
    parts = [pipeline.part(model, plan, stage, model_spec) for stage in range(len(plan.stages))]

    @torch.no_grad()
    def stream(x: Tensor, stage: int) -> Tensor:
        if stage == 0:
            return x
        hidden = x.to(precision.weight_dtype(plan)) if x.is_floating_point() else x
        for part in parts[:stage]:
            hidden = part(hidden)
        is_input, dtype = stage < len(parts), precision.compute_dtype(plan)
        device = x.device if is_input else "meta"
        return torch.empty(hidden.shape, dtype=dtype, device=device, requires_grad=is_input)

    return stream


def parity(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Batch],
    loss: Loss,
    plans: Sequence[str | Plan],
    model_spec: ModelSpec | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[ParityResult]:
    """Train a model for one step a batch under each plan and in one process, and compare every number.

    - `make_model()` is called here once, for the first weights, and once on each rank, which takes over these.
    - A batch is a tuple or dict of tensors whose dim 0 counts its rows, which plans share out; the model is called with
      the first tensor.
    - `loss(output, batch)` returns the sum of the losses of a batch's rows, and how many there are: what is trained is
      the sum over all rows of a step ÷ the count over all.
    - `plans` are words like "shard=2,zero=3" or whole values, all of one precision: float64 unless stated.
    - `model_spec` holds the model's answers; without, it can be copied and sharded only.

    The functions must be found by name in another process: defined at the top of a module, or of a script that calls
    this under `if __name__ == "__main__"`.
    """
    model_spec = model_spec or ModelSpec()
    _raise([*_unreachable(make_model, loss, model_spec), *_misshapen(batches)])
    model, rows = make_model(), len(next(iter(named(batches[0]).values())))
    made = decided(plans, rows, len(model_spec.blocks(model)), model_spec)
    parted = [problem for name, plan in made for problem in _parted(model, name, plan, model_spec)]
    _raise([*_unsplit(model, [plan for _, plan in made], model_spec), *parted])
    # What the function's own module took names from is imported once, before ranks are forked.
    own = getattr(make_model, "__module__", None) or "__main__"
    modules = {getattr(value, "__module__", None) for value in vars(sys.modules[own]).values()}
    preload = sorted(name for name in modules if isinstance(name, str) and name not in ("__main__", own))
    SERVER.set_forkserver_preload(["meshwright.verify.prove_module", *preload])
    with tempfile.TemporaryDirectory() as name:
        subject = Subject(make_model, loss, model_spec, Path(name), isinstance(batches[0], Mapping))
        _write(model, batches, subject.folder)
        reference = Trial(plan=Plan(microbatch=rows, precision=made[0][1].precision))
        planned = [(name, Trial(plan=plan)) for name, plan in made]
        width = max(len(name) for name, _ in made)
        return beside(reference, planned, (record, subject), subject.folder, say, width)


def _write(model: nn.Module, batches: Sequence[Batch], folder: Path) -> None:
    """What ranks begin from. Tensors are copied: the format refuses two names for one memory."""
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in state_of(model)}, folder / START)
    tensors = {
        f"{step}.{name}": tensor.detach().clone().contiguous()
        for step, batch in enumerate(batches)
        for name, tensor in named(batch).items()
    }
    safetensors.torch.save_file(tensors, folder / BATCHES)


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise InputError(problems)


def _unreachable(make_model: Callable[..., Any], loss: Loss, model_spec: ModelSpec) -> Iterator[Problem]:
    """Functions that another process could not find by their name."""
    given = {
        "make_model": make_model,
        "loss": loss,
        "model_spec.blocks": model_spec.blocks,
        "model_spec.tp_plan": model_spec.tp_plan,
        "model_spec.stage_fn": model_spec.stage_fn,
    }
    for name, function in given.items():
        inner = function.func if isinstance(function, partial) else function
        if "<" in getattr(inner, "__qualname__", ""):  # <lambda>, or inside <locals>
            remedy = "define it with def at the top of a module, and bind arguments with functools.partial"
            yield Problem(f"{name} is a function that ranks, being other processes, cannot import", remedy)


def _misshapen(batches: Sequence[Batch]) -> Iterator[Problem]:
    """Batches that cannot be cut alike."""
    if not batches:
        yield Problem("there are no batches", "give one batch for each step to be compared; two or three are enough")
        return
    tensors = [list(named(batch).values()) for batch in batches if isinstance(batch, tuple | Mapping)]
    whole = len(tensors) == len(batches) and all(tensors)
    if not whole or not all(isinstance(x, Tensor) and x.dim() > 0 for each in tensors for x in each):
        yield Problem("a batch is not a tuple or dict of tensors with rows", "give tuples like (inputs, targets)")
    elif len({len(x) for each in tensors for x in each}) > 1:
        yield Problem("the tensors of the batches have different numbers of rows", "give dim 0 the same size in all")


def _unsplit(model: nn.Module, plans: list[Plan], model_spec: ModelSpec) -> Iterator[Problem]:
    """Lines of a split table that would cut nothing, and so prove nothing."""
    if model_spec.tp_plan is None or all(plan.tp == 1 for plan in plans):
        return
    table = model_spec.tp_plan(model)
    for pattern in unmatched(table, model):
        what = f"no module is called {pattern}, which the split table cuts"
        yield Problem(what, "use names of model.named_modules()", "plan.tp")
    if not table:
        yield Problem("the split table is empty", "say which matrices plan.tp cuts, or leave plan.tp at 1")


def _parted(model: nn.Module, name: str, plan: Plan, model_spec: ModelSpec) -> Iterator[Problem]:
    """Cut points that lose a weight, or put it on two stages."""
    if plan.pp == 1:
        return
    parts = [pipeline.part(model, plan, stage, model_spec) for stage in range(len(plan.stages))]
    held = [weight for each in parts for weight, _ in each.named_parameters()]
    whole = [weight for weight, _ in model.named_parameters()]
    where = f"plan {name}"
    for weight in sorted({*held, *whole}):
        if weight not in held:
            yield Problem(f"no stage holds {weight}", "keep it in one of the parts, under its own name", where=where)
        elif weight not in whole:
            what = f"{weight} of a stage is in the whole model another weight, tied to it, or none"
            yield Problem(what, "keep every name, and untie weights of different stages", where=where)
        elif held.count(weight) > 1:
            what = f"{held.count(weight)} stages hold {weight}"
            yield Problem(what, "let `part` leave it to one of them, as Absent does for modules", where=where)
