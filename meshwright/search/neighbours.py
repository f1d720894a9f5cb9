"""The plans beside a plan: one thing changed, and the ranks that this frees or takes given to or by the data axes."""

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.search.levels import Order
from meshwright.search.question import Question
from meshwright.search.running import compiles, homes
from meshwright.search.space import CHUNKS, SCHEDULES, divisors, problems
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import default_chunks
from meshwright.spec.stages import balanced_stages


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that differs in one choice, or why there is none."""

    change: str  # as a person would say it: "tp 8 → 4"
    plan: Plan | None = None
    problem: str = ""


def neighbours(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """Each way to change one choice of a plan, whether or not it is legal."""
    for axis in ("tp", "pp", "cp"):
        degree = getattr(plan, axis)
        for other in (degree // 2, degree * 2):
            if other >= 1 and (degree % 2 == 0 or other > degree):
                yield _moved(question, plan, axis, other)
    yield from _zeros(question, plan)
    for other in (plan.microbatch // 2, plan.microbatch * 2):
        if other >= 1:
            yield _changed(question, plan, "microbatch", other)
    for policy in ("none", "selective", "full"):
        if policy != plan.recompute:
            yield _changed(question, plan, "recompute", policy)
    if plan.pp > 1:
        yield from _schedules(question, plan)
    if plan.compile:
        yield _changed(question, plan, "compile", False)
    if plan.cp > 1:
        yield _changed(question, plan, "cp_kind", "ring" if plan.cp_kind == "ulysses" else "ulysses")
    if question.cluster.host_bytes:
        yield _changed(question, plan, "activations", "host" if plan.activations == "device" else "device")
    for home, update in homes(question) if plan.world == 1 else ():
        if (home, update) != (plan.offload, plan.offload_update) and home + plan.offload != "nonenone":
            found = _changed(question, plan, "offload", home, offload_update=update)
            words = f"{found.change}, updated by the {update}" if home != "none" else found.change
            yield msgspec.structs.replace(found, change=words)


def smaller_microbatches(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """The same batch in ever more and smaller microbatches."""
    for size in reversed(divisors(question.batch // plan.data)):
        if size < plan.microbatch:
            yield _changed(question, plan, "microbatch", size)


def _zeros(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """One more or one less thing sharded; and between copies and shards where one of them is all there is."""
    if plan.data * plan.cp == 1:
        return
    if plan.zero == 0:
        yield _changed(question, plan, "zero", 1, shard=plan.replicate, replicate=1)
        yield _changed(question, plan, "zero", 3, shard=plan.replicate, replicate=1)
        return
    for other in (plan.zero - 1, plan.zero + 1):
        if other == 0:
            yield _changed(question, plan, "zero", 0, replicate=plan.data, shard=1)
        elif other <= 3:
            yield _changed(question, plan, "zero", other)
    if plan.shard % 2 == 0:
        yield _changed(question, plan, "shard", plan.shard // 2, replicate=plan.replicate * 2)
    if plan.replicate % 2 == 0:
        yield _changed(question, plan, "shard", plan.shard * 2, replicate=plan.replicate // 2)


def _schedules(question: Question, plan: Plan) -> Iterator[Neighbour]:
    for schedule in SCHEDULES:
        if schedule not in (plan.schedule, "naive"):
            yield _changed(question, plan, "schedule", schedule, chunks=default_chunks(schedule))
    for chunks in CHUNKS:
        if chunks > 1 and plan.chunks > 1 and chunks in (plan.chunks // 2, plan.chunks * 2):
            yield _changed(question, plan, "chunks", chunks)


def _moved(question: Question, plan: Plan, axis: str, degree: int) -> Neighbour:
    """Another degree of an axis, with the ranks taken from, or given to, those that read different samples."""
    old = getattr(plan, axis)
    if degree < old:
        lender = "shard" if plan.zero else "replicate"
        return _changed(question, plan, axis, degree, **{lender: getattr(plan, lender) * old // degree})
    for lender in ("shard", "replicate"):
        if getattr(plan, lender) % (degree // old) == 0:
            return _changed(question, plan, axis, degree, **{lender: getattr(plan, lender) * old // degree})
    return Neighbour(change=f"{axis} {old} → {degree}", problem="no data axis has the ranks for it")


def _said(value: Any) -> str:
    """A value as run files have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changed(question: Question, plan: Plan, name: str, value: Any, **others: Any) -> Neighbour:
    change = f"{name} {_said(getattr(plan, name))} → {_said(value)}"
    changed = msgspec.structs.replace(plan, **{name: value}, **others)
    if changed.shard == 1 and changed.cp == 1 and changed.zero and name != "zero" and not changed.offload_weights:
        changed = msgspec.structs.replace(changed, zero=0)
    if name in ("schedule", "pp") and plan.compile and "compile" not in question.fixed:
        order = Order(changed.schedule, changed.chunks)
        changed = msgspec.structs.replace(changed, compile=compiles(question, changed.pp, order))
    return _completed(question, changed, change)


def _completed(question: Question, plan: Plan, change: str) -> Neighbour:
    """The same batch in as many microbatches as it now takes, the same layers in as many stages."""
    share, rest = divmod(question.batch, plan.data)
    if rest or share % plan.microbatch:
        what = f"batch {question.batch} is no multiple of {plan.data} data ranks × microbatch {plan.microbatch}"
        return Neighbour(change=change, problem=what)
    stages = plan.pp * plan.chunks
    plan = msgspec.structs.replace(plan, accumulate=share // plan.microbatch)
    if plan.pp == 1:
        plan = msgspec.structs.replace(plan, stages=(), chunks=1, schedule="1f1b")
    elif len(plan.stages) != stages:
        plan = msgspec.structs.replace(plan, stages=balanced_stages(question.arch, stages))
    if found := problems(question, plan):
        return Neighbour(change=change, problem=found[0].text)
    return Neighbour(change=change, plan=plan)
