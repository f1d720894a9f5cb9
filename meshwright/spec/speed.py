"""How fast a training program is beside its kernels: fusion, launches, overlap. One small table for each stack."""

from typing import Literal

import msgspec


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of a training program that cost or save time. The defaults are an eager program's in torch."""

    # Kernels, beside those of the accelerator.
    product: float = 1.0  # speed of matrix products ÷ the accelerator's own figure
    attention: float = 1.0  # speed of fused attention ÷ the accelerator's own figure
    elementwise: float = 2.7  # bytes that kernels between products move ÷ the least that perfect fusion needs
    compiled: float = 0.45  # of that, what is left where blocks are compiled
    score_passes: float = 10.0  # times that unfused attention reads or writes its scores in a forward
    logit_passes: float = 12.0  # times that the loss and its gradient read or write the logits in fp32

    # The host, which must start every kernel before it can run.
    layer_seconds: float = 0.4e-3  # to start one layer's forward; its backward takes as long
    tp_seconds: float = 0.02e-3  # more for every further rank of tp
    tp_across_seconds: float = 0.0  # more for every rank of tp, where stages of a pipeline are in different domains
    compiled_host: float = 0.5  # of those, what is left where blocks are compiled
    step_seconds: float = 5e-3  # once a step: data, logging, the optimizer's own launches

    # Weights, their gradients and the optimizer.
    gather_bytes: float = 0.0  # of a weight on its way to be used; 0: as wide as the arithmetic
    reduce_bytes: float = 4.0  # of a gradient on its way to be summed
    calls: float = 1.0  # collectives in which a layer's weights travel; each costs its latency
    accumulate_bytes: float = 10.0  # that adding one microbatch's gradient moves, for each weight
    optimizer_bytes: float = 30.0  # that one update moves, for each weight: gradient, master and moments
    selective: Literal["operations", "attention", "blocks"] = "operations"  # what `recompute = selective` does anew
    stops_early: bool = True  # of a block that is computed anew, the last product is left out: nobody asks for it

    # Overlap: the share of communication that runs beside arithmetic, where there is enough of it.
    overlap_shard: float = 1.0  # gathers and scatters of sharded weights
    overlap_replicate: float = 1.0  # sums over copies, behind the last backward
    contention: float = 0.7  # what arithmetic loses beside it, ÷ the time of its bytes over the scale-up link
    overlap_tp: float = 0.0  # gathers and scatters of hidden states, behind the products that they feed
    overlap_ep: float = 0.0
    blocking_sends: bool = False  # a stage waits for its message to have arrived before it goes on
    scattered_sends: bool = True  # each rank of tp sends its part of a message, not all of it

    # How far off such predictions have been: the half-width of the interval, as a share.
    spread: float = 0.2
