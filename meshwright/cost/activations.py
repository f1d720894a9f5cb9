"""The activation policy: what blocks save for their backward, in how many bytes and where, and what they recompute.

`activation_policy` reads the flags of a plan once, and what its stack means by them. The ledger, traffic, step time,
FLOPs and explanations read that. The bytes follow from the numbers of one microbatch on one rank.
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.hardware.stacks import StackMemory
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan, by_operation, runs

ITEM_BYTES = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
CHUNK_BYTES = 2**31  # of logits in one chunk of the loss, as in kernels/cross_entropy.py
CHUNK_ROWS = 1024  # its rows are a multiple of this
FUSED_COPIES = 3.0  # of a gated layer: gate, up and their product
OURS = "meshwright"  # the stack whose kernels are those of kernels/
NARROW_PRECISIONS = ("bf16", "fp16", "fp8")
NARROWEST_HEAD = 16  # for which there is attention by blocks


class ActivationPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the activations that a block's backward needs."""

    recompute: str = "none"  # which blocks are recomputed, as spec/plan.py reads it
    # What `selective` recomputes: everything but costly operations, attention alone, or some blocks.
    selective: Literal["operations", "attention", "blocks"] = "operations"
    to_the_end: bool = False  # a recomputed block runs to its end; else it stops before its last product
    compiled: bool = False  # blocks are, each by itself
    quant: Literal["none", "fp8", "int8"] = "none"  # saved in eight bits
    offload: bool = False  # saved in host memory

    @property
    def by_operation(self) -> bool:
        """Whether a recomputed block saves what its costly operations return."""
        return by_operation(self.recompute)

    @property
    def recomputes_attention(self) -> bool:
        """Whether blocks recompute attention and nothing else: they save what fused attention saves."""
        return self.by_operation and self.selective == "attention"

    @property
    def saves_plainly(self) -> bool:
        """Whether what is saved stays on the device as it is."""
        return self.quant == "none" and not self.offload

    def runs(self, layers: int) -> tuple[range, ...]:
        """The recomputed ones among so many layers of a stage, those of one run together."""
        return runs(self.recompute, layers)

    def share(self, layers: int) -> float:
        """The recomputed share of so many layers."""
        return sum(map(len, self.runs(layers))) / layers if layers else 0.0


def activation_policy(job: Job) -> ActivationPolicy:
    """What the blocks of a job do."""
    plan, speed = job.plan, job.stack.speed
    return _policy(
        plan.recompute, plan.compile, plan.activation_quant, plan.activation_offload, speed.selective, speed.stops_early
    )


def policy_of(plan: Plan) -> ActivationPolicy:
    """The same under our own trainer."""
    return _policy(plan.recompute, plan.compile, plan.activation_quant, plan.activation_offload, "operations", True)


@lru_cache(maxsize=1024)
def _policy(
    recompute: str,
    compiled: bool,
    quant: Literal["none", "fp8", "int8"],
    offload: bool,
    selective: Literal["operations", "attention", "blocks"],
    stops_early: bool,
) -> ActivationPolicy:
    return ActivationPolicy(
        recompute=recompute,
        selective=selective,
        to_the_end=compiled or not stops_early,
        compiled=compiled,
        quant=quant,
        offload=offload,
    )


def has_chunks(plan: Plan) -> bool:
    """Whether the loss computes some rows' logits at a time; a pipeline's last stage hands all of them over."""
    return plan.pp == 1 and plan.kernels != "plain" and (plan.tp > 1 or plan.precision != "fp64")


