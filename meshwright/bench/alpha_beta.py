"""Collectives as numbers: bandwidths as nccl-tests define them; latency (α) and bandwidth (β) fitted to times."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby

from meshwright.hardware.profile import CollectiveFit, CollectiveTime

ROUNDS = 30  # of reweighting; ten settle it
OUTLIER = 0.05  # relative: errors beyond it count by their size, not by their square
LEAST_SIZES = 2  # a line needs two points


def algorithm_bandwidth(time: CollectiveTime) -> float:
    """Bytes of the whole tensor ÷ seconds, which nccl-tests call algbw."""
    return time.bytes / time.seconds


def bus_bandwidth(time: CollectiveTime) -> float:
    """Bytes that pass each rank's link ÷ seconds, busbw: the link's own speed if the ring is perfect."""
    return algorithm_bandwidth(time) * bus_share(time.kind, time.ranks)


def bus_share(kind: str, ranks: int) -> float:
    """What passes a link ÷ the whole tensor."""
    if kind in ("broadcast", "send"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def fits(times: Iterable[CollectiveTime]) -> tuple[CollectiveFit, ...]:
    """One fit for each kind of collective among the same ranks."""

    def alike(time: CollectiveTime) -> tuple[str, int, int]:
        return time.kind, time.ranks, time.domains

    groups = [list(group) for _, group in groupby(sorted(times, key=alike), key=alike)]
    return tuple(fit(group) for group in groups if len({time.bytes for time in group}) >= LEAST_SIZES)


def fit(times: Sequence[CollectiveTime]) -> CollectiveFit:
    """Latency and bandwidth of least relative error. Every size counts alike, and a disturbed one counts less."""
    weights = [1.0] * len(times)
    latency, slope = 0.0, 0.0
    for _ in range(ROUNDS):
        latency, slope = _line(times, weights)
        errors = [abs(_error(time, latency, slope)) for time in times]
        weights = [min(OUTLIER / error, 1.0) if error else 1.0 for error in errors]
    return CollectiveFit(
        kind=times[0].kind,
        ranks=times[0].ranks,
        domains=times[0].domains,
        latency=latency,
        bandwidth=1 / slope,
        error=statistics.median(abs(_error(time, latency, slope)) for time in times),
    )


def fitted_seconds(found: CollectiveFit, size: float) -> float:
    """What a fit says of one call."""
    return found.latency + size / found.bandwidth


def _error(time: CollectiveTime, latency: float, slope: float) -> float:
    return (latency + slope * time.bytes) / time.seconds - 1


def _line(times: Sequence[CollectiveTime], weights: Sequence[float]) -> tuple[float, float]:
    """The two numbers of weighted least squares in relative error; neither is below zero, as no time is."""
    rows = [(weight, 1 / time.seconds, time.bytes / time.seconds) for weight, time in zip(weights, times, strict=True)]
    a, b = sum(w * x for w, x, _ in rows), sum(w * y for w, _, y in rows)
    aa, bb = sum(w * x * x for w, x, _ in rows), sum(w * y * y for w, _, y in rows)
    ab = sum(w * x * y for w, x, y in rows)
    determinant = aa * bb - ab * ab
    latency, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency <= 0:
        return 0.0, b / bb
    if slope <= 0:  # noise larger than the bytes' own time: the largest size bounds it
        largest = max(times, key=lambda time: time.bytes)
        return a / aa, largest.seconds / largest.bytes
    return latency, slope
