"""Why a question has no legal plan at all: the rule that empties its space, in the words of the rule."""

import math
from itertools import product
from typing import Any

from meshwright.search.question import Question, variants
from meshwright.search.space import divisors, plans, problems, wants_pipeline
from meshwright.spec.plan import AXES, Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.schedule import default_chunks
from meshwright.spec.stages import balanced_stages

TRIED = 2000  # plans that are asked for their problems; the nearest to legal speaks for all


def refuse_empty(question: Question) -> None:
    """Nothing, if some plan is legal; else what is wrong is raised."""
    if all(next(plans(variant), None) is None for variant in variants(question)):
        raise InputError(empty(question))


def empty(question: Question) -> list[Problem]:
    """What is wrong with the plan that breaks the fewest rules."""
    fixed, gpus = question.fixed, question.cluster.gpus
    taken = math.prod(fixed.get(axis, 1) for axis in AXES)
    if taken < 1 or gpus % taken:
        axes = [axis for axis in AXES if fixed.get(axis, 1) != 1]
        product_of = " × ".join(f"plan.{axis} {fixed[axis]}" for axis in axes)
        stated = f"plan.{axes[0]}" if len(axes) == 1 else product_of
        return [Problem(f"{stated} = {taken} does not divide {gpus} GPUs", "fix other numbers, or take other machines")]
    if problem := _batch(question) or _stages(question):
        return [problem]
    spread = _spread(question)
    if wants_pipeline(question):
        spread = [plan for plan in spread if plan.pp > 1]
        if not spread:
            return [_no_pipeline(question)]
    simplest = sorted(spread, key=lambda plan: plan.tp * plan.cp * plan.pp)[:TRIED]
    return min((problems(question, plan) for plan in simplest), key=len, default=[]) or [
        Problem("no plan has all the fields that are fixed", "leave one of them to the search", "plan")
    ]


def _batch(question: Question) -> Problem | None:
    """A batch that the fixed microbatches do not divide, or that no number of data ranks divides."""
    fixed, batch = question.fixed, question.batch
    part = math.prod(fixed.get(name, 1) for name in ("microbatch", "accumulate", "replicate", "shard"))
    if part < 1 or batch % part:
        names = [name for name in ("microbatch", "accumulate", "replicate", "shard") if name in fixed]
        what = f"batch = {batch} is no multiple of {' × '.join(f'plan.{name} {fixed[name]}' for name in names)}"
        return Problem(what, f"use a batch that is a multiple of {max(part, 1)}", "batch")
    return None


def _stages(question: Question) -> Problem | None:
    """Stages that do not add up to the model."""
    stages, layers = question.fixed.get("stages", ()), question.arch.layers
    if not stages or (sum(stages) == layers and min(stages) >= 1):
        return None
    what = f"plan.stages = {list(stages)} has {sum(stages)} layers, and the model has {layers}"
    if min(stages) < 1:
        what = f"plan.stages = {list(stages)} has a stage without a layer"
    return Problem(what, "leave plan.stages out to have the layers balanced", "plan.stages")


def _no_pipeline(question: Question) -> Problem:
    """Fields of a pipeline where there is none."""
    names = [name for name in ("schedule", "stages", "chunks") if name in question.fixed]
    what = f"{' and '.join(f'plan.{name}' for name in names)} {'is' if len(names) == 1 else 'are'} for pipelines"
    ranks = "plan.pp = 1" if question.fixed.get("pp") == 1 else "the machines have no GPUs left for one"
    return Problem(f"{what}, and {ranks}", "leave it out, or have plan.pp above 1", f"plan.{names[0]}")


def _spread(question: Question) -> list[Plan]:
    """Plans over all GPUs with the fixed fields, legal or not."""
    fixed, gpus = question.fixed, question.cluster.gpus
    axes = [(fixed[axis],) if axis in fixed else divisors(gpus) for axis in AXES]
    plans = []
    for degrees in product(*axes):
        if math.prod(degrees) != gpus:
            continue
        values = dict(zip(AXES, degrees, strict=True))
        data = values["replicate"] * values["shard"]
        microbatch = fixed.get("microbatch") or max(question.batch // data // fixed.get("accumulate", 1), 1)
        accumulate = fixed.get("accumulate") or max(question.batch // data // microbatch, 1)
        values |= {"zero": int(values["shard"] > 1), "microbatch": microbatch, "accumulate": accumulate}
        plans.append(_plan(question, values | {key: value for key, value in fixed.items() if key not in AXES}))
    return plans


def _plan(question: Question, values: dict[str, Any]) -> Plan:
    stages = values.get("stages")
    if values["pp"] > 1 and stages:
        values = {"chunks": max(len(stages) // values["pp"], 1)} | values
    elif values["pp"] > 1:
        schedule = str(values.get("schedule", "1f1b"))
        chunks = values.get("chunks") or default_chunks(schedule)  # pyright: ignore[reportArgumentType]
        values = values | {"chunks": chunks, "stages": balanced_stages(question.arch, values["pp"] * chunks)}
    return Plan(**values, precision=question.precision)  # pyright: ignore[reportArgumentType]