def chunk_rows(vocab: int, plan: Plan) -> int:
    """Rows of a chunk: the largest part of the vocabulary decides, so that all ranks of tp have as many."""
    row = math.ceil(vocab / plan.tp) * ITEM_BYTES[plan.precision]
    return max(CHUNK_BYTES // row // CHUNK_ROWS, 1) * CHUNK_ROWS


def slots(arch: Arch, choices: int, sequence: int) -> int:
    """Tokens that one expert may take of a sequence; all of them when no capacity is set."""
    if arch.capacity == 0:
        return sequence
    return min(sequence, math.ceil(arch.capacity * choices * sequence / arch.experts))


class MicrobatchShape(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch of one rank."""

    arch: Arch
    holds: StackMemory
    whole: int  # positions of the microbatch that a rank's matrices see
    split: int  # positions it holds between matrices
    sequence: int  # keys that a query may meet
    vocab: int  # filled up as the stack does
    tp: int
    narrow: int  # bytes of an activation's number
    wide: int  # bytes where low precision would spoil it
    attention: Literal["flash", "math"]
    mask: int  # numbers that tell which positions are of one document, kept by every layer
    chunk: int  # rows whose logits exist at a time; 0: all of them
    left: float  # bytes of gathered tensors that cannot be reused at once
    out_copies: int  # of attention's result: where queries lie by head so does it, and the projection reads a copy
    fused_norm: bool = True  # a CPU has no fused norm of root mean squares
    compiled: bool = False  # blocks are, each by itself
    coded: bool = False  # blocks keep what they can in codes of eight bits
    sent: bool = False  # and what they keep on the host
    last_stays: bool = False  # but for the last block, whose backward comes at once
    codes: bool = False  # products of blocks keep their inputs and weights as fp8 codes

    @property
    def drops(self) -> bool:
        """Whether there is dropout: models of the Llama family are trained without, whatever the program."""
        return self.holds.dropout and self.arch.norm == "layer"

    @property
    def stream(self) -> int:
        """Bytes of the hidden states between two blocks."""
        return self.split * self.arch.hidden * self.narrow

    @property
    def entering(self) -> float:
        """Bytes of what a matrix is multiplied with: whole on every rank of tp, or its part if gathered again."""
        share = self.holds.gathered_kept
        return (share * self.whole + (1 - share) * self.split) * self.arch.hidden * self.narrow


def microbatch_shape(job: Job, fused_norm: bool = True) -> MicrobatchShape:
    """The work of a job's rank."""
    plan, stack, policy = job.plan, job.stack, activation_policy(job)
    whole = plan.microbatch * job.sequence // plan.cp
    narrow = ITEM_BYTES[plan.precision]
    return MicrobatchShape(
        arch=job.arch,
        holds=_fused(stack.holds) if policy.compiled or _has_kernels(job) else stack.holds,
        compiled=policy.compiled,
        whole=whole,
        split=whole // plan.tp if stack.sequence_parallel else whole,
        sequence=job.sequence,
        vocab=padded_vocab(job),
        tp=plan.tp,
        narrow=narrow,
        wide=max(narrow, 4),
        attention="flash" if policy.recomputes_attention else stack.attention,
        mask=plan.microbatch * job.sequence**2 if job.masked and _has_dense_mask(job) else 0,
        chunk=_chunk(job),
        left=stack.holds.gathered_left * whole * job.arch.hidden if _leaves(plan, stack.holds) else 0.0,
        out_copies=1 if job.arch.positions == "rope" or (plan.cp > 1 and plan.cp_kind == "ulysses") else 0,
        fused_norm=fused_norm,
        coded=policy.quant != "none",
        sent=policy.offload,
        last_stays=plan.pp == 1,
        # A compiled block computes them anew; with a scale for every row the numbers themselves are kept.
        codes=stack.name == OURS
        and plan.precision == "fp8"
        and plan.fp8_scaling == "tensorwise"
        and not policy.compiled,
    )


def _fused(holds: StackMemory) -> StackMemory:
    """A compiled block, or one with kernels of ours, computes the gate's activation anew from the gate."""
    return msgspec.structs.replace(holds, gated_copies=min(holds.gated_copies, FUSED_COPIES))


def _has_kernels(job: Job) -> bool:
    """Whether a block's gates are kernels of ours, as parallel/fused_kernels.py puts them."""
    plan = job.plan
    return job.stack.holds.chunked_loss and plan.kernels != "plain" and plan.tp == 1 and plan.precision != "fp64"


def _has_dense_mask(job: Job) -> bool:
    """Whether attention within documents reads a mask of all pairs; a ring meets them piece by piece.

    On a GPU kernels of ours need none, in the precisions and for the heads of kernels/document_attention.py.
    """
    plan = job.plan
    if not plan.attends_whole:
        return False
    by_blocks = job.stack.name == OURS and plan.kernels != "plain" and plan.precision in NARROW_PRECISIONS
    return not (by_blocks and job.arch.head_dim >= NARROWEST_HEAD)


def _chunk(job: Job) -> int:
    """Rows of a chunk of the fused loss; 0 where all logits exist."""
    plan = job.plan
    if not (has_chunks(plan) and job.stack.holds.chunked_loss):
        return 0
    return min(chunk_rows(job.arch.vocab, plan), plan.microbatch * job.sequence // plan.cp)


def _leaves(plan: Plan, holds: StackMemory) -> bool:
    """Whether gathered tensors pile up. The bounds describe published runs: see docs/memory.md."""
    within = plan.tp < (holds.left_below_tp or plan.tp + 1) and plan.world < (holds.left_below_gpus or plan.world + 1)
    return plan.tp > 1 and within and plan.pp != holds.left_except_pp


def padded_vocab(job: Job) -> int:
    """Entries of the vocabulary with those that fill it up."""
    multiple = job.stack.vocab_multiple * job.plan.tp if job.stack.vocab_multiple > 1 else 1
    return math.ceil(job.arch.vocab / multiple) * multiple


INDEX = 8  # bytes of an index
MASK = 1


def mixture_kept(work: MicrobatchShape, norm: float) -> float:
    """What an MoE layer and its norm save: the router's elements, a row for every choice, and each expert's work."""
    return norm + _router(work) + _rows(work) + _shared(work)


def _router(work: MicrobatchShape) -> float:
    """A wide copy of the input where arithmetic is narrow, probabilities, their order, and the choices' numbers."""
    arch, tokens = work.arch, work.whole
    copied = work.narrow < work.wide
    scores = tokens * arch.experts * (3 * work.wide + INDEX)
    chosen = tokens * _choices(work) * (MASK + INDEX) + 2 * tokens * work.wide
    balance = tokens / work.sequence * arch.experts * work.wide  # of every sequence
    entering = tokens * arch.hidden * work.wide + (arch.experts * arch.hidden * work.wide if copied else 0)
    return entering + scores + chosen + balance


def _rows(work: MicrobatchShape) -> float:
    """A row of the input for every choice, what its expert keeps, and what it returns."""
    arch, rows = work.arch, rows_of(work)
    copies = work.holds.gated_copies if arch.mlp == "swiglu" else work.holds.plain_copies
    inside = copies * rows * arch.expert_ffn / work.tp * work.narrow
    return 2 * rows * arch.hidden * work.narrow + inside + rows * (2 * INDEX + work.wide)


def _shared(work: MicrobatchShape) -> float:
    """Experts that every token passes through are one dense layer on the same input."""
    arch = work.arch
    if not arch.shared_experts:
        return 0.0
    copies = work.holds.gated_copies if arch.mlp == "swiglu" else work.holds.plain_copies
    width = arch.shared_experts * arch.expert_ffn
    # In fp32 the router keeps the very input that the shared experts have.
    entering = work.whole * arch.hidden * work.narrow if work.narrow < work.wide else 0
    return entering + copies * work.whole * width / work.tp * work.narrow


def mixture_selected(work: MicrobatchShape) -> float:
    """What the matrix products of a mixture layer return: scores, and of routed and shared experts each."""
    arch = work.arch
    gated = 2 if arch.mlp == "swiglu" else 1
    rows = rows_of(work) * (gated * arch.expert_ffn / work.tp + arch.hidden)
    width = arch.shared_experts * arch.expert_ffn
    shared = work.whole * (gated * width / work.tp + arch.hidden) if width else 0
    return work.whole * arch.experts * work.wide + (rows + shared) * work.narrow


def rows_of(work: MicrobatchShape) -> int:
    """Rows that a rank's experts get: as many as its tokens make, where routers share them out evenly."""
    arch = work.arch
    if arch.router == "expert_choice":
        kept = arch.experts * slots(arch, 1, work.sequence)
    else:
        kept = min(work.sequence * arch.top_k, arch.experts * slots(arch, arch.top_k, work.sequence))
    return math.ceil(work.whole * kept / work.sequence)


def _choices(work: MicrobatchShape) -> int:
    return work.arch.experts if work.arch.router == "expert_choice" else work.arch.top_k


CODE = 33 / 32  # bytes of a number: its code, and its share of a scale of four bytes for 128 of them
SMALL = 64 * 1024  # bytes below which a tensor is left as it is, as in parallel/activation_offload.py
STATISTIC = 1 / 16  # of a block's input: what has no more numbers is kept exact, as there
ATTENTION_PRODUCTS = 3  # that read the same input: queries, keys and values


def as_kept(work: MicrobatchShape, mixture: bool, whole: float) -> float:
    """What a block saves that would save so much unquantized: quantized elements, and statistics as they are."""
    if not work.coded:
        return whole
    numbers, size = _codable(work, mixture)
    return whole - size + numbers * CODE


def input_kept(work: MicrobatchShape) -> float:
    """A block's input, which is all that one keeps that is computed anew."""
    return work.stream / work.narrow * CODE if work.coded else work.stream


def small_kept(work: MicrobatchShape) -> float:
    """Statistics of a block's norms and its attention, where they are below what is worth a message."""
    each = norm_statistics(work) / (2 if work.arch.norm == "layer" else 1)
    norms = 2 * norm_statistics(work) if each < SMALL else 0.0
    exponents = _exponents(work) * work.wide
    return norms + (exponents if exponents < SMALL else 0.0)


def _exponents(work: MicrobatchShape) -> float:
    """Numbers of attention's log-sum-exp."""
    return work.whole * work.arch.heads / work.tp if work.attention == "flash" else 0.0


def decoding(work: MicrobatchShape) -> float:
    """The widest kept tensor while it is read from its codes: wide, and then as it was."""
    arch = work.arch
    width = max(arch.ffn, arch.q_width, arch.hidden * work.tp)
    return work.whole * width / work.tp * (work.wide + work.narrow) if work.coded else 0.0


def norm_kept(work: MicrobatchShape) -> float:
    """A norm's input and its statistics; a norm made of several operations also keeps its input wide and scaled."""
    return norm_input(work) + norm_statistics(work)


def norm_input(work: MicrobatchShape) -> float:
    """What a norm saves that has the shape of the hidden states."""
    numbers = work.split * work.arch.hidden
    pieces = work.arch.norm == "rms" and not work.fused_norm
    return 2 * numbers * work.wide if pieces else numbers * work.narrow


def norm_statistics(work: MicrobatchShape) -> float:
    """A norm's statistics: one or two elements for each position."""
    if work.arch.norm == "layer":
        return 2 * work.split * (work.wide if work.fused_norm else work.narrow)
    return work.split * work.wide


def entering_kept(work: MicrobatchShape, products: int) -> float:
    """What some products read together: once, or as codes of each, with codes of their weights."""
    if not work.codes:
        return work.entering
    arch = work.arch
    attention = products == ATTENTION_PRODUCTS
    widths = arch.q_width + 2 * arch.kv_width if attention else products * arch.ffn
    return products * work.whole * arch.hidden + widths * arch.hidden


def product_kept(work: MicrobatchShape, width: int, otherwise: float) -> float:
    """What the product back to the hidden width reads: as it is, or as codes, with codes of its weight."""
    return work.whole * width + width * work.arch.hidden if work.codes else otherwise


def _codable(work: MicrobatchShape, mixture: bool) -> tuple[float, float]:
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


MASK_BYTES = 1  # of a number in a dropout mask


class SavedActivations(msgspec.Struct, frozen=True, kw_only=True):
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
def saved_activations(work: MicrobatchShape, mixtures: tuple[bool, ...], last: bool, policy: str) -> SavedActivations:
    """What a part of the model saves; `mixtures` says for each of its layers whether it is an MoE layer."""
    kinds = set(mixtures)
    whole = {mixture: block_kept(work, mixture) for mixture in kinds}
    each = {mixture: as_kept(work, mixture, size) for mixture, size in whole.items()}
    blocks = [each[mixture] for mixture in mixtures]
    anew = runs(policy, len(blocks))
    inside = [sum(whole[mixtures[layer]] for layer in run) for run in anew]
    selected = {mixture: _selected(work, mixture) for mixture in kinds} if by_operation(policy) else {}
    remaining = [sum(selected[mixtures[layer]] for layer in run) if selected else input_kept(work) for run in anew]
    alone = sum(blocks) - sum(blocks[layer] for run in anew for layer in run)
    everything = SavedActivations(
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


def _sent(work: MicrobatchShape, everything: SavedActivations, blocks: list[float], policy: str) -> SavedActivations:
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


def moved_bytes(work: MicrobatchShape, size: float, anew: bool) -> float:
    """What goes to the host of a block that saves so much: small tensors stay."""
    return input_kept(work) if anew else size - small_kept(work)


def block_kept(work: MicrobatchShape, mixture: bool) -> float:
    """Everything that one block saves."""
    return attention_kept(work) + (mixture_kept(work, norm_kept(work)) if mixture else dense_kept(work))


def attention_kept(work: MicrobatchShape) -> float:
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


def dense_kept(work: MicrobatchShape) -> float:
    """The norm's input, the first matrices' input, and tensors as wide as the feed-forward layer."""
    arch, holds = work.arch, work.holds
    copies = holds.gated_copies if arch.mlp == "swiglu" else holds.plain_copies
    masks = work.split * arch.hidden * MASK_BYTES if work.drops else 0
    one = work.whole * arch.ffn / work.tp * work.narrow
    inner = (copies - 1) * one + product_kept(work, arch.ffn, one)
    return norm_kept(work) + entering_kept(work, 2 if arch.mlp == "swiglu" else 1) + inner + masks


def _weights(work: MicrobatchShape) -> float:
    """Attention's weights as saved: their log-sum-exp, or where they exist as a whole themselves, and dropped out."""
    heads = work.arch.heads / work.tp
    if work.attention == "flash":
        return work.whole * heads * work.wide
    each = 2 * work.narrow + MASK_BYTES if work.drops else work.narrow
    return work.whole * heads * work.sequence * each


def _rotation(work: MicrobatchShape) -> float:
    """Cosines and sines of every position, kept once for all layers of a part."""
    return work.whole * work.arch.head_dim * work.wide if work.arch.positions == "rope" else 0.0


def _end(work: MicrobatchShape) -> float:
    """The last norm and the input of the output projection."""
    return norm_kept(work) + work.entering


def _selected(work: MicrobatchShape, mixture: bool) -> float:
    """What a selectively recomputed block saves: its input, and what matmuls, attention and collectives return.

    Of one that is computed anew as a whole only its input is kept, and of a run of them that of the first.
    """
    arch = work.arch
    projected = work.whole * (2 * arch.q_width + 2 * arch.kv_width) / work.tp * work.narrow  # and attention's result
    gathered = 2 * work.whole * arch.hidden * work.narrow + 2 * work.stream if work.tp > 1 else 0.0
    inner = mixture_selected(work) if mixture else _dense_selected(work)
    return work.stream + projected + _weights(work) + work.whole * arch.hidden * work.narrow + inner + gathered


def _dense_selected(work: MicrobatchShape) -> float:
    gated = 2 if work.arch.mlp == "swiglu" else 1
    # No gradient needs what the last product returns. The compiler knows that; torch's own policy keeps it.
    last = 0 if work.compiled else work.arch.hidden
    return work.whole * (gated * work.arch.ffn / work.tp + last) * work.narrow


def passing(work: MicrobatchShape) -> float:
    """Gradients alive at once inside a block: of its output and input, and of two tensors of the feed-forward width."""
    arch = work.arch
    width = max(arch.ffn, arch.q_width, arch.top_k * arch.expert_ffn)
    return (2 * work.whole * arch.hidden + 2 * work.whole * width / work.tp) * work.narrow


def _products(work: MicrobatchShape) -> float:
    """Gradients of what a block's matrices return: the weights' half of a split backward multiplies with them."""
    arch = work.arch
    gated = 2 if arch.mlp == "swiglu" else 1
    widths = arch.q_width + 2 * arch.kv_width + gated * max(arch.ffn, arch.top_k * arch.expert_ffn)
    return work.whole * (widths / work.tp + 2 * arch.hidden) * work.narrow


def _logits(work: MicrobatchShape) -> float:
    """Log-probabilities; of a loss in chunks the gradient of the projection, which the forward has made already."""
    if work.chunk:
        return work.vocab / work.tp * work.arch.hidden * work.narrow
    return work.whole * work.vocab / work.tp * work.wide


def _loss(work: MicrobatchShape) -> float:
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
