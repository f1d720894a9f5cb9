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
from meshwright.search import space
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
from meshwright.search.space import AxesChoice
from meshwright.spec.plan import FIELDS, Plan
from meshwright.spec.quantized import FORMATS
from meshwright.spec.units import gib, html_table

TOLD_APART = 0.02  # the same run measured twice differs by this much at best
ALIKE = 0.05  # predictions err by as much at their best (results/accuracy.json): no reason for a more intricate plan


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

    def _repr_html_(self) -> str:
        return Candidates((self,))._repr_html_() + self.ledger._repr_html_()


class Candidates(tuple[Candidate, ...]):
    """Plans beside each other, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        heads = ("plan", "s/step", "tokens/s", "MFU", "GiB per GPU", "headroom GiB", "fits")
        return html_table(f"{len(self)} plans" if len(self) != 1 else "1 plan", heads, map(_cells, self))


def _cells(each: Candidate) -> tuple[str, ...]:
    price, fit = each.price, each.fit
    return (
        str(each.plan),
        f"{price.seconds:.3g} ({price.low_seconds:.3g} to {price.high_seconds:.3g})",
        f"{price.tokens_per_second_per_gpu * each.plan.world:,.0f}",
        f"{price.mfu:.1%}" if price.mfu else "–",
        f"{gib(each.peak_bytes)}",
        f"{gib(fit.headroom_bytes)}",
        "yes" if fit.fits else fit.host_question or f"no: {fit.why}",
    )


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
    left_out: dict[str, str] = {}  # where kinds are asked for: those of which no plan is found, and why

    @property
    def host_question(self) -> str | None:
        """What is to be asked before the first plan can be said to fit; None: nothing."""
        return self.found[0].fit.host_question if self.found else None


def priced(job: Job) -> Candidate:
    """A plan, priced."""
    return Candidate(job=job, price=price(job), fit=fit_of(job))


fit_of = lru_cache(maxsize=1024)(fits)  # asked once to prune, and again of a plan that is shown


Complexity = tuple[bool, int, int, int]
Rank = tuple[int, Complexity, int, float]


def rank(found: Candidate, fastest: float) -> Rank:
    """By time for a token as far as predictions can tell; then the simpler; then by measurable time, then by room."""
    fine = notch(found.seconds_per_token, fastest, TOLD_APART)
    return (notch(found.seconds_per_token, fastest), complexity(found.job), fine, -found.fit.headroom_bytes)


def notch(seconds: float, fastest: float, step: float = ALIKE) -> int:
    """Times above the fastest plan's in steps of a share: those on one step are alike."""
    return max(math.floor(math.log(seconds / fastest) / math.log1p(step)), 0)


KINDS = {  # of plans, and what each is good for
    "one GPU": "nothing to synchronize",
    "DDP": "the simplest: every GPU has the whole model, and gradients are summed once a step",
    "ZeRO": "DDP's traffic with optimizer states sharded: less memory at the same speed",
    "FSDP": "weights sharded too (ZeRO-3): the least memory without splitting layers; needs a fast network",
    "tensor parallel": "matrices split inside the node: for wide layers and few sequences per GPU; needs NVLink",
    "context parallel": "sequences split: for long ones",
    "expert parallel": "experts on different GPUs: for MoE models",
    "pipeline": "layers in stages that exchange little: for many nodes and slow networks; "
    "idle while they fill and drain",
    "offload": "what the GPUs cannot hold waits in host memory: for few GPUs; as slow as the way there",
}
ORDER = {name: place for place, name in enumerate(KINDS)}  # from the usual to the unusual
OFFLOADS = ("optimizer_offload", "cpu_offload", "activation_offload")


def kind(plan: Plan) -> str:
    """What people call a plan, by the technique that takes most to set up."""
    return "offload" if any(map(plan.uses, OFFLOADS)) else _kind_of_axes(plan)


def _kind_of_axes(axes: Plan | AxesChoice) -> str:
    if axes.cpu_offload:
        return "offload"
    if axes.pp > 1:
        return "pipeline"
    if axes.tp > 1 or axes.cp > 1 or axes.ep > 1:
        return f"{'tensor' if axes.tp > 1 else 'context' if axes.cp > 1 else 'expert'} parallel"
    return "one GPU" if axes.data == 1 else ("DDP", "ZeRO", "ZeRO", "FSDP")[axes.zero if axes.shards > 1 else 0]


def complexity(job: Job) -> Complexity:
    """How much there is to understand: offload, what else is not as on one GPU, how usual, how much is sharded.

    So are weights and states of fewer bits: of plans alike in time the one that rounds nothing comes first.
    """
    plan, name = job.plan, kind(job.plan)
    rounds = (job.master_weights != "fp32") + (job.state_dtype != "fp32")
    used = sum(field.weighs and plan.uses(field.name) for field in FIELDS)
    return name == "offload", used + rounds, ORDER[name], plan.zero


