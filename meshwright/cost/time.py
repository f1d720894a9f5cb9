"""Seconds of one step of a plan, with an interval, and where they go: a waterfall from the data sheet to what is left.

docs/time.md has every term in words.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from meshwright.cost.flops import TRAINING, forward_flops_per_token, hardware_flops, step_flops, utilization
from meshwright.cost.job import Job
from meshwright.cost.kernels import slowest
from meshwright.cost.links import axis_span, collective_seconds
from meshwright.cost.simulate import StageCost, makespan
from meshwright.cost.time_layer import SELECTED, Bench, again, bench, block, ends
from meshwright.cost.time_terms import Passes
from meshwright.cost.time_weights import Behind, WeightSeconds, weight_seconds
from meshwright.cost.traffic_held import placement
from meshwright.spec.arch import Arch
from meshwright.spec.efficiency import Efficiency, efficiency_of
from meshwright.spec.recompute import by_operation, runs

WIDER = 0.1  # by which each doubling of the domains widens the interval, as a share
DRAINED = ("naive", "gpipe", "1f1b", "interleaved", "looped")  # a rank's last action is its first stage's backward


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step's seconds, and why it is spent. One below zero is saved."""

    name: str
    seconds: float
    why: str


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float  # model FLOPs utilization, 0 to 1
    hfu: float  # the same with what is computed anew
    waterfall: tuple[Share, ...]  # adds up to the seconds


