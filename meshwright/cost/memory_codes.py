"""What a block keeps when it is kept in codes, and what of it is too small to be moved or changed.

As parallel/compress.py and kernels/linear8.py have it; docs/compress.md has it in words.
"""

from meshwright.cost.memory_moe import rows_of
from meshwright.cost.memory_work import Work

CODE = 33 / 32  # bytes of a number: its code, and its share of a scale of four bytes for 128 of them
SMALL = 64 * 1024  # bytes below which a tensor is left as it is, as in parallel/compress.py
STATISTIC = 1 / 16  # of a block's input: what has no more numbers is kept exact, as there
ATTENTION_PRODUCTS = 3  # that read the same input: queries, keys and values


def as_kept(work: Work, mixture: bool, whole: float) -> float:
    """Of a block that would keep so much, what it keeps: codes, and statistics as they are."""
    if not work.coded:
        return whole
    numbers, size = _codable(work, mixture)
    return whole - size + numbers * CODE


def input_kept(work: Work) -> float:
    """A block's input, which is all that one keeps that is computed anew."""
    return work.stream / work.narrow * CODE if work.coded else work.stream


def small_kept(work: Work) -> float:
    """Statistics of a block's norms and its attention, where they are below what is worth a message."""
    each = norm_statistics(work) / (2 if work.arch.norm == "layer" else 1)
    norms = 2 * norm_statistics(work) if each < SMALL else 0.0
    exponents = _exponents(work) * work.wide
    return norms + (exponents if exponents < SMALL else 0.0)


def _exponents(work: Work) -> float:
    """Numbers of attention's log-sum-exp."""
    return work.whole * work.arch.heads / work.tp if work.attention == "flash" else 0.0


def decoding(work: Work) -> float:
    """The widest kept tensor while it is read from its codes: wide, and then as it was."""
    arch = work.arch
    width = max(arch.ffn, arch.q_width, arch.hidden * work.tp)
    return work.whole * width / work.tp * (work.wide + work.narrow) if work.coded else 0.0


def norm_kept(work: Work) -> float:
    """A norm's input and its statistics; a norm made of several operations also keeps its input wide and scaled."""
    return norm_input(work) + norm_statistics(work)


def norm_input(work: Work) -> float:
    """Of a norm, what is as wide as the hidden states."""
    numbers = work.split * work.arch.hidden
    pieces = work.arch.norm == "rms" and not work.fused_norm
    return 2 * numbers * work.wide if pieces else numbers * work.narrow


def norm_statistics(work: Work) -> float:
    """Of a norm, one or two numbers for each position."""
    if work.arch.norm == "layer":
        return 2 * work.split * (work.wide if work.fused_norm else work.narrow)
    return work.split * work.wide


def entering_kept(work: Work, products: int) -> float:
    """What some products read together: once, or as codes of each, with codes of their weights."""
    if not work.codes:
        return work.entering
    arch = work.arch
    attention = products == ATTENTION_PRODUCTS
    widths = arch.q_width + 2 * arch.kv_width if attention else products * arch.ffn
    return products * work.whole * arch.hidden + widths * arch.hidden


def product_kept(work: Work, width: int, otherwise: float) -> float:
    """What the product back to the hidden width reads: as it is, or as codes, with codes of its weight."""
    return work.whole * width + width * work.arch.hidden if work.codes else otherwise


def _codable(work: Work, mixture: bool) -> tuple[float, float]:
    """Numbers of a block that codes may stand for, and their bytes as they are."""
    arch, tp = work.arch, work.tp
    norms = 2 * norm_input(work)
    in_norms = 2 * work.split * arch.hidden * (2 if arch.norm == "rms" and not work.fused_norm else 1)
    attended = work.whole * (2 * arch.q_width + 2 * arch.kv_width + arch.q_width * work.out_copies) / tp + work.mask
    exponents = _exponents(work)
    if exponents * work.wide < SMALL or arch.heads <= arch.hidden * STATISTIC:
        exponents = 0.0
    numbers = in_norms + attended + exponents
    size = norms + attended * work.narrow + exponents * work.wide + work.entering
    entering = work.entering / work.narrow
    copies = work.holds.gated_copies if arch.mlp == "swiglu" else work.holds.plain_copies
    if not mixture:
        inner = copies * work.whole * arch.ffn / tp + entering
        return numbers + entering + inner, size + inner * work.narrow
    rows = rows_of(work) * (2 * arch.hidden + copies * arch.expert_ffn / tp)
    shared = copies * work.whole * arch.shared_experts * arch.expert_ffn / tp
    shared += work.whole * arch.hidden if arch.shared_experts and work.narrow < work.wide else 0
    read = work.whole * arch.hidden  # by the router, wide
    return numbers + entering + rows + shared + read, size + (rows + shared) * work.narrow + read * work.wide
