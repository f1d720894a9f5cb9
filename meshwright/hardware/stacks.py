"""What software runs a plan: where stacks differ in what they hold and how fast they go, by name and as data."""

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from meshwright.hardware.cluster import Gpu


class StackMemory(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """The memory habits of one program. docs/memory.md says where each number comes from."""

    # fully_shard: fp32 weights are sharded, and all-gathered in the compute dtype for use.
    # buffers: bf16 weights beside a gradient buffer, neither sharded; from zero 1 only the optimizer states are.
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
    dropout: bool = False  # masks are saved, one byte an element
    chunked_loss: bool = False  # the loss's kernel computes some rows' logits at a time, where a rank has whole rows
    logits_bytes: float = 0.0  # of each logit at the loss's peak; 0: two in fp32 and one in the compute dtype
    logits_left: float = 0.0  # of each logit of the microbatch before, which something still holds

    workspace_bytes: float = 0.0  # of libraries, inside what torch counts as allocated
    slack: float = 0.0  # what the allocator reserves beyond the peak ÷ the peak
    context_bytes: float = 0.0  # what the driver shows beyond the reserved: the device's context, collective buffers
    published: Literal["allocated", "reserved", "shown"] = "allocated"  # which of the three its reports print
    low: float = 0.95  # what is measured ÷ what is predicted, nine times in ten between these two
    high: float = 1.05


class StackSpeed(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of a training program that cost or save time. The defaults are an eager program's in torch."""

    # Kernels, beside those of the accelerator.
    product: float = 1.0  # speed of matmuls ÷ the accelerator's own figure
    attention: float = 1.0  # speed of fused attention ÷ the accelerator's own figure
    elementwise: float = 2.7  # bytes that kernels between matmuls move ÷ the least that perfect fusion needs
    compiled: float = 0.45  # of that, what is left where blocks are compiled
    casts: float = 1.0  # bytes that make operands of FP8 matmuls ÷ those of kernels of their own, for every microbatch
    score_passes: float = 10.0  # times that unfused attention reads or writes its scores in a forward
    logit_passes: float = 12.0  # times that the loss and its gradient read or write the logits in fp32

    # The host, which must start every kernel before it can run.
    layer_seconds: float = 0.4e-3  # to start one layer's forward; its backward takes as long
    moe_seconds: float = 0.0  # more for a layer of experts: routing, rows there and back, many small kernels
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
    selective: Literal["operations", "attention", "blocks"] = "operations"  # what `recompute = selective` recomputes
    stops_early: bool = True  # of a recomputed block the last matmul is left out: its result is not needed

    # Overlap: the share of communication that runs beside arithmetic, where there is enough of it.
    overlap_shard: float = 1.0  # gathers and scatters of sharded weights
    overlap_replicate: float = 1.0  # sums over copies, behind the last backward
    contention: float = 0.7  # what arithmetic loses beside it, ÷ the time of its bytes over the scale-up link
    overlap_tp: float = 0.0  # gathers and scatters of hidden states, behind the matmuls that they feed
    overlap_ep: float = 0.0
    once_a_node: bool = False  # a token goes to a node of experts once, which hands it on to those it chose there
    torch_ring: bool = False  # a ring of cp is written in torch: blocks are merged by kernels of their own
    blocking_sends: bool = False  # a stage waits for its message to have arrived before it goes on
    scattered_sends: bool = True  # each rank of tp sends its part of a message, not all of it

    # How far off such predictions have been: the half-width of the interval, as a share.
    spread: float = 0.2


class Stack(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of one training program. Those of our own trainer are the entry `meshwright`."""

    name: str
    match: tuple[str, ...] = ()  # words in the name that a publication gives

    sequence_parallel: bool = True  # with tp, activations between matmuls are sharded along the sequence
    attention: Literal["flash", "math"] = "flash"  # "math": the scores of a layer exist as a whole
    vocab_multiple: int = 1  # the vocabulary is filled up to a multiple of this times tp
    holds: StackMemory = StackMemory()  # what it keeps in memory
    speed: StackSpeed = StackSpeed()  # the table [NAME.speed]


@cache
def stacks() -> dict[str, Stack]:
    """Every known stack by name, in the order of the file."""
    table = tomllib.loads((resources.files("meshwright.hardware") / "stacks.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **entry}, Stack) for name, entry in table.items()}


def stack_of(framework: str) -> Stack:
    """The stack of a framework's name as a publication gives it; `generic` where it is not known."""
    text = framework.lower()
    for stack in stacks().values():
        if any(word in text for word in stack.match):
            return stack
    return stacks()["generic"]


GENERIC = "generic"  # the entry for accelerators of which nothing was measured


class Efficiency(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """What kernels of one kind of accelerator reach. Shares are of the data sheet's figure."""

    name: str
    match: tuple[str, ...] = ()  # beginnings of the accelerators' names in the catalogue
    product: float  # share of the peak that large matmuls reach
    product_fp8: float = 0.0  # the same in fp8, which falls further behind its peak; 0: like the others
    fp8_exact: float = 1.0  # rate of fp8 matmuls that accumulate in fp32, ÷ that of those that accumulate fast
    wave: float  # outputs of a matmul that take no less time than none: half a wave of tiles
    depth: float  # and terms of its sums: filling and draining a tile
    attention_forward: float  # share of the peak that fused causal attention reaches, long sequences, heads of 128
    attention_backward: float
    attention_sequence: float  # positions that take no less time than none
    memory: float  # share of the bandwidth that element-wise kernels reach
    kernel_seconds: float  # of the smallest kernel on the device
    variation: float = 0.02  # by which speeds of such accelerators differ, as a share: everyone waits for the slowest


@cache
def efficiencies() -> tuple[Efficiency, ...]:
    """Every entry of the catalogue."""
    table = tomllib.loads((resources.files("meshwright.hardware") / "efficiencies.toml").read_text())
    return tuple(msgspec.convert({"name": name, **entry}, Efficiency) for name, entry in table.items())


@cache
def efficiency_of(gpu: Gpu) -> Efficiency:
    """The entry whose beginning of the name is the longest; the generic one for a card that none names."""
    generic = next(each for each in efficiencies() if each.name == GENERIC)
    fitting = [(len(word), each) for each in efficiencies() for word in each.match if gpu.name.startswith(word)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else generic
