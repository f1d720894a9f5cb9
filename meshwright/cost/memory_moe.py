"""What a mixture of experts keeps for its backward."""

import math

from meshwright.cost.memory_work import Work
from meshwright.cost.traffic_activations import slots

INDEX = 8  # bytes of an index
MASK = 1


def mixture_kept(work: Work, norm: float) -> float:
    """Of one mixture layer, its norm included: the router's numbers, a row for every choice, and each expert's work."""
    return norm + _router(work) + _rows(work) + _shared(work)


def _router(work: Work) -> float:
    """A wide copy of the input where arithmetic is narrow, probabilities, their order, and the choices' numbers."""
    arch, tokens = work.arch, work.whole
    copied = work.narrow < work.wide
    scores = tokens * arch.experts * (3 * work.wide + INDEX)
    chosen = tokens * _choices(work) * (MASK + INDEX) + 2 * tokens * work.wide
    balance = tokens / work.sequence * arch.experts * work.wide  # of every sequence
    entering = tokens * arch.hidden * work.wide + (arch.experts * arch.hidden * work.wide if copied else 0)
    return entering + scores + chosen + balance


def _rows(work: Work) -> float:
    """A row of the input for every choice, what its expert keeps, and what it returns."""
    arch, rows = work.arch, rows_of(work)
    copies = work.holds.gated_copies if arch.mlp == "swiglu" else work.holds.plain_copies
    inside = copies * rows * arch.expert_ffn / work.tp * work.narrow
    return 2 * rows * arch.hidden * work.narrow + inside + rows * (2 * INDEX + work.wide)


def _shared(work: Work) -> float:
    """Experts that every token passes through are one dense layer on the same input."""
    arch = work.arch
    if not arch.shared_experts:
        return 0.0
    copies = work.holds.gated_copies if arch.mlp == "swiglu" else work.holds.plain_copies
    width = arch.shared_experts * arch.expert_ffn
    # In fp32 the router keeps the very input that the shared experts have.
    entering = work.whole * arch.hidden * work.narrow if work.narrow < work.wide else 0
    return entering + copies * work.whole * width / work.tp * work.narrow


def mixture_selected(work: Work) -> float:
    """What the matrix products of a mixture layer return: scores, and of routed and shared experts each."""
    arch = work.arch
    gated = 2 if arch.mlp == "swiglu" else 1
    rows = rows_of(work) * (gated * arch.expert_ffn / work.tp + arch.hidden)
    width = arch.shared_experts * arch.expert_ffn
    shared = work.whole * (gated * width / work.tp + arch.hidden) if width else 0
    return work.whole * arch.experts * work.wide + (rows + shared) * work.narrow


def rows_of(work: Work) -> int:
    """Rows that a rank's experts get: as many as its tokens make, where routers share them out evenly."""
    arch = work.arch
    if arch.router == "expert_choice":
        kept = arch.experts * slots(arch, 1, work.sequence)
    else:
        kept = min(work.sequence * arch.top_k, arch.experts * slots(arch, arch.top_k, work.sequence))
    return math.ceil(work.whole * kept / work.sequence)


def _choices(work: Work) -> int:
    return work.arch.experts if work.arch.router == "expert_choice" else work.arch.top_k
