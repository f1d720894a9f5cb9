"""Every legal plan of a question, level by level: axes, then microbatches, then schedules, then recomputation.

Legal is what the rules of spec/check_plan.py let pass; a test holds the two equal. Left out are other spellings of a
plan that is there (see `_zeros`), and, of numbers that could be anything, all but a few (CHUNKS, FIRST_SHARES).
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args

from meshwright.search.levels import Layout, Order, Policy, Round
from meshwright.search.question import Question
from meshwright.search.running import compiles, policies, shadows
from meshwright.spec import check_plan
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem
from meshwright.spec.run import Optim, Run
from meshwright.spec.schedule import Schedule, legal
from meshwright.spec.stages import balanced_stages

CHUNKS = (1, 2, 4, 8)  # stages on a rank; more only add messages
CHOSEN = {
    "pp", "replicate", "shard", "zero", "cp", "cp_kind", "ep", "tp", "microbatch", "accumulate", "schedule", "chunks",
    "stages", "recompute", "precision", "activations", "compress", "offload", "offload_update",
}  # fmt: skip
SCHEDULES = cast("tuple[Schedule, ...]", get_args(Schedule))

Choice = TypeVar("Choice")


def plans(question: Question) -> Iterator[Plan]:
    """Every legal plan, in an order that is always the same."""
    for layout in layouts(question):
        for each in rounds(question, layout):
            if respelled(question, layout, each):
                continue
            for order in orders(question, layout, each):
                for policy in policies(question, layout.pp, order):
                    yield plan_of(question, layout, each, order, policy)


def plan_of(question: Question, layout: Layout, each: Round, order: Order, policy: Policy) -> Plan:
    """The levels put together; layers are balanced over the stages unless these are given."""
    stages = ()
    if layout.pp > 1:
        stages = tuple(question.fixed.get("stages", ())) or balanced_stages(question.arch, layout.pp * order.chunks)
    return Plan(
        **layout._asdict(),
        **each._asdict(),
        **order._asdict(),
        stages=stages,
        **policy._asdict(),
        precision=question.precision,
        **{"compile": compiles(question, layout.pp, order), "shadow": shadows(question), **carried(question)},
    )


def carried(question: Question) -> dict[str, Any]:
    """Fixed fields that no level chooses, such as kernels: every plan has them."""
    return {name: value for name, value in question.fixed.items() if name not in CHOSEN}


def layouts(question: Question) -> Iterator[Layout]:
    """Every legal use of the GPUs by axes."""
    world = question.cluster.gpus
    for tp in _given(question, "tp", divisors(world)):
        if not _splits(question.arch, tp) or question.sequence % tp:
            continue
        for cp in _given(question, "cp", divisors(world // tp)):
            if cp > 1 and question.sequence % (2 * cp * tp):
                continue
            for pp in _given(question, "pp", divisors(world // tp // cp)):
                if pp <= question.arch.layers and not (pp == 1 and wants_pipeline(question)):
                    yield from _data_axes(question, pp, cp, tp)


def _data_axes(question: Question, pp: int, cp: int, tp: int) -> Iterator[Layout]:
    """The ranks that are left read different samples."""
    data = question.cluster.gpus // (pp * cp * tp)
    if question.batch % data:
        return
    for shard in _given(question, "shard", divisors(data)):
        if "replicate" in question.fixed and question.fixed["replicate"] * shard != data:
            continue
        for zero in _zeros(question, pp, shard, cp):
            for kind in _kinds(question, cp, tp):
                layout = Layout(pp, data // shard, shard, zero, cp, kind, 1, tp)
                if _carries(question, layout):
                    yield from (layout._replace(ep=ep) for ep in _expert_ranks(question, layout))


def _zeros(question: Question, pp: int, shard: int, cp: int) -> tuple[int, ...]:
    """Without ranks to shard over zero is 0; in a pipeline 1, 2 and 3 are the same, and 1 stands for them."""
    possible = (1, 2, 3) if shard > 1 else (0, 1, 2, 3)
    if "zero" in question.fixed:
        return tuple(_given(question, "zero", possible))
    if question.fixed.get("offload_weights"):
        return (3,)
    if shard * cp == 1:
        return (0,)
    return tuple(zero for zero in possible if zero <= 1 or pp == 1)


def _kinds(question: Question, cp: int, tp: int) -> Iterable[str]:
    arch = question.arch
    spread = cp > 1 and arch.heads % (cp * tp) == 0 and arch.kv_heads % (cp * tp) == 0
    if cp == 1:
        return (question.fixed.get("cp_kind", "ring"),)
    return _given(question, "cp_kind", ("ring", "ulysses") if spread else ("ring",))


def _expert_ranks(question: Question, layout: Layout) -> Iterable[int]:
    if question.arch.experts == 0:
        return _given(question, "ep", (1,))
    lenders = layout.shards if layout.zero else layout.replicate * layout.cp
    return _given(question, "ep", tuple(ep for ep in divisors(lenders) if question.arch.experts % ep == 0))


def _carries(question: Question, layout: Layout) -> bool:
    """Whether these axes may have the fields that every plan has: asked of the rules, where there are such fields."""
    usual = question.rounding == "master" and question.states == "fp32" and "offload" not in question.fixed
    if question.precision != "fp8" and usual and not carried(question):
        return True
    for each in rounds(question, layout):
        for order in orders(question, layout, each):
            found = policies(question, layout.pp, order)
            return bool(found) and not problems(question, plan_of(question, layout, each, order, found[0]))
    return False


def rounds(question: Question, layout: Layout) -> Iterator[Round]:
    """A data rank's share of the batch, in microbatches of every size that divides it."""
    share = question.batch // layout.data
    for microbatch in _given(question, "microbatch", divisors(share)):
        each = Round(microbatch, share // microbatch)
        if question.fixed.get("accumulate", each.accumulate) != each.accumulate:
            continue
        if question.fixed.get("deterministic") and not _power_of_two(each.accumulate):
            continue
        if question.precision == "fp8" and microbatch * question.sequence // layout.cp % check_plan.FP8_MULTIPLE:
            continue
        yield each


def respelled(question: Question, layout: Layout, each: Round) -> bool:
    """With one microbatch a step, scattering every gradient (zero 2) and scattering it once (zero 1) are the same."""
    return layout.zero == 2 and each.accumulate == 1 and "zero" not in question.fixed


def orders(question: Question, layout: Layout, each: Round) -> tuple[Order, ...]:
    """Every schedule that can have these numbers."""
    if layout.pp == 1:
        return (Order(question.fixed.get("schedule", "1f1b"), 1),)
    schedules = _given(question, "schedule", SCHEDULES)
    return _orders(schedules, _chunks(question, layout.pp), layout.pp, each.accumulate)


def choices(question: Question, layout: Layout, each: Round) -> tuple[tuple[Order, tuple[Policy, ...]], ...]:
    """Every schedule and the policies it can have; of the layout only pp matters."""
    return tuple((order, policies(question, layout.pp, order)) for order in orders(question, layout, each))


def _chunks(question: Question, pp: int) -> tuple[int, ...]:
    """Stages on a rank: as many as given, or as the given stages make, or a few numbers that the layers allow."""
    chunks = (question.fixed["chunks"],) if "chunks" in question.fixed else CHUNKS
    if stages := question.fixed.get("stages"):
        if sum(stages) != question.arch.layers or min(stages) < 1:
            return ()
        chunks = tuple(count for count in range(1, len(stages) + 1) if count * pp == len(stages))
    return tuple(count for count in chunks if count * pp <= question.arch.layers)


@lru_cache(maxsize=4096)
def _orders(schedules: tuple[Schedule, ...], chunks: tuple[int, ...], pp: int, accumulate: int) -> tuple[Order, ...]:
    found = (Order(schedule, count) for schedule in schedules for count in chunks)
    return tuple(order for order in found if legal(order.schedule, pp, order.chunks, accumulate) is None)


def problems(question: Question, plan: Plan) -> list[Problem]:
    """What the rules say of a plan."""
    optim = Optim(rounding=question.rounding, states=question.states)
    run = Run(arch=question.arch, plan=plan, batch=question.batch, sequence=question.sequence, optim=optim)
    return [problem for rule in check_plan.RULES for problem in rule(run)]


def _given(question: Question, name: str, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The choices, or of them the one that is fixed."""
    if name not in question.fixed:
        return choices
    return tuple(choice for choice in choices if choice == question.fixed[name])


def wants_pipeline(question: Question) -> bool:
    """Whether stages or a schedule that are asked for would be lost on a plan without a pipeline."""
    fixed = question.fixed
    return bool(fixed.get("stages")) or fixed.get("chunks", 1) > 1 or ("schedule" in fixed and "pp" not in fixed)


def _splits(arch: Arch, tp: int) -> bool:
    """Whether every matrix can be shared by so many ranks."""
    widths = (arch.heads, arch.kv_heads, arch.ffn, *((arch.expert_ffn,) if arch.experts else ()))
    return all(width % tp == 0 for width in widths)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
