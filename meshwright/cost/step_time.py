"""Seconds of one step of a plan, with an interval, and where they go: a waterfall from the data sheet to what is left.

    step = pipeline × (1 + stragglers) + exposed weights (cost/weight_time.py) + host overhead

`pipeline` is a schedule played on a clock (cost/simulate.py) with the passes of each stage, which are its layers'
(cost/layer_time.py); without stages it is their sum for every microbatch. Bounds for the search leave the playing out.
docs/time.md has every term in words.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from meshwright.cost.activations import ActivationPolicy, Quant, activation_policy
from meshwright.cost.flops import (
    TRAINING,
    attention_share,
    causal_step_flops,
    recomputed_flops,
    step_flops,
    utilization,
)
from meshwright.cost.job import Job
from meshwright.cost.layer_time import (
    SELECTED,
    LayerModel,
    PassTimes,
    block,
    ends,
    layer_model,
    recomputed_terms,
    unreached,
    with_policy,
)
from meshwright.cost.layout import label_of
from meshwright.cost.primitives import axis_span, collective_seconds, slowest
from meshwright.cost.rank_view import EVERYWHERE, grad_flow, placement, stage_lengths, still_blocks
from meshwright.cost.simulate import StageCost, makespan
from meshwright.cost.weight_time import OverlapWindow, WeightSeconds, least_seconds, weight_seconds
from meshwright.hardware.stacks import Efficiency, efficiency_of
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

DRAINED = ("naive", "gpipe", "1f1b", "interleaved", "looped")  # a rank's last action is its first stage's backward
WIDER = 0.1  # by which each doubling of the domains widens the interval, as a share
GUESSES = ("b200", "b300", "v100", "generic")  # entries of the catalogue that no measurement stands behind
RELAYED = 4  # microbatches without a backward after which each takes as long as the one before
GUESSED = 1.5  # the interval of such accelerators ÷ that of others


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch through each stage of the model, and what a message between them takes."""

    passes: tuple[PassTimes, ...]
    seconds: tuple[float, ...]  # of each stage's passes together
    send: float
    ranks: tuple[int, ...]  # of each stage

    def of(self, rank: int) -> list[PassTimes]:
        """The passes through a rank's stages."""
        return [each for each, on in zip(self.passes, self.ranks, strict=True) if on == rank]


class StageKind(NamedTuple):
    """What the time of a stage depends on."""

    dense: int  # layers without experts
    moe: int
    first: bool
    last: bool
    still: tuple[bool, ...] = ()  # of its first layers, those that no backward reaches: whether they are MoE layers
    partly: int | None = None  # the layer that one reaches in part: the first it reaches, if something of it is frozen


class StepTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A step's forwards and backwards: alike in plans that differ only in replicate, shard and zero."""

    at: LayerModel
    stages: Stages
    pipeline: float  # seconds from the first forward to the last backward
    slower: float  # share of them by which the slowest accelerator is behind the mean

    @property
    def working(self) -> float:
        """With the wait for the slowest."""
        return self.pipeline + self.pipeline * self.slower


