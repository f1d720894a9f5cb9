"""What a training program keeps in memory, where programs differ; the defaults are our own trainer's."""

from typing import Literal

import msgspec

GIB = 2**30


class Holding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory habits of one program. docs/memory.md says where each number comes from."""

    # fully_shard: fp32 weights lie in shards and a narrow copy is gathered for use.
    # buffers: narrow weights lie whole beside a whole gradient buffer; from zero 1 only the optimizer is shared out.
    states: Literal["fully_shard", "buffers"] = "fully_shard"
    weight_bytes: float = 2.0  # buffers only, of each parameter: what the arithmetic reads
    gradient_bytes: float = 4.0  # buffers only: the sum of its gradients
    optimizer_bytes: float = 12.0  # buffers only: an fp32 master copy and two moments
    bucket_bytes: float = 0.0  # buffers only, where several data ranks add up gradients: what these are gathered in
    update_bytes: float = 0.0  # of each parameter that a rank updates, what the optimizer's step makes beside

    gathered_kept: float = 1.0  # with tp, the share of gathered inputs that is kept whole rather than gathered again
    gathered_left: float = 0.0  # with tp, bytes × hidden a token of gathered tensors that cannot be reused at once
    left_below_tp: int = 0  # and the bounds within which published runs show them; 0: no bound
    left_below_gpus: int = 0
    left_except_pp: int = 0
    gated_copies: float = 4.0  # tensors as wide as a gated layer that are kept: gate, its silu, up, their product
    plain_copies: float = 2.0  # the same without a gate: before and after the activation
    more_hidden: float = 0.0  # bytes × hidden that a token of a layer keeps beyond the formula, split over tp
    dropout: bool = False  # masks are kept, one byte a number
    chunked_loss: bool = False  # the loss's kernel computes some rows' logits at a time, where a rank has whole rows
    logits_bytes: float = 0.0  # of each logit at the loss's peak; 0: twice the wide and once the narrow number
    logits_left: float = 0.0  # of each logit of the microbatch before, which something still holds

    workspace_bytes: float = 0.0  # of libraries, inside what torch counts as allocated
    slack: float = 0.0  # what the allocator reserves beyond the peak ÷ the peak
    context_bytes: float = 0.0  # what the driver shows beyond the reserved: the device's context, collective buffers
    published: Literal["allocated", "reserved", "shown"] = "allocated"  # which of the three its reports print
    low: float = 0.95  # what is measured ÷ what is predicted, nine times in ten between these two
    high: float = 1.05
