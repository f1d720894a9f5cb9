"""Parity of anyone's model: a plain module under plans, beside the same module in one process."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from meshwright.launch.ranks import SERVER
from meshwright.parallel.anatomy import Anatomy, unmatched
from meshwright.parallel.pipeline import part
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.verify import any_plans
from meshwright.verify.any_record import BATCHES, START, Batch, Loss, Subject, Trial, named, record, state_of
from meshwright.verify.certificate import TOLERANCES, Verdict, header, line
from meshwright.verify.prove import beside


def parity(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Batch],
    loss: Loss,
    plans: Sequence[str | Plan],
    anatomy: Anatomy | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Verdict]:
    """Train a model for one step a batch under each plan and in one process, and compare every number.

    - `make_model()` is called here once, for the first weights, and once on each rank, which takes over these.
    - A batch is a tuple or dict of tensors whose dim 0 counts its rows, which plans share out; the model is called with
      the first tensor.
    - `loss(output, batch)` returns the sum of the losses of a batch's rows, and how many there are: what is trained is
      the sum over all rows of a step ÷ the count over all.
    - `plans` are words like "shard=2,zero=3" or whole values, all of one precision: float64 unless stated.
    - `anatomy` holds the model's answers; without, it can be copied and sharded only.

    The functions must be found by name in another process: defined at the top of a module, or of a script that calls
    this under `if __name__ == "__main__"`.
    """
    anatomy = anatomy or Anatomy()
    _raise([*_unreachable(make_model, loss, anatomy), *_misshapen(batches)])
    model, rows = make_model(), len(next(iter(named(batches[0]).values())))
    made = any_plans.decided(plans, rows, len(anatomy.blocks(model)), anatomy)
    parted = [problem for name, plan in made for problem in _parted(model, name, plan, anatomy)]
    _raise([*_unsplit(model, [plan for _, plan in made], anatomy), *parted])
    SERVER.set_forkserver_preload(["meshwright.verify.any_model", *_imported_by(make_model)])
    with tempfile.TemporaryDirectory() as name:
        subject = Subject(make_model, loss, anatomy, Path(name), isinstance(batches[0], Mapping))
        _write(model, batches, subject.folder)
        reference = Trial(plan=any_plans.alone(rows, made[0][1].precision))
        planned = [(name, Trial(plan=plan)) for name, plan in made]
        told = _teller([name for name, _ in made], reference, say)
        return beside(reference, planned, (record, subject), subject.folder, told)


def _teller(names: list[str], reference: Trial, say: Callable[[str], None]) -> Callable[[Verdict], None]:
    width = max(map(len, names))
    tolerance, reason = TOLERANCES[reference.plan.precision]
    say(f"largest relative deviation from one process, {tolerance:.0e} allowed ({reason}):")
    say(header(width))
    return lambda verdict: say(line(verdict, width))


def _write(model: nn.Module, batches: Sequence[Batch], folder: Path) -> None:
    """What ranks begin from. Tensors are copied: the format refuses two names for one memory."""
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in state_of(model)}, folder / START)
    tensors = {
        f"{step}.{name}": tensor.detach().clone().contiguous()
        for step, batch in enumerate(batches)
        for name, tensor in named(batch).items()
    }
    safetensors.torch.save_file(tensors, folder / BATCHES)


def _imported_by(function: Callable[..., Any]) -> list[str]:
    """The modules that a function's own module took names from: imported once, before ranks are forked."""
    own = getattr(function, "__module__", None) or "__main__"
    names = {getattr(value, "__module__", None) for value in vars(sys.modules[own]).values()}
    return sorted(name for name in names if isinstance(name, str) and name not in ("__main__", own))


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise InputError(problems)


def _unreachable(make_model: Callable[..., Any], loss: Loss, anatomy: Anatomy) -> Iterator[Problem]:
    """Functions that another process could not find by their name."""
    given = {
        "make_model": make_model,
        "loss": loss,
        "anatomy.blocks": anatomy.blocks,
        "anatomy.splits": anatomy.splits,
        "anatomy.part": anatomy.part,
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


def _unsplit(model: nn.Module, plans: list[Plan], anatomy: Anatomy) -> Iterator[Problem]:
    """Lines of a split table that would cut nothing, and so prove nothing."""
    if anatomy.splits is None or all(plan.tp == 1 for plan in plans):
        return
    table = anatomy.splits(model)
    for pattern in unmatched(table, model):
        what = f"no module is called {pattern}, which the split table cuts"
        yield Problem(what, "use names of model.named_modules()", "plan.tp")
    if not table:
        yield Problem("the split table is empty", "say which matrices plan.tp cuts, or leave plan.tp at 1")


def _parted(model: nn.Module, name: str, plan: Plan, anatomy: Anatomy) -> Iterator[Problem]:
    """Cut points that lose a weight, or put it on two stages."""
    if plan.pp == 1:
        return
    parts = [part(model, plan, stage, anatomy) for stage in range(len(plan.stages))]
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
