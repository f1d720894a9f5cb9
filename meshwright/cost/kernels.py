"""Seconds of single kernels: matrix products by shape, attention, and what is all memory traffic."""

import math
from functools import lru_cache

import msgspec

from meshwright.hardware.cluster import Gpu
from meshwright.hardware.stacks import Efficiency
from meshwright.spec.plan import Precision

HALF = 0.5  # of all pairs of positions a causal kernel computes
BACKWARD_ATTENTION = 2.5  # the backward of fused attention has five products where the forward has two
NARROW = 2  # bytes of a number in the arithmetic of a product; fp8 is made from it and returns it
WIDE = ("fp32", "fp64")  # precisions of four bytes or more


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What kernels of one precision reach on one accelerator."""

    peak: float  # operations a second of the data sheet
    product: float  # operations a second of large products
    wave: float
    depth: float
    forward: float  # operations a second of fused attention
    backward: float
    attention_sequence: float
    bandwidth: float  # bytes a second
    kernel_seconds: float
    variation: float
    width: int  # bytes of a number


@lru_cache(maxsize=256)
def rates(gpu: Gpu, efficiency: Efficiency, precision: Precision) -> Rates:
    """The data sheet, as far as kernels reach it."""
    peak = peak_of(gpu, precision)
    attention = peak_of(gpu, "bf16") if precision == "fp8" else peak  # attention stays in bf16 beside fp8 products
    share = efficiency.product_fp8 or efficiency.product if precision == "fp8" else efficiency.product
    return Rates(
        peak=peak,
        product=peak * share,
        wave=efficiency.wave,
        depth=efficiency.depth,
        forward=attention * efficiency.attention_forward,
        backward=attention * efficiency.attention_backward,
        attention_sequence=efficiency.attention_sequence,
        bandwidth=gpu.bandwidth * efficiency.memory,
        kernel_seconds=efficiency.kernel_seconds,
        variation=efficiency.variation,
        width=4 if precision in WIDE else NARROW,
    )


def peak_of(gpu: Gpu, precision: Precision) -> float:
    """Operations a second; a precision without a figure is taken as the next one that has it."""
    order: tuple[Precision, ...] = {"fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16")}.get(
        precision, ()
    )
    return next((peak for each in order if (peak := gpu.peak(each))), gpu.fp32)


def product_seconds(m: float, n: float, k: float, at: Rates) -> float:
    """Time of an (m, k) by (k, n) product: its work in tiles, or the traffic of its matrices if that is more."""
    work = 2 * (m * n + at.wave) * (k + at.depth) / at.product
    moved = at.width * (m * k + k * n + m * n) / at.bandwidth
    return max(work, moved, at.kernel_seconds)


def attention_flops(pairs: float, q_width: float) -> float:
    """Operations of the two products of a forward over `pairs` of positions."""
    return 2 * 2 * pairs * q_width


def flash_seconds(rows: float, positions: float, q_width: float, at: Rates) -> tuple[float, float]:
    """Forward and backward of fused causal attention: `rows` queries, each against half of `positions` keys."""
    flops = attention_flops(rows * positions * HALF, q_width) * (1 + at.attention_sequence / positions)
    return (
        max(flops / at.forward, at.kernel_seconds),
        max(BACKWARD_ATTENTION * flops / at.backward, 2 * at.kernel_seconds),
    )


def slowest(ranks: int, at: Rates) -> float:
    """Time of the slowest of some ranks, ÷ the mean, beyond one: the expected largest of so many normal deviations."""
    return at.variation * math.sqrt(2 * math.log(ranks))


def moved_seconds(moved_bytes: float, at: Rates) -> float:
    """Time of kernels that only read and write."""
    return moved_bytes / at.bandwidth
