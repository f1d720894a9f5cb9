"""Seconds of one step of a plan, with an interval, and where they go: a waterfall from the data sheet to what is left.

docs/time.md has every term in words.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from meshwright.cost.flops import (
    TRAINING,
    attention_flops_per_token,
    forward_flops_per_token,
    hardware_flops,
    step_flops,
    utilization,
)
from meshwright.cost.job import Job
from meshwright.cost.kernels import slowest
from meshwright.cost.time_layer import SELECTED, Bench, bench
from meshwright.cost.time_stages import Stages, pipeline_seconds, stages_of
from meshwright.cost.time_terms import Passes
from meshwright.cost.time_weights import Behind, WeightSeconds, weight_seconds
from meshwright.spec.arch import Arch
from meshwright.spec.efficiency import Efficiency, efficiency_of
from meshwright.spec.recompute import by_operation

WIDER = 0.1  # by which each doubling of the domains widens the interval, as a share
GUESSES = ("b200", "v100", "generic")  # entries of the catalogue that no measurement stands behind
GUESSED = 1.5  # the interval of such accelerators ÷ that of others


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


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """A step's forwards and backwards: alike in plans that differ only in replicate, shard and zero."""

    at: Bench
    stages: Stages
    pipeline: float  # seconds from the first forward to the last backward
    slower: float  # share of them by which the slowest accelerator is behind the mean

    @property
    def working(self) -> float:
        """With the wait for the slowest."""
        return self.pipeline + self.pipeline * self.slower


def price(job: Job, efficiency: Efficiency | None = None) -> Price:
    """Seconds of a step. `efficiency` replaces the cluster's own and the catalogue's, as `calibrated` gives it."""
    return price_in(job, course(job, efficiency))


def course(job: Job, efficiency: Efficiency | None = None) -> Course:
    """The forwards and backwards of a step, played on a clock."""
    at = bench(job, efficiency)
    stages = stages_of(at, job)
    return Course(
        at=at, stages=stages, pipeline=pipeline_seconds(stages, job), slower=slowest(job.plan.world, at.rates)
    )


def seconds_in(job: Job, known: Course) -> float:
    """Seconds of a step whose forwards and backwards are known."""
    return known.working + _weights(job, known).seconds + job.stack.speed.step_seconds


def price_in(job: Job, known: Course) -> Price:
    """The price of a step whose forwards and backwards are known."""
    plan, at = job.plan, known.at
    working = _mean(known.stages, plan.pp) * plan.accumulate
    seconds = seconds_in(job, known)
    low, high = _interval(job, seconds, working)
    ideal = step_flops(job.arch, job.sequence, plan.batch) / plan.world
    return Price(
        seconds=seconds,
        low_seconds=low,
        high_seconds=high,
        tokens_per_second_per_gpu=plan.batch * job.sequence / seconds / plan.world,
        mfu=utilization(ideal, seconds, at.rates.peak),
        hfu=utilization(_done(job) / plan.world, seconds, at.rates.peak),
        waterfall=tuple(_waterfall(job, known, working)),
    )


def _mean(stages: Stages, pp: int) -> Passes:
    """The work of a microbatch on a rank, on average."""
    total = Passes()
    for each in stages.passes:
        total += each
    return total * (1 / pp)


def _weights(job: Job, known: Course) -> WeightSeconds:
    """Of the pipeline's two ends the one that waits longer: the middle has neither embedding nor projection."""
    found = []
    for rank in {0, job.plan.pp - 1}:
        mine = known.stages.of(rank)
        behind = Behind(
            forward=sum(each.forward.seconds - each.forward.link for each in mine),
            backward=sum(each.seconds - each.forward.seconds - each.input.link for each in mine),
        )
        found.append(weight_seconds(job, rank, known.at.rates, behind))
    return max(found, key=lambda each: each.seconds)


@lru_cache(maxsize=1024)
def _products_share(arch: Arch, sequence: int) -> float:
    """Of the model's operations, those of products with weights; attention's are the rest."""
    return 1 - attention_flops_per_token(arch, sequence) / forward_flops_per_token(arch, sequence)


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


def _waterfall(job: Job, known: Course, working: Passes) -> Iterator[Share]:
    """Where the seconds go, from the data sheet down; the mean rank's, so that the idle ones are the bubble."""
    at, pipeline, weights = known.at, known.pipeline, _weights(job, known)
    ideal = step_flops(job.arch, job.sequence, job.plan.batch) / job.plan.world / at.rates.peak
    product_ideal = ideal * _products_share(job.arch, job.sequence)
    once = working.forward + working.input + working.weight
    idle = pipeline - working.seconds
    messages = min(max(idle, 0.0), _messages(job, known.stages))
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
        "link": (once.link, "activations go to the host and come back, beyond what a block's arithmetic hides"),
        "tp": (once.tp, "hidden states gathered and summed over tp"),
        "cp": (once.cp, "keys and values, or heads, exchanged over cp"),
        "ep": (once.ep, "rows sent to their experts and back"),
        "pp": (messages, "messages between stages that nobody can work behind"),
        "bubble": (idle - messages, "ranks of the pipeline wait for their first and after their last microbatch"),
        "stragglers": (pipeline * known.slower, "everyone waits for the slowest accelerator"),
        "shard": (weights.shard, "sharded weights gathered and gradients scattered, beyond what arithmetic hides"),
        "replicate": (weights.replicate, "gradients summed over copies, beyond what the backward hides"),
        "tied": (weights.tied, "the two copies of a tied embedding add up their gradients"),
        "optimizer": (weights.optimizer, "the update reads and writes every weight and its states"),
        "offload": (weights.offload, "the step waits for states that live or are updated elsewhere"),
        "host": (job.stack.speed.step_seconds, "data, logging and launches once a step"),
    }
    return (Share(name=name, seconds=spent, why=why) for name, (spent, why) in whys.items() if spent)


def _messages(job: Job, stages: Stages) -> float:
    """Sends on the critical path: of the first microbatch down and the last one up; in between one each way blocks."""
    between = 2 if job.stack.speed.blocking_sends else 1
    return stages.send * (2 * (job.plan.pp - 1) + between * job.plan.accumulate) if job.plan.pp > 1 else 0.0


def _interval(job: Job, seconds: float, working: Passes) -> tuple[float, float]:
    """What nine of ten fitted runs lie in; wider where less is known.

    That is over many domains, where the host decides, and on accelerators of which nothing was measured or fitted.
    """
    domains = max(job.plan.world / job.cluster.domain, 1.0)
    late = (working.forward.launch + working.input.launch) / seconds
    guessed = (job.cluster.efficiency or efficiency_of(job.cluster.gpu)).name in GUESSES
    width = job.stack.speed.spread * (1 + WIDER * math.log2(domains)) * (1 + late) * (GUESSED if guessed else 1)
    return seconds / (1 + width), seconds * (1 + width)
