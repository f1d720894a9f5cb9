"""A plan with everything that is known of it before it runs, and how plans are put in order."""

import math
from functools import lru_cache

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import Fit, Ledger, fits
from meshwright.cost.time import Price, price
from meshwright.spec.plan import AXES, Plan

TOLD_APART = 0.02  # the same run measured twice differs by this much at best


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its price and its ledger."""

    job: Job
    price: Price
    fit: Fit

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def ledger(self) -> Ledger:
        """Of the fullest rank."""
        return self.fit.ledger

    @property
    def peak_bytes(self) -> int:
        """As the driver would show it."""
        return self.ledger.shown

    @property
    def is_tight(self) -> bool:
        """Whether it fits by the estimate, and not by the upper end of its interval."""
        return self.fit.fits and self.peak_bytes * self.ledger.high > self.job.cluster.gpu.memory_bytes

    @property
    def seconds_per_token(self) -> float:
        return self.price.seconds / (self.plan.batch * self.job.sequence)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of every legal plan: the parts add up to `legal`."""

    legal: int
    too_large: dict[str, int]  # by the ledger line that is the largest in them
    slower: int  # whose bound is above the time of the plans found
    priced: int

    @property
    def does_not_fit(self) -> int:
        return sum(self.too_large.values())


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The best plans that fit, best first, and what became of the others."""

    found: tuple[Found, ...]
    counts: Counts


def priced(job: Job) -> Found:
    """A plan, priced."""
    return Found(job=job, price=price(job), fit=fit_of(job))


fit_of = lru_cache(maxsize=1024)(fits)  # asked once to prune, and again of a plan that is shown


def rank(found: Found) -> tuple[int, int, float]:
    """By time for a token, as far as it can be told; then the simpler plan; then the one with more room."""
    return (notch(found.seconds_per_token), axes_used(found.plan), -found.fit.headroom_bytes)


def notch(seconds: float) -> int:
    """Times in steps of TOLD_APART: those on one step are alike."""
    return math.floor(math.log(seconds) / math.log1p(TOLD_APART)) if seconds > 0 else -(10**6)


def axes_used(plan: Plan) -> int:
    """How much there is to understand in a plan: its axes, and whatever else is not as it would be on one GPU."""
    axes = sum(getattr(plan, axis) > 1 for axis in (*AXES, "ep"))
    moved = (plan.activations != "device") + (plan.compress != "none")
    moved += plan.offload != "none" or plan.offload_weights
    return axes + (plan.chunks > 1) + (plan.recompute != "none") + moved