class TimeShare(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step's seconds, and why it is spent. One below zero is saved."""

    name: str
    seconds: float
    why: str

    @property
    def label(self) -> str:
        """The name as people read it."""
        return label_of(self.name)


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float  # model FLOPs utilization, 0 to 1, attention counted in full
    mfu_causal: float  # the same, attention counted as it is computed
    flops_per_second: float  # of a GPU, attention counted as it is computed
    hfu: float  # the same with what is recomputed
    waterfall: tuple[TimeShare, ...]  # adds up to the seconds


def price(job: Job, efficiency: Efficiency | None = None) -> Price:
    """Seconds of a step. `efficiency` replaces the cluster's own and the catalogue's, as `calibrated` gives it."""
    return price_in(job, step_timeline(job, efficiency))


def step_timeline(job: Job, efficiency: Efficiency | None = None) -> StepTimeline:
    """The forwards and backwards of a step, played on a clock."""
    at = layer_model(job, efficiency)
    stages = stages_of(at, job)
    return StepTimeline(
        at=at, stages=stages, pipeline=pipeline_seconds(stages, job), slower=slowest(job.plan.world, at.rates)
    )


def seconds_in(job: Job, known: StepTimeline) -> float:
    """Seconds of a step whose forwards and backwards are known."""
    return known.working + _weights(job, known).seconds + job.stack.speed.step_seconds


def price_in(job: Job, known: StepTimeline) -> Price:
    """The price of a step whose forwards and backwards are known."""
    plan, at = job.plan, known.at
    working = sum(known.stages.passes, PassTimes()) * (1 / plan.pp) * plan.grad_accum  # of the mean rank
    seconds = seconds_in(job, known)
    # Nine of ten fitted runs lie in the interval. It is wider where less is known: over many domains, where the host
    # decides, and on accelerators of which nothing was measured or fitted.
    domains = max(plan.world / job.cluster.domain, 1.0)
    late = (working.forward.launch + working.input.launch) / seconds
    guessed = (job.cluster.efficiency or efficiency_of(job.cluster.gpu)).name in GUESSES
    width = job.stack.speed.spread * (1 + WIDER * math.log2(domains)) * (1 + late) * (GUESSED if guessed else 1)
    ideal = step_flops(job.arch, job.sequence, plan.batch, job.span) / plan.world
    causal = causal_step_flops(job.arch, job.sequence, plan.batch, job.span) / plan.world
    return Price(
        seconds=seconds,
        low_seconds=seconds / (1 + width),
        high_seconds=seconds * (1 + width),
        tokens_per_second_per_gpu=plan.batch * job.sequence / seconds / plan.world,
        mfu=utilization(ideal, seconds, at.rates.peak),
        mfu_causal=utilization(causal, seconds, at.rates.peak),
        flops_per_second=causal / seconds,
        hfu=utilization(_done(job) / plan.world, seconds, at.rates.peak),
        waterfall=tuple(_waterfall(job, known, working)),
    )


def work_bound(job: Job, efficiency: Efficiency | None = None) -> float:
    """Without playing the schedule, and as if weights cost nothing: the same for every replicate, shard and zero."""
    return _working(layer_model(job, efficiency), job) + job.stack.speed.step_seconds


def lower_bound(job: Job, efficiency: Efficiency | None = None) -> float:
    """Without playing the schedule, with what the first rank's weights cost at least, whatever is recomputed."""
    at = layer_model(job, efficiency)
    kinds, places = kinds_of(job.arch, stage_lengths(job.arch, job.plan))
    ranks = placement(job.plan)
    mine = [place for place, rank in zip(places, ranks, strict=True) if rank == 0]
    timed = [_seconds(at, kind, ActivationPolicy()) for kind in kinds]
    forward = sum(timed[place][1] for place in mine)
    behind = OverlapWindow(forward=forward, backward=sum(timed[place][0] for place in mine) - forward)
    more, together = least_seconds(job, 0, at.rates, behind)
    return max(_working(at, job) + more, together) + job.stack.speed.step_seconds


def stages_of(at: LayerModel, job: Job) -> Stages:
    """The stages of a job; a model without a pipeline is one."""
    plan = job.plan
    send = 0.0
    if plan.pp > 1:  # hidden states, or their gradient; where tp scatters them, each rank sends its part
        size = at.tokens * at.arch.hidden * at.rates.width / (plan.tp if at.speed.scattered_sends else 1)
        send = collective_seconds("send", size, axis_span("pp", plan, job.cluster), job.cluster)
    return _timed(at, stage_lengths(job.arch, plan), placement(plan), activation_policy(job), send)


@lru_cache(maxsize=8192)
def _timed(
    at: LayerModel, lengths: tuple[int, ...], ranks: tuple[int, ...], policy: ActivationPolicy, send: float
) -> Stages:
    """Most stages are alike, so each kind is timed once."""
    kinds, places = kinds_of(at.arch, lengths)
    timed = [stage_passes(at, kind, policy) + ends(at, kind.first, kind.last) for kind in kinds]
    if at.arch.compared:  # the reference goes forward as well
        timed = [each._replace(forward=each.forward * 2) for each in timed]
    seconds = [passes.seconds for passes in timed]
    return Stages(
        passes=tuple([timed[place] for place in places]),
        seconds=tuple([seconds[place] for place in places]),
        send=send,
        ranks=ranks,
    )


@lru_cache(maxsize=1024)
def kinds_of(arch: Arch, lengths: tuple[int, ...]) -> tuple[tuple[StageKind, ...], tuple[int, ...]]:
    """The kinds of stage that there are, and for every stage the place of its kind among them."""
    found: dict[StageKind, int] = {}
    places, start, last = [], 0, len(lengths) - 1
    for stage, length in enumerate(lengths):
        moe = sum(map(arch.is_moe, range(start, start + length))) if arch.experts else 0
        still = tuple(arch.is_moe(layer) for layer in range(start, min(start + length, still_blocks(arch))))
        reached = start + len(still)
        partly = reached if len(still) < length and grad_flow(arch)[reached] != EVERYWHERE else None
        kind = StageKind(length - moe, moe, stage == 0, stage == last, still, partly)
        places.append(found.setdefault(kind, len(found)))
        start += length
    return tuple(found), tuple(places)


@lru_cache(maxsize=8192)
def stage_passes(at: LayerModel, kind: StageKind, policy: ActivationPolicy) -> PassTimes:
    """The blocks of a stage; of those that are recomputed, each kind has its fair share."""
    recomputed, operations = policy.share(kind.dense + kind.moe, len(kind.still)), policy.by_operation
    total = PassTimes()
    for moe, every in ((False, kind.dense), (True, kind.moe)):
        if still := kind.still.count(moe):
            total += PassTimes(forward=block(at, moe).forward * still)
        if not (count := every - still):
            continue
        if policy.saves_plainly:  # what is recomputed is all that blocks differ in
            repeated = recomputed_terms(at, moe, operations) * recomputed
            total += block(at, moe)._replace(recompute=repeated) * count
        else:
            once, again = _quantized_or_offloaded(at, moe, policy.quant, policy.offload, operations)
            total += once * (count * (1 - recomputed))
            total += again * (count * recomputed)
    if kind.partly is not None:
        total = total._replace(input=total.input + unreached(at, kind.partly) * -1)
    return total


@lru_cache(maxsize=8192)
def _quantized_or_offloaded(
    at: LayerModel, moe: bool, quant: Quant, offload: bool, operations: bool
) -> tuple[PassTimes, PassTimes]:
    """One block that quantizes or offloads what it saves: recomputing nothing, and costly operations apart or all."""
    one, policy = block(at, moe), ActivationPolicy(quant=quant, offload=offload)
    again = one._replace(recompute=recomputed_terms(at, moe, operations))
    return with_policy(at, policy, moe, one), with_policy(at, policy, moe, again)


def pipeline_seconds(stages: Stages, job: Job) -> float:
    """From the first forward to the last backward."""
    plan = job.plan
    if plan.pp == 1:
        return stages.seconds[0] * plan.grad_accum
    blocked, travel = (stages.send, 0.0) if job.stack.speed.blocking_sends else (0.0, stages.send)
    times = 2 if job.arch.compared else 1
    forwards = [each.forward.seconds / times for each in stages.passes]
    cost = StageCost(
        forward_seconds=tuple(each + blocked for each in forwards),
        input_seconds=tuple(each.recompute.seconds + each.input.seconds + blocked for each in stages.passes),
        weight_seconds=tuple(each.weight.seconds for each in stages.passes),
        activation=(0.0,) * len(stages.passes),
    )
    played = makespan(plan.schedule, plan.pp, plan.grad_accum, cost, travel)
    if job.arch.compared:
        seconds = [each - forward for each, forward in zip(stages.seconds, forwards, strict=True)]
        ahead = relay_seconds([each + stages.send for each in forwards], stages.ranks, plan.grad_accum)
        return max(played, least_pipeline(seconds, forwards, plan)) + ahead
    return max(played, least_pipeline(stages.seconds, forwards, plan))


def relay_seconds(forwards: Sequence[float], ranks: Sequence[int], microbatches: int) -> float:
    """Of the reference of DPO through the stages: each rank takes one microbatch through all of its own in turn."""
    free, ends = dict.fromkeys(ranks, 0.0), list[float]()
    for _ in range(min(microbatches, RELAYED)):
        at = 0.0
        for seconds, rank in zip(forwards, ranks, strict=True):
            at = free[rank] = max(at, free[rank]) + seconds
        ends.append(at)
    return ends[-1] + (microbatches - len(ends)) * (ends[-1] - ends[-2] if len(ends) > 1 else 0.0)


def least_pipeline(seconds: Sequence[float], forwards: Sequence[float], plan: Plan) -> float:
    """The busiest rank's work, and what must come before the first of it and after the last; from stages' seconds."""
    return _longest(_starts(seconds, forwards, placement(plan), plan.schedule in DRAINED), plan)


def _longest(starts: tuple[tuple[float, float], ...], plan: Plan) -> float:
    return max([before + busy * plan.grad_accum for before, busy in starts])


def _starts(
    seconds: Sequence[float], forwards: Sequence[float], ranks: Sequence[int], drained: bool
) -> tuple[tuple[float, float], ...]:
    """For each rank what must come before its first work, and after its last, and one microbatch's work."""
    pp = max(ranks) + 1
    busy = [0.0] * pp
    for each, rank in zip(seconds, ranks, strict=True):
        busy[rank] += each
    before = accumulate((seconds if drained else forwards)[:pp], initial=0.0)  # the first stage that each rank holds
    return tuple([(start, busy[rank]) for start, rank in zip(before, ranks[:pp], strict=False)])


def _weights(job: Job, known: StepTimeline) -> WeightSeconds:
    """The pipeline's end that waits longer: the middle has neither embedding nor projection."""
    found = []
    for rank in {0, job.plan.pp - 1}:
        mine = known.stages.of(rank)
        behind = OverlapWindow(
            forward=sum(each.forward.seconds - each.forward.link for each in mine),
            backward=sum(each.seconds - each.forward.seconds - each.input.link for each in mine),
        )
        found.append(weight_seconds(job, rank, known.at.rates, behind))
    return max(found, key=lambda each: each.seconds)


def _waterfall(job: Job, known: StepTimeline, working: PassTimes) -> Iterator[TimeShare]:
    """Where the seconds go, from the data sheet down; the mean rank's, so that the idle ones are the bubble."""
    at, pipeline, weights = known.at, known.pipeline, _weights(job, known)
    ideal = step_flops(job.arch, job.sequence, job.plan.batch, job.span) / job.plan.world / at.rates.peak
    matmul_ideal = ideal * (1 - attention_share(job.arch, job.span or job.sequence))
    once = working.forward + working.input + working.weight
    idle = pipeline - working.seconds
    # Sends on the critical path: of the first microbatch down and the last one up; in between one each way blocks.
    blocking = (2 if job.stack.speed.blocking_sends else 1) * job.plan.grad_accum
    sends = known.stages.send * (2 * (job.plan.pp - 1) + blocking) if job.plan.pp > 1 else 0.0
    messages = min(max(idle, 0.0), sends)
    reached = f"matmuls reach {matmul_ideal / once.matmuls:.0%} of peak at these shapes" if once.matmuls > 0 else ""
    whys = {
        "ideal": (ideal, "the model's operations at the data sheet's peak"),
        "matmul": (once.matmuls - matmul_ideal, reached or "matmuls at peak"),
        "attention": (
            once.attention - (ideal - matmul_ideal),
            "attention runs below peak; negative where a causal kernel skips more than that costs",
        ),
        "elementwise": (once.elementwise, "norms, activations, residual adds, losses: memory traffic between matmuls"),
        "launch": (once.launch, "the device waits for the host to launch small kernels"),
        "recompute": (working.recompute.seconds, "forwards recomputed in the backward"),
        "host_transfer": (once.link, "offloaded activations to the host and back, beyond what a block's compute hides"),
        "tp": (once.tp, "hidden states all-gathered and reduce-scattered over tp"),
        "cp": (once.cp, "keys and values, or heads, exchanged over cp"),
        "ep": (once.ep, "tokens sent to their experts and back (all-to-all)"),
        "pp": (messages, "sends between stages that no compute hides"),
        "bubble": (idle - messages, "pipeline ranks idle before their first and after their last microbatch"),
        "stragglers": (pipeline * known.slower, "everyone waits for the slowest accelerator"),
        "shard": (
            weights.shard,
            "sharded weights all-gathered and gradients reduce-scattered, beyond what compute hides",
        ),
        "replicate": (weights.replicate, "gradients all-reduced over replicas, beyond what the backward hides"),
        "outer": (
            weights.outer,
            "replicas that sync rarely, or push to servers: the exchange and its update, a step's share",
        ),
        "tied": (weights.tied, "the two copies of a tied embedding all-reduce their gradients"),
        "optimizer": (weights.optimizer, "the update reads and writes every weight and its optimizer states"),
        "offload": (weights.offload, "the step waits for states that are offloaded, or updated on the host"),
        "host_overhead": (job.stack.speed.step_seconds, "data, logging and launches once per step"),
    }
    return (TimeShare(name=name, seconds=spent, why=why) for name, (spent, why) in whys.items() if spent)


def _done(job: Job) -> float:
    """Operations of a step with those that are recomputed, which stacks choose differently under one name."""
    plan, batch = job.plan, job.plan.batch
    policy = activation_policy(job)
    if not policy.by_operation:
        return recomputed_flops(job.arch, plan, job.sequence, batch, policy, job.span)
    attention = attention_share(job.arch, job.span or job.sequence)
    recomputed = {"operations": 0.0, "attention": attention, "blocks": SELECTED}[policy.selective]
    return step_flops(job.arch, job.sequence, batch, job.span) * (1 + recomputed / TRAINING)


def _working(at: LayerModel, job: Job) -> float:
    plan, lengths = job.plan, stage_lengths(job.arch, job.plan)
    starts = _starts_of(at, lengths, placement(plan), plan.schedule in DRAINED, activation_policy(job))
    return _longest(starts, plan) * (1 + slowest(plan.world, at.rates))


@lru_cache(maxsize=16384)
def _starts_of(
    at: LayerModel, lengths: tuple[int, ...], ranks: tuple[int, ...], drained: bool, policy: ActivationPolicy
) -> tuple[tuple[float, float], ...]:
    """What stages' seconds come to on each rank, found once for every number of microbatches."""
    kinds, places = kinds_of(at.arch, lengths)
    timed = [_seconds(at, kind, policy) for kind in kinds]
    seconds, forwards = [timed[place][0] for place in places], [timed[place][1] for place in places]
    return _starts(seconds, forwards, ranks, drained)


@lru_cache(maxsize=16384)
def _seconds(at: LayerModel, kind: StageKind, policy: ActivationPolicy) -> tuple[float, float]:
    """One microbatch through a stage, and its forward alone."""
    outside = ends(at, kind.first, kind.last)
    whole, forward = outside.seconds, outside.forward.seconds
    share = policy.share(kind.dense + kind.moe, len(kind.still))
    for moe, every in ((False, kind.dense), (True, kind.moe)):
        if still := kind.still.count(moe):
            going = still * block(at, moe).forward.seconds
            whole, forward = whole + going, forward + going
        if not (count := every - still):
            continue
        if policy.saves_plainly:
            once, going, recomputed = _block_seconds(at, moe, policy.by_operation)
            whole += count * (once + recomputed * share)
            forward += count * going
        else:
            once, again = _quantized_or_offloaded(at, moe, policy.quant, policy.offload, policy.by_operation)
            whole += count * (once.seconds * (1 - share) + again.seconds * share)
            forward += count * (once.forward.seconds * (1 - share) + again.forward.seconds * share)
    whole -= unreached(at, kind.partly).seconds if kind.partly is not None else 0.0
    return (whole + forward, 2 * forward) if at.arch.compared else (whole, forward)


@lru_cache(maxsize=16384)
def _block_seconds(at: LayerModel, moe: bool, operations: bool) -> tuple[float, float, float]:
    """A block without recomputation, its forward alone, and what recomputation adds."""
    one = block(at, moe)
    return one.seconds, one.forward.seconds, recomputed_terms(at, moe, operations).seconds
