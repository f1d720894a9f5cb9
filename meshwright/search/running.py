"""How the blocks of a plan run: compiled or not, from which weights, and what their backward computes anew."""

from functools import lru_cache
from typing import Any

from meshwright.search.levels import Order
from meshwright.search.question import Question
from meshwright.spec import check_plan
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.run import Run
from meshwright.spec.stages import balanced_stages

FIRST_SHARES = (0.25, 0.5, 0.75)  # of a stage's blocks that "first-K" computes anew
NARROW = ("bf16", "fp16", "fp8")
UNCOMPILED = ("tpu", "trainium")  # accelerators that torch writes no kernels for
KEPT = ("compress", "activations")  # what happens to that which blocks keep; nothing, unless it is fixed

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
    alone = question.cluster.gpus == 1 and not question.fixed.get("deterministic")
    return question.fixed.get("shadow", alone and question.precision in NARROW)


def policies(question: Question, pp: int, order: Order) -> tuple[str, ...]:
    """What the backward may compute anew under a schedule."""
    fixed = question.fixed
    if "recompute" in fixed:
        words = (fixed["recompute"],)
    else:
        blocks = -(-question.arch.layers // (pp * order.chunks))
        words = _words(blocks)
    how = (("compile", compiles(question, pp, order)), *((name, fixed[name]) for name in KEPT if name in fixed))
    return _policies(question.arch, pp, order, words, how)


@lru_cache(maxsize=4096)
def _policies(arch: Arch, pp: int, order: Order, words: tuple[str, ...], how: How) -> tuple[str, ...]:
    return tuple(word for word in words if _obeyed(arch, pp, order, word, how))


@lru_cache(maxsize=256)
def _words(blocks: int) -> tuple[str, ...]:
    """The policies that differ from each other on so many blocks."""
    first = {max(round(share * blocks), 1) for share in FIRST_SHARES}
    root = ("sqrt",) if round(blocks**0.5) > 1 else ()  # else each block by itself, which is "full"
    return ("none", "selective", *(f"first-{count}" for count in sorted(first) if count < blocks), *root, "full")


def _obeyed(arch: Arch, pp: int, order: Order, policy: str, how: How) -> bool:
    """Whether the rules let this policy and this schedule meet: asked of them, on a plan without other axes.

    `how`: what else is said of the way that blocks run.
    """
    accumulate = 2 * pp
    stages = balanced_stages(arch, pp * order.chunks) if pp > 1 else ()
    pipeline = {"pp": pp, "stages": stages, **order._asdict()}
    plan = Plan(**pipeline, microbatch=1, accumulate=accumulate, recompute=policy, **dict(how))
    run = Run(arch=arch, plan=plan, batch=accumulate, sequence=1)
    return not any(problem for rule in check_plan.RULES for problem in rule(run))
