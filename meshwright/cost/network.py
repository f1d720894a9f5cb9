"""Seconds of collectives: latency and bandwidth over the links that a group of ranks really spans."""

import math
from functools import lru_cache

import msgspec

from meshwright.cost.traffic import Axis, Collective, Kind
from meshwright.hardware.cluster import Cluster, Link
from meshwright.spec.plan import Plan


class GroupSpan(msgspec.Struct, frozen=True, kw_only=True):
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
        "expert_replicate": (expert_copies, plan.tp * plan.ep if plan.zero == 0 else inner),
        "pp": (2, plan.world // plan.pp),
        "tied": (2, plan.world // plan.pp * max(plan.pp - 1, 1)),
        "world": (plan.world, 1),
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
    if kind == "all_to_all":
        return _exchange_seconds(size, over, cluster)
    passes = 2 if kind == "all_reduce" else 1
    share = (over.ranks - 1) / over.ranks
    return passes * share * size / bus_bandwidth(over, cluster) + _latency(passes, over, cluster)


def bus_bandwidth(over: GroupSpan, cluster: Cluster) -> float:
    """Bytes a second that pass any rank of a ring: across domains it enters and leaves by every local rank's NIC."""
    inside = achieved(cluster.scale_up)
    outside = achieved(cluster.network) * over.local
    if over.domains == 1:
        return inside
    return outside if over.local == 1 else min(inside, outside)


def _latency(passes: int, over: GroupSpan, cluster: Cluster) -> float:
    """Hops of a ring through all domains; a sum of small tensors goes up and down a tree where that is shorter."""
    hops = over.domains - 1
    if passes > 1 and over.domains > 1:
        hops = min(hops, math.ceil(math.log2(over.domains)))
    return passes * (hops * cluster.network.latency + (over.local - 1) * cluster.scale_up.latency)


def _exchange_seconds(size: float, over: GroupSpan, cluster: Cluster) -> float:
    """Every rank gives an equal part to every other; what leaves the domain goes through the rank's own NIC."""
    inside = size * (over.local - 1) / over.ranks / achieved(cluster.scale_up)
    outside = size * (over.ranks - over.local) / over.ranks / achieved(cluster.network)
    latency = cluster.network.latency if over.domains > 1 else cluster.scale_up.latency
    return max(inside, outside) + latency


def call_seconds(call: Collective, plan: Plan, cluster: Cluster, parts: float = 1.0) -> float:
    """All calls of one entry of the traffic, each sent in so many parts."""
    over = axis_span(call.axis, plan, cluster)
    return call.count * parts * collective_seconds(call.kind, call.bytes / parts, over, cluster)


def inside_seconds(call: Collective, plan: Plan, cluster: Cluster) -> float:
    """What the bytes of one entry would take over the scale-up link, through which they enter and leave a GPU."""
    ranks = axis_span(call.axis, plan, cluster).ranks
    passes = 2 if call.kind == "all_reduce" else 1
    return passes * call.total_bytes * (ranks - 1) / ranks / achieved(cluster.scale_up)
