"""Questions that are answered by asking for plans several times: how many GPUs, how large, how long, what if."""

import math
from collections.abc import Iterator

import msgspec

from meshwright.search.found import Answer, Found
from meshwright.search.order import search
from meshwright.search.question import Question, variants
from meshwright.search.room import smallest_world

MOST_GPUS = 131_072  # beyond, no number is looked for
HOUR = 3600.0


class Duration(msgspec.Struct, frozen=True, kw_only=True):
    """How long some tokens take and what they cost."""

    tokens: float
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    gpu_hours: float
    dollars: float | None  # None: no price was given


def with_gpus(question: Question, gpus: int) -> Question:
    """The same question for another number of the same GPUs."""
    machines = msgspec.structs.replace(question.cluster, gpus=gpus, name=f"{gpus}x{question.cluster.gpu.name}")
    return msgspec.structs.replace(question, cluster=machines)


def gpu_counts(question: Question) -> Iterator[int]:
    """Numbers of GPUs that one can have: parts of a node that divide it, then whole nodes, ever coarser."""
    domain = question.cluster.domain
    yield from (part for part in range(1, domain) if domain % part == 0)
    nodes = 1
    while nodes * domain <= MOST_GPUS:
        yield nodes * domain
        nodes += max(1, 2 ** (nodes.bit_length() - 4))  # steps of an eighth at most: an answer is off by no more


def gpus_needed(question: Question, top: int = 5) -> tuple[int, Answer] | None:
    """The least number of these GPUs on which some plan fits, and the best plans there; None: none does."""
    least = min(smallest_world(variant) for variant in variants(with_gpus(question, 1)))
    for gpus in gpu_counts(question):
        if gpus >= least and (answer := search(with_gpus(question, gpus), top)).found:
            return gpus, answer
    return None


def duration(found: Found, tokens: float, dollars_per_gpu_hour: float | None = None) -> Duration:
    """How long so many tokens take under a plan, interruptions not counted."""
    steps = math.ceil(tokens / (found.plan.batch * found.job.sequence))
    gpu_hours = steps * found.price.seconds * found.plan.world / HOUR
    return Duration(
        tokens=tokens,
        steps=steps,
        seconds=steps * found.price.seconds,
        low_seconds=steps * found.price.low_seconds,
        high_seconds=steps * found.price.high_seconds,
        gpu_hours=gpu_hours,
        dollars=None if dollars_per_gpu_hour is None else gpu_hours * dollars_per_gpu_hour,
    )
