"""What a forward keeps for its backward: bytes of one microbatch, block by block.

A test counts the storages that autograd really saves, on a CPU, and finds exactly these; docs/memory.md lists them.
"""

from functools import lru_cache
from itertools import pairwise

import msgspec

from meshwright.cost.memory_codes import (
    ATTENTION_PRODUCTS,
    as_kept,
    decoding,
    entering_kept,
    input_kept,
    norm_kept,
    product_kept,
    small_kept,
)
from meshwright.cost.memory_moe import mixture_kept, mixture_selected
from meshwright.cost.memory_work import Work
from meshwright.spec.recompute import by_operation, runs

MASK_BYTES = 1  # of a number in a dropout mask


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What one microbatch leaves in a run of layers, and what its backward adds for a while."""

    activations: float  # from the forward to the backward
    first_run: float  # of them, what is left when the backward reaches the first blocks
    first_blocks: int  # which it computes anew together
    anew: float  # of the run of blocks that is computed anew, while it is
    passing: float  # gradients of activations inside one block
    between: float  # between the halves of a split backward, gradients that those of the weights still need
    logits: float  # log-probabilities, from the forward to the backward
    loss: float  # what the loss's gradient adds to them for a moment
    sent: float = 0.0  # to the host, by one microbatch
    pair: float = 0.0  # of that, the two neighbours with most, which are on the device together
    largest: float = 0.0  # and the block with most


@lru_cache(maxsize=4096)
def kept(work: Work, mixtures: tuple[bool, ...], last: bool, policy: str) -> Kept:
    """Of a part of the model: `mixtures` tells for each of its layers whether it is one."""
    kinds = set(mixtures)
    whole = {mixture: block_kept(work, mixture) for mixture in kinds}
    each = {mixture: as_kept(work, mixture, size) for mixture, size in whole.items()}
    blocks = [each[mixture] for mixture in mixtures]
    anew = runs(policy, len(blocks))
    inside = [sum(whole[mixtures[layer]] for layer in run) for run in anew]
    selected = {mixture: _selected(work, mixture) for mixture in kinds} if by_operation(policy) else {}
    remaining = [sum(selected[mixtures[layer]] for layer in run) if selected else input_kept(work) for run in anew]
    alone = sum(blocks) - sum(blocks[layer] for run in anew for layer in run)
    everything = Kept(
        activations=alone + sum(remaining) + _rotation(work) + (_end(work) if last else 0.0),
        first_run=(remaining[0] if remaining else blocks[0] if blocks else 0.0) + _rotation(work),
        first_blocks=len(anew[0]) if anew else 1,
        anew=max((size - left for size, left in zip(inside, remaining, strict=True)), default=0.0),
        passing=passing(work) + decoding(work),
        between=len(blocks) * _products(work),
        logits=_logits(work) if last else 0.0,
        loss=_loss(work) if last else 0.0,
    )
    return _sent(work, everything, blocks, policy) if work.sent else everything


def _sent(work: Work, everything: Kept, blocks: list[float], policy: str) -> Kept:
    """The same when blocks send what they keep: at most two of them are on the device, whatever their number."""
    away = [moved_bytes(work, size, False) for size in blocks]
    for run in runs(policy, len(blocks)):
        for layer in run:
            away[layer] = moved_bytes(work, blocks[layer], True)
    pairs = (one + other for one, other in pairwise(away))
    return msgspec.structs.replace(
        everything,
        activations=everything.activations - sum(away),
        sent=sum(away[:-1]) if work.last_stays else sum(away),
        pair=max(pairs, default=sum(away)),
        largest=max(away, default=0.0),
    )


def moved_bytes(work: Work, size: float, anew: bool) -> float:
    """Of a block that keeps so much, what goes to the host: small tensors stay."""
    return input_kept(work) if anew else size - small_kept(work)


def block_kept(work: Work, mixture: bool) -> float:
    """Of one block, everything."""
    return attention_kept(work) + (mixture_kept(work, norm_kept(work)) if mixture else dense_kept(work))


def attention_kept(work: Work) -> float:
    """The norm's input, the projections' input, queries, keys and values, and what attention returns."""
    arch = work.arch
    projected = work.whole * (arch.q_width + 2 * arch.kv_width) / work.tp * work.narrow
    out = work.whole * arch.q_width / work.tp * work.narrow
    copied = product_kept(work, arch.q_width, out * work.out_copies)
    masks = work.split * arch.hidden * MASK_BYTES if work.drops else 0
    more = work.holds.more_hidden * work.whole * arch.hidden / work.tp
    told = work.mask * work.narrow
    results = projected + out + copied + _weights(work)
    return norm_kept(work) + entering_kept(work, ATTENTION_PRODUCTS) + results + told + masks + more


def dense_kept(work: Work) -> float:
    """The norm's input, the first matrices' input, and tensors as wide as the feed-forward layer."""
    arch, holds = work.arch, work.holds
    copies = holds.gated_copies if arch.mlp == "swiglu" else holds.plain_copies
    masks = work.split * arch.hidden * MASK_BYTES if work.drops else 0
    one = work.whole * arch.ffn / work.tp * work.narrow
    inner = (copies - 1) * one + product_kept(work, arch.ffn, one)
    return norm_kept(work) + entering_kept(work, 2 if arch.mlp == "swiglu" else 1) + inner + masks


def _weights(work: Work) -> float:
    """Of attention's weights: their log-sum-exp, or where they exist as a whole themselves, and dropped out."""
    heads = work.arch.heads / work.tp
    if work.attention == "flash":
        return work.whole * heads * work.wide
    each = 2 * work.narrow + MASK_BYTES if work.drops else work.narrow
    return work.whole * heads * work.sequence * each


