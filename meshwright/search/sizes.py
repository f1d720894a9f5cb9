"""What some machines can train, and what it takes: the largest model, microbatch or sequence, and the fewest GPUs.

Also how long some tokens take under a plan, and the model layer by layer.
"""

import math
from collections.abc import Callable, Iterator

import msgspec

from meshwright.config import presets
from meshwright.cost.activations import block_saved, microbatch_shape
from meshwright.search.best_first import Candidate, SearchResult, search
from meshwright.search.bounds import groups, smallest_world, widths
from meshwright.search.question import Question, variants
from meshwright.search.space import empty, refuse_empty, suits
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import DESCRIPTIONS
from meshwright.spec.params import Param, as_stored, count, params
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

SHORTEST = 1024  # a sequence; shorter ones are not looked for

MOST = 2**40

MOST_GPUS = 131_072  # beyond, no number is looked for

HOUR = 3600.0

LONGEST_STEP = HOUR  # what takes longer is not offered as the largest that one can train: nobody waits for a second one


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest of something that fits, the plan that does it, and the next larger one, which does not."""

    value: int | str
    found: Candidate
    next_value: int | str | None = None  # None: nothing larger was tried
    end: str = ""  # why not, where there is a reason


class Duration(msgspec.Struct, frozen=True, kw_only=True):
    """How long some tokens take and what they cost."""

    tokens: float
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    gpu_hours: float
    dollars: float | None  # None: no price was given


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, or several alike."""

    name: str
    count: int = 1
    parameters: int  # of one
    flops_per_token: float  # of one's forward
    state_bytes: float  # weights, gradients and moments of one, on one rank
    activation_bytes: float  # saved by one for one sequence, without recomputation


def largest_model(question: Question) -> Largest | None:
    """The largest known model that can be trained on this cluster."""
    larger, slow = None, None
    for name in sorted(presets.preset_names(), key=lambda name: (-count(presets.preset(name)), name)):
        arch = msgspec.structs.replace(presets.preset(name), tuning=question.arch.tuning)
        if arch.positions == "learned" and arch.context < question.sequence:
            continue
        asked = msgspec.structs.replace(question, arch=arch)
        if not suits(asked):
            continue
        if _fewest_for_states(asked) > question.cluster.gpus:
            larger = name if any(_has_plans(variant) for variant in variants(asked)) else larger
            continue
        answer = search(asked, top=1)
        if answer.found:
            found = answer.found[0]
            if found.price.seconds <= LONGEST_STEP:
                return Largest(value=name, found=found, next_value=larger, end=_too_slow(slow) if slow else "")
            slow, larger = Largest(value=name, found=found, next_value=larger), name
        elif answer.counts.legal:  # else what is fixed does not suit this model, whatever its size
            larger = name
    return slow and msgspec.structs.replace(slow, end=_too_slow(slow))


def largest_microbatch(question: Question) -> Largest | None:
    """The most sequences in one forward pass of one rank, every GPU reading its own unless axes are fixed."""
    alone = {"tp": 1, "pp": 1, "cp": 1, "grad_accum": 1} | question.fixed
    axes = math.prod(alone[axis] for axis in ("tp", "pp", "cp"))
    if axes < 1 or question.cluster.gpus % axes:
        raise InputError(empty(question))
    sequences = question.cluster.gpus // axes * alone["grad_accum"]
    vary = tuple(each for each in question.vary if each != "batch")  # which follows from the microbatch

    def asked(microbatch: int) -> Question:
        fixed = alone | {"microbatch": microbatch}
        return msgspec.structs.replace(question, batch=microbatch * sequences, fixed=fixed, vary=vary)

    refuse_empty(asked(1))
    return _largest(lambda microbatch: _best(asked(microbatch)), start=1, grain=1, share=0.0)


def largest_sequence(question: Question) -> Largest | None:
    """The longest sequence that some plan can train on, to an eighth, or as long as the table of its positions."""
    has_table = question.arch.positions == "learned"
    most = question.arch.context if has_table else MOST

    def attempt(sequence: int) -> Candidate | None:
        return _best(msgspec.structs.replace(question, sequence=sequence))

    found = _largest(attempt, start=min(SHORTEST, most), grain=SHORTEST, share=1 / 8, most=most)
    if found is None or found.value != most or not has_table or found.end:
        return found
    return msgspec.structs.replace(found, end="the table of learned positions ends there")


def gpus_needed(question: Question, top: int = 5) -> tuple[int, SearchResult] | None:
    """The least number of these GPUs on which some plan fits, and the best plans there; None: none does."""
    least = _fewest_for_states(question)
    for gpus in gpu_counts(question):
        if gpus >= least and (answer := search(with_gpus(question, gpus), top)).found:
            return gpus, answer
    return None


