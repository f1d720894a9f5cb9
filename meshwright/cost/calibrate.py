"""From what was measured on a machine to the efficiencies that its plans are priced with.

Each constant is the one of least misfit: the mean of |log(predicted ÷ measured)| over the records that it explains.
Collectives are also told as numbers of their own: bandwidths as nccl-tests define them, latency (α) and bandwidth (β).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import msgspec

from meshwright.cost.primitives import GroupSpan, Rates, collective_seconds, flash_seconds, matmul_seconds, rates
from meshwright.hardware.cluster import Cluster, Gpu, Link, catalogue, cluster_of_device, recognised
from meshwright.hardware.profile import AttentionTime, CollectiveFit, CollectiveTime, MatmulTime, Profile
from meshwright.hardware.stacks import Efficiency, Stack, efficiency_of, stacks
from meshwright.spec.plan import Precision
from meshwright.spec.problem import mistake

STARTED = 1.5  # a matmul that takes less than so many times the quickest one shows the host's time, not its own
LEAST_RECORDS = 3  # fewer say nothing about three constants
FINEST_STEP = 0.002  # relative: where a search stops
MOST_ROUNDS = 60  # of a search; each looks at every constant
WORTH = 1e-4  # relative: a smaller gain is not one, or a search would creep
LARGEST_SHARE = 1.0  # of a data sheet's figure
ROUNDS = 30  # of reweighting; ten settle it
OUTLIER = 0.05  # relative: errors beyond it count by their size, not by their square
LEAST_SIZES = 2  # a line needs two points
CPU = "cpu"  # as measurements and profiles name it


class PredictionSource(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to believe about this machine: a profile that the user gave, else the catalogue, else a probe."""

    given: Profile | None
    probed: Callable[[], Profile | None]  # asked only where the catalogue does not know the device

    def of(self, device: str, gpus: int) -> tuple[Cluster | None, str]:
        """The cluster that runs are priced on, and what is known of it from where."""
        stack, known = stacks()["meshwright"], recognised(device, catalogue().cards) is not None
        if self.given is not None and known:
            return measured(cluster_of_device(device, gpus), self.given, stack), "the profile given"
        if self.given is not None and self.given.device != device:
            what = f"the profile was measured on {self.given.device}, and this machine has {device}"
            raise mistake(what, "measure it with meshwright bench --probe", "profile")
        if self.given is not None:
            return machine(self.given, gpus, stack), "the profile given"
        if known:
            return cluster_of_device(device, gpus), "the catalogue"
        profile = self.probed()
        return (None, "") if profile is None else (machine(profile, gpus, stack), "a quick probe of this machine")


def measured(cluster: Cluster, profile: Profile, stack: Stack) -> Cluster:
    """The cluster as its own probe found it: its links, and its kernels as a training program uses them.

    The program takes the fastest attention there is. Times of one card say nothing of another; whose name is not in
    the catalogue, the user knows.
    """
    known = catalogue().cards
    if cluster.gpu.name in known and recognised(profile.device, known) != cluster.gpu.name:
        what = f"the profile was measured on {profile.device}, and the cluster has {cluster.gpu.name}"
        raise mistake(what, "name the cards that were measured, or measure these", "profile")
    usual, backend = cluster.efficiency or efficiency_of(cluster.gpu), fastest(profile.attention)
    found = calibrated(usual, cluster.gpu, profile, backend)
    if backend:
        found = _without_factor(found, stack)
    if found.product != usual.product:  # else it is still the catalogue's entry where it matters most
        found = msgspec.structs.replace(found, name=profile.device)
    return msgspec.structs.replace(calibrated_cluster(cluster, profile), efficiency=None if found == usual else found)


