"""The numbers of one microbatch on one rank, from which every activation's size follows."""

import math
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.traffic_held import ITEM_BYTES
from meshwright.spec.arch import Arch
from meshwright.spec.holding import Holding
from meshwright.spec.plan import Plan

COMPILED_COPIES = 3.0  # of a gated layer: gate, up and their product
CHUNK_BYTES = 2**31  # of logits in one chunk of the fused loss, as in kernels/cross_entropy.py
CHUNK_ROWS = 1024  # its rows are a multiple of this


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
        holds=_compiled(stack.holds) if plan.compile else stack.holds,
        whole=whole,
        split=whole // plan.tp if stack.sequence_parallel else whole,
        sequence=job.sequence,
        vocab=padded_vocab(job),
        tp=plan.tp,
        narrow=narrow,
        wide=max(narrow, 4),
        attention=stack.attention,
        mask=plan.microbatch * job.sequence**2 if job.masked and _asks_whole_rows(plan) else 0,
        chunk=_chunk(job, narrow),
        left=stack.holds.gathered_left * whole * job.arch.hidden if _leaves(plan, stack.holds) else 0.0,
        out_copies=1 if job.arch.positions == "rope" or (plan.cp > 1 and plan.cp_kind == "ulysses") else 0,
        fused_norm=fused_norm,
    )


def _compiled(holds: Holding) -> Holding:
    """A compiled block computes the gate's activation anew from the gate."""
    return msgspec.structs.replace(holds, gated_copies=min(holds.gated_copies, COMPILED_COPIES))


def _asks_whole_rows(plan: Plan) -> bool:
    """Whether one call of attention sees whole sequences; a ring meets them piece by piece."""
    return plan.cp == 1 or plan.cp_kind == "ulysses"


def _chunk(job: Job, narrow: int) -> int:
    """Rows of a chunk of the fused loss: cut logits and those of a pipeline's last stage exist as a whole."""
    plan = job.plan
    whole = plan.tp > 1 or plan.pp > 1 or plan.kernels == "plain" or plan.precision == "fp64"
    if whole or not job.stack.holds.chunked_loss:
        return 0
    rows = max(CHUNK_BYTES // (job.arch.vocab * narrow) // CHUNK_ROWS, 1) * CHUNK_ROWS
    return min(rows, plan.microbatch * job.sequence // plan.cp)


def _leaves(plan: Plan, holds: Holding) -> bool:
    """Whether gathered tensors pile up. The bounds describe published runs: see docs/memory.md."""
    within = plan.tp < (holds.left_below_tp or plan.tp + 1) and plan.world < (holds.left_below_gpus or plan.world + 1)
    return plan.tp > 1 and within and plan.pp != holds.left_except_pp


def padded_vocab(job: Job) -> int:
    """Entries of the vocabulary with those that fill it up."""
    multiple = job.stack.vocab_multiple * job.plan.tp if job.stack.vocab_multiple > 1 else 1
    return math.ceil(job.arch.vocab / multiple) * multiple