class _Stages(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch through each stage of the model, and what a message between them takes."""

    passes: tuple[Passes, ...]
    send: float
    ranks: tuple[int, ...]  # of each stage

    def busy(self, rank: int) -> float:
        return sum(each.seconds for each, on in zip(self.passes, self.ranks, strict=True) if on == rank)


def price(job: Job, efficiency: Efficiency | None = None) -> Price:
    """Seconds of a step. `efficiency` replaces the catalogue's entry for the accelerator, as `calibrated` gives it."""
    at = bench(job, efficiency or efficiency_of(job.cluster.gpu))
    stages = _stages(at, job)
    plan = job.plan
    working = _mean(stages, plan.pp) * plan.accumulate
    pipeline = _pipeline(stages, job)
    weights = _weights(job, at, stages)
    waiting = pipeline * slowest(plan.world, at.rates)
    seconds = pipeline + waiting + weights.seconds + job.stack.speed.step_seconds
    shares = tuple(_waterfall(job, at, working, pipeline, weights, stages))
    low, high = _interval(job, seconds, working)
    ideal = step_flops(job.arch, job.sequence, plan.batch) / plan.world
    return Price(
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        tokens_per_second_per_gpu=plan.batch * job.sequence / seconds / plan.world,
        mfu=utilization(ideal, seconds, at.rates.peak),
        hfu=utilization(_done(job) / plan.world, seconds, at.rates.peak),
        waterfall=shares,
    )


def lower_bound(job: Job, efficiency: Efficiency | None = None) -> float:
    """Seconds that a step takes at least, without playing its schedule: never above its price."""
    at = bench(job, efficiency or efficiency_of(job.cluster.gpu))
    return _least(_stages(at, job), job) * (1 + slowest(job.plan.world, at.rates)) + job.stack.speed.step_seconds


def _least(stages: _Stages, job: Job) -> float:
    """The busiest rank's work, and what must come before the first of it and after the last."""
    plan = job.plan
    least = before = 0.0
    for stage in range(plan.pp):  # the first stage that each rank holds
        least = max(least, before + stages.busy(stages.ranks[stage]) * plan.accumulate)
        passes = stages.passes[stage]
        before += passes.seconds if plan.schedule in DRAINED else passes.forward.seconds
    return least


def _stages(at: Bench, job: Job) -> _Stages:
    plan = job.plan
    lengths = plan.stages if plan.pp > 1 else (job.arch.layers,)
    return _timed_stages(at, lengths, placement(plan), plan.recompute, _send(at, job))


@lru_cache(maxsize=8192)
def _timed_stages(at: Bench, lengths: tuple[int, ...], ranks: tuple[int, ...], recompute: str, send: float) -> _Stages:
    passes, start, last = [], 0, len(lengths) - 1
    for stage, length in enumerate(lengths):
        mixtures = sum(at.arch.is_mixture(layer) for layer in range(start, start + length))
        passes.append(_stage(at, length - mixtures, mixtures, recompute) + ends(at, stage == 0, stage == last))
        start += length
    return _Stages(passes=tuple(passes), send=send, ranks=ranks)


@lru_cache(maxsize=8192)
def _stage(at: Bench, dense: int, mixtures: int, recompute: str) -> Passes:
    """The blocks of a stage; of those that are computed anew, each kind has its fair share."""
    layers = dense + mixtures
    anew = sum(map(len, runs(recompute, layers))) / layers if layers else 0.0
    total = Passes()
    for mixture, count in ((False, dense), (True, mixtures)):
        if count:
            one = block(at, mixture)
            repeated = again(at, mixture, by_operation(recompute)) * anew
            total += Passes(forward=one.forward, again=repeated, input=one.input, weight=one.weight) * count
    return total


def _send(at: Bench, job: Job) -> float:
    """A message between stages: hidden states, or their gradient; where tp scatters it, each rank sends its part."""
    if job.plan.pp == 1:
        return 0.0
    size = at.tokens * at.arch.hidden * at.rates.width / (job.plan.tp if at.speed.scattered_sends else 1)
    return collective_seconds("send", size, axis_span("pp", job.plan, job.cluster), job.cluster)


def _mean(stages: _Stages, pp: int) -> Passes:
    """The work of a microbatch on a rank, on average."""
    total = Passes()
    for each in stages.passes:
        total += each
    return total * (1 / pp)


def _pipeline(stages: _Stages, job: Job) -> float:
    """From the first forward to the last backward."""
    plan = job.plan
    if plan.pp == 1:
        return stages.busy(0) * plan.accumulate
    blocked, travel = (stages.send, 0.0) if job.stack.speed.blocking_sends else (0.0, stages.send)
    cost = StageCost(
        forward_seconds=tuple(each.forward.seconds + blocked for each in stages.passes),
        input_seconds=tuple(each.again.seconds + each.input.seconds + blocked for each in stages.passes),
        weight_seconds=tuple(each.weight.seconds for each in stages.passes),
        activation=(0.0,) * len(stages.passes),
    )
    return max(makespan(plan.schedule, plan.pp, plan.accumulate, cost, travel), _least(stages, job))


def _weights(job: Job, at: Bench, stages: _Stages) -> WeightSeconds:
    """Of the pipeline's two ends the one that waits longer: the middle has neither embedding nor projection."""
    found = []
    for rank in {0, job.plan.pp - 1}:
        mine = [each for each, on in zip(stages.passes, stages.ranks, strict=True) if on == rank]
        behind = Behind(
            forward=sum(each.forward.seconds for each in mine),
            backward=sum(each.seconds - each.forward.seconds for each in mine),
        )
        found.append(weight_seconds(job, rank, at.rates, behind))
    return max(found, key=lambda each: each.seconds)


@lru_cache(maxsize=1024)
def _products_share(arch: Arch, sequence: int) -> float:
    """Of the model's operations, those of products with weights; attention's are the rest."""
    scores = 2 * 2 * arch.layers * arch.q_width * sequence
    return 1 - scores / forward_flops_per_token(arch, sequence)


def _done(job: Job) -> float:
    """Operations of a step with those that are done anew, which stacks choose differently under one name."""
    plan, batch = job.plan, job.plan.batch
    if not by_operation(plan.recompute):
        to_the_end = plan.compile or not job.stack.speed.stops_early  # as what a compiler made is
        counted = msgspec.structs.replace(plan, compile=to_the_end)
        return hardware_flops(job.arch, counted, job.sequence, batch)
    attention = 1 - _products_share(job.arch, job.sequence)
    anew = {"operations": 0.0, "attention": attention, "blocks": SELECTED}[job.stack.speed.selective]
    return step_flops(job.arch, job.sequence, batch) * (1 + anew / TRAINING)


def _waterfall(
    job: Job, at: Bench, working: Passes, pipeline: float, weights: WeightSeconds, stages: _Stages
) -> Iterator[Share]:
    """Where the seconds go, from the data sheet down; the mean rank's, so that the idle ones are the bubble."""
    ideal = step_flops(job.arch, job.sequence, job.plan.batch) / job.plan.world / at.rates.peak
    product_ideal = ideal * _products_share(job.arch, job.sequence)
    once = working.forward + working.input + working.weight
    idle = pipeline - working.seconds
    messages = min(max(idle, 0.0), _messages(job, stages))
    whys = {
        "ideal": (ideal, "the model's operations at the data sheet's peak"),
        "products": (once.products - product_ideal, "matrix products of these shapes stay below the peak"),
        "attention": (
            once.attention - (ideal - product_ideal),
            "attention stays below the peak; below zero, a causal kernel skips more than that costs",
        ),
        "elementwise": (once.elementwise, "norms, activations, sums, losses: memory traffic between products"),
        "launch": (once.launch, "the device waits for the host to start small kernels"),
        "recompute": (working.again.seconds, "forwards that the backward does anew"),
        "tp": (once.tp, "hidden states gathered and summed over tp"),
        "cp": (once.cp, "keys and values, or heads, exchanged over cp"),
        "ep": (once.ep, "rows sent to their experts and back"),
        "pp": (messages, "messages between stages that nobody can work behind"),
        "bubble": (idle - messages, "ranks of the pipeline wait for their first and after their last microbatch"),
        "stragglers": (pipeline * slowest(job.plan.world, at.rates), "everyone waits for the slowest accelerator"),
        "shard": (weights.shard, "sharded weights gathered and gradients scattered, beyond what arithmetic hides"),
        "replicate": (weights.replicate, "gradients summed over copies, beyond what the backward hides"),
        "tied": (weights.tied, "the two copies of a tied embedding add up their gradients"),
        "optimizer": (weights.optimizer, "the update reads and writes every weight and its states"),
        "host": (job.stack.speed.step_seconds, "data, logging and launches once a step"),
    }
    return (Share(name=name, seconds=spent, why=why) for name, (spent, why) in whys.items() if spent)


def _messages(job: Job, stages: _Stages) -> float:
    """Sends on the critical path: of the first microbatch down and the last one up; in between one each way blocks."""
    between = 2 if job.stack.speed.blocking_sends else 1
    return stages.send * (2 * (job.plan.pp - 1) + between * job.plan.accumulate) if job.plan.pp > 1 else 0.0


def _interval(job: Job, seconds: float, working: Passes) -> tuple[float, float]:
    """What nine of ten fitted runs lie in; wider where less is known: over many domains, and where the host decides."""
    domains = max(job.plan.world / job.cluster.domain, 1.0)
    late = (working.forward.launch + working.input.launch) / seconds
    width = job.stack.speed.spread * (1 + WIDER * math.log2(domains)) * (1 + late)
    return seconds / (1 + width), seconds * (1 + width)
