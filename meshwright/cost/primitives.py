"""Seconds of what a step is made of: single kernels, and single collectives over the links that a group really spans.

matmul     = the larger of its work in tiles and the traffic of its matrices;  attention = operations ÷ its rate
collective = latency + the bytes that pass a rank ÷ the bandwidth of its slowest link
"""

import math
from functools import lru_cache

import msgspec

from meshwright.cost.traffic import Axis, Collective, Kind
from meshwright.hardware.cluster import Cluster, Gpu, Link
from meshwright.hardware.stacks import Efficiency
from meshwright.spec.plan import Arithmetic, Plan

HALF = 0.5  # of all pairs of positions a causal kernel computes
BACKWARD_ATTENTION = 2.5  # the backward of fused attention has five matmuls where the forward has two
LOW_BYTES = 2  # of an element in the arithmetic of a matmul; fp8 is made from it and returns it
WIDE = ("fp32", "tf32", "fp64")  # precisions of four bytes or more


class Rates(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """What kernels of one precision reach on one accelerator."""

    peak: float  # operations a second of the data sheet
    matmul: float  # operations a second of large matmuls
    matmul_back: float  # and of those of gradients, which may accumulate otherwise
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
def rates(gpu: Gpu, efficiency: Efficiency, precision: Arithmetic, exact_fp8: bool = False) -> Rates:
    """The data sheet, as far as kernels reach it; `exact_fp8`: matmuls of gradients accumulate in fp32."""
    peak = peak_of(gpu, precision)
    attention = peak_of(gpu, "bf16") if precision == "fp8" else peak  # attention stays in bf16 beside fp8 matmuls
    share = efficiency.product_fp8 or efficiency.product if precision == "fp8" else efficiency.product
    back = share * efficiency.fp8_exact if precision == "fp8" and exact_fp8 else share
    return Rates(
        peak=peak,
        matmul=peak * share,
        matmul_back=peak * back,
        wave=efficiency.wave,
        depth=efficiency.depth,
        forward=attention * efficiency.attention_forward,
        backward=attention * efficiency.attention_backward,
        attention_sequence=efficiency.attention_sequence,
        bandwidth=gpu.bandwidth * efficiency.memory,
        kernel_seconds=efficiency.kernel_seconds,
        variation=efficiency.variation,
        width=4 if precision in WIDE else LOW_BYTES,
    )


def peak_of(gpu: Gpu, precision: Arithmetic) -> float:
    """Operations a second; a precision without a figure is taken as the next one that has it."""
    order: dict[Arithmetic, tuple[Arithmetic, ...]] = {
        "fp8": ("fp8", "bf16", "fp16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16"), "tf32": ("tf32",),
    }  # fmt: skip
    return next((peak for each in order.get(precision, ()) if (peak := gpu.peak(each))), gpu.fp32)


def matmul_seconds(m: float, n: float, k: float, at: Rates, back: bool = False) -> float:
    """Time of an (m, k) by (k, n) matmul: its work in tiles, or the traffic of its matrices if that is more."""
    work = 2 * (m * n + at.wave) * (k + at.depth) / (at.matmul_back if back else at.matmul)
    moved = at.width * (m * k + k * n + m * n) / at.bandwidth
    return max(work, moved, at.kernel_seconds)


def attention_flops(pairs: float, q_width: float) -> float:
    """Operations of the two matmuls of a forward over `pairs` of positions."""
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


class GroupSpan(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """Where the ranks of a group sit: so many in each scale-up domain, in so many domains."""

    local: int
    domains: int

    @property
    def ranks(self) -> int:
        return self.local * self.domains


@lru_cache(maxsize=4096)
def span(ranks: int, stride: int, domain: int, alone: bool = False) -> GroupSpan:
    """Ranks a stride apart, laid into domains in order: neighbours share one as long as it has room.

    Groups that do not fill domains evenly lie across their borders, unless one domain holds all of them (`alone`).
    """
    room = max(domain // stride, 1)
    extent, fullest = ranks * stride, 2 ** (domain.bit_length() - 1)  # of 72 ranks 64 are used
    is_inside = ranks <= room and (alone or domain % extent == 0 or fullest % extent == 0)
    local = ranks if is_inside else math.gcd(ranks, room)
    return GroupSpan(local=local, domains=ranks // local)


def axis_span(axis: Axis, plan: Plan, cluster: Cluster) -> GroupSpan:
    """The group of an axis. The plan's axes lie outermost to innermost as pp, replicate, shard, cp, tp.

    Of a pipeline in several domains some neighbours are in two, and the slowest message sets the pace of all.
    """
    ranks, stride = _reach(axis, plan)
    alone = plan.world <= cluster.domain
    if axis in ("pp", "tied") and not alone:
        stride = max(stride, cluster.domain)
    return span(ranks, stride, cluster.domain, alone)


def _reach(axis: Axis, plan: Plan) -> tuple[int, int]:
    """How many ranks an axis has, and how far apart they are."""
    if axis == "tp":  # the commonest, by far
        return plan.tp, 1
    inner = plan.shards * plan.tp
    expert_copies = plan.copies if plan.zero else max(plan.copies // plan.ep, 1)
    return {
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, plan.tp),
        "shard": (plan.shards, plan.tp),
        "replicate": (plan.copies, plan.tp if plan.zero == 0 else inner),
        "expert_shard": (max(plan.shards // plan.ep, 1), plan.tp * plan.ep),
        "shard_tp": (inner, 1),
        "expert_shard_tp": (max(plan.shards // plan.ep, 1) * plan.tp, plan.ep),  # in runs of tp, but on average so far
        "expert_replicate": (expert_copies, plan.tp * plan.ep if plan.zero == 0 else inner),
        "pp": (2, plan.world // plan.pp),
        "tied": (2, plan.world // plan.pp * max(plan.pp - 1, 1)),
        "world": (plan.world, 1),
        "outer": (plan.parts, plan.world // plan.pp // plan.parts),
        "peers": (plan.world // plan.parts, 1),
        "secondary": (plan.secondary_shard, plan.tp),
        "node": (plan.grad_reduce_node, plan.tp),
        "between_nodes": (max(plan.shards // plan.grad_reduce_node, 1), plan.tp * plan.grad_reduce_node),
    }[axis]


def achieved(link: Link) -> float:
    """Bytes a second that large collectives reach."""
    return link.bandwidth * link.efficiency


def collective_seconds(kind: Kind, size: float, over: GroupSpan, cluster: Cluster) -> float:
    """One call; `size` are its bytes where the tensor is whole."""
    if over.ranks == 1:
        return 0.0
    if kind == "send":
        link = cluster.network if over.domains > 1 else cluster.scale_up
        return link.latency + size / achieved(link)
    if kind == "all_to_all":  # an equal part for every other; what leaves the domain goes through the rank's own NIC
        inside = size * (over.local - 1) / over.ranks / achieved(cluster.scale_up)
        outside = size * (over.ranks - over.local) / over.ranks / achieved(cluster.network)
        latency = cluster.network.latency if over.domains > 1 else cluster.scale_up.latency
        return max(inside, outside) + latency
    passes, hops = 2 if kind == "all_reduce" else 1, over.domains - 1
    if passes > 1 and over.domains > 1:  # a sum of small tensors goes up and down a tree where that is shorter
        hops = min(hops, math.ceil(math.log2(over.domains)))
    latency = passes * (hops * cluster.network.latency + (over.local - 1) * cluster.scale_up.latency)
    share = (over.ranks - 1) / over.ranks
    return passes * share * size / bus_bandwidth(over, cluster) + latency


def bus_bandwidth(over: GroupSpan, cluster: Cluster) -> float:
    """Bytes a second that pass any rank of a ring: across domains it enters and leaves by every local rank's NIC."""
    inside = achieved(cluster.scale_up)
    outside = achieved(cluster.network) * over.local
    if over.domains == 1:
        return inside
    return outside if over.local == 1 else min(inside, outside)


def call_seconds(call: Collective, plan: Plan, cluster: Cluster, parts: float = 1.0) -> float:
    """All calls of one entry of the traffic, each sent in so many parts."""
    over = axis_span(call.axis, plan, cluster)
    return call.count * parts * collective_seconds(call.kind, call.bytes / parts, over, cluster)


def inside_seconds(call: Collective, plan: Plan, cluster: Cluster) -> float:
    """What the bytes of one entry would take over the scale-up link, through which they enter and leave a GPU."""
    ranks = axis_span(call.axis, plan, cluster).ranks
    passes = 2 if call.kind == "all_reduce" else 1
    return passes * call.total_bytes * (ranks - 1) / ranks / achieved(cluster.scale_up)
