"""Recomputation by budget: the fastest recompute policy whose most loaded rank stays within given bytes."""

from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from meshwright.config import load
from meshwright.config.check import how_blocks_run
from meshwright.config.run import Run
from meshwright.cost.job import Job
from meshwright.cost.memory import Ledger, worst
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import Cluster, cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.question import Question
from meshwright.spec.optimizers import description_of
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import GIB

ALWAYS = ("none", "selective", "sqrt", "full")

COUNTED = ("selective", "first")  # of so many blocks

ANY_CARD = "h100"  # where nobody says which: bytes are the same on all, and more work takes longer on all

KEY = "goal.memory_gib"


class RecomputeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A recompute policy, and what it costs."""

    plan: Plan
    ledger: Ledger  # of the most loaded rank
    seconds: float  # of a step, by the estimate
    slowdown: float  # those ÷ what they would be without recomputation

    def __str__(self) -> str:
        slower = f"{self.slowdown - 1:.1%} slower than without recomputation" if self.slowdown > 1 else "no slowdown"
        return f"recompute = {self.plan.recompute}: {_gib(self.ledger.shown)} GiB at {self.ledger.moment}; {slower}"


def fitting(job: Job, size: float) -> Plan:
    """The job's plan with the recomputation that fits in `size` bytes at the least slowdown."""
    return choose(job, size).plan


def choose(job: Job, size: float, policies: Iterable[str] | None = None) -> RecomputeChoice:
    """The fastest of the policies (all there are, unless stated) that fits; an InputError if none does."""
    legal = [policy for policy in policies or _policies(job, size) if not any(how_blocks_run(_under(job, policy).plan))]
    fit = [policy for policy in dict.fromkeys(legal) if _bytes(job, policy) <= size]
    if not fit:
        raise InputError([_too_little(job, size, legal or [job.plan.recompute])])
    best = min(fit, key=lambda policy: (_seconds(job, policy), _bytes(job, policy)))
    chosen, seconds = _under(job, best), _seconds(job, best)
    slowdown = seconds / _seconds(job, "none")
    return RecomputeChoice(plan=chosen.plan, ledger=worst(chosen), seconds=seconds, slowdown=slowdown)


def resolved(loaded: load.LoadedRun) -> tuple[load.LoadedRun, RecomputeChoice | None]:
    """A run whose goal.memory_gib has become one of the plain policies; without such a goal, the run as it is.

    A policy that was stated is kept, and refused if it does not fit.
    """
    run, origins = loaded.run, loaded.origins
    if run.goal.memory_gib is None:
        return loaded, None
    stated = "plan.recompute" in origins
    job, size = job_of(run), run.goal.memory_gib * GIB
    try:
        if stated and _bytes(job, run.plan.recompute) > size:
            other = choose(job, size)  # or the problem that none fits
            needed = _gib_up(_bytes(job, run.plan.recompute))
            text = f"plan.recompute = {run.plan.recompute} needs {needed} GiB, and {KEY} = {size / GIB:.4g}"
            remedy = f"leave plan.recompute out; {other.plan.recompute} would be chosen"
            raise InputError([Problem(text, remedy, "plan.recompute")])
        choice = choose(job, size, [run.plan.recompute] if stated else None)
    except InputError as error:
        raise InputError([load.placed(problem, origins) for problem in error.problems]) from None
    run = msgspec.structs.replace(run, plan=choice.plan)
    return load.LoadedRun(
        run=run, origins=origins if stated else origins | {"plan.recompute": f"derived: {KEY}"}
    ), choice


def job_of(run: Run) -> Job:
    """A run as something to be priced, on the machines that its goal names."""
    machines = cluster(run.goal.cluster or ANY_CARD, network=run.goal.network or "", gpus=run.plan.world)
    return question_of(run, machines).job(run.plan)


def question_of(run: Run, machines: Cluster) -> Question:
    """What the planner would have been asked for this run, on given machines."""
    return Question(
        arch=run.arch,
        sequence=run.sequence,
        batch=run.batch,
        precision=run.plan.precision,
        cluster=machines,
        stack=stack_of("meshwright"),
        masked=run.data.masks,
        master_weights=run.optim.master_weights,
        state_dtype=run.optim.state_dtype,
        optimizer=description_of(run.optim),
    )


def _policies(job: Job, size: float) -> Iterator[str]:
    """Every policy but those of first-K and selective-K that recompute more than they must.

    From K = 1 on, each further block that saves less lowers the most loaded rank's peak: the least K that fits is found
    by halves.
    """
    yield from ALWAYS
    for word in COUNTED:
        low, high = 1, max(job.plan.stages if job.plan.pp > 1 else (job.arch.blocks,))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _bytes(job, f"{word}-{middle}") <= size else (middle + 1, high)
        yield f"{word}-{low}"


def _under(job: Job, policy: str) -> Job:
    return msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, recompute=policy))


def _bytes(job: Job, policy: str) -> int:
    """Bytes of the most loaded rank, as nvidia-smi would show them."""
    return worst(_under(job, policy)).shown


def _seconds(job: Job, policy: str) -> float:
    return price(_under(job, policy)).seconds


def _too_little(job: Job, size: float, policies: list[str]) -> Problem:
    """Nothing fits: the least that would, and changes of the plan under which something fits."""
    least = min(policies, key=partial(_bytes, job))
    found = worst(_under(job, least))
    most = max(found.lines, key=lambda line: line.bytes)
    text = (
        f"{KEY} = {size / GIB:.4g} is too little for this plan: the smallest policy, recompute = {least}, needs "
        f"{_gib(found.shown)} GiB at {found.moment}, of which {most.label} {_gib(most.bytes)} GiB"
    )
    helps = [f"{words} ({_gib(needed)} GiB)" for words, needed in _helps(job) if needed <= size]
    also = " or ".join(helps) or "more ranks to shard the weights over (plan.shard, plan.tp) or a smaller model"
    return Problem(text, f"allow {_gib_up(found.shown)} GiB, or use {also}", KEY)


def _helps(job: Job) -> Iterator[tuple[str, int]]:
    """Other plans of the same ranks and batch that hold less, and their bytes when everything is recomputed."""
    plan = job.plan
    smaller = {"microbatch": 1, "grad_accum": plan.grad_accum * plan.microbatch}
    sharded = {"replicate": 1, "shard": plan.data, "zero": 3}
    if plan.microbatch > 1:
        yield _changed(job, smaller)
    if plan.data > 1 and (plan.zero < 3 or plan.replicate > 1):
        yield _changed(job, sharded)
        if plan.microbatch > 1:
            yield _changed(job, smaller | sharded)


def _changed(job: Job, fields: dict[str, int]) -> tuple[str, int]:
    plan = msgspec.structs.replace(job.plan, **fields)
    plan = msgspec.structs.replace(plan, recompute="full")
    if any(how_blocks_run(plan)):
        plan = msgspec.structs.replace(plan, recompute="none")
    words = " ".join(f"plan.{name}={value}" for name, value in fields.items())
    return words, worst(msgspec.structs.replace(job, plan=plan)).shown


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _gib_up(size: float) -> str:
    """Rounded up, so that what is said suffices."""
    return f"{-(-size * 100 // GIB) / 100:.2f}"
