"""The numbers of one microbatch on one rank, from which every activation's size follows."""

import math
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.traffic_held import ITEM_BYTES, chunk_rows, has_chunks
from meshwright.spec.arch import Arch
from meshwright.spec.holding import Holding
from meshwright.spec.plan import Plan

FUSED_COPIES = 3.0  # of a gated layer: gate, up and their product
OURS = "meshwright"  # the stack whose kernels are those of kernels/
NARROW_PRECISIONS = ("bf16", "fp16", "fp8")
NARROWEST_HEAD = 16  # for which there is attention by blocks


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One microbatch of one rank."""

    arch: Arch
    holds: Holding
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


def work_of(job: Job, fused_norm: bool = True) -> Work:
    """The work of a job's rank."""
    plan, stack = job.plan, job.stack
    whole = plan.microbatch * job.sequence // plan.cp
    narrow = ITEM_BYTES[plan.precision]
    return Work(
        arch=job.arch,
        holds=_fused(stack.holds) if plan.compile or _has_kernels(job) else stack.holds,
        compiled=plan.compile,
        whole=whole,
        split=whole // plan.tp if stack.sequence_parallel else whole,
        sequence=job.sequence,
        vocab=padded_vocab(job),
        tp=plan.tp,
        narrow=narrow,
        wide=max(narrow, 4),
        attention=stack.attention,
        mask=plan.microbatch * job.sequence**2 if job.masked and _has_dense_mask(job) else 0,
        chunk=_chunk(job),
        left=stack.holds.gathered_left * whole * job.arch.hidden if _leaves(plan, stack.holds) else 0.0,
        out_copies=1 if job.arch.positions == "rope" or (plan.cp > 1 and plan.cp_kind == "ulysses") else 0,
        fused_norm=fused_norm,
        coded=plan.compress != "none",
        sent=plan.activations == "host",
        last_stays=plan.pp == 1,
        # A compiled block computes them anew; with a scale for every row the numbers themselves are kept.
        codes=stack.name == OURS and plan.precision == "fp8" and plan.scaling == "tensor" and not plan.compile,
    )


def _fused(holds: Holding) -> Holding:
    """A compiled block, or one with kernels of ours, computes the gate's activation anew from the gate."""
    return msgspec.structs.replace(holds, gated_copies=min(holds.gated_copies, FUSED_COPIES))


def _has_kernels(job: Job) -> bool:
    """Whether a block's gates are kernels of ours, as parallel/eager.py puts them."""
    plan = job.plan
    return job.stack.holds.chunked_loss and plan.kernels != "plain" and plan.tp == 1 and plan.precision != "fp64"


def _has_dense_mask(job: Job) -> bool:
    """Whether attention within documents reads a mask of all pairs; a ring meets them piece by piece.

    On a GPU kernels of ours need none, in the precisions and for the heads of kernels/documents.py.
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


def _leaves(plan: Plan, holds: Holding) -> bool:
    """Whether gathered tensors pile up. The bounds describe published runs: see docs/memory.md."""
    within = plan.tp < (holds.left_below_tp or plan.tp + 1) and plan.world < (holds.left_below_gpus or plan.world + 1)
    return plan.tp > 1 and within and plan.pp != holds.left_except_pp


def padded_vocab(job: Job) -> int:
    """Entries of the vocabulary with those that fill it up."""
    multiple = job.stack.vocab_multiple * job.plan.tp if job.stack.vocab_multiple > 1 else 1
    return math.ceil(job.arch.vocab / multiple) * multiple
