"""Plans that have their first choices in common, judged together as long as they can be."""

from typing import NamedTuple

from meshwright.cost.time import lower_bound
from meshwright.search import space
from meshwright.search.question import Question
from meshwright.search.space import Layout, Order, Round
from meshwright.spec.plan import Plan


class Group(NamedTuple):
    """Plans that differ in how data is split, and, where they are None, in schedule and recomputation."""

    question: Question
    splits: tuple[Layout, ...]  # alike but for replicate, shard and zero
    each: Round
    order: Order | None = None
    policy: str | None = None
    bounded: bool = False  # a split of it was priced, and its bound is what the others share with that one

    @property
    def decided_order(self) -> Order:
        assert self.order is not None, "only a group of one schedule is asked"
        return self.order

    @property
    def decided_policy(self) -> str:
        assert self.policy is not None, "only a group of one policy is asked"
        return self.policy

    def parts(self) -> list["Group"]:
        """The same plans with one more choice made: of the schedule, or of the policy."""
        layout = self.splits[0]
        if self.order is None:
            return [self._replace(order=order) for order in space.orders(self.question, layout, self.each)]
        return [self._replace(policy=policy) for policy in space.policies(self.question, layout, self.order)]

    def plan(self, layout: Layout) -> Plan:
        """The plan of one split."""
        return space.plan_of(self.question, layout, self.each, self.decided_order, self.decided_policy)


def groups(question: Question) -> list[Group]:
    """All plans of a question, by their axes and microbatches."""
    alike: dict[tuple[object, ...], list[Layout]] = {}
    for layout in space.layouts(question):
        alike.setdefault((layout.pp, layout.cp, layout.cp_kind, layout.ep, layout.tp), []).append(layout)
    found = []
    for layouts in alike.values():
        for each in space.rounds(question, layouts[0]):
            splits = tuple(layout for layout in layouts if not space.respelled(question, layout, each))
            if splits:
                found.append(Group(question, splits, each))
    return found


def bound(group: Group) -> float:
    """Seconds for a token that no plan of a group goes below.

    Before the schedule is known: the busiest rank of a pipeline has at least a fair share of the work on one rank.
    """
    question, layout = group.question, group.splits[0]
    if group.order is None:
        alone = layout._replace(pp=1)
        plan = space.plan_of(question, alone, group.each, Order("1f1b", 1), "none")
        return lower_bound(question.job(plan)) / layout.pp / question.tokens
    plan = space.plan_of(question, layout, group.each, group.order, group.policy or "none")  # nothing is done twice
    return lower_bound(question.job(plan)) / question.tokens
