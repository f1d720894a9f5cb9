"""Pricing and pruning: of all legal plans the best few, with an account of why the others are not among them.

Groups of plans are opened best first. A group's bound is never above the time of any plan in it, so that the search may
stop when the best few are at most as slow as every bound that is left.
"""

import heapq
import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import Fit, Ledger, fits
from meshwright.cost.step_time import Price, StepTimeline, price, price_in, seconds_in, step_timeline
from meshwright.search.bounds import (
    STATES,
    MemoryBound,
    PlanGroup,
    bound,
    bound_of_policies,
    bound_with_weights,
    groups,
    lacking,
)
from meshwright.search.question import Question, variants
from meshwright.spec.plan import FIELDS, Plan

TOLD_APART = 0.02  # the same run measured twice differs by this much at best


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, its price and its ledger."""

    job: Job
    price: Price
    fit: Fit

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def ledger(self) -> Ledger:
        """The ledger of the most loaded rank."""
        return self.fit.ledger

    @property
    def peak_bytes(self) -> int:
        """As nvidia-smi would show it."""
        return self.ledger.shown

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None: on its device, and nobody says whether the host or the disk has."""
        return self.fit.fits

    @property
    def is_tight(self) -> bool:
        """Whether it fits by the estimate, and not by the upper end of its interval."""
        return self.fits is not False and self.peak_bytes * self.ledger.high > self.job.cluster.gpu.memory_bytes

    @property
    def seconds_per_token(self) -> float:
        return self.price.seconds / (self.plan.batch * self.job.sequence)


class SearchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of every legal plan: the parts add up to `legal`."""

    legal: int
    too_large: dict[str, int]  # by their largest ledger entry
    slower: int  # whose bound is above the time of the plans found
    priced: int

    @property
    def does_not_fit(self) -> int:
        return sum(self.too_large.values())


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The best plans that fit, best first, and what became of the others."""

    found: tuple[Candidate, ...]
    counts: SearchCounts

    @property
    def host_question(self) -> str | None:
        """What is to be asked before the first plan can be said to fit; None: nothing."""
        return self.found[0].fit.host_question if self.found else None


def priced(job: Job) -> Candidate:
    """A plan, priced."""
    return Candidate(job=job, price=price(job), fit=fit_of(job))


fit_of = lru_cache(maxsize=1024)(fits)  # asked once to prune, and again of a plan that is shown


Rank = tuple[int, bool, tuple[int, int], float]


def rank(found: Candidate, fastest: float) -> Rank:
    """By time for a token, as far as it can be told; safe plans first, then the simpler, then those with more room."""
    notch_of = notch(found.seconds_per_token, fastest)
    return (notch_of, found.is_tight, complexity(found.plan), -found.fit.headroom_bytes)


def notch(seconds: float, fastest: float) -> int:
    """Times above the fastest plan's in steps of TOLD_APART: those on one step are alike."""
    return max(math.floor(math.log(seconds / fastest) / math.log1p(TOLD_APART)), 0)


def complexity(plan: Plan) -> tuple[int, int]:
    """How much there is to understand in a plan: what is not as it would be on one GPU, and how much is sharded."""
    return sum(field.weighs and plan.uses(field.name) for field in FIELDS), plan.zero


SLOWER = 2.0  # × the seconds of the plan that wants most of an unknown host: what one that wants less may take

WORTH = 1.03  # of a bound: nearer ones are not worth waiting for


def search(question: Question, top: int = 5) -> SearchResult:
    """The best `top` plans, and what became of every other one.

    Plans that offload compete by their times wherever the cluster tells what its hosts and disks hold. Where it does
    not tell, they are a second tier, opened if nothing else fits: each is then an open question, not an answer.
    """
    answer = _search(question, top)
    known = question.cluster.host_bytes and (question.cluster.disk_bytes or question.cluster.gpus > 1)
    if answer.found or known or question.unknown_host != "last":
        return answer
    return _modest(question.with_unknown_host("too"), top)


def _modest(question: Question, top: int) -> SearchResult:
    """The best on hosts of which nothing is known: those that want half as much of it, as long as there are any.

    Whoever is asked for less is more often able to say yes; a step may take SLOWER times as long for it, no more.
    """
    answer = best = _search(question, top)
    while best.found and (needed := best.found[0].ledger.away.host_bytes) and not question.cluster.host_bytes:
        small = msgspec.structs.replace(question.cluster, host_bytes=needed / 2)
        best = _search(msgspec.structs.replace(question, cluster=small), top)
        first, most = best.found[:1], SLOWER * answer.found[0].seconds_per_token
        if not first or first[0].seconds_per_token > most or first[0].ledger.away.disk:
            break
        jobs = [msgspec.structs.replace(each.job, cluster=question.cluster) for each in best.found]
        answer = SearchResult(found=tuple(map(priced, jobs)), counts=answer.counts)
    return answer


def _search(question: Question, top: int) -> SearchResult:
    """The same in one tier."""
    work = _Work(top)
    for variant in variants(question):
        room = MemoryBound(variant)
        for group in groups(variant):
            work.begin(group, room)
    work.finish()
    return work.answer()


class _BoundedGroup(NamedTuple):
    """A plan whose time is known, and whose ledger is made when its turn comes."""

    job: Job
    group: PlanGroup
    known: StepTimeline  # what it has in common with the others of its group


