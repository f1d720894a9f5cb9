"""Questions that are answered by asking for plans several times: how many GPUs, how large, how long, what if."""

import math
from collections.abc import Callable, Iterator

import msgspec

from meshwright.search.found import Answer, Found
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.search.room import smallest_world
from meshwright.spec import zoo
from meshwright.spec.params import count

MOST_GPUS = 131_072  # no cluster of one kind is larger
HOUR = 3600.0


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest of something that fits, the plan that does it, and the next larger one, which does not."""

    value: int | str
    found: Found
    next_value: int | str | None = None  # None: nothing larger was tried


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


def gpus_needed(question: Question) -> tuple[int, Answer] | None:
    """The least number of these GPUs on which some plan fits, and the best plans there; None: none does."""
    least = smallest_world(question)
    for gpus in gpu_counts(question):
        if gpus >= least and (answer := search(with_gpus(question, gpus))).found:
            return gpus, answer
    return None


def largest_model(question: Question) -> Largest | None:
    """Of the zoo, the largest model that can be trained on these machines."""
    larger = None
    for name in sorted(zoo.preset_names(), key=lambda name: (-count(zoo.preset(name)), name)):
        arch = zoo.preset(name)
        if arch.positions == "learned" and arch.context < question.sequence:
            continue
        answer = search(msgspec.structs.replace(question, arch=arch), top=1)
        if answer.found:
            return Largest(value=name, found=answer.found[0], next_value=larger)
        larger = name
    return None


def largest_microbatch(question: Question) -> Largest | None:
    """The most sequences in one forward pass of one rank, every GPU reading its own unless axes are fixed."""
    alone = {"tp": 1, "pp": 1, "cp": 1} | question.fixed

    def attempt(microbatch: int) -> Found | None:
        fixed = alone | {"microbatch": microbatch, "accumulate": 1}
        data = question.cluster.gpus // math.prod(fixed[axis] for axis in ("tp", "pp", "cp"))
        asked = msgspec.structs.replace(question, batch=microbatch * data, fixed=fixed)
        return next(iter(search(asked, top=1).found), None)

    return _largest(attempt, start=1, grain=1)


def largest_sequence(question: Question) -> Largest | None:
    """The longest sequence that some plan can train on, to an eighth."""

    def attempt(sequence: int) -> Found | None:
        if question.arch.positions == "learned" and sequence > question.arch.context:
            return None
        return next(iter(search(msgspec.structs.replace(question, sequence=sequence), top=1).found), None)

    return _largest(attempt, start=1024, grain=1024)


def _largest(attempt: Callable[[int], Found | None], start: int, grain: int) -> Largest | None:
    """The largest number that an attempt survives: doubled until one fails, then halved in between."""
    best = attempt(start)
    if best is None:
        return None
    low, high = start, 2 * start
    while high < 2**40 and (found := attempt(high)) is not None:
        best, low, high = found, high, 2 * high
    while high - low > max(grain, low // 8):
        middle = (low + high) // 2 // grain * grain
        found = attempt(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return Largest(value=low, found=best, next_value=high)


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
