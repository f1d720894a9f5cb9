"""Why a question has no legal plan at all: the rule that empties its space, in the words of the rule."""

import math
from itertools import product

from meshwright.search.question import Question
from meshwright.search.space import divisors, problems
from meshwright.spec.plan import AXES, Plan
from meshwright.spec.problem import Problem
from meshwright.spec.schedule import default_chunks
from meshwright.spec.stages import balanced_stages

TRIED = 2000  # plans that are asked for their problems; the nearest to legal speaks for all


def empty(question: Question) -> list[Problem]:
    """What is wrong with the plan that breaks the fewest rules."""
    fixed, gpus = question.fixed, question.cluster.gpus
    taken = math.prod(fixed.get(axis, 1) for axis in AXES)
    if taken < 1 or gpus % taken:
        axes = [axis for axis in AXES if axis in fixed]
        product_of = " × ".join(f"plan.{axis} {fixed[axis]}" for axis in axes)
        stated = f"plan.{axes[0]}" if len(axes) == 1 else product_of
        return [Problem(f"{stated} = {taken} does not divide {gpus} GPUs", "fix other numbers, or take other machines")]
    if problem := _batch(question):
        return [problem]
    simplest = sorted(_spread(question), key=lambda plan: plan.tp * plan.cp * plan.pp)[:TRIED]
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


def _plan(question: Question, values: dict[str, int]) -> Plan:
    if values["pp"] > 1 and "stages" not in values:
        schedule = str(values.get("schedule", "1f1b"))
        chunks = values.get("chunks") or default_chunks(schedule)  # pyright: ignore[reportArgumentType]
        values = values | {"chunks": chunks, "stages": balanced_stages(question.arch, values["pp"] * chunks)}
    return Plan(**values, precision=question.precision)  # pyright: ignore[reportArgumentType]