SLOWER = 2.0  # × the seconds of the plan that wants most of an unknown host: what one that wants less may take

WORTH = 1.03  # of a bound: nearer ones are not worth waiting for
SLOWEST = 1.5  # × the fastest: a kind of plan that takes longer is no alternative


def search(question: Question, top: int = 5, *, kinds: bool = False) -> SearchResult:
    """The best `top` plans, or the best plan of each of the best `top` kinds; and what became of every other one.

    Plans that may be too large by a small error of the ledger come after all that fit for sure. Plans that offload
    compete by their times wherever the cluster tells what its hosts and disks hold. Where it does not tell, they are a
    second tier, opened if nothing else fits: each is then an open question, not an answer.
    """
    answer = _search(question, top, kinds)
    known = question.cluster.host_bytes and (question.cluster.disk_bytes or question.cluster.gpus > 1)
    if answer.found or known or question.unknown_host != "last":
        return answer
    return _modest(question.with_unknown_host("too"), top, kinds)


def _modest(question: Question, top: int, kinds: bool) -> SearchResult:
    """The best on hosts of which nothing is known: those that want half as much of it, as long as there are any.

    Whoever is asked for less is more often able to say yes; a step may take SLOWER times as long for it, no more.
    """
    answer = best = _search(question, top, kinds)
    while best.found and (needed := best.found[0].ledger.offloaded.host_bytes) and not question.cluster.host_bytes:
        small = msgspec.structs.replace(question.cluster, host_bytes=needed / 2)
        best = _search(msgspec.structs.replace(question, cluster=small), top, kinds)
        first, most = best.found[:1], SLOWER * answer.found[0].seconds_per_token
        if not first or first[0].seconds_per_token > most or first[0].ledger.offloaded.disk:
            break
        jobs = [msgspec.structs.replace(each.job, cluster=question.cluster) for each in best.found]
        answer = msgspec.structs.replace(answer, found=tuple(map(priced, jobs)))
    return answer


def _search(question: Question, top: int, kinds: bool) -> SearchResult:
    """The same in one tier. States of 8 or 4 bits, which round at every update, are tried where no others fit."""
    every = list(variants(question))
    unquantized = [variant for variant in every if variant.state_dtype not in FORMATS]
    answer = _among(unquantized, top, kinds)
    return answer if answer.found or len(unquantized) == len(every) else _among(every, top, kinds)


def _among(chosen: list[Question], top: int, kinds: bool) -> SearchResult:
    """The best of some variants of a question."""
    work = _Work(_Shortlist(top, kinds), _Shortlist(top, kinds))
    for variant in chosen:
        room = MemoryBound(variant)
        for group in groups(variant):
            for part in _by_kind(group) if kinds else (group,):
                work.begin(part, room)
    work.finish()
    return work.answer()


def _by_kind(group: PlanGroup) -> list[PlanGroup]:
    """A group in parts of one kind."""
    splits: dict[str, list[AxesChoice]] = {}
    for layout in group.splits:
        splits.setdefault(_kind_of_axes(layout), []).append(layout)
    return [group._replace(splits=tuple(alike)) for alike in splits.values()]


class _Shortlist:
    """The best plans so far, in order: the best few, or of each kind one."""

    def __init__(self, top: int, kinds: bool) -> None:
        self.top = top
        self.kinds = kinds
        self.fastest = math.inf  # seconds for a token of the first plan: times come in ascending order
        self.entries: list[tuple[Rank, int, Candidate]] = []

    def hopeless(self, seconds_per_token: float) -> bool:
        """Whether nothing that takes so long can still be among the best."""
        if self.kinds and seconds_per_token > SLOWEST * self.fastest:
            return True
        return len(self.entries) == self.top and notch(seconds_per_token, self.fastest) > self.entries[-1][0][0]

    def rival(self, name: str) -> tuple[Rank, int, Candidate] | None:
        """The plan that one of a kind has to beat; None while there is a place for both."""
        alike = [entry for entry in self.entries if kind(entry[2].plan) == name] if self.kinds else []
        last = self.entries[-1] if len(self.entries) == self.top else None
        return alike[0] if alike else last

    def may_take(self, name: str, seconds_per_token: float, job: Job | None = None) -> bool:
        """Whether a plan of a kind that takes so long may be among the best, however much room it has."""
        if self.kinds and name == "offload" and any(not entry[0][1][0] for entry in self.entries):
            return False  # a plan without offload is faster
        rival = self.rival(name)
        if rival is None:
            return True
        at_best = (notch(seconds_per_token, self.fastest), *([complexity(job)] if job else ()))
        return at_best <= rival[0][: len(at_best)]

    def add(self, found: Candidate, order: int) -> None:
        """Keep a plan, if it is among the best."""
        self.fastest = min(self.fastest, found.seconds_per_token)
        entry, rival = (rank(found, self.fastest), order, found), self.rival(kind(found.plan))
        if rival is not None:
            if entry[:2] > rival[:2]:
                return
            self.entries.remove(rival)
        self.entries.append(entry)
        self.entries.sort(key=lambda entry: entry[:2])