def machine(profile: Profile, gpus: int, stack: Stack) -> Cluster:
    """The cluster that a profile alone describes.

    Its peaks are the fastest matmuls measured, so what is priced as a share of a peak is a share of those.
    """
    if not (profile.matmuls and profile.copy_bandwidth):
        remedy = "measure it with meshwright bench --probe"
        raise mistake("the profile has no matmuls or no copy", remedy, "profile")

    def fastest_matmul(dtype: str) -> float:
        """Operations a second; 0 where none was measured."""
        return max((2 * e.m * e.n * e.k / e.seconds for e in profile.matmuls if e.dtype == dtype), default=0.0)

    gpu = Gpu(
        name=profile.device,
        match=(),
        memory_bytes=profile.memory_bytes,
        bandwidth=profile.copy_bandwidth,
        **{dtype: fastest_matmul(dtype) for dtype in ("fp32", "bf16", "fp16", "fp8")},
    )
    domains = max((each.domains for each in profile.collectives), default=1)
    times = profile.collectives
    link = Link(  # as fast as the fastest collective and as quick as the quickest; what it reaches is fitted later
        name="measured",
        bandwidth=2 * max((each.bytes / each.seconds for each in times), default=profile.copy_bandwidth),
        latency=min((each.seconds for each in times), default=profile.launch_seconds),
        efficiency=0.5,
    )
    domain = max(profile.ranks // domains, 1) if domains > 1 else gpus
    bare = Cluster(
        name=f"{gpus}x{profile.device}",
        gpu=gpu,
        gpus=gpus,
        domain=domain,
        per_node=domain,
        scale_up=link,
        network=link,
        host=Link(name="host", bandwidth=profile.host_bandwidth or profile.copy_bandwidth, latency=0.0),
        efficiency=_efficiency(profile, gpu, stack),
    )
    return calibrated_cluster(bare, profile)


def calibrated(
    efficiency: Efficiency, gpu: Gpu, profile: Profile, backend: str = "flash", precision: Precision = "bf16"
) -> Efficiency:
    """The efficiencies that explain a profile best. What was not measured stays as it was.

    `backend`: whose times stand for fused attention, as the profile names it. `precision`: of the matmuls that
    decide; two bytes wide on a GPU, fp32 on a CPU.
    """
    found = efficiency
    if profile.copy_bandwidth:
        found = msgspec.structs.replace(found, memory=min(profile.copy_bandwidth / gpu.bandwidth, LARGEST_SHARE))
    deciding = ("fp32",) if precision == "fp32" else ("bf16", "fp16")
    found = _with_matmuls(found, gpu, [each for each in profile.matmuls if each.dtype in deciding], precision)
    found = _with_matmuls(found, gpu, [each for each in profile.matmuls if each.dtype == "fp8"], "fp8")
    return _with_attention(found, gpu, [each for each in profile.attention if each.backend == backend], precision)


def calibrated_cluster(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with its links as collectives were measured on them, and its host link as a copy was."""
    inside = [each for each in profile.collectives if each.domains == 1]
    across = [each for each in profile.collectives if each.domains > 1]
    found = cluster
    if len(inside) >= LEAST_RECORDS:
        found = msgspec.structs.replace(found, scale_up=_link(found, "scale_up", inside))
    if len(across) >= LEAST_RECORDS:
        found = msgspec.structs.replace(found, network=_link(found, "network", across))
    if profile.host_bandwidth:
        share = min(profile.host_bandwidth / found.host.bandwidth, LARGEST_SHARE)
        found = msgspec.structs.replace(found, host=msgspec.structs.replace(found.host, efficiency=share))
    return found


def fastest(records: Sequence[AttentionTime]) -> str:
    """The backend whose attention took least, on the shapes that all of them were measured on; "" if none was."""
    times: dict[str, dict[tuple[int, ...], float]] = {}
    for each in records:
        shape = (each.batch, each.heads, each.kv_heads, each.sequence, each.head_dim)
        times.setdefault(each.backend, {})[shape] = each.forward_seconds + each.backward_seconds
    times = {backend: found for backend, found in times.items() if len(found) >= LEAST_RECORDS}
    alike = set.intersection(*(set(found) for found in times.values())) if times else set()
    return min(times, key=lambda backend: sum(times[backend][shape] for shape in alike), default="")


def trainer(device: str) -> Stack:
    """Our trainer; on a CPU nothing of a message is free, since the cores that compute also carry it."""
    stack = stacks()["meshwright"]
    if device != CPU:
        return stack
    speed = msgspec.structs.replace(stack.speed, overlap_shard=0.0, overlap_replicate=0.0)
    return msgspec.structs.replace(stack, speed=speed)


def matmul_errors(records: Sequence[MatmulTime], at: Rates) -> list[float]:
    """Predicted ÷ measured, as logarithms."""
    return [math.log(_matmul(each, at) / each.seconds) for each in records]


def beyond_launch(records: Sequence[MatmulTime]) -> list[MatmulTime]:
    """The matmuls whose time is the device's own."""
    quickest = min((each.seconds for each in records), default=0.0)
    return [each for each in records if each.seconds > STARTED * quickest]


def least(
    misfit: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    most: Mapping[str, float] | None = None,
    least_value: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Positive constants of least misfit: each is tried larger and smaller in turn, by steps that shrink on failure."""
    best, found = misfit(start), dict(start)
    steps = dict.fromkeys(found, 0.5)
    for _ in range(MOST_ROUNDS):
        if max(steps.values()) <= FINEST_STEP:
            break
        for name, step in steps.items():
            for factor in (1 + step, 1 / (1 + step)):
                value = min(found[name] * factor, (most or {}).get(name, math.inf))
                value = max(value, (least_value or {}).get(name, 0.0))
                trial = {**found, name: value}
                if value != found[name] and (error := misfit(trial)) < best * (1 - WORTH):
                    best, found = error, trial
                    break
            else:
                steps[name] = step / 2
    return found


def _matmul(record: MatmulTime, at: Rates) -> float:
    """The gradient of an input sums over n, that of a weight over m."""
    m, n, k = record.m, record.n, record.k
    m, n, k = {"forward": (m, n, k), "input": (m, k, n), "weight": (n, k, m)}[record.kind]
    return matmul_seconds(m, n, k, at)


def _with_matmuls(efficiency: Efficiency, gpu: Gpu, records: Sequence[MatmulTime], precision: Precision) -> Efficiency:
    """Of matmuls the share of the peak and what tiles cost; of those in fp8 the share alone."""
    kept, in_fp8 = beyond_launch(records), precision == "fp8"
    if len(kept) < LEAST_RECORDS or (in_fp8 and not gpu.fp8):
        return efficiency

    def misfit(found: Mapping[str, float]) -> float:
        return _mean_size(matmul_errors(kept, _rates(efficiency, gpu, precision, found)))

    start = {"product": efficiency.product, "wave": efficiency.wave, "depth": efficiency.depth}
    if in_fp8:
        start = {"product_fp8": efficiency.product_fp8 or efficiency.product}
    most = {"product": LARGEST_SHARE, "product_fp8": LARGEST_SHARE}
    return msgspec.structs.replace(efficiency, **least(misfit, start, most))


def _with_attention(
    efficiency: Efficiency, gpu: Gpu, records: Sequence[AttentionTime], precision: Precision
) -> Efficiency:
    if len(records) < LEAST_RECORDS:
        return efficiency

    def misfit(found: Mapping[str, float]) -> float:
        at = _rates(efficiency, gpu, precision, found)
        errors = []
        for each in records:
            rows, width = each.batch * each.sequence, each.heads * each.head_dim
            forward, backward = flash_seconds(rows, each.sequence, width, at)
            errors += [math.log(forward / each.forward_seconds), math.log(backward / each.backward_seconds)]
        return _mean_size(errors)

    names = ("attention_forward", "attention_backward", "attention_sequence")
    start = {name: getattr(efficiency, name) for name in names}
    most = {"attention_forward": LARGEST_SHARE, "attention_backward": LARGEST_SHARE}
    return msgspec.structs.replace(efficiency, **least(misfit, start, most))


def _rates(efficiency: Efficiency, gpu: Gpu, precision: Precision, found: Mapping[str, float]) -> Rates:
    return rates(gpu, msgspec.structs.replace(efficiency, **found), precision)


def _link(cluster: Cluster, which: str, records: Sequence[CollectiveTime]) -> Link:
    """The latency and the efficiency of one of a cluster's links that explain measured collectives best."""
    link: Link = getattr(cluster, which)

    def misfit(found: Mapping[str, float]) -> float:
        trial = msgspec.structs.replace(cluster, **{which: msgspec.structs.replace(link, **found)})
        errors = []
        for each in records:
            over = GroupSpan(local=each.ranks // each.domains, domains=each.domains)
            errors.append(math.log(collective_seconds(each.kind, each.bytes, over, trial) / each.seconds))
        return _mean_size(errors)

    start = {"latency": link.latency, "efficiency": link.efficiency}
    return msgspec.structs.replace(link, **least(misfit, start, {"efficiency": LARGEST_SHARE}))


def _mean_size(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _without_factor(efficiency: Efficiency, stack: Stack) -> Efficiency:
    """What is measured has the stack's own factor on attention in it, which tells it apart from a plain kernel."""
    own = stack.speed.attention
    forward, backward = efficiency.attention_forward / own, efficiency.attention_backward / own
    return msgspec.structs.replace(efficiency, attention_forward=forward, attention_backward=backward)


def _efficiency(profile: Profile, gpu: Gpu, stack: Stack) -> Efficiency:
    """What the kernels of an unknown device reach: a search from guesses, which stay where nothing was measured."""
    start = Efficiency(
        name=profile.device,
        product=1.0,
        wave=1e3,
        depth=10.0,
        attention_forward=0.5,
        attention_backward=0.5,
        attention_sequence=100.0,
        memory=1.0,
        kernel_seconds=profile.launch_seconds,
    )
    found = calibrated(start, gpu, profile, fastest(profile.attention), "fp32" if profile.threads else "bf16")
    return _without_factor(found, stack)


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
