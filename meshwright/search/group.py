"""Plans that have their first choices in common, judged together as long as they can be."""

from typing import NamedTuple

from meshwright.cost.time_bound import lower_bound, work_bound
from meshwright.search import space
from meshwright.search.levels import Layout, Order, Policy, Round
from meshwright.search.question import Question
from meshwright.spec.plan import Plan


class Group(NamedTuple):
    """Plans that differ in how data is split, and, where they are None, in schedule and recomputation."""

    question: Question
    splits: tuple[Layout, ...]  # alike but for replicate, shard and zero
    each: Round
    choices: tuple[tuple[Order, tuple[Policy, ...]], ...]  # schedules, and the policies of each
    order: Order | None = None
    policies: tuple[Policy, ...] = ()  # of a group of one schedule, those that may fit
    helps: tuple[Policy, ...] = ()  # further ones, whose turn comes when their plainer one turns out too large
    policy: Policy | None = None
    weighed: bool = False  # its bound has what weights cost in it

    @property
    def decided_order(self) -> Order:
        assert self.order is not None, "only a group of one schedule is asked"
        return self.order

    @property
    def decided_policy(self) -> Policy:
        assert self.policy is not None, "only a group of one policy is asked"
        return self.policy

    @property
    def may_be_weighed(self) -> bool:
        """Whether what weights cost bounds every policy: not where states may be elsewhere, nor beside codes."""
        return all((each.compress, each.offload) == ("none", "none") for each in self.policies)

    @property
    def plans_of_a_split(self) -> int:
        """Plans that differ in schedule and recomputation."""
        return sum(len(policies) for _, policies in self.choices)

    def parts(self) -> list["Group"]:
        """The same plans with one more choice made: of the schedule, or of the policy."""
        if self.order is not None:
            return [self._replace(policy=policy) for policy in self.policies]
        return [self._replace(order=order, policies=policies) for order, policies in self.choices]

    def plan(self, layout: Layout) -> Plan:
        """The plan of one split."""
        return space.plan_of(self.question, layout, self.each, self.decided_order, self.decided_policy)


def groups(question: Question) -> list[Group]:
    """All plans of a question, by their axes and microbatches."""
    alike: dict[tuple[object, ...], list[Layout]] = {}
    for layout in space.layouts(question):
        alike.setdefault((layout.pp, layout.cp, layout.cp_kind, layout.ep, layout.tp), []).append(layout)
    found, choices = [], {}
    for layouts in alike.values():
        for each in space.rounds(question, layouts[0]):
            splits = tuple(layout for layout in layouts if not space.respelled(question, layout, each))
            key = (layouts[0].pp, each.accumulate)
            if key not in choices:
                choices[key] = space.choices(question, layouts[0], each)
            if splits:
                found.append(Group(question, splits, each, choices[key]))
    return found


def bound(group: Group) -> float:
    """Seconds for a token that no plan of a group goes below, as if weights cost nothing.

    Before the schedule is known: the busiest rank of a pipeline has at least a fair share of the work on one rank.
    """
    question, layout = group.question, group.splits[0]
    if group.order is None:
        alone = layout._replace(pp=1)
        order = Order("1f1b", 1)
        plan = space.plan_of(question, alone, group.each, order, Policy())
        return work_bound(question.job(plan)) / layout.pp / question.tokens
    return work_bound(question.job(_least_plan(group, layout))) / question.tokens


def bound_of_policies(group: Group) -> float:
    """The bound of a group of one schedule; where all its policies send or code what is kept, with what that costs."""
    if not all(policy.is_helped for policy in group.policies):
        return bound(group)
    return min(bound(group._replace(policy=policy)) for policy in group.policies)


def bound_with_weights(group: Group, enough: float) -> float:
    """The same with what weights cost at least: of the splits of the data axes the cheapest, or one within `enough`.

    Sharing out the optimizer's states alone, as far as it goes, is cheapest most of the time.
    """
    least = float("inf")
    for layout in sorted(group.splits, key=lambda layout: (layout.zero != 1, -layout.shard)):
        seconds = lower_bound(group.question.job(_least_plan(group, layout))) / group.question.tokens
        least = min(least, seconds)
        if least <= enough:
            break
    return least


def _least_plan(group: Group, layout: Layout) -> Plan:
    """Before the policy is known: the plan in which nothing is done twice."""
    return space.plan_of(group.question, layout, group.each, group.decided_order, group.policy or Policy())