class _BoundedGroup(NamedTuple):
    """A plan whose time is known, and whose ledger is made when its turn comes."""

    job: Job
    group: PlanGroup
    known: StepTimeline  # what it has in common with the others of its group


class _Work:
    """Groups and plans that are still to be looked at, the most promising first; and the best plans so far."""

    def __init__(self, best: _Shortlist, tight: _Shortlist) -> None:
        self.best = best
        self.tight = tight  # those that fit by the estimate alone: wanted where too few fit for sure
        self.heap: list[tuple[float, int, PlanGroup | _BoundedGroup, MemoryBound]] = []
        self.pushed = 0
        self.legal = self.priced = 0
        self.too_large: Counter[str] = Counter()
        self.seen: set[str] = set()  # kinds, fitting or not
        self.slow: set[str] = set()  # kinds of plans that were passed over for their time, fitting or not

    def begin(self, group: PlanGroup, room: MemoryBound) -> None:
        """Count a group, and keep of it what the states of the model leave room for."""
        plans = group.plans_of_a_split
        self.seen.add(_kind_of_axes(group.splits[0]))
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

    def finish(self) -> None:
        """Look at one after the other until no time that is left can win."""
        while self.heap and not self.best.hopeless(self.heap[0][0]):
            least, _, item, room = heapq.heappop(self.heap)
            if isinstance(item, _BoundedGroup):
                self.weigh(item, room, least)
            elif not self.best.may_take(_kind_of_axes(item.splits[0]), least):
                self.slow.add(_kind_of_axes(item.splits[0]))
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
            rest = {policy: None for policy, line in zip(part.policies, lines, strict=True) if line is None}
            plainer = space.plainer(part.policies)
            helps = {policy: plainer[policy] for policy in rest if plainer.get(policy) in rest}
            if rest:
                policies = tuple(policy for policy in rest if policy not in helps)
                part = part._replace(policies=policies, helps=tuple(helps.items()))
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
            if self.best.hopeless(seconds):
                self.slow.add(kind(job.plan))
            else:
                self.push(_BoundedGroup(job, group, known), room, seconds)

    def weigh(self, candidate: _BoundedGroup, room: MemoryBound, seconds_per_token: float) -> None:
        """Keep a plan that fits, if it is among the best."""
        job, group, known = candidate
        if not self.best.may_take(kind(job.plan), seconds_per_token, job):
            self.slow.add(kind(job.plan))
            return
        if line := room.too_large(group) or lacking(job):
            self.too_large[line] += 1
            self.priced -= 1
            self.help(group, job.plan, room)
            return
        found = Candidate(job=job, price=price_in(job, known), fit=fit_of(job))
        if found.is_tight:
            self.tight.add(found, self.pushed)
            self.help(group, job.plan, room)
        else:
            self.best.add(found, self.pushed)

    def help(self, group: PlanGroup, plan: Plan, room: MemoryBound) -> None:
        """Open the plans that do the same as one that is too large, and hold less."""
        layout = next(layout for layout in group.splits if (layout.shard, layout.zero) == (plan.shard, plan.zero))
        for policy, plainer in group.helps:
            if plainer == group.policy:
                part = group._replace(policy=policy, splits=(layout,))
                self.push(part, room, bound(part))

    def answer(self) -> SearchResult:
        too_large = {line: plans for line, plans in self.too_large.most_common() if plans}
        slower = self.legal - self.priced - sum(too_large.values())
        counts = SearchCounts(legal=self.legal, too_large=too_large, slower=slower, priced=self.priced)
        found = [found for _, _, found in self.best.entries]
        shown = {kind(each.plan) for each in found} if self.best.kinds else set()
        found += [each for _, _, each in self.tight.entries if kind(each.plan) not in shown]
        first = tuple(found[: self.best.top])
        return SearchResult(found=first, counts=counts, left_out=self.left_out(first))

    def left_out(self, found: tuple[Candidate, ...]) -> dict[str, str]:
        """Kinds that nothing is shown of: what there is of them takes too long or is tight, or all are too large."""
        if not self.best.kinds or self.best.top == 1:
            return {}
        slow = self.slow | {
            _kind_of_axes(group.splits[0]) for _, _, group, _ in self.heap if isinstance(group, PlanGroup)
        }
        slow |= {kind(plan.job.plan) for _, _, plan, _ in self.heap if isinstance(plan, _BoundedGroup)}
        tight = {kind(each.plan) for _, _, each in self.tight.entries}
        missing = sorted(self.seen - {kind(each.plan) for each in found}, key=ORDER.__getitem__)
        why = dict.fromkeys(tight, "fits by the estimate alone") | dict.fromkeys(slow, "slower, if it fits")
        return {name: why.get(name, "does not fit") for name in missing}
