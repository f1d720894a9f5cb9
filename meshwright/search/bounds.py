"""Bounds for whole groups of plans: a time that none goes below, and memory that none holds less than.

A closed form costs a few microseconds where the ledger costs a thousand, and sends most plans of a large model away;
the ledger judges what it lets pass.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.cost.activations import MicrobatchShape, microbatch_shape, saved_activations
from meshwright.cost.job import Job
from meshwright.cost.layout import LedgerEntry, state_layout
from meshwright.cost.memory import Ledger, overflows, settled, too_large
from meshwright.cost.rank_view import still_blocks
from meshwright.cost.step_time import lower_bound, work_bound
from meshwright.search import space
from meshwright.search.question import Question
from meshwright.search.space import (
    AxesChoice,
    BatchChoice,
    PipelineChoice,
    Policy,
    keeps_bf16_params,
    locations,
    may_live_in_host_memory,
)
from meshwright.spec.params import frozen_bytes, trained
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.schedule import IN_SIGHT, Schedule, stage_ranks

CPU_OFFLOAD = "weights too"  # a location of states, beside those of plan.optimizer_offload

STATES = "states"  # weights, gradients and moments, as the closed form knows them

ACTIVATIONS = "activations"

AT_ONCE = ("naive", "gpipe", "looped")  # their first backward comes when most is in flight, or little ever is


class PlanGroup(NamedTuple):
    """Plans that differ in how data is split, and, where they are None, in schedule and recomputation."""

    question: Question
    splits: tuple[AxesChoice, ...]  # alike but for replicate, shard and zero
    each: BatchChoice
    choices: tuple[tuple[PipelineChoice, tuple[Policy, ...]], ...]  # schedules, and the policies of each
    order: PipelineChoice | None = None
    policies: tuple[Policy, ...] = ()  # of a group of one schedule, those that may fit
    helps: tuple[tuple[Policy, Policy], ...] = ()  # further ones: their turn comes when the plainer turns out too large
    policy: Policy | None = None
    weighed: bool = False  # its bound has what weights cost in it

    @property
    def decided_order(self) -> PipelineChoice:
        assert self.order is not None, "only a group of one schedule is asked"
        return self.order

    @property
    def decided_policy(self) -> Policy:
        assert self.policy is not None, "only a group of one policy is asked"
        return self.policy

    @property
    def may_be_weighed(self) -> bool:
        """Whether what weights cost bounds every policy: not where states are offloaded or activations quantized."""
        return all((each.activation_quant, each.optimizer_offload) == ("none", "none") for each in self.policies)

    @property
    def plans_of_a_split(self) -> int:
        """Plans that differ in schedule and recomputation."""
        return sum(len(policies) for _, policies in self.choices)

    def parts(self) -> list["PlanGroup"]:
        """The same plans with one more choice made: of the schedule, or of the policy."""
        if self.order is not None:
            return [self._replace(policy=policy) for policy in self.policies]
        return [self._replace(order=order, policies=policies) for order, policies in self.choices]

    def plan(self, layout: AxesChoice) -> Plan:
        """The plan of one split."""
        return space.plan_of(self.question, layout, self.each, self.decided_order, self.decided_policy)


def groups(question: Question) -> list[PlanGroup]:
    """All plans of a question, by their axes and microbatches."""
    alike: dict[tuple[object, ...], list[AxesChoice]] = {}
    for layout in space.layouts(question):
        copied = space.has_bf16_copy(question, layout)
        key = (layout.pp, layout.cp, layout.cp_kind, layout.ep, layout.tp, layout.cpu_offload, copied)
        alike.setdefault(key, []).append(layout)
    found, choices = [], {}
    for layouts in alike.values():
        for each in space.rounds(question, layouts[0]):
            splits = tuple(layout for layout in layouts if not space.respelled(question, layout, each))
            key = (layouts[0].pp, space.locations_under(question, layouts[0]), each.grad_accum)
            if key not in choices:
                choices[key] = space.choices(question, layouts[0], each)
            if splits:
                found.append(PlanGroup(question, splits, each, choices[key]))
    return found


def bound(group: PlanGroup) -> float:
    """Seconds for a token that no plan of a group goes below, as if weights cost nothing.

    Before the schedule is known: the busiest rank of a pipeline has at least a fair share of the work on one rank.
    """
    question, layout = group.question, group.splits[0]
    if group.order is None:
        alone = layout._replace(pp=1)
        order = PipelineChoice("1f1b", 1)
        plan = space.plan_of(question, alone, group.each, order, Policy())
        return work_bound(question.job(plan)) / layout.pp / question.tokens
    return work_bound(question.job(_least_plan(group, layout))) / question.tokens


def bound_of_policies(group: PlanGroup) -> float:
    """The bound of a group of one schedule; where all its policies offload or quantize, with what that costs."""
    if not all(policy.is_helped for policy in group.policies):
        return bound(group)
    return min(bound(group._replace(policy=policy)) for policy in group.policies)


def bound_with_weights(group: PlanGroup, enough: float) -> float:
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


def _least_plan(group: PlanGroup, layout: AxesChoice) -> Plan:
    """Before the policy is known: the plan in which nothing is recomputed."""
    return space.plan_of(group.question, layout, group.each, group.decided_order, group.policy or Policy())


class MemoryBound:
    """What is known of the memory that plans of one question need."""

    def __init__(self, question: Question) -> None:
        self.question = question
        holds = question.stack.holds  # torch can give out what the context and the allocator's cache leave
        # The ledger rounds its lines: a byte more, so that what fits to the last one is not sent away.
        given_out = (question.cluster.gpu.memory_bytes - holds.context_bytes + 1) / (1 + holds.slack)
        self.memory = given_out - holds.workspace_bytes
        self.numbers = sum(param.numel for param in trained(question.arch))
        self.routed = sum(param.numel for param in trained(question.arch) if param.expert)
        self.kinds = sorted({question.arch.is_moe(layer) for layer in range(question.arch.layers)})
        self.master_bytes, self.param_bytes = widths(question)
        self.frozen = still_bytes(question)
        self.locations = {location for location, _ in locations(question)}
        self.states = {location: _widths(question, location) for location in (*self.locations, CPU_OFFLOAD)}
        self.kept: dict[tuple[int, int, int, int, bool, Policy], tuple[float, float]] = {}
        self.works: dict[tuple[int, int, int, Policy], MicrobatchShape] = {}
        self.shortest: dict[tuple[int, PipelineChoice], int] = {}
        self.refused: dict[tuple[object, ...], tuple[int, str]] = {}  # microbatch and largest line

    def may_hold(self, layout: AxesChoice) -> bool:
        """Whether a layout's plans may fit."""
        return self.floor(layout) <= self.memory

    def floor(self, layout: AxesChoice) -> float:
        """Bytes of a layout's most loaded rank at least, at the update: ranks that share evenly hold the least."""
        locations = (CPU_OFFLOAD,) if layout.cpu_offload else self.locations
        return min((self._floor(layout, location) for location in locations), default=0.0)

    def _floor(self, layout: AxesChoice, location: str) -> float:
        """The same with states in a given place."""
        each = self.states[location]
        copied = self._whole(layout) * self.param_bytes if layout.pp == 1 and self._copied(layout, location) else 0.0
        shadow = self.param_bytes if keeps_bf16_params(self.question) and self._copied(layout, location) else 0
        shard = self._shard(layout)
        return self._frozen(layout) + max((each.held + each.gradient + shadow) * shard, each.held * shard + copied)

    def _frozen(self, layout: AxesChoice) -> float:
        """Bytes of a rank's part of the weights that are not trained, on its device."""
        return 0.0 if layout.cpu_offload else self.frozen / (layout.pp * layout.tp * layout.shards)

    def _shard(self, layout: AxesChoice) -> float:
        """Numbers in a rank's part of the weights."""
        return self.numbers / (layout.pp * layout.tp * layout.shards)

    def _whole(self, layout: AxesChoice) -> float:
        """Weights that a rank computes with: of the routed experts only its own."""
        return (self.numbers - self.routed + self.routed / layout.ep) / (layout.pp * layout.tp)

    def _copied(self, layout: AxesChoice, location: str) -> bool:
        """Whether the arithmetic reads a second copy of the weights for longer than a block takes."""
        return not self.states[location].in_place and (
            layout.pp > 1 or (layout.zero < 3 and self.param_bytes < self.master_bytes)
        )

    def _resting(self, layout: AxesChoice, group: PlanGroup, location: str) -> float:
        """Bytes at least that a rank holds beside the most activations.

        States; what the arithmetic reads, in a pipeline under zero 3 the stages in sight; and, when an earlier
        microbatch has left one, the gradient: whole in a pipeline, where every stage has one once each rank has had
        two rounds.
        """
        order, grad_accum = group.decided_order, group.each.grad_accum
        resting = self.states[location].held * self._shard(layout) + self._frozen(layout)
        if self._copied(layout, location):
            in_sight = min(1, IN_SIGHT / order.chunks) if layout.zero == 3 else 1
            resting += self._whole(layout) * self.param_bytes * in_sight
        if layout.pp == 1 and grad_accum > 1:
            resting += self.states[location].summed * self._shard(layout)
        if layout.pp > 1 and order.schedule not in AT_ONCE and grad_accum >= 2 * layout.pp:
            resting += self._whole(layout) * self.master_bytes
        return resting

    def obstacles(self, group: PlanGroup) -> list[str | None]:
        """What keeps all plans of a policy from fitting, by the closed forms, for each of a group of one schedule.

        None if something may fit. Of the splits of the data axes the one that shards most holds least.
        """
        frugal, found = frugal_split(group), list[str | None]()
        locations = {_location(frugal, policy) for policy in group.policies}
        at_rest = {
            location: (self._resting(frugal, group, location), self._floor(frugal, location)) for location in locations
        }
        for policy, live in zip(group.policies, self._live(group, group.policies), strict=True):
            still, floor = at_rest[_location(frugal, policy)]
            fits = max(still + live, floor) <= self.memory
            found.append(None if fits else STATES if still > live else ACTIVATIONS)
        return found

    def least(self, group: PlanGroup) -> float:
        """Bytes at least of the most loaded rank of every plan of a group."""
        frugal, policy = frugal_split(group), group.decided_policy
        location = _location(frugal, policy)
        (live,) = self._live(group, (policy,))
        return max(self._floor(frugal, location), self._resting(frugal, group, location) + live)

    def _live(self, group: PlanGroup, policies: tuple[Policy, ...]) -> Iterator[float]:
        """Bytes at least that activations take on the first rank, when most microbatches are in flight there."""
        layout, order = group.splits[0], group.decided_order
        cut = (layout.pp, order)
        if cut not in self.shortest:
            self.shortest[cut] = _shortest(self.question, layout.pp, order)
        shape = (layout.tp, layout.cp, group.each.microbatch, self.shortest[cut], layout.pp == 1)
        forwards = in_flight(order.schedule, layout.pp, order.chunks, group.each.grad_accum)
        for policy in policies:
            if policy.optimizer_offload != "none":  # activations are the same
                policy = policy._replace(optimizer_offload="none", optimizer_offload_update="host")
            key = (*shape, policy)
            if key not in self.kept:
                self.kept[key] = self._kept(*key)
            flying, moment = self.kept[key]
            yield flying * forwards + moment

    def _kept(self, tp: int, cp: int, microbatch: int, layers: int, last: bool, policy: Policy) -> tuple[float, float]:
        """Bytes that one microbatch leaves in so many layers, and what its backward adds for a moment.

        Of the kind of layer that needs less; `last` if the projection follows them, whose logits are there before that.
        """
        work = self._work(tp, cp, microbatch, policy._replace(recompute="none"))
        still = min(still_blocks(self.question.arch), layers)
        found = [saved_activations(work, (moe,) * layers, last, policy.recompute, still) for moe in self.kinds]
        moments = [max(each.logits, each.recomputed + each.activation_grads) + each.pair for each in found]
        return min(each.activations for each in found), min(moments)

    def _work(self, tp: int, cp: int, microbatch: int, policy: Policy) -> MicrobatchShape:
        """A rank's microbatch, compiled if it ever is: compiled blocks save less."""
        key = (tp, cp, microbatch, policy)
        if key not in self.works:
            compiled = bool(self.question.fixed.get("compile", True))
            axes = {"tp": tp, "cp": cp, "microbatch": microbatch, **policy._asdict()}
            plan = Plan(**axes, precision=self.question.precision, compile=compiled)
            self.works[key] = microbatch_shape(self.question.job(plan))
        return self.works[key]

    def too_large(self, group: PlanGroup) -> str | None:
        """The largest line of a group of which nothing fits, None if something may.

        Where as many microbatches are followed, larger ones hold more.
        """
        frugal, each = frugal_split(group), group.each
        rounds = settled(group.decided_order.schedule, frugal.pp, each.grad_accum)
        key = (frugal, group.order, group.policy, rounds)
        microbatch, line = self.refused.get(key, (0, ""))
        if line and microbatch <= each.microbatch:
            return line
        found = lacking(self.question.job(group.plan(frugal)))
        if found is not None:
            self.refused[key] = (each.microbatch, found)
        return found


