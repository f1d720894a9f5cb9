"""Every legal plan of a question, level by level: axes, then microbatches, then schedules, then recomputation.

Legal is what the rules of config/check.py let pass; a test holds the two equal. Left out are other spellings of a
plan that is there, zero 3 in pipelines (see `_zeros`), and, of numbers that could be anything, all but a few (CHUNKS,
FIRST_SHARES). Where nothing is legal, `empty` says which rule emptied the question.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast, get_args

import msgspec

from meshwright.config import check
from meshwright.config.rules.tuning import TUNED_PLAN_RULES, cuts_tuned, idle_stage
from meshwright.config.run import Optim, Run
from meshwright.search.question import Question, variants
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import DESCRIPTIONS
from meshwright.spec.params import cut_widths
from meshwright.spec.plan import AXES, FIELDS, FP8_MULTIPLE, LOW_PRECISIONS, Plan, balanced_stages
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.quantized import FORMATS
from meshwright.spec.schedule import Schedule, default_chunks, legal

FIRST_SHARES = 8  # parts of a stage's blocks that "first-K" goes by: one is 4 % of the time at most

RUNS = (2, 3, 4)  # blocks that "every-K" recomputes together; a pipeline's stage may be one run

SELECTIVE_SHARE = 0.5  # of those that "selective-K" does

UNCOMPILED = ("tpu", "trainium")  # accelerators that torch writes no kernels for

CHUNKS = (1, 2, 4, 8)  # stages on a rank, and numbers between that make them even; more only add messages

CHOSEN = {field.name for field in FIELDS if field.searched}

ON_DEVICE = {"cpu_offload": False, "optimizer_offload": "none", "activation_offload": False}  # nothing is offloaded

SCHEDULES = cast("tuple[Schedule, ...]", get_args(Schedule))

LAYOUTS_TRIED = 2000  # plans that are asked for their problems; the nearest to legal speaks for all

How = tuple[tuple[str, Any], ...]

Choice = TypeVar("Choice")


class AxesChoice(NamedTuple):
    """The axes of a plan."""

    pp: int
    replicate: int
    shard: int
    zero: int
    cp: int
    cp_kind: str
    ep: int
    tp: int
    cpu_offload: bool = False  # here, because weights that live in host memory take zero 3 and have no pipeline

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        return self.shard * self.cp if self.zero else 1


class BatchChoice(NamedTuple):
    """How a data rank goes through its share of the batch."""

    microbatch: int
    grad_accum: int


class PipelineChoice(NamedTuple):
    """How a pipeline goes through its microbatches."""

    schedule: Schedule
    chunks: int


class Policy(NamedTuple):
    """What becomes of the activations that blocks save for the backward, and where states live."""

    recompute: str = "none"
    activation_offload: bool = False
    activation_quant: str = "none"
    optimizer_offload: str = "none"
    optimizer_offload_update: str = "host"

    @property
    def is_helped(self) -> bool:
        """Whether activations are offloaded or quantized to hold less."""
        return self.activation_offload or self.activation_quant != "none"


def plans(question: Question) -> Iterator[Plan]:
    """Every legal plan, in an order that is always the same."""
    for layout in layouts(question):
        for each in rounds(question, layout):
            if respelled(question, layout, each):
                continue
            for order in orders(question, layout, each):
                for policy in policies(question, layout, order):
                    yield plan_of(question, layout, each, order, policy)


def plan_of(question: Question, layout: AxesChoice, each: BatchChoice, order: PipelineChoice, policy: Policy) -> Plan:
    """The levels put together; layers are balanced over the stages unless these are given."""
    stages = _stages(question, layout.pp, order) if layout.pp > 1 else ()
    return Plan(
        **layout._asdict(),
        **each._asdict(),
        **order._asdict(),
        stages=stages,
        **policy._asdict(),
        precision=question.precision,
        **{
            "compile": compiles(question, layout.pp, order),
            "bf16_params": has_bf16_copy(question, layout),
            **carried(question),
        },
    )


def _stages(question: Question, pp: int, order: PipelineChoice) -> tuple[int, ...]:
    return tuple(question.fixed.get("stages", ())) or balanced_stages(question.arch, pp * order.chunks)


def carried(question: Question) -> dict[str, Any]:
    """Fixed fields that no level chooses, such as kernels: every plan has them."""
    return {name: value for name, value in question.fixed.items() if name not in CHOSEN}


def layouts(question: Question) -> Iterator[AxesChoice]:
    """Every legal use of the GPUs by axes."""
    world, arch = question.cluster.gpus, question.arch
    for tp in _ranks(question, "tp", world):
        if any(width % tp for width in (*cut_widths(arch, tp).values(), question.sequence)):
            continue
        if tp > 1 and not cuts_tuned(arch, tp, question.precision):
            continue
        for cp in _ranks(question, "cp", world // tp):
            if cp > 1 and question.sequence % (2 * cp * tp):
                continue
            for pp in _ranks(question, "pp", world // tp // cp):
                if pp <= arch.blocks and not (pp == 1 and wants_pipeline(question)):
                    yield from _data_axes(question, pp, cp, tp)


def _ranks(question: Question, axis: str, most: int) -> tuple[int, ...]:
    """How many ranks an axis may have."""
    return _given(question, axis, divisors(most))


def rounds(question: Question, layout: AxesChoice) -> Iterator[BatchChoice]:
    """A data rank's share of the batch, in microbatches of every size that divides it."""
    share = question.batch // layout.data
    for microbatch in _given(question, "microbatch", divisors(share)):
        each = BatchChoice(microbatch, share // microbatch)
        if question.fixed.get("grad_accum", each.grad_accum) != each.grad_accum:
            continue
        if question.fixed.get("deterministic") and each.grad_accum & (each.grad_accum - 1):
            continue
        if question.precision == "fp8" and microbatch * question.sequence // layout.cp % FP8_MULTIPLE:
            continue
        yield each


def respelled(question: Question, layout: AxesChoice, each: BatchChoice) -> bool:
    """With one microbatch a step, scattering every gradient (zero 2) and scattering it once (zero 1) are the same."""
    return layout.zero == 2 and each.grad_accum == 1 and "zero" not in question.fixed


def orders(question: Question, layout: AxesChoice, each: BatchChoice) -> tuple[PipelineChoice, ...]:
    """Every schedule that can have these numbers."""
    if layout.pp == 1:
        return (PipelineChoice(question.fixed.get("schedule", "1f1b"), 1),)
    schedules = tuple(_given(question, "schedule", SCHEDULES))
    found = _orders(schedules, _chunks(question, layout.pp), layout.pp, each.grad_accum)
    if not question.freezes:
        return found
    return tuple(order for order in found if idle_stage(question.arch, _stages(question, layout.pp, order)) is None)


def choices(
    question: Question, layout: AxesChoice, each: BatchChoice
) -> tuple[tuple[PipelineChoice, tuple[Policy, ...]], ...]:
    """Every schedule and the policies it can have; of the layout only pp and cpu_offload matter."""
    return tuple((order, policies(question, layout, order)) for order in orders(question, layout, each))


def policies(question: Question, layout: AxesChoice, order: PipelineChoice) -> tuple[Policy, ...]:
    """What may be recomputed under a schedule, quantized or offloaded, and where states may live."""
    fixed, pp = question.fixed, layout.pp
    partly = question.stack.speed.selective == "operations"  # others mean another thing by it, and by all blocks
    blocks = -(-question.arch.blocks // (pp * order.chunks))
    words = (fixed["recompute"],) if "recompute" in fixed else _words(blocks, partly, pp > 1)
    how = (("compile", compiles(question, pp, order)),)
    kept = tuple(product(words, _offloads(question), _quantizations(question)))
    plain = _policies(question.arch, pp, order, kept, how)
    return tuple(
        policy._replace(optimizer_offload=location, optimizer_offload_update=update)
        for policy in plain
        for location, update in locations_under(question, layout)
    )


@lru_cache(maxsize=4096)
def plainer(policies: tuple[Policy, ...]) -> dict[Policy, Policy]:
    """For each policy another that does less to hold less, and is never slower: with room for that, it has no use.

    Activations that stay as they are, or one step fewer of the blocks recomputed, or each block by itself.
    """
    found, before = {}, dict[Policy, Policy]()
    for policy in policies:
        if policy.is_helped:
            found[policy] = policy._replace(activation_offload=False, activation_quant="none")
            continue
        kind, plain = policy.recompute.split("-")[0], policy._replace(recompute="none")
        if kind in ("every", "sqrt"):
            found[policy] = policy._replace(recompute="full")
        elif policy != plain:
            chain = policy._replace(recompute="selective" if kind == "selective" else "full")
            found[policy] = before.get(chain, plain)
            before[chain] = policy
    return found


def locations(question: Question) -> tuple[tuple[str, str], ...]:
    """Where a lone rank's states may live, and who updates them there; several ranks share them out instead."""
    fixed = question.fixed
    updates = (fixed["optimizer_offload_update"],) if "optimizer_offload_update" in fixed else ("host", "device")
    if "optimizer_offload" in fixed:
        return tuple(
            (fixed["optimizer_offload"], update)
            for update in (updates if fixed["optimizer_offload"] != "none" else updates[:1])
        )
    resident = question.state_dtype != "bf16" or question.master_weights != "fp32"
    found = [("none", updates[0])] if resident else []
    bare = question.precision in LOW_PRECISIONS and not keeps_bf16_params(question)
    on_device = question.master_weights != "fp32" or question.state_dtype in FORMATS
    if not question.may_offload_states or fixed.get("deterministic") or on_device or bare:
        return tuple(found)
    if question.has_host:
        found += [("host", update) for update in updates]
        found += [("disk", updates[0])] if question.has_disk else []  # by way of the host
    return tuple(found)


def locations_under(question: Question, layout: AxesChoice) -> tuple[tuple[str, str], ...]:
    """Those of a layout: not beside weights that are in host memory too, nor where the device has no bf16 ones."""
    bare = question.precision in LOW_PRECISIONS and not has_bf16_copy(question, layout)
    return locations(question)[:1] if layout.cpu_offload or bare else locations(question)


def compiles(question: Question, pp: int, order: PipelineChoice) -> bool:
    """Whether blocks are compiled: as it is fixed, or wherever torch can, because it changes time and memory alone."""
    fixed = question.fixed.get("compile")
    if fixed is not None:
        return fixed
    taken = not question.arch.compared and not question.cluster.gpu.name.startswith(UNCOMPILED)
    return taken and _compilable(pp, order)


def keeps_bf16_params(question: Question) -> bool:
    """Whether a bf16 copy of the weights is kept: by one rank in low precision, as a run without a plan does."""
    fixed = question.fixed
    alone = question.cluster.gpus == 1 and not fixed.get("deterministic")
    return fixed.get("bf16_params", alone and question.precision in LOW_PRECISIONS)


def has_bf16_copy(question: Question, layout: AxesChoice) -> bool:
    """Whether a lone rank keeps that copy under a layout: zero 3 casts block by block instead, and holds less."""
    casts = layout.zero == 3 and question.fixed.get("optimizer_offload", "none") == "none"
    return keeps_bf16_params(question) and not layout.cpu_offload and not casts


def problems(question: Question, plan: Plan) -> list[Problem]:
    """What the rules say of a plan."""
    run = _run(question, plan)
    return [problem for rule in (*check.PLAN_RULES, *TUNED_PLAN_RULES) for problem in rule(run)]


def suits(question: Question) -> bool:
    """Whether its model can be trained as is asked: with these adapters, or on preferences."""
    if question.arch.tuning is msgspec.UNSET:
        return True
    run = _run(question, Plan(microbatch=1))
    return not any(problem for rule in check.MODEL_RULES for problem in rule(run))


def _run(question: Question, plan: Plan) -> Run:
    kept = question.master_weights
    name: Any = DESCRIPTIONS[question.optimizer].name  # of those that optim.name may be
    draws = kept == "none"
    freeze = question.arch.tuning.freeze if question.arch.tuning is not msgspec.UNSET else ()
    states = question.state_dtype
    optim = Optim(name=name, master_weights=kept, stochastic_rounding=draws, state_dtype=states, freeze=freeze)
    return Run(
        arch=question.arch,
        plan=plan,
        batch=question.batch,
        sequence=question.sequence,
        optim=optim,
        adapter=question.arch.adapter,
        objective="dpo" if question.arch.compared else "sft",
    )


def wants_pipeline(question: Question) -> bool:
    """Whether stages or a schedule that are asked for would be lost on a plan without a pipeline."""
    fixed = question.fixed
    return bool(fixed.get("stages")) or fixed.get("chunks", 1) > 1 or ("schedule" in fixed and "pp" not in fixed)


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
    if problem := _batch_problem(question) or _stages_problem(question):
        return [problem]
    spread = _spread(question)
    if wants_pipeline(question):
        spread = [plan for plan in spread if plan.pp > 1]
        if not spread:
            return [_no_pipeline(question)]
    simplest = sorted(spread, key=lambda plan: plan.tp * plan.cp * plan.pp)[:LAYOUTS_TRIED]
    return min((problems(question, plan) for plan in simplest), key=len, default=[]) or [
        Problem("no plan has all the fields that are fixed", "leave one of them to the search", "plan")
    ]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(small + [number // each for each in reversed(small) if each * each != number])


def _given(question: Question, name: str, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The choices, or of them the one that is fixed."""
    if name not in question.fixed:
        return choices
    return tuple(choice for choice in choices if choice == question.fixed[name])


def _data_axes(question: Question, pp: int, cp: int, tp: int) -> Iterator[AxesChoice]:
    """The ranks that are left read different samples."""
    data = question.cluster.gpus // (pp * cp * tp)
    if question.batch % data:
        return
    for shard in _given(question, "shard", divisors(data)):
        if "replicate" in question.fixed and question.fixed["replicate"] * shard != data:
            continue
        for zero, cpu_offload in _sharings(question, pp, shard, cp):
            for kind in _kinds(question, cp, tp):
                layout = AxesChoice(pp, data // shard, shard, zero, cp, kind, 1, tp, cpu_offload)
                if _carries(question, layout):
                    yield from (layout._replace(ep=ep) for ep in _expert_ranks(question, layout))


def _sharings(question: Question, pp: int, shard: int, cp: int) -> Iterator[tuple[int, bool]]:
    """What is sharded (zero), and whether all of it lives in host memory, which takes zero 3 on one rank too."""
    chosen = question.fixed.get("cpu_offload")
    if not chosen:
        yield from ((zero, False) for zero in _zeros(question, pp, shard, cp))
    if pp == 1 and chosen is not False and question.fixed.get("zero", 3) == 3 and may_live_in_host_memory(question):
        yield 3, True


def may_live_in_host_memory(question: Question) -> bool:
    """Whether the fields that every plan has let weights, gradients and states be there, and there is such memory."""
    fixed = question.fixed
    apart = question.state_dtype == "bf16" and question.master_weights == "fp32"  # only the states are offloaded
    updates_on_device = question.updates_whole or question.arch.copies_reference or question.state_dtype in FORMATS
    on_device = fixed.get("bf16_params") or fixed.get("deterministic") or apart or updates_on_device
    wanted = question.has_host or fixed.get("cpu_offload")
    return bool(wanted and not on_device and fixed.get("optimizer_offload", "none") == "none")


def _zeros(question: Question, pp: int, shard: int, cp: int) -> tuple[int, ...]:
    """In a pipeline 1 and 2 are the same, and 1 stands for them.

    Without ranks to shard over zero is 0, or 3 where blocks then copy or cast their weights when they use them.
    So are 3 and 1 up to IN_SIGHT chunks. With more, 3 holds less and gathers again for every round: only where fixed.
    """
    possible = (1, 2, 3) if shard > 1 else (0, 1, 2, 3)
    if "zero" in question.fixed:
        return tuple(_given(question, "zero", possible))
    if shard * cp == 1:
        casts = question.precision in LOW_PRECISIONS and question.master_weights == "fp32"
        frees = question.cluster.gpus > 1 or (casts and not question.fixed.get("bf16_params"))
        return (0, 3) if pp == 1 and frees else (0,)
    return tuple(zero for zero in possible if zero <= 1 or pp == 1)


def _kinds(question: Question, cp: int, tp: int) -> Iterable[str]:
    arch = question.arch
    spread = cp > 1 and arch.heads % (cp * tp) == 0 and arch.kv_heads % (cp * tp) == 0
    if cp == 1:
        return (question.fixed.get("cp_kind", "ring"),)
    return _given(question, "cp_kind", ("ring", "ulysses") if spread else ("ring",))


def _expert_ranks(question: Question, layout: AxesChoice) -> Iterable[int]:
    if question.arch.experts == 0:
        return _given(question, "ep", (1,))
    lenders = layout.shards if layout.zero else layout.replicate * layout.cp
    return _given(question, "ep", tuple(ep for ep in divisors(lenders) if question.arch.experts % ep == 0))


def _carries(question: Question, layout: AxesChoice) -> bool:
    """Whether these axes may have the fields that every plan has: asked of the rules, where there are such fields."""
    usual = (
        question.master_weights == "fp32"
        and question.state_dtype == "fp32"
        and "optimizer_offload" not in question.fixed
        and not DESCRIPTIONS[question.optimizer].compresses  # which needs replicas
    )
    if question.precision != "fp8" and usual and not carried(question):
        return True
    for each in rounds(question, layout):
        for order in orders(question, layout, each):
            found = policies(question, layout, order)
            return bool(found) and not problems(question, plan_of(question, layout, each, order, found[0]))
    return False


def _chunks(question: Question, pp: int) -> tuple[int, ...]:
    """Stages on a rank: as many as given, or as the given stages make, or a few numbers that the layers allow."""
    even = (count for count in range(1, CHUNKS[-1]) if question.arch.blocks % (count * pp) == 0)
    chunks = (question.fixed["chunks"],) if "chunks" in question.fixed else sorted({*CHUNKS, *even})
    if stages := question.fixed.get("stages"):
        if sum(stages) != question.arch.blocks or min(stages) < 1:
            return ()
        chunks = tuple(count for count in range(1, len(stages) + 1) if count * pp == len(stages))
    return tuple(count for count in chunks if count * pp <= question.arch.blocks)


@lru_cache(maxsize=4096)
def _orders(
    schedules: tuple[Schedule, ...], chunks: tuple[int, ...], pp: int, grad_accum: int
) -> tuple[PipelineChoice, ...]:
    found = (PipelineChoice(schedule, count) for schedule in schedules for count in chunks)
    return tuple(order for order in found if legal(order.schedule, pp, order.chunks, grad_accum) is None)


def _offloads(question: Question) -> tuple[bool, ...]:
    """Where activations may wait: a host whose memory nobody tells is not counted on."""
    if "activation_offload" in question.fixed:
        return (question.fixed["activation_offload"],)
    return (False, True) if question.has_host else (False,)


def _quantizations(question: Question) -> tuple[str, ...]:
    """Eight bits change the numerics as a low precision does, and may vary with it."""
    if "activation_quant" in question.fixed:
        return (question.fixed["activation_quant"],)
    if "precision" not in question.vary or question.precision == "fp64":
        return ("none",)
    return ("none", "int8", *(("fp8",) if question.cluster.gpu.fp8 else ()))


@lru_cache(maxsize=256)
def _words(blocks: int, partly: bool, pipelined: bool) -> tuple[str, ...]:
    """The policies that differ from each other on so many blocks, less before more; by operation if it can be."""
    first = sorted({max(round(part / FIRST_SHARES * blocks), 1) for part in range(1, FIRST_SHARES)})
    root = round(blocks**0.5)
    lengths = {*RUNS, *((blocks,) if pipelined else ())} - {1, root}
    some = (f"selective-{max(round(SELECTIVE_SHARE * blocks), 1)}",) if partly and blocks > 1 else ()
    counted = (f"first-{count}" for count in first if count < blocks)
    together = (f"every-{length}" for length in sorted(lengths) if length <= blocks - (not pipelined))
    return ("none", *some, "selective", *counted, "full", *(("sqrt",) if root > 1 else ()), *together)


@lru_cache(maxsize=4096)
def _policies(
    arch: Arch, pp: int, order: PipelineChoice, kept: tuple[tuple[str, bool, str], ...], how: How
) -> tuple[Policy, ...]:
    """Those that the rules let meet a schedule: asked of them, on a plan without other axes.

    `how`: what else is said of the way that blocks run.
    """
    stages = balanced_stages(arch, pp * order.chunks) if pp > 1 else ()
    pipeline = {"pp": pp, "stages": stages, **order._asdict()}

    def is_legal(policy: Policy) -> bool:
        plan = Plan(**pipeline, microbatch=1, grad_accum=2 * pp, **policy._asdict(), **dict(how))
        run = Run(arch=arch, plan=plan, batch=2 * pp, sequence=1)
        return not any(problem for rule in check.PLAN_RULES for problem in rule(run))

    return tuple(policy for each in kept if is_legal(policy := Policy(*each)))


@lru_cache(maxsize=1024)
def _compilable(pp: int, order: PipelineChoice) -> bool:
    plan = Plan(pp=pp, **order._asdict(), microbatch=1, compile=True)
    return next(check.how_blocks_run(plan), None) is None


def _batch_problem(question: Question) -> Problem | None:
    """A batch that the fixed microbatches do not divide, or that no number of data ranks divides."""
    fixed, batch = question.fixed, question.batch
    part = math.prod(fixed.get(name, 1) for name in ("microbatch", "grad_accum", "replicate", "shard"))
    if part < 1 or batch % part:
        names = [name for name in ("microbatch", "grad_accum", "replicate", "shard") if name in fixed]
        what = f"batch = {batch} is no multiple of {' × '.join(f'plan.{name} {fixed[name]}' for name in names)}"
        return Problem(what, f"use a batch that is a multiple of {max(part, 1)}", "batch")
    return None


def _stages_problem(question: Question) -> Problem | None:
    """Stages that do not add up to the model."""
    stages, layers = question.fixed.get("stages", ()), question.arch.blocks
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
        values: dict[str, Any] = dict(zip(AXES, degrees, strict=True))
        data = values["replicate"] * values["shard"]
        microbatch = fixed.get("microbatch") or max(question.batch // data // fixed.get("grad_accum", 1), 1)
        grad_accum = fixed.get("grad_accum") or max(question.batch // data // microbatch, 1)
        values |= {"zero": int(values["shard"] > 1), "microbatch": microbatch, "grad_accum": grad_accum}
        values |= {key: value for key, value in fixed.items() if key not in AXES}
        if values["pp"] > 1 and (stages := values.get("stages")):
            values = {"chunks": max(len(stages) // values["pp"], 1)} | values
        elif values["pp"] > 1:
            chunks = values.get("chunks") or default_chunks(values.get("schedule", "1f1b"))
            values |= {"chunks": chunks, "stages": balanced_stages(question.arch, values["pp"] * chunks)}
        plans.append(Plan(**values, precision=question.precision))
    return plans
