"""The plans of a proof of anyone's model: from words to values, and every reason why one cannot be run."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meshwright.parallel.anatomy import Anatomy, unanswered
from meshwright.spec import compiler, schema
from meshwright.spec.check_plan import how_blocks_run
from meshwright.spec.plan import AXES, Plan, Precision
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.schedule import default_chunks, misfits
from meshwright.verify.plans import fields


def decided(plans: Sequence[str | Plan], rows: int, layers: int, anatomy: Anatomy) -> list[tuple[str, Plan]]:
    """Each plan by its name, complete; raises everything that is wrong with any of them."""
    tables = {str(plan): _table(plan, rows, layers) for plan in plans}
    problems = [problem for table in tables.values() for problem in schema.misfits(table, Plan, "plan.")]
    if problems:
        raise InputError(problems)
    made = [(name, msgspec.convert(table, Plan)) for name, table in tables.items()]
    for name, plan in made:
        found = [*_shape(plan, rows, layers), *unanswered(anatomy, plan), *_beyond(plan)]
        found += [*how_blocks_run(plan), *compiler.missing(plan)]
        problems += [msgspec.structs.replace(problem, where=f"plan {name}") for problem in found]
    if len({plan.precision for _, plan in made}) > 1:
        problems.append(Problem("the plans name different precisions", "prove one precision at a time"))
    if not made:
        problems.append(Problem("there is no plan to prove", 'name some, such as "shard=2,zero=3"'))
    if problems:
        raise InputError(problems)
    return made


def alone(rows: int, precision: Precision) -> Plan:
    """One process, the whole batch at once: what every plan is compared with."""
    return Plan(microbatch=rows, precision=precision)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, the first ones longer by one where they cannot be alike."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def _table(plan: str | Plan, rows: int, layers: int) -> dict[str, Any]:
    """A plan's fields, with what its words leave open: a pipeline has twice as many microbatches as ranks."""
    if isinstance(plan, Plan):
        return msgspec.structs.asdict(plan)
    given: dict[str, Any] = {key: _value(text) for key, text in {"precision": "fp64", **fields(plan)}.items()}
    pp, data = _count(given, "pp"), _count(given, "replicate") * _count(given, "shard")
    given.setdefault("accumulate", 2 * pp if pp > 1 else 1)
    given.setdefault("microbatch", max(rows // (data * _count(given, "accumulate")), 1))
    if pp > 1:
        given.setdefault("chunks", default_chunks(given.get("schedule", "1f1b")))
        given.setdefault("stages", even(layers, pp * _count(given, "chunks")))
    return given


def _value(text: str) -> Any:
    """A word of a plan as a run file would hold it."""
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text, text)


def _count(given: dict[str, Any], key: str) -> int:
    """A count, or one where what stands there is none; the rules say so."""
    value = given.get(key, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _shape(plan: Plan, rows: int, layers: int) -> Iterator[Problem]:
    """A plan beside the batch and the model's blocks."""
    for name in (*AXES, "ep", "chunks", "microbatch", "accumulate"):
        if (value := getattr(plan, name)) < 1:
            yield Problem(f"plan.{name} = {value} is not a count", "use whole numbers of at least 1", f"plan.{name}")
    if plan.batch != rows:
        parts = f"microbatch {plan.microbatch} × accumulate {plan.accumulate} × {plan.data} data ranks"
        remedy = f"use batches of a multiple of {plan.data * plan.accumulate} rows"
        yield Problem(f"batches of {rows} rows are not {parts}", remedy, "plan.microbatch")
    if plan.zero == 0 and plan.shard > 1:
        yield Problem(f"plan.shard = {plan.shard} with plan.zero = 0 shards nothing", "set plan.zero to 1, 2 or 3")
    if plan.pp > 1:
        yield from _pipeline(plan, layers)


def _pipeline(plan: Plan, layers: int) -> Iterator[Problem]:
    stages = plan.pp * plan.chunks
    if stages > layers:
        yield Problem(f"{stages} stages are more than the model's {layers} blocks", f"use at most {layers} stages")
    elif len(plan.stages) != stages or sum(plan.stages) != layers or min(plan.stages) < 1:
        what = f"plan.stages = {list(plan.stages)} is not {stages} stages of {layers} blocks in all"
        yield Problem(what, "leave plan.stages out to have the blocks shared evenly", "plan.stages")
    for misfit in misfits(plan.schedule, plan.pp, plan.chunks, plan.accumulate):
        yield Problem(misfit.text, misfit.remedy, misfit.key)


def _beyond(plan: Plan) -> Iterator[Problem]:
    """What no answer of an anatomy can give: it takes the layers of our own decoder."""
    if plan.cp > 1:
        what = f"plan.cp = {plan.cp} puts another attention into the model, which only meshwright's own layers let it"
        yield Problem(what, "leave plan.cp at 1, or share the work of a long sequence with plan.tp", "plan.cp")
    if plan.ep > 1:
        what = f"plan.ep = {plan.ep} shares out the experts of a mixture, which only meshwright's own layers let it"
        yield Problem(what, "leave plan.ep at 1, or cut the experts with plan.tp and a split table", "plan.ep")
    if plan.deterministic:
        what = "plan.deterministic fixes the order of sums over the ranks of meshwright's own trainer"
        yield Problem(what, "leave it out: parity allows for rounding", "plan.deterministic")