def _fewest_for_states(question: Question) -> float:
    """GPUs below which nothing fits, since the states alone do not: known without a search."""
    widest = question.with_unknown_host("too") if question.unknown_host == "last" else question
    return min(smallest_world(variant) for variant in variants(with_gpus(widest, 1)))


def _has_plans(question: Question) -> bool:
    """Whether what is fixed suits a model, however large it is."""
    return bool(groups(question))


def gpu_counts(question: Question) -> Iterator[int]:
    """Numbers of GPUs that one can have: parts of a machine that divide it, then whole machines, ever coarser.

    Several machines behind one switch are had one by one; beyond, whole domains.
    """
    node, domain = question.cluster.per_node, question.cluster.domain
    yield from (part for part in range(1, node) if node % part == 0)
    yield from range(node, domain, node)
    domains = 1
    while domains * domain <= MOST_GPUS:
        yield domains * domain
        domains += max(1, 2 ** (domains.bit_length() - 4))  # steps of an eighth at most: an answer is off by no more


def with_gpus(question: Question, gpus: int) -> Question:
    """The same question for another number of the same GPUs."""
    machines = msgspec.structs.replace(question.cluster, gpus=gpus, name=f"{gpus}x{question.cluster.gpu.name}")
    return msgspec.structs.replace(question, cluster=machines)


def duration(found: Candidate, tokens: float, dollars_per_gpu_hour: float | None = None) -> Duration:
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


def layers(question: Question) -> tuple[Layer, ...]:
    """The model from its embedding to its output, layers alike in one line."""
    arch, (master_bytes, param_bytes) = question.arch, widths(question)
    spec = DESCRIPTIONS[question.optimizer]
    work = microbatch_shape(question.job(Plan(microbatch=1, precision=question.precision)))

    def layer(name: str, mine: list[Param], flops: float, activation_bytes: float, alike: int = 1) -> Layer:
        parameters, kept = sum(param.numel for param in mine), [param for param in mine if param.trained]
        moved = sum(param.numel for param in kept)
        frozen = sum(each.numel * (each.item or param_bytes) for each in as_stored(mine) if not each.trained)
        return Layer(
            name=name,
            count=alike,
            parameters=parameters,
            flops_per_token=flops,
            state_bytes=2 * master_bytes * moved + frozen + spec.total_bytes(kept, master_bytes),
            activation_bytes=activation_bytes,
        )

    def outside(*begins: str) -> list[Param]:
        return [param for param in params(arch) if param.layer < 0 and param.name.startswith(begins)]

    found = [layer("embedding", outside("embed.", "positions."), 0.0, 0.0)]
    for moe in (False, True):
        alike = [number for number in range(arch.layers) if arch.is_moe(number) is moe]
        if alike:
            mine = [param for param in params(arch) if param.layer == alike[0]]
            flops = sum(_flops(param, arch) for param in mine) + 2 * (arch.q_width + arch.out_width) * question.sequence
            found.append(layer("MoE block" if moe else "block", mine, flops, block_saved(work, moe), len(alike)))
    logits = question.sequence * arch.vocab * master_bytes
    flops = 2.0 * arch.vocab * arch.hidden  # tied or not, it is multiplied
    return (*found, layer("output", outside("norm.", "head."), flops, logits))


def _best(question: Question) -> Candidate | None:
    return next(iter(search(question, top=1).found), None)


def _largest(
    attempt: Callable[[int], Candidate | None], start: int, grain: int, share: float, most: int = MOST
) -> Largest | None:
    """The largest number that an attempt survives within LONGEST_STEP: doubled until one fails, then halved in between.

    It is found to `grain`, and to a `share` of itself where that is more. The first may take as long as it does.
    """
    best, low, high, slow = attempt(start), start, 0, None
    if best is None:
        return None
    while (low < most and not high) or high - low > max(grain, share * low):
        tried = min(2 * low, most) if not high else low + max((high - low) // 2 // grain, 1) * grain
        found = attempt(tried)
        if found is not None and found.price.seconds <= LONGEST_STEP:
            best, low = found, tried
        else:
            high, slow = tried, found and Largest(value=tried, found=found)
    slow = Largest(value=low, found=best) if best.price.seconds > LONGEST_STEP else slow
    return Largest(value=low, found=best, next_value=high or None, end=_too_slow(slow) if slow else "")


def _too_slow(found: Largest) -> str:
    """Why something that fits is not offered."""
    hours = found.found.price.seconds / HOUR
    return f"{found.value} fits and takes {hours:,.1f} hours a step: more than one is not offered (try a smaller batch)"


def _flops(param: Param, arch: Arch) -> float:
    """FLOPs of one token: a matmul for a matrix, the chosen experts' alone, nothing to speak of for a vector."""
    if not param.is_matrix:
        return 0.0
    return 2.0 * param.numel * (arch.top_k / arch.experts if param.expert else 1)
