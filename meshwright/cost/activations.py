"""The activation policy: what blocks save for their backward, in how many bytes and where, and what they recompute.

`activation_policy` reads the flags of a plan once, and what its stack means by them; the ledger, traffic, step time,
FLOPs and explanations read that. `saved_activations` counts the bytes of one microbatch on one rank:

    block      = attention (norm, projections' input, queries, keys, values, result, log-sum-exp or scores, masks)
               + feed-forward (norm, first matmuls' input, a few tensors of its width) or MoE (router, rows, experts)
    microbatch = blocks + rope tables + on the last stage the last norm, the projection's input and the logits

Of a recomputed block there is its input alone, or what its costly operations return. Quantized activations take 33/32
bytes an element. Of offloaded ones two blocks are on the device at a time.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.hardware.stacks import StackMemory
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, Split, kv_part, layer_params
from meshwright.spec.plan import LOW_PRECISIONS, Plan, by_operation, logit_rows, runs
from meshwright.spec.tuning import DOWN, UP, is_adapter

ITEM_BYTES = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
INDEX_BYTES, MASK_BYTES = 8, 1
OURS = "meshwright"  # the stack whose kernels are those of kernels/
CLAMPED_COPIES = 7.0  # of gpt-oss's: gate and up, both clamped, a sigmoid, and two products
FUSED_COPIES = 3.0  # of a gated layer: gate, up and their product
SMALLEST_HEAD = 16  # for which there is attention by blocks
ATTENTION_PRODUCTS = 3  # that read the same input: queries, keys and values
LATENT_PRODUCTS = 2  # and of latent attention: queries or the way down to them, and the way down to keys and values
# Quantized activations, as in parallel/activation_offload.py.
CODE = 33 / 32  # bytes of an element: its code, and its share of a scale of four bytes for 128 of them
SMALL = 64 * 1024  # bytes below which a tensor is left as it is
STATISTIC = 1 / 16  # of a block's input: what has no more elements is saved exact


Quant = Literal["none", "fp8", "int8"]
Selective = Literal["operations", "attention", "blocks"]


class ActivationPolicy(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """What becomes of the activations that a block's backward needs."""

    recompute: str = "none"  # which blocks are recomputed, as spec/plan.py reads it
    # What `selective` recomputes: everything but costly operations, attention alone, or some blocks.
    selective: Selective = "operations"
    to_the_end: bool = False  # a recomputed block runs to its end; else it stops before its last matmul
    compiled: bool = False  # blocks are, each by itself
    quant: Quant = "none"  # saved in eight bits
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

    def runs(self, layers: int, ahead: bool = False) -> tuple[range, ...]:
        """The recomputed ones among so many layers of a stage, those of one run together."""
        return runs(self.recompute, layers, ahead)

    def share(self, layers: int, still: int = 0) -> float:
        """Layers that are recomputed ÷ those that a backward reaches: of so many, all but the first that are still."""
        return sum(map(len, reached(self.runs(layers), still))) / (layers - still) if layers > still else 0.0


