"""Closed forms of the literature, one small function each: what people compute on paper before they trust a ledger.

Letters as in the papers: P parameters, s sequence, b microbatch, h hidden, a heads, L layers, V vocabulary, t tensor
ranks, p pipeline ranks, m microbatches, v stages of a rank, N data ranks.
"""

import math
from typing import Literal


def gpt_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """12·L·h²·(1 + 13/(12h) + (V + s)/(12·L·h)): a GPT with biases, learned positions and a tied output."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def notes_parameters(layers: int, hidden: int, vocab: int) -> float:
    """V·E + E + L·(8.5·E² + 2·E): the decoder of the notes' memory formula."""
    return vocab * hidden + hidden + layers * (8.5 * hidden**2 + 2 * hidden)


States = Literal["fp32", "notes", "exact", "megatron", "bf16"]
# Bytes of a parameter, its gradient and its optimizer's state under Adam, by who counts.
STATES: dict[States, float] = {
    "fp32": 16.0,  # 4 weight, 4 gradient, 8 moments
    "notes": 20.0,  # 2 + 4 weight, 12 Adam with its master copy, 2 gradient: the master copy is counted twice
    "exact": 16.0,  # 2 weight, 2 gradient, 4 master, 8 moments
    "megatron": 18.0,  # the same with gradients summed in fp32
    "bf16": 8.0,  # 2 weight, 2 gradient, 4 moments: everything narrow
}


def states_bytes(parameters: float, counting: States = "exact") -> float:
    """Model states under Adam, without sharding."""
    return parameters * STATES[counting]


def zero_bytes(parameters: float, ranks: int, stage: Literal[0, 1, 2, 3]) -> float:
    """Model states of one rank under ZeRO: 16, 4 + 12/N, 2 + 14/N, 16/N bytes a parameter."""
    each = {0: 16.0, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]
    return parameters * each


def activation_bytes(shape: tuple[int, int, int, int], tp: int = 1, kind: str = "tensor") -> float:
    """Activations of one layer, 2 bytes a number, for a shape (s, b, h, a).

    "tensor": sbh(10 + 24/t + 5as/(ht)). "sequence": sbh/t·(34 + 5as/h). "flash" and "selective": the same without the
    scores. "full": 2sbh, the layer's input alone.
    """
    sequence, microbatch, hidden, heads = shape
    tokens = sequence * microbatch * hidden
    scores = 5 * heads * sequence / hidden
    return (
        tokens
        * {
            "tensor": 10 + 24 / tp + scores / tp,
            "sequence": (34 + scores) / tp,
            "flash": 10 + 24 / tp,
            "selective": 34 / tp,
            "full": 2.0,
        }[kind]
    )


def feed_forward_bytes(layers: int, width: int, tokens: int) -> float:
    """2·L·width·tokens: what the feed-forward layers keep at 2 bytes a number."""
    return 2.0 * layers * width * tokens


def notes_memory(parameters: float, batch: int, shape: tuple[int, int, int, int], vocab: int) -> float:
    """(4·P + 2·B·C·(2·V + l·(6e + h·C)))·2 bytes, for a shape (C, e, h, l): context, width, heads, layers."""
    context, width, heads, layers = shape
    return (4 * parameters + 2 * batch * context * (2 * vocab + layers * (6 * width + heads * context))) * 2


def bubble(pp: int, microbatches: int, chunks: int = 1) -> float:
    """The idle share of a pipelined step, (p − 1)/(v·m + p − 1)."""
    return (pp - 1) / (chunks * microbatches + pp - 1)


def bubble_over_ideal(pp: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time ÷ useful time, (p − 1)/(v·m): the other way in which papers print it."""
    return (pp - 1) / (chunks * microbatches)


def segment_memory(layers: int, segments: int) -> float:
    """Layers' worth of activations that live at most: one input a segment, and one segment whole."""
    return segments + math.ceil(layers / segments)


def sqrt_segments(layers: int) -> int:
    """The number of segments that makes `segment_memory` least: about √L."""
    return max(round(math.sqrt(layers)), 1)


def recompute_layers(layers: int, segments: int, keeps_segment: bool) -> float:
    """Layers computed anew in one backward.

    A segment that is kept while it is walked back costs one extra forward, L. One that keeps nothing inside computes
    each layer's input from the segment's: about L²/(2·C), which is L·√L/2 with √L segments.
    """
    if keeps_segment:
        return float(layers)
    length = layers / segments
    return segments * length * (length + 1) / 2


def training_flops(parameters: float, tokens: float, recompute: bool = False) -> float:
    """6·N·D; with every layer computed once more, 8·N·D."""
    return (8 if recompute else 6) * parameters * tokens


def palm_flops_per_token(parameters: float, layers: int, width: int, sequence: int) -> float:
    """6·N + 12·L·H·Q·s: with attention, as if it looked at all tokens."""
    return 6 * parameters + 12 * layers * width * sequence


def megatron_flops(shape: tuple[int, int, int, int, int], recompute: bool = True) -> float:
    """96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) of a step, for a shape (B, s, l, h, V); 72 and V/12 without recomputing."""
    batch, sequence, layers, hidden, vocab = shape
    whole = 96 if recompute else 72
    head = 16 if recompute else 12
    return (
        whole * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (head * layers * hidden))
    )


def training_seconds(tokens: float, parameters: float, gpus: int, flops_per_second: float) -> float:
    """8·T·P/(n·X): how long a run takes that recomputes every layer, at X achieved on each of n GPUs."""
    return 8 * tokens * parameters / (gpus * flops_per_second)


def ring_bytes(size: float, ranks: int) -> float:
    """What one rank sends in an all-reduce, 2·(N − 1)/N of the buffer; half of it for a gather or a scatter."""
    return 2 * size * (ranks - 1) / ranks


def checkpoint_interval(save_seconds: float, failure_seconds: float) -> float:
    """√(2·δ·M): how long to work between saves that take δ, when something fails every M."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def goodput(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """The useful share of time: 1 − δ/τ − (τ/2 + R)/M, to first order."""
    return max(1 - save_seconds / interval - (interval / 2 + restart_seconds) / failure_seconds, 0.0)