def _location(layout: AxesChoice, policy: Policy) -> str:
    """Where states live under a layout and a policy."""
    return CPU_OFFLOAD if layout.cpu_offload else policy.optimizer_offload


def frugal_split(group: PlanGroup) -> AxesChoice:
    """A group's split of the data axes that holds least: it shards most."""
    return max(group.splits, key=lambda layout: (layout.zero, layout.shards))


def lacking(job: Job) -> str | None:
    """The largest line of a rank that has too little memory, None if every rank has enough; or the place that lacks."""
    found = too_large(job)
    if found is None:
        return None
    return overflows(job, found) if found.shown <= job.cluster.gpu.memory_bytes else largest(found).name


def largest(ledger: Ledger) -> LedgerEntry:
    """The line that takes most."""
    return max(ledger.lines, key=lambda line: line.bytes)


def still_bytes(question: Question) -> int:
    """Bytes of the weights that are not trained, and of the frozen copy of all that DPO may compare with."""
    arch, (_, param_bytes) = question.arch, widths(question)
    return frozen_bytes(arch, param_bytes) + (frozen_bytes(arch.reference, param_bytes) if arch.copies_reference else 0)


def smallest_world(question: Question) -> float:
    """GPUs below which the model's states do not fit, however they are shared out and wherever they are kept."""
    several = msgspec.structs.replace(question, cluster=msgspec.structs.replace(question.cluster, gpus=2))
    alone = msgspec.structs.replace(question, cluster=msgspec.structs.replace(question.cluster, gpus=1))
    sizes = [_widths(alone, location) for location, _ in locations(alone) if location != "none"]
    numbers, memory = sum(param.numel for param in trained(question.arch)), question.cluster.gpu.memory_bytes
    frozen = still_bytes(question)
    if any((each.held + each.gradient) * numbers + frozen <= memory for each in sizes):
        return 1.0
    each = _widths(several, "none")
    least = ((each.held + each.gradient) * numbers + frozen) / memory
    if not may_live_in_host_memory(question):
        return least
    on_host = state_layout(question.job(Plan(microbatch=1, zero=3, precision=question.precision, cpu_offload=True)))
    there = on_host.of("weights", "host") + on_host.of("moments", "host") + on_host.of("gradients", "host")
    return min(least, (there * numbers + frozen) / (question.cluster.host_bytes or math.inf))