class MicrobatchShape(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """One microbatch of one rank."""

    arch: Arch
    holds: StackMemory
    whole: int  # positions of the microbatch that a rank's matrices see
    split: int  # positions it holds between matrices
    sequence: int  # keys that a query may meet
    vocab: int  # padded as the stack does
    tp: int
    compute_bytes: int  # of an element of activations
    accum_bytes: int  # of one where low precision would spoil it
    attention: Literal["flash", "math"]
    mask: int  # elements of the mask that keeps documents apart, saved by every layer
    chunk: int  # rows whose logits exist at a time; 0: all of them
    left: float  # bytes of gathered tensors that cannot be reused at once
    out_copies: int  # of attention's result: where queries lie by head so does it, and the projection reads a copy
    fused_norm: bool = True  # a CPU has no fused norm of root mean squares
    compiled: bool = False  # blocks are, each by itself
    quantized: bool = False  # blocks save what they can in eight bits
    offloads: bool = False  # and what they save on the host
    last_stays: bool = False  # but for the last block, whose backward comes at once
    fp8_inputs: bool = False  # matmuls of blocks save their inputs in fp8
    gates_inside: bool = False  # of experts, whose outputs are then not saved
    slots: int = 0  # rows that experts get from a rank of ep, filled or not; 0: as many as there are

    @property
    def drops(self) -> bool:
        """Whether there is dropout: models of the Llama family are trained without, whatever the program."""
        return self.holds.dropout and self.arch.norm == "layer"

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states between two blocks."""
        return self.split * self.arch.hidden * self.compute_bytes

    @property
    def entering(self) -> float:
        """Bytes of what a matrix is multiplied with: whole on every rank of tp, or its part if gathered again."""
        share = self.holds.gathered_kept
        return (share * self.whole + (1 - share) * self.split) * self.arch.hidden * self.compute_bytes

    @property
    def qkv(self) -> float:
        """Elements of queries, keys and values of a position on one rank."""
        return self.arch.q_width / self.tp + kv_part(self.arch, self.tp)

    @property
    def out(self) -> float:
        """Elements of what attention returns."""
        return self.arch.out_width / self.tp

    @property
    def norms(self) -> int:
        """Norms of a block that each save an input of their own."""
        return {"both": 4}.get(self.arch.norm_position, 1 if self.arch.parallel_residual != "none" else 2)

    @property
    def copies(self) -> float:
        """Tensors of the feed-forward width that a feed-forward layer saves."""
        if self.arch.mlp == "swiglu_clamped" and not self.compiled:
            return CLAMPED_COPIES
        return self.holds.gated_copies if self.arch.gated else self.holds.plain_copies

    @property
    def first_matmuls(self) -> int:
        """Matmuls of a feed-forward layer that read its input."""
        return 2 if self.arch.gated else 1

    @property
    def expert_rows(self) -> int:
        """Rows that a rank's experts get: as many as its tokens make, where routers share them out evenly."""
        return self.slots or math.ceil(self.whole * rows_per_sequence(self.arch, self.sequence) / self.sequence)


class SavedActivations(msgspec.Struct, frozen=True, kw_only=True):
    """What one microbatch leaves in a run of layers, and what its backward adds for a while."""

    activations: float  # from the forward to the backward
    first_run: float  # of them, what is left when the backward reaches the first blocks
    first_blocks: int  # which it recomputes together
    recomputed: float  # of the run of blocks that is recomputed, while it is
    activation_grads: float  # inside one block
    between: float  # between the halves of a split backward, gradients that those of the weights still need
    logits: float  # log-probabilities, from the forward to the backward
    loss: float  # what the loss's gradient adds to them for a moment
    offloaded: float = 0.0  # to the host, by one microbatch
    pair: float = 0.0  # of that, the two neighbours with most, which are on the device together
    largest: float = 0.0  # and the block with most


def activation_policy(job: Job) -> ActivationPolicy:
    """What the blocks of a job do."""
    return policy_of(job.plan, job.stack.speed.selective, job.stack.speed.stops_early)


def policy_of(plan: Plan, selective: Selective = "operations", stops_early: bool = True) -> ActivationPolicy:
    """The same of a plan, under our own trainer unless another's habits are given."""
    return _policy(plan.recompute, plan.compile, plan.activation_quant, plan.activation_offload, selective, stops_early)


@lru_cache(maxsize=1024)
def _policy(
    recompute: str, compiled: bool, quant: Quant, offload: bool, selective: Selective, stops_early: bool
) -> ActivationPolicy:
    return ActivationPolicy(
        recompute=recompute,
        selective=selective,
        to_the_end=compiled or not stops_early,
        compiled=compiled,
        quant=quant,
        offload=offload,
    )


def microbatch_shape(job: Job, fused_norm: bool = True) -> MicrobatchShape:
    """One microbatch of a job's rank."""
    plan, stack, policy, holds = job.plan, job.stack, activation_policy(job), job.stack.holds
    whole = plan.microbatch * job.sequence // plan.cp
    compute_bytes = ITEM_BYTES[plan.precision]
    accum_bytes = max(compute_bytes, 4)
    our_gates = holds.chunked_loss and plan.kernels != "plain" and plan.tp == 1 and plan.precision != "fp64"
    if policy.compiled or our_gates:  # the gate's activation is recomputed from the gate
        holds = msgspec.structs.replace(holds, gated_copies=min(holds.gated_copies, FUSED_COPIES))
    return MicrobatchShape(
        arch=job.arch,
        holds=holds,
        compiled=policy.compiled,
        whole=whole,
        split=whole // plan.tp if stack.sequence_parallel else whole,
        sequence=job.sequence,
        vocab=padded_vocab(job),
        tp=plan.tp,
        compute_bytes=compute_bytes,
        accum_bytes=accum_bytes,
        attention="flash" if policy.recomputes_attention else stack.attention,
        mask=plan.microbatch * job.sequence**2 if job.masked and _has_dense_mask(job) else 0,
        chunk=min(chunk_rows(job.arch, plan), whole) if has_chunks(job.arch, plan) and holds.chunked_loss else 0,
        left=holds.gathered_left * whole * job.arch.hidden if _leaves(plan, holds) else 0.0,
        out_copies=1 if _copies_out(job) else 0,
        fused_norm=fused_norm,
        quantized=policy.quant != "none",
        offloads=policy.offload,
        last_stays=plan.pp == 1,
        # With a scale for every row the elements themselves are saved, and so they are for an adapter.
        fp8_inputs=stack.name == OURS
        and plan.precision == "fp8"
        and plan.fp8_scaling == "tensorwise"
        and job.arch.adapter.kind == "none",
        slots=sent_rows(job.arch, plan, job.sequence)
        if stack.name == OURS and plan.ep > 1 and job.arch.capacity
        else 0,
        gates_inside=stack.name == OURS
        and policy.compiled
        and compute_bytes < accum_bytes
        and plan.tp == 1
        and plan.ep == 1
        and plan.kernels != "plain"
        and job.cluster.gpu.fp8 > 0,  # a GPU with FP8 has grouped matmuls, or is of the generation before
    )


def _copies_out(job: Job) -> bool:
    """Whether queries lie by head, so that attention's result does too; our RoPE leaves them by position."""
    by_head = job.arch.positions == "rope" and job.stack.name != OURS
    return by_head or (job.plan.cp > 1 and job.plan.cp_kind == "ulysses")


def _has_dense_mask(job: Job) -> bool:
    """Whether attention within documents reads a mask of all pairs; a ring meets them piece by piece.

    On a GPU kernels of ours need none, in the precisions and for the heads of kernels/attention.py.
    """
    plan = job.plan
    by_blocks = job.stack.name == OURS and plan.kernels != "plain" and plan.precision in LOW_PRECISIONS
    return plan.attends_whole and not (by_blocks and job.arch.head_dim >= SMALLEST_HEAD)


def _leaves(plan: Plan, holds: StackMemory) -> bool:
    """Whether gathered tensors pile up. The bounds describe published runs: see docs/memory.md."""
    within = plan.tp < (holds.left_below_tp or plan.tp + 1) and plan.world < (holds.left_below_gpus or plan.world + 1)
    return plan.tp > 1 and within and plan.pp != holds.left_except_pp


def has_chunks(arch: Arch, plan: Plan) -> bool:
    """Whether the loss computes some rows' logits at a time; a pipeline's last stage hands all of them over.

    Those of which DPO sums log-probabilities are all made.
    """
    return plan.pp == 1 and not arch.compared and plan.kernels != "plain" and (plan.tp > 1 or plan.precision != "fp64")


def chunk_rows(arch: Arch, plan: Plan) -> int:
    """Rows of a chunk: the largest part of the vocabulary decides, so that all ranks of tp have as many."""
    return logit_rows(math.ceil(arch.vocab / plan.tp), ITEM_BYTES[plan.precision], is_frozen=not projects(arch))


def projects(arch: Arch) -> bool:
    """Whether the projection to logits is trained."""
    return arch.trains("embed.weight" if arch.tied else "head.weight")


def padded_vocab(job: Job) -> int:
    """Entries of the vocabulary with its padding."""
    multiple = job.stack.vocab_multiple * job.plan.tp if job.stack.vocab_multiple > 1 else 1
    return math.ceil(job.arch.vocab / multiple) * multiple


def sent_rows(arch: Arch, plan: Plan, sequence: int) -> int:
    """Rows that a rank of ep sends to experts for a microbatch: with a capacity every slot, filled or not."""
    if not arch.capacity:
        return math.ceil(plan.microbatch * sequence * arch.top_k / plan.cp)
    return plan.microbatch * arch.experts * min(arch.expert_slots(sequence), sequence // plan.cp)


def rows_per_sequence(arch: Arch, sequence: int) -> int:
    """Copies of a sequence's tokens that experts take at most; all that routers make when no capacity is set."""
    every = arch.experts * arch.expert_slots(sequence)
    return every if arch.router == "expert_choice" else min(sequence * arch.top_k, every)


def reached(recomputed: tuple[range, ...], still: int) -> tuple[range, ...]:
    """Those runs of layers that a backward asks for: not where all of their layers are among the first `still`."""
    return tuple(run for run in recomputed if run[-1] >= still)


@lru_cache(maxsize=4096)
def saved_activations(
    work: MicrobatchShape, is_moe: tuple[bool, ...], last: bool, policy: str, still: int = 0
) -> SavedActivations:
    """What a part of the model saves; `is_moe` says for each of its layers whether it is an MoE layer.

    Its first `still` layers, which no backward reaches, save nothing.
    """
    kinds = set(is_moe)
    whole = {moe: block_saved(work, moe) for moe in kinds}
    each = {moe: as_saved(work, moe, size) for moe, size in whole.items()}
    blocks = [each[moe] if layer >= still else 0.0 for layer, moe in enumerate(is_moe)]
    looks_ahead = last and work.arch.mtp_layers > 0
    recomputed = reached(runs(policy, len(blocks), looks_ahead), still)
    inside = [sum(whole[is_moe[layer]] for layer in run if layer >= still) for run in recomputed]
    selected = {moe: _selected(work, moe) for moe in kinds} if by_operation(policy) else {}
    remaining = [
        sum(selected[is_moe[layer]] for layer in run if layer >= still) if selected else _input_saved(work)
        for run in recomputed
    ]
    alone = sum(blocks) - sum(blocks[layer] for run in recomputed for layer in run)
    tables = 2 if work.arch.rope_local_theta else 1  # once for all layers, of each base
    rope = work.whole * work.arch.rotated * tables * work.accum_bytes if work.arch.positions == "rope" else 0.0
    logits, loss = _loss(work) if last else (0.0, 0.0)
    ahead = _ahead_saved(work, is_moe, policy) if looks_ahead else 0.0
    everything = SavedActivations(
        activations=alone + sum(remaining) + rope + ahead + (_end_saved(work) if last else 0.0),
        first_run=(remaining[0] if remaining else blocks[still] if still < len(blocks) else 0.0) + rope,
        first_blocks=len(recomputed[0]) if recomputed else 1,
        # Less than nothing where matmuls of adapters return more than a plain forward saves.
        recomputed=max((size - left for size, left in zip(inside, remaining, strict=True) if size > left), default=0.0),
        activation_grads=_activation_grads(work),
        between=(len(blocks) - still) * _matmul_grads(work),
        logits=logits * (1 + work.arch.mtp_layers),
        loss=loss,
    )
    if not work.offloads:
        return everything
    repeated = {layer for run in recomputed for layer in run}
    moved = [moved_bytes(work, size, layer in repeated) if size else 0.0 for layer, size in enumerate(blocks)]
    return msgspec.structs.replace(
        everything,
        activations=everything.activations - sum(moved),
        offloaded=sum(moved[:-1]) if work.last_stays else sum(moved),
        pair=max((one + other for one, other in pairwise(moved)), default=sum(moved)),
        largest=max(moved, default=0.0),
    )


def moved_bytes(work: MicrobatchShape, size: float, recomputed: bool) -> float:
    """Of a block that saves so much, what goes to the host: statistics of norms and attention stay if small."""
    if recomputed:
        return _input_saved(work)
    each = _norm_statistics(work) / (2 if work.arch.norm == "layer" else 1)
    norms = 2 * _norm_statistics(work) if each < SMALL else 0.0
    exponents = _exponents(work) * work.accum_bytes
    return size - (norms + (exponents if exponents < SMALL else 0.0))


def block_saved(work: MicrobatchShape, moe: bool) -> float:
    """What one block saves, before it is quantized."""
    feed_forward = _moe_saved(work) if moe else _dense_saved(work)
    return _attention_saved(work) + feed_forward + _adapters_saved(work, moe)


def _adapters_saved(work: MicrobatchShape, moe: bool) -> float:
    """What the down-projections of a block's adapters return; of DoRA also what magnitudes multiply, and the norms."""
    saved, rank = 0.0, work.arch.adapter.rank
    for param, rows in _adapters(work, moe):
        if param.name.endswith(DOWN):
            saved += rows * rank * work.compute_bytes
        elif param.init == "norms":
            width, outputs = _cut_outputs(work, param, param.shape[-1])
            copies = 2 if param.expert else 1  # of experts also the magnitude of each row's own
            saved += copies * rows * width * work.compute_bytes + outputs * (work.compute_bytes + work.accum_bytes)
    return saved


def _adapters_selected(work: MicrobatchShape, moe: bool) -> float:
    """What all matmuls of a block's adapters return: with A and with B, and of DoRA those that norms are made of."""
    saved, rank = 0.0, work.arch.adapter.rank
    for param, rows in _adapters(work, moe):
        if param.name.endswith(DOWN):
            saved += rows * rank * work.compute_bytes
        elif param.name.endswith(UP):
            width, outputs = _cut_outputs(work, param, param.shape[-2])
            saved += rows * width * work.compute_bytes
            if work.arch.adapter.kind == "dora":  # W Aᵀ; and A Aᵀ, with B before it
                squares = param.numel // (param.shape[-2] * rank) * rank**2
                saved += outputs * (work.compute_bytes + work.accum_bytes) + squares * work.accum_bytes
            if work.arch.adapter.drops_rows:  # W times what dropout leaves
                saved += rows * width * work.compute_bytes
    return saved


def _adapters(work: MicrobatchShape, moe: bool) -> Iterator[tuple[Param, int]]:
    """The adapters' weights of a block, and the rows that each multiplies."""
    if work.arch.adapter.kind == "none":
        return
    for param in layer_params(work.arch, moe):
        if is_adapter(param.name):
            yield param, work.expert_rows if param.expert else work.whole


def _cut_outputs(work: MicrobatchShape, param: Param, width: int) -> tuple[int, int]:
    """Of the outputs of an adapter's layer those that a rank of tp has, and the elements of its weight for them."""
    mine = width // (1 if param.split is Split.NONE else work.tp)
    return mine, param.numel // width * mine


def as_saved(work: MicrobatchShape, moe: bool, whole: float) -> float:
    """Of a block that would save so much, what it saves: quantized elements, and statistics as they are."""
    if not work.quantized:
        return whole
    elements, size = _quantizable(work, moe)
    return whole - size + elements * CODE


def _input_saved(work: MicrobatchShape) -> float:
    """A block's input, which is all that a recomputed one saves."""
    return work.hidden_states / work.compute_bytes * CODE if work.quantized else work.hidden_states


def _attention_saved(work: MicrobatchShape) -> float:
    """The norm's input, the projections' input, queries, keys and values, and what attention returns."""
    arch = work.arch
    projected = work.whole * work.qkv * work.compute_bytes + _inner_norms(work)
    out = work.whole * work.out * work.compute_bytes
    masks = work.split * arch.hidden * MASK_BYTES if work.drops else 0
    more = work.holds.more_hidden * work.whole * arch.hidden / work.tp
    results = projected + out * (1 + work.out_copies) + _scores(work)
    entering = _matmul_input(work, LATENT_PRODUCTS if arch.is_latent else ATTENTION_PRODUCTS)
    # Norms beyond two a block, or the one that parallel sub-layers share.
    other = (work.norms - 2) * _norm_input(work) + (_block_norms(arch) - 2) * _norm_statistics(work)
    mask = work.mask * work.compute_bytes
    return _norm_saved(work) + other + entering + results + mask + masks + more + _offsets(work)


def _offsets(work: MicrobatchShape) -> float:
    """One more than the weights of a block's norms, where these are stored as what is above one."""
    arch = work.arch
    inside = 2 * arch.head_dim if arch.qk_norm == "head" else 0
    return (_block_norms(arch) * arch.hidden + inside) * work.compute_bytes if arch.norm_offset else 0.0


def _block_norms(arch: Arch) -> int:
    """Norms over hidden states that a block has."""
    return 4 if arch.norm_position == "both" else 1 if arch.parallel_residual == "one_norm" else 2


def _inner_norms(work: MicrobatchShape) -> float:
    """What norms inside attention save, and what latent attention makes on the way to queries, keys and values."""
    arch = work.arch
    if arch.is_latent:
        widths = [arch.kv_rank, *([arch.q_rank] if arch.q_rank else [])]
        normed = sum(_rms_saved(work, work.whole * width, work.whole, work.compute_bytes) for width in widths)
        # The whole of what a split returns is saved with its part: rotated keys beside latents, keys beside values.
        if work.fused_norm or work.compute_bytes == work.accum_bytes:
            normed += work.whole * arch.rope_dim * work.compute_bytes
        values = arch.heads * (arch.head_dim - arch.rope_dim) / work.tp
        latents = sum(widths) * (1 if work.fp8_inputs else work.compute_bytes)  # which the ways up read
        return normed + work.whole * (latents + values * work.compute_bytes)
    if arch.qk_norm == "none":
        return 0.0
    queries, keys = work.whole * arch.q_width / work.tp, work.whole * kv_part(arch, work.tp) / 2
    heads = 2 * work.whole if arch.qk_norm == "full" else (queries + keys) / arch.head_dim
    if arch.qk_norm == "layer":  # its input and two numbers of each head, and what its weight multiplies
        statistics = 2 * heads * (work.accum_bytes if work.fused_norm else work.compute_bytes)
        return 2 * (queries + keys) * work.compute_bytes + statistics
    if arch.qk_norm == "full" and work.tp > 1:  # ranks sum squares of their parts, by several operations
        return 2 * (queries + keys) * work.accum_bytes + heads * work.accum_bytes
    return _rms_saved(work, queries + keys, heads, work.compute_bytes)


def _rms_saved(work: MicrobatchShape, elements: float, rows: float, compute_bytes: int) -> float:
    """What an RMSNorm of so many elements saves: its input, or made of several operations also in fp32 and scaled."""
    return (elements * compute_bytes if work.fused_norm else 2 * elements * work.accum_bytes) + rows * work.accum_bytes


def _dense_saved(work: MicrobatchShape) -> float:
    """The norm's input, the first matmuls' input, and tensors as wide as the feed-forward layer."""
    masks = work.split * work.arch.hidden * MASK_BYTES if work.drops else 0
    one = work.whole * work.arch.ffn / work.tp * work.compute_bytes
    inner = (work.copies - 1) * one + (one / work.compute_bytes if work.fp8_inputs else one)
    shared = work.arch.parallel_residual == "one_norm" and work.tp == 1  # attention reads the same; tp gathers anew
    return _norm_saved(work) + (0 if shared else _matmul_input(work, work.first_matmuls)) + inner + masks


def _moe_saved(work: MicrobatchShape) -> float:
    """The norm, the router's numbers, a row for every choice with its expert's work, and shared experts."""
    arch, tokens, rows = work.arch, work.whole, work.expert_rows
    # The router: an fp32 copy of the input in low precision, probabilities, their order, and the choices.
    scores = tokens * arch.experts * (3 * work.accum_bytes + INDEX_BYTES)
    choices = arch.experts if arch.router == "expert_choice" else arch.top_k
    chosen = tokens * choices * (MASK_BYTES + INDEX_BYTES) + 2 * tokens * work.accum_bytes
    balance = tokens / work.sequence * arch.experts * work.accum_bytes  # of every sequence
    copied = arch.experts * arch.hidden * work.accum_bytes if work.compute_bytes < work.accum_bytes else 0
    router = tokens * arch.hidden * work.accum_bytes + copied + scores + chosen + balance
    inside = work.copies * rows * arch.expert_ffn / work.tp * work.compute_bytes
    ends = 1 if work.gates_inside else 2  # the rows that enter, and those that leave
    routed = ends * rows * arch.hidden * work.compute_bytes + inside + rows * (2 * INDEX_BYTES + work.accum_bytes)
    shared = 0.0
    if arch.shared_experts:  # one dense layer on the same input, which in fp32 is the very one that the router saves
        entering = tokens * arch.hidden * work.compute_bytes if work.compute_bytes < work.accum_bytes else 0
        width = arch.shared_experts * arch.expert_ffn
        shared = entering + work.copies * tokens * width / work.tp * work.compute_bytes
    return _norm_saved(work) + router + routed + shared


def _selected(work: MicrobatchShape, moe: bool) -> float:
    """Of a block that is recomputed by operation: its input, and what matmuls, attention and collectives return.

    Of one that is recomputed as a whole only its input is saved, and of a run of them that of the first.
    """
    arch, gated = work.arch, work.first_matmuls
    projected = work.whole * (work.qkv + work.out) * work.compute_bytes + _inner_norms(work)  # and attention's result
    gathered = 2 * work.whole * arch.hidden * work.compute_bytes + 2 * work.hidden_states if work.tp > 1 else 0.0
    if moe:
        rows = work.expert_rows * (gated * arch.expert_ffn / work.tp + (0 if work.gates_inside else arch.hidden))
        width = arch.shared_experts * arch.expert_ffn
        shared = work.whole * (gated * width / work.tp + arch.hidden) if width else 0
        inner = work.whole * arch.experts * work.accum_bytes + (rows + shared) * work.compute_bytes
    else:
        # No gradient needs what the last matmul returns. The compiler knows that; torch's own policy saves it.
        last = 0 if work.compiled else arch.hidden
        inner = work.whole * (gated * arch.ffn / work.tp + last) * work.compute_bytes
    inner += _adapters_selected(work, moe)
    returned = work.whole * arch.hidden * work.compute_bytes
    return work.hidden_states + projected + _scores(work) + returned + inner + gathered


def _quantizable(work: MicrobatchShape, moe: bool) -> tuple[float, float]:
    """Elements of a block that eight bits may stand for, and their bytes as they are."""
    arch, tp = work.arch, work.tp
    in_norms = 2 * work.split * arch.hidden * (2 if arch.norm == "rms" and not work.fused_norm else 1)
    attended = work.whole * (work.qkv + work.out * (1 + work.out_copies)) + work.mask
    exponents = _exponents(work)
    if exponents * work.accum_bytes < SMALL or arch.heads <= arch.hidden * STATISTIC:
        exponents = 0.0
    elements = in_norms + attended + exponents
    size = 2 * _norm_input(work) + attended * work.compute_bytes + exponents * work.accum_bytes + work.entering
    entering = work.entering / work.compute_bytes
    if not moe:
        inner = work.copies * work.whole * arch.ffn / tp + entering
        return elements + entering + inner, size + inner * work.compute_bytes
    ends = 1 if work.gates_inside else 2
    rows = work.expert_rows * (ends * arch.hidden + work.copies * arch.expert_ffn / tp)
    shared = work.copies * work.whole * arch.shared_experts * arch.expert_ffn / tp
    shared += work.whole * arch.hidden if arch.shared_experts and work.compute_bytes < work.accum_bytes else 0
    read = work.whole * arch.hidden  # by the router, in fp32
    size += (rows + shared) * work.compute_bytes + read * work.accum_bytes
    return elements + entering + rows + shared + read, size


def _matmul_input(work: MicrobatchShape, matmuls: int) -> float:
    """What some matmuls read together: once, or in fp8 for each; the compiler casts once for all."""
    if not work.fp8_inputs:
        return work.entering
    return (1 if work.compiled else matmuls) * work.whole * work.arch.hidden


def _end_saved(work: MicrobatchShape) -> float:
    """What the projection to logits reads, and the norm before it where there is one."""
    offset = work.arch.hidden * work.compute_bytes if work.arch.norm_offset else 0
    return work.entering + (_norm_saved(work) + offset if work.arch.norm_position != "post" else 0.0)


def _ahead_saved(work: MicrobatchShape, is_moe: tuple[bool, ...], policy: str) -> float:
    """What multi-token prediction saves beside its block: embeddings, three norms, and what two matrices read.

    Where the block is recomputed, the embeddings are its second input, and what it returns is projected. The model's
    own hidden states are saved once for both, unless the loss saves their gradient instead, or tp gathers them for it.
    Of a part of the sequence is also what the joining matrix reads.
    """
    recomputed = any(len(is_moe) - 1 in run for run in runs(policy, len(is_moe))) and not by_operation(policy)
    same = work.tp == 1 and not work.chunk and (recomputed or work.fused_norm or work.compute_bytes == work.accum_bytes)
    shared = work.hidden_states if same else 0
    if recomputed:
        return work.hidden_states + work.entering - shared
    return 3 * _norm_saved(work) + 2 * work.hidden_states + work.entering - shared


def _norm_saved(work: MicrobatchShape) -> float:
    return _norm_input(work) + _norm_statistics(work)


def _norm_input(work: MicrobatchShape) -> float:
    """A norm's input; a norm made of several operations also saves it in fp32 and scaled."""
    elements = work.split * work.arch.hidden
    pieces = work.arch.norm == "rms" and not work.fused_norm
    return 2 * elements * work.accum_bytes if pieces else elements * work.compute_bytes


def _norm_statistics(work: MicrobatchShape) -> float:
    """Of a norm, one or two numbers for each position."""
    if work.arch.norm == "layer":
        return 2 * work.split * (work.accum_bytes if work.fused_norm else work.compute_bytes)
    return work.split * work.accum_bytes


def _exponents(work: MicrobatchShape) -> float:
    """Elements of attention's log-sum-exp."""
    return work.whole * work.arch.heads / work.tp if work.attention == "flash" else 0.0


def _scores(work: MicrobatchShape) -> float:
    """Of attention's scores: their log-sum-exp, or where they exist as a whole themselves, and dropped out."""
    heads = work.arch.heads / work.tp
    if work.attention == "flash":
        return work.whole * heads * work.accum_bytes
    each = 2 * work.compute_bytes + MASK_BYTES if work.drops else work.compute_bytes
    return work.whole * heads * work.sequence * each


def _activation_grads(work: MicrobatchShape) -> float:
    """Gradients alive at once inside a block: of its output and input, and of two tensors of the feed-forward width.

    Where activations are quantized, also the widest of them while it is read: in fp32, and then as it was.
    """
    arch = work.arch
    width = max(arch.ffn, arch.q_width, arch.top_k * arch.expert_ffn)
    grads = (2 * work.whole * arch.hidden + 2 * work.whole * width / work.tp) * work.compute_bytes
    widest = max(arch.ffn, arch.q_width, arch.hidden * work.tp)
    return grads + (work.whole * widest / work.tp * (work.accum_bytes + work.compute_bytes) if work.quantized else 0.0)


def _matmul_grads(work: MicrobatchShape) -> float:
    """Gradients of what a block's matrices return: the weights' half of a split backward multiplies with them."""
    arch = work.arch
    inner = work.first_matmuls * max(arch.ffn, arch.top_k * arch.expert_ffn)
    return work.whole * (work.qkv + inner / work.tp + 2 * arch.hidden) * work.compute_bytes


def _loss(work: MicrobatchShape) -> tuple[float, float]:
    """Log-probabilities, and what their gradient adds for a moment: it and the logits' own, in fp32 before cast down.

    Over cut logits torch writes the gradient out of three fp32 temporaries. A loss in chunks saves the gradient of the
    projection, which its forward has made already, and adds a chunk's logits and, if it is not the only one, that
    gradient twice, in fp32: the sum so far and the next. Only then is it cast down to what is saved.
    """
    if work.chunk:
        elements = work.vocab / work.tp * work.arch.hidden if projects(work.arch) else 0.0
        sums = elements * (2 * work.accum_bytes - work.compute_bytes) if work.chunk < work.whole else 0
        chunks = 2 if work.arch.logit_softcap else 1  # of which one is what the cap's gradient needs
        return elements * work.compute_bytes, chunks * work.chunk * work.vocab / work.tp * work.compute_bytes + sums
    logits = work.whole * work.vocab / work.tp
    added = 3 * work.accum_bytes if work.tp > 1 else 2 * work.accum_bytes
    if work.holds.logits_bytes:
        added = max(work.holds.logits_bytes - work.accum_bytes, 0.0)
    return logits * work.accum_bytes, logits * added
