"""Pricing and pruning: of all legal plans the best few, with an account of why the others are not among them.

Groups of plans are opened best first. A group's bound is never above the time of any plan in it, so that the search may
stop when the best few are at most as slow as every bound that is left.
"""

import heapq
from collections import Counter
from typing import NamedTuple

from meshwright.cost.job import Job
from meshwright.cost.time import Price, price
from meshwright.search.found import Answer, Counts, Found, fit_of, notch, rank
from meshwright.search.group import Group, bound, groups
from meshwright.search.question import Question, variants
from meshwright.search.room import STATES, Room, largest, shortened

# The shares of a step that the data axes decide, and the one that grows with the others.
OF_WEIGHTS = ("shard", "replicate", "tied", "optimizer", "stragglers")


def search(question: Question, top: int = 5) -> Answer:
    """The best `top` plans, and what became of every other one."""
    work = _Work(top)
    for variant in variants(question):
        room = Room(variant)
        for group in groups(variant):
            work.begin(group, room)
    work.finish()
    return work.answer()


class _Candidate(NamedTuple):
    """A plan whose price is known, and whose ledger is made when its turn comes."""

    job: Job
    price: Price


class _Work:
    """Groups and plans that are still to be looked at, the most promising first; and the best plans so far."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.heap: list[tuple[float, int, Group | _Candidate, Room]] = []
        self.pushed = 0
        self.best: list[tuple[tuple[int, int, float], int, Found]] = []
        self.legal = self.priced = 0
        self.too_large: Counter[str] = Counter()

    def begin(self, group: Group, room: Room) -> None:
        """Count a group, and keep of it what the states of the model leave room for."""
        plans = sum(len(order.parts()) for order in group.parts())
        self.legal += plans * len(group.splits)
        fitting = tuple(layout for layout in group.splits if room.may_hold(layout))
        self.too_large[STATES] += plans * (len(group.splits) - len(fitting))
        if fitting:
            self.push(group._replace(splits=fitting), room)

    def push(self, item: Group | _Candidate, room: Room, seconds_per_token: float | None = None) -> None:
        """Put something in its place by its time, or by the bound of its time."""
        if seconds_per_token is None:
            assert isinstance(item, Group)
            seconds_per_token = bound(item)
        self.pushed += 1  # equal bounds are opened in the order in which they came
        heapq.heappush(self.heap, (seconds_per_token, self.pushed, item, room))

    def hopeless(self, seconds_per_token: float) -> bool:
        """Whether nothing that takes so long can still be among the best."""
        return len(self.best) == self.top and notch(seconds_per_token) > self.best[-1][0][0]

    def finish(self) -> None:
        """Look at one after the other until no time that is left can win."""
        while self.heap and not self.hopeless(self.heap[0][0]):
            _, _, item, room = heapq.heappop(self.heap)
            if isinstance(item, _Candidate):
                self.weigh(item, room)
            elif item.order is None:
                self.divide(item, room)
            elif item.policy is None:
                for part in room.possible(item):
                    self.push(part, room)
            else:
                self.judge(item, room)

    def divide(self, group: Group, room: Room) -> None:
        """A group by schedules; policies that hold too much are counted out, and a schedule that has no other."""
        for part in group.parts():
            lines = [room.obstacle(policy) for policy in part.parts()]
            self.too_large.update({line: lines.count(line) * len(part.splits) for line in lines if line})
            if None in lines:
                self.push(part, room)

    def judge(self, group: Group, room: Room) -> None:
        """Price one split of a group, and bound the others by what all of them have in common with it."""
        if not group.bounded and (line := room.too_large(group)):
            self.too_large[line] += len(group.splits)
            return
        splits = group.splits if group.bounded else group.splits[:1]
        common = 0.0
        for layout in splits:
            job = group.question.job(group.plan(layout))
            cost = price(job)
            self.priced += 1
            self.push(_Candidate(job, cost), room, cost.seconds / group.question.tokens)
            own = sum(share.seconds for share in cost.waterfall if share.name in OF_WEIGHTS)
            common = max(cost.seconds - own, 0.0) / group.question.tokens
        if others := group.splits[len(splits) :]:
            self.push(group._replace(splits=others, bounded=True), room, common)

    def weigh(self, candidate: _Candidate, room: Room) -> None:
        """Keep a plan that fits, if it is among the best: by a shortened step first, which cannot need more."""
        job, cost = candidate
        short = fit_of(room.question.job(shortened(job.plan)))
        at_best = Found(job=job, price=cost, fit=short)
        if len(self.best) == self.top and rank(at_best) > self.best[-1][0]:
            return
        fit = fit_of(job) if short.fits else short
        if not fit.fits:
            self.too_large[largest(fit.ledger)] += 1
            self.priced -= 1
            return
        found = Found(job=job, price=cost, fit=fit)
        self.best.append((rank(found), self.pushed, found))
        self.best.sort(key=lambda entry: entry[:2])
        del self.best[self.top :]

    def answer(self) -> Answer:
        found = {line: plans for line, plans in self.too_large.most_common() if plans}
        slower = self.legal - self.priced - sum(found.values())
        counts = Counts(legal=self.legal, too_large=found, slower=slower, priced=self.priced)
        return Answer(found=tuple(found for _, _, found in self.best), counts=counts)
