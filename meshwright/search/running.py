"""How the blocks of a plan run: compiled or not, from which weights, what becomes of what they keep."""

from functools import lru_cache
from typing import Any

from meshwright.search.levels import Order, Policy
from meshwright.search.question import Question
from meshwright.spec import check_plan
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.run import Run
from meshwright.spec.stages import balanced_stages

FIRST_SHARES = (0.25, 0.5, 0.75)  # of a stage's blocks that "first-K" computes anew
SELECTIVE_SHARE = 0.5  # of those that "selective-K" does
NARROW = ("bf16", "fp16", "fp8")
UNCOMPILED = ("tpu", "trainium")  # accelerators that torch writes no kernels for

How = tuple[tuple[str, Any], ...]


def compiles(question: Question, pp: int, order: Order) -> bool:
    """Whether blocks are compiled: as it is fixed, or wherever torch can, because it changes time and memory alone."""
    fixed = question.fixed.get("compile")
    if fixed is not None:
        return fixed
    return not question.cluster.gpu.name.startswith(UNCOMPILED) and _compilable(pp, order)


@lru_cache(maxsize=1024)
def _compilable(pp: int, order: Order) -> bool:
    plan = Plan(pp=pp, **order._asdict(), microbatch=1, compile=True)
    return next(check_plan.how_blocks_run(plan), None) is None


def shadows(question: Question) -> bool:
    """Whether a narrow copy of the weights is kept: by one rank in low precision, as a run without a plan does."""
    fixed = question.fixed
    alone = question.cluster.gpus == 1 and not fixed.get("deterministic") and not fixed.get("offload_weights")
    return fixed.get("shadow", alone and question.precision in NARROW)


def policies(question: Question, pp: int, order: Order) -> tuple[Policy, ...]:
    """What may be computed anew under a schedule, what may be coded or sent away, and where states may live."""
    fixed = question.fixed
    partly = question.stack.speed.selective == "operations"  # others mean another thing by it, and by all blocks
    blocks = -(-question.arch.layers // (pp * order.chunks))
    words = (fixed["recompute"],) if "recompute" in fixed else _words(blocks, partly)
    how = (("compile", compiles(question, pp, order)),)
    plain = _policies(question.arch, pp, order, _kept(words, _activations(question), _codes(question)), how)
    return tuple(
        policy._replace(offload=home, offload_update=update) for policy in plain for home, update in homes(question)
    )


def _activations(question: Question) -> tuple[str, ...]:
    """Where activations may wait: a host whose memory nobody tells is not counted on."""
    if "activations" in question.fixed:
        return (question.fixed["activations"],)
    return ("device", "host") if question.cluster.host_bytes else ("device",)


def _codes(question: Question) -> tuple[str, ...]:
    """Codes change the mathematics as a low precision does, and may vary with it."""
    if "compress" in question.fixed:
        return (question.fixed["compress"],)
    if "precision" not in question.vary or question.precision == "fp64":
        return ("none",)
    return ("none", "int8", *(("fp8",) if question.cluster.gpu.fp8 else ()))


def homes(question: Question) -> tuple[tuple[str, str], ...]:
    """Where a lone rank's states may live, and who updates them there; several ranks share them out instead."""
    fixed = question.fixed
    updates = (fixed["offload_update"],) if "offload_update" in fixed else ("host", "device")
    if "offload" in fixed:
        return tuple((fixed["offload"], update) for update in (updates if fixed["offload"] != "none" else updates[:1]))
    found = [("none", updates[0])] if question.states == "fp32" else []
    bare = question.precision in NARROW and not shadows(question)
    elsewhere = fixed.get("deterministic") or fixed.get("offload_weights")
    if question.cluster.gpus > 1 or elsewhere or question.rounding != "master" or bare:
        return tuple(found)
    if question.cluster.host_bytes:
        found += [("host", update) for update in updates]
    if question.cluster.disk_bytes:
        found.append(("disk", updates[0]))
    return tuple(found)


@lru_cache(maxsize=256)
def _kept(words: tuple[str, ...], places: tuple[str, ...], codes: tuple[str, ...]) -> tuple[Policy, ...]:
    return tuple(Policy(word, place, code) for word in words for place in places for code in codes)


@lru_cache(maxsize=4096)
def _policies(arch: Arch, pp: int, order: Order, kept: tuple[Policy, ...], how: How) -> tuple[Policy, ...]:
    return tuple(policy for policy in kept if _obeyed(arch, pp, order, policy, how))


@lru_cache(maxsize=256)
def _words(blocks: int, partly: bool) -> tuple[str, ...]:
    """The policies that differ from each other on so many blocks; by operation in some of them if it can be."""
    first = {max(round(share * blocks), 1) for share in FIRST_SHARES}
    root = ("sqrt",) if round(blocks**0.5) > 1 else ()  # else each block by itself, which is "full"
    some = (f"selective-{max(round(SELECTIVE_SHARE * blocks), 1)}",) if partly and blocks > 1 else ()
    counted = (f"first-{count}" for count in sorted(first) if count < blocks)
    return ("none", *some, "selective", *counted, *root, "full")


def _obeyed(arch: Arch, pp: int, order: Order, policy: Policy, how: How) -> bool:
    """Whether the rules let this policy and this schedule meet: asked of them, on a plan without other axes.

    `how`: what else is said of the way that blocks run.
    """
    accumulate = 2 * pp
    stages = balanced_stages(arch, pp * order.chunks) if pp > 1 else ()
    pipeline = {"pp": pp, "stages": stages, **order._asdict()}
    plan = Plan(**pipeline, microbatch=1, accumulate=accumulate, **policy._asdict(), **dict(how))
    run = Run(arch=arch, plan=plan, batch=accumulate, sequence=1)
    return not any(problem for rule in check_plan.RULES for problem in rule(run))