class _Work:
    """Groups and plans that are still to be looked at, the most promising first; and the best plans so far."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.fastest = math.inf  # seconds for a token of the first plan that fits: times come in ascending order
        self.heap: list[tuple[float, int, PlanGroup | _BoundedGroup, MemoryBound]] = []
        self.pushed = 0
        self.best: list[tuple[Rank, int, Candidate]] = []
        self.legal = self.priced = 0
        self.too_large: Counter[str] = Counter()

    def begin(self, group: PlanGroup, room: MemoryBound) -> None:
        """Count a group, and keep of it what the states of the model leave room for."""
        plans = group.plans_of_a_split
        self.legal += plans * len(group.splits)
        fitting = tuple(layout for layout in group.splits if room.may_hold(layout))
        self.too_large[STATES] += plans * (len(group.splits) - len(fitting))
        if fitting:
            group = group._replace(splits=fitting)
            self.push(group, room, bound(group))

    def push(self, item: PlanGroup | _BoundedGroup, room: MemoryBound, seconds_per_token: float) -> None:
        """Put something in its place by its time, or by the bound of its time."""
        self.pushed += 1  # equal bounds are opened in the order in which they came
        heapq.heappush(self.heap, (seconds_per_token, self.pushed, item, room))

    def hopeless(self, seconds_per_token: float) -> bool:
        """Whether nothing that takes so long can still be among the best."""
        return len(self.best) == self.top and notch(seconds_per_token, self.fastest) > self.best[-1][0][0]

    def finish(self) -> None:
        """Look at one after the other until no time that is left can win."""
        while self.heap and not self.hopeless(self.heap[0][0]):
            least, _, item, room = heapq.heappop(self.heap)
            if isinstance(item, _BoundedGroup):
                self.weigh(item, room, least)
            elif item.order is None:
                self.divide(item, room)
            elif item.policy is None:
                self.open(item, room, least)
            else:
                self.judge(item, room)

    def divide(self, group: PlanGroup, room: MemoryBound) -> None:
        """A group by schedules; policies that hold too much are counted out, and a schedule that has no other."""
        for part in group.parts():
            lines = room.obstacles(part)
            self.too_large.update({line: lines.count(line) * len(part.splits) for line in lines if line})
            rest = [policy for policy, line in zip(part.policies, lines, strict=True) if line is None]
            helps = tuple(policy for policy in rest if policy.is_helped and policy.plainer in rest)
            if rest:
                part = part._replace(policies=tuple(policy for policy in rest if policy not in helps), helps=helps)
                self.push(part, room, bound_of_policies(part))

    def open(self, group: PlanGroup, room: MemoryBound, least: float) -> None:
        """A group of one schedule by policies, unless what weights cost sends it back to wait."""
        if not group.weighed and group.may_be_weighed:
            heavier = bound_with_weights(group, least * WORTH)
            if heavier > least * WORTH:
                self.push(group._replace(weighed=True), room, heavier)
                return
        for part in group.parts():
            seconds = max(least, bound(part))
            if part.decided_policy.is_helped and group.may_be_weighed:
                seconds = max(seconds, bound_with_weights(part, seconds * WORTH))
            self.push(part, room, seconds)

    def judge(self, group: PlanGroup, room: MemoryBound) -> None:
        """Time every split of a group: forwards and backwards are the same in all of them."""
        known: StepTimeline | None = None
        for layout in group.splits:
            job = group.question.job(group.plan(layout))
            known = known or step_timeline(job)
            seconds = seconds_in(job, known) / group.question.tokens
            self.priced += 1
            if not self.hopeless(seconds):
                self.push(_BoundedGroup(job, group, known), room, seconds)

    def weigh(self, candidate: _BoundedGroup, room: MemoryBound, seconds_per_token: float) -> None:
        """Keep a plan that fits, if it is among the best."""
        job, group, known = candidate
        if len(self.best) == self.top:
            at_best = (notch(seconds_per_token, self.fastest), False, complexity(job.plan))
            if at_best > self.best[-1][0][:3]:
                return
        if line := room.too_large(group) or lacking(job):
            self.too_large[line] += 1
            self.priced -= 1
            self.help(group, job.plan, room)
            return
        found = Candidate(job=job, price=price_in(job, known), fit=fit_of(job))
        self.fastest = min(self.fastest, found.seconds_per_token)
        self.best.append((rank(found, self.fastest), self.pushed, found))
        self.best.sort(key=lambda entry: entry[:2])
        del self.best[self.top :]

    def help(self, group: PlanGroup, plan: Plan, room: MemoryBound) -> None:
        """Open the plans that do the same as one that is too large, and hold less."""
        layout = next(layout for layout in group.splits if (layout.shard, layout.zero) == (plan.shard, plan.zero))
        for policy in group.helps:
            if policy.plainer == group.policy:
                part = group._replace(policy=policy, splits=(layout,))
                self.push(part, room, bound(part))

    def answer(self) -> SearchResult:
        found = {line: plans for line, plans in self.too_large.most_common() if plans}
        slower = self.legal - self.priced - sum(found.values())
        counts = SearchCounts(legal=self.legal, too_large=found, slower=slower, priced=self.priced)
        return SearchResult(found=tuple(found for _, _, found in self.best), counts=counts)
