"""Seconds of what is kept in codes, waits on the host, or is updated away from the device, where arithmetic hides none.

docs/time.md has the terms in words.
"""

import msgspec

from meshwright.cost.job import Rounding, States
from meshwright.cost.kernels import moved_seconds
from meshwright.cost.memory_codes import CODE, as_kept
from meshwright.cost.memory_kept import block_kept, moved_bytes
from meshwright.cost.memory_widths import widths
from meshwright.cost.memory_work import Work, work_of
from meshwright.cost.time_layer import Bench
from meshwright.cost.time_terms import Passes, Terms
from meshwright.spec.cluster import Cluster, Link
from meshwright.spec.plan import Plan

# Bytes beside the numbers themselves, for each of them: what the operators of parallel/codes.py read and write.
FP8_ENCODED, FP8_DECODED = 1.0, 17.0  # one kernel; codes widened, scaled and narrowed
INT8_ENCODED, INT8_DECODED = 17.0, 9.0  # extremes, a wide product, its rounding; a wide product, narrowed
HOST_BYTES = 28  # a parameter of an update by the host reads and writes of its memory: states, gradient, weight
HALVES_HOST_BYTES = 80  # with states of 16 bits: some twenty passes of four bytes, most of them in its caches
HOST_REACH = 0.7  # of its memory's bandwidth, what the host's update reaches: a guess
ROUNDED_BYTES = {"compensated": 26, "stochastic": 22}  # of one parameter, read and written by kernels/adamw_bf16.py
PLAINLY_ROUNDED_BYTES = 230  # and by the operators of optim/rounding.py


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan does with that which blocks keep."""

    compress: str
    activations: str


NOTHING = Away(compress="none", activations="device")


def away_of(plan: Plan) -> Away:
    """Of a plan; where nothing is done, the same for all."""
    if plan.compress == "none" and plan.activations == "device":
        return NOTHING
    return Away(compress=plan.compress, activations=plan.activations)


def with_away(at: Bench, kind: Away, mixture: bool, one: Passes) -> Passes:
    """A block's passes with codes made and read, and with what the link to the host takes longer than its arithmetic.

    A block that is computed anew keeps its input alone.
    """
    if kind == NOTHING:
        return one
    work, anew = _work(at, kind), one.again.seconds > 0
    whole = work.stream if anew else block_kept(work, mixture)
    one = _coded(at, kind, one, whole / work.narrow) if kind.compress != "none" else one
    if kind.activations == "device":
        return one
    travels = moved_bytes(work, as_kept(work, mixture, whole), anew) / rate(at.job.cluster.host)
    back = one.again.seconds + one.input.seconds + one.weight.seconds
    going, coming = max(travels - one.forward.seconds, 0.0), max(travels - back, 0.0)
    return msgspec.structs.replace(one, forward=one.forward + Terms(link=going), input=one.input + Terms(link=coming))


def _work(at: Bench, kind: Away) -> Work:
    return msgspec.structs.replace(work_of(at.job), coded=kind.compress != "none")


def _coded(at: Bench, kind: Away, one: Passes, numbers: float) -> Passes:
    """What encoding and decoding move."""
    narrow = at.rates.width
    beside = (FP8_ENCODED, FP8_DECODED) if kind.compress == "fp8" else (INT8_ENCODED, INT8_DECODED)
    encode, decode = (moved_seconds(numbers * (narrow + more + CODE - 1), at.rates) for more in beside)
    return msgspec.structs.replace(
        one, forward=one.forward + Terms(elementwise=encode), input=one.input + Terms(elementwise=decode)
    )


def rate(link: Link) -> float:
    """Bytes a second of a large copy."""
    return link.bandwidth * link.efficiency


def offload_seconds(plan: Plan, numbers: float, cluster: Cluster, states: States) -> float:
    """An update of so many weights whose states are elsewhere: its slowest part, as all parts run at once."""
    width, narrow = widths(plan, states=states), widths(plan, states=states).weight
    link, files = rate(cluster.host), 0.0
    if plan.offload_update == "device":
        slowest = width.away / link  # both ways at once
    else:
        travels = width.gradient + (narrow if states == "bf16" else 0)
        passes = HALVES_HOST_BYTES if states == "bf16" else HOST_BYTES
        slowest = max(travels / link, passes / (cluster.host_bandwidth * HOST_REACH))
    if plan.offload == "disk":
        far = max(1 - plan.offload_host_bytes / (numbers * width.away), 0.0)
        files = 2 * width.away * far / cluster.disk_bandwidth  # read and written
    return numbers * max(slowest, files)


class Travels(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds of a step whose weights live in host memory, before arithmetic hides any."""

    arrive: float  # weights to the device
    leave: float  # gradients to the host
    update: float  # by the host, which has waited for the last gradient


def travels(plan: Plan, numbers: float, cluster: Cluster, rounding: Rounding) -> Travels:
    """Of so many weights on a rank: every microbatch brings them twice, and takes their gradient away once.

    Sums over copies leave with the last microbatch only.
    """
    beside = widths(msgspec.structs.replace(plan, offload_weights=False), rounding)
    link = rate(cluster.host)
    passes = PLAINLY_ROUNDED_BYTES if rounding != "master" else HOST_BYTES
    sums = plan.accumulate if plan.copies == 1 else 1
    return Travels(
        arrive=numbers * beside.weight * 2 * plan.accumulate / link,
        leave=numbers * beside.gradient * sums / link,
        update=numbers * passes / (cluster.host_bandwidth * HOST_REACH),
    )


def exposed_travels(each: Travels, plan: Plan, forward: float, backward: float) -> float:
    """What a step waits for, beside so much arithmetic of all its microbatches.

    Ranks that share weights fetch those of the next block meanwhile; what lies on one rank is fetched when it is used.
    A gradient that is added to an earlier one on the host is waited for.
    """
    half = each.arrive / 2
    leave = each.leave if plan.accumulate == 1 or plan.copies > 1 else each.leave / plan.accumulate
    always = each.leave - leave + each.update
    if plan.shards == 1:
        return always + each.arrive + max(leave - backward, 0.0)
    return always + max(half - forward, 0.0) + max(half - backward, leave - backward, 0.0)  # both ways at once


def exposed_update(update: float, forward: float, layers: int) -> float:
    """What the next forward waits: it begins when the first block is moved, and ends after the last one is."""
    return max(update - forward * (1 - 1 / layers), update / layers)