def widths(question: Question) -> tuple[int, int]:
    """Bytes of a number as it is held, and as it is computed with."""
    return (8, 8) if question.precision == "fp64" else (4, 4 if question.precision == "fp32" else 2)


@lru_cache(maxsize=4096)
def in_flight(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> int:
    """Forwards at least, of single stages, that the first rank of a pipeline has done when its next backward begins."""
    if pp == 1 or schedule == "naive":
        return 1
    every = microbatches * chunks
    if schedule in ("gpipe", "looped"):
        return every
    if schedule == "interleaved":
        return min(every, (chunks - 1) * pp + 2 * (pp - 1) + 1)
    return min(every, pp * chunks)


def _shortest(question: Question, pp: int, order: PipelineChoice) -> int:
    """Layers of the shortest stage on the first rank."""
    if pp == 1:
        return question.arch.blocks
    stages = question.fixed.get("stages") or balanced_stages(question.arch, pp * order.chunks)
    ranks = stage_ranks(order.schedule, pp, order.chunks)
    return min(length for length, rank in zip(stages, ranks, strict=True) if rank == 0)


class _Widths(NamedTuple):
    """Bytes of a parameter: states, and its gradient after one microbatch and after several."""

    held: int
    gradient: int
    summed: int
    in_place: bool  # the arithmetic reads the very bf16 weights that are held


def _widths(question: Question, location: str) -> _Widths:
    """The widths of a rank whose states live in a given place."""
    plan = Plan(microbatch=1, precision=question.precision, bf16_params=keeps_bf16_params(question))
    changes = (
        {"cpu_offload": True, "zero": 3, "bf16_params": False}
        if location == CPU_OFFLOAD
        else {"optimizer_offload": location}
    )
    plan = msgspec.structs.replace(plan, **changes)
    once = state_layout(question.job(plan))
    more = state_layout(question.job(msgspec.structs.replace(plan, grad_accum=2)))
    held = once.of("weights") + once.of("moments") + once.of("master")
    in_place = plan.bf16_params and once.reads == "stored"
    return _Widths(held, once.of("gradients"), more.of("gradients"), in_place)
