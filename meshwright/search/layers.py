"""A model layer by layer: its weights, its operations, and the bytes both leave in memory."""

from collections.abc import Iterator

import msgspec

from meshwright.cost.memory_kept import block_kept
from meshwright.cost.memory_widths import MOMENTS
from meshwright.cost.memory_work import work_of
from meshwright.search.question import Question
from meshwright.search.room import widths
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, params
from meshwright.spec.plan import Plan


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, or several alike."""

    name: str
    count: int = 1
    parameters: int  # of one
    flops_per_token: float  # of one's forward
    state_bytes: float  # weights, gradients and moments of one, on one rank
    activation_bytes: float  # that one keeps of one sequence, without recomputation


def layers(question: Question) -> tuple[Layer, ...]:
    """The model from its embedding to its output, layers alike in one line."""
    return (*_outside(question, "embedding", ("embed.", "positions.")), *_blocks(question), *_output(question))


def _blocks(question: Question) -> Iterator[Layer]:
    arch = question.arch
    for mixture in (False, True):
        alike = [layer for layer in range(arch.layers) if arch.is_mixture(layer) is mixture]
        if not alike:
            continue
        mine = [param for param in params(arch) if param.layer == alike[0]]
        scores = 2 * 2 * arch.q_width * question.sequence
        plan = Plan(microbatch=1, precision=question.precision)
        yield Layer(
            name="block with experts" if mixture else "block",
            count=len(alike),
            parameters=sum(param.numel for param in mine),
            flops_per_token=sum(_flops(param, arch) for param in mine) + scores,
            state_bytes=_states(question, mine),
            activation_bytes=block_kept(work_of(question.job(plan)), mixture),
        )


def _output(question: Question) -> Iterator[Layer]:
    arch = question.arch
    for layer in _outside(question, "output", ("norm.", "head.")):
        logits = question.sequence * arch.vocab * widths(question)[0]
        flops = 2.0 * arch.vocab * arch.hidden  # tied or not, it is multiplied
        yield msgspec.structs.replace(layer, flops_per_token=flops, activation_bytes=logits)


def _outside(question: Question, name: str, begins: tuple[str, ...]) -> Iterator[Layer]:
    mine = [param for param in params(question.arch) if param.layer < 0 and param.name.startswith(begins)]
    yield Layer(
        name=name,
        parameters=sum(param.numel for param in mine),
        flops_per_token=0.0,
        state_bytes=_states(question, mine),
        activation_bytes=0.0,
    )


def _flops(param: Param, arch: Arch) -> float:
    """Of one token: a product for a matrix, of the experts only the chosen ones', nothing to speak of for a vector."""
    if len(param.shape) < 2:
        return 0.0
    return 2.0 * param.numel * (arch.top_k / arch.experts if param.expert else 1)


def _states(question: Question, mine: list[Param]) -> float:
    return (1 + 1 + MOMENTS) * widths(question)[0] * sum(param.numel for param in mine)