def _rotation(work: Work) -> float:
    """Cosines and sines of every position, kept once for all layers of a part."""
    return work.whole * work.arch.head_dim * work.wide if work.arch.positions == "rope" else 0.0


def _end(work: Work) -> float:
    """The last norm and the input of the output projection."""
    return norm_kept(work) + work.entering


def _selected(work: Work, mixture: bool) -> float:
    """Of a block that is computed anew by operation: its input, and what products, attention and collectives return.

    Of one that is computed anew as a whole only its input is kept, and of a run of them that of the first.
    """
    arch = work.arch
    projected = work.whole * (2 * arch.q_width + 2 * arch.kv_width) / work.tp * work.narrow  # and attention's result
    gathered = 2 * work.whole * arch.hidden * work.narrow + 2 * work.stream if work.tp > 1 else 0.0
    inner = mixture_selected(work) if mixture else _dense_selected(work)
    return work.stream + projected + _weights(work) + work.whole * arch.hidden * work.narrow + inner + gathered


def _dense_selected(work: Work) -> float:
    gated = 2 if work.arch.mlp == "swiglu" else 1
    # No gradient needs what the last product returns. The compiler knows that; torch's own policy keeps it.
    last = 0 if work.compiled else work.arch.hidden
    return work.whole * (gated * work.arch.ffn / work.tp + last) * work.narrow


def passing(work: Work) -> float:
    """Gradients alive at once inside a block: of its output and input, and of two tensors of the feed-forward width."""
    arch = work.arch
    width = max(arch.ffn, arch.q_width, arch.top_k * arch.expert_ffn)
    return (2 * work.whole * arch.hidden + 2 * work.whole * width / work.tp) * work.narrow


def _products(work: Work) -> float:
    """Gradients of what a block's matrices return: the weights' half of a split backward multiplies with them."""
    arch = work.arch
    gated = 2 if arch.mlp == "swiglu" else 1
    widths = arch.q_width + 2 * arch.kv_width + gated * max(arch.ffn, arch.top_k * arch.expert_ffn)
    return work.whole * (widths / work.tp + 2 * arch.hidden) * work.narrow


def _logits(work: Work) -> float:
    """Log-probabilities; of a loss in chunks the gradient of the projection, which the forward has made already."""
    if work.chunk:
        return work.vocab / work.tp * work.arch.hidden * work.narrow
    return work.whole * work.vocab / work.tp * work.wide


def _loss(work: Work) -> float:
    """Beside the log-probabilities: their gradient and the logits' own, both wide before they are narrowed.

    Over cut logits torch writes the gradient out of three wide temporaries. In chunks there are a chunk's logits and,
    if it is not the only one, the projection's gradient twice, wide: the sum so far and the next. Only then is that
    narrowed to what is kept.
    """
    if work.chunk:
        numbers = work.vocab / work.tp * work.arch.hidden
        sums = numbers * (2 * work.wide - work.narrow) if work.chunk < work.whole else 0
        return work.chunk * work.vocab / work.tp * work.narrow + sums
    logits = work.whole * work.vocab / work.tp
    if work.holds.logits_bytes:
        return logits * max(work.holds.logits_bytes - work.wide, 0.0)
    return logits * (3 * work.wide if work.tp > 1 else 2 * work.wide)
