"""Seconds that weights cost a step: all-gathered, their gradients reduced, and updated.

    shard     = all-gathers beyond the forward + reduce-scatters beyond the backward
    replicate = all-reduces beyond what the backward leaves
    outer     = a sync of replicas that sync rarely, and its update ÷ the steps between two
    optimizer = bytes of weights, gradients and states read and written ÷ the memory's bandwidth; of Muon also the
                matmuls of its matrices, beside which they travel
    offload   = the slowest of link, host and disk, beyond the arithmetic it runs beside

What is beyond arithmetic is cost/layer_time.py's `exposed`, with the share of overlap that a stack reaches.
"""

import math
from collections import Counter
from functools import lru_cache

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.layer_time import exposed
from meshwright.cost.layout import LOW_BYTES, StateLayout, state_layout
from meshwright.cost.matrices import MatrixTeam, matrix_teams
from meshwright.cost.primitives import (
    Rates,
    achieved,
    call_seconds,
    inside_seconds,
    matmul_seconds,
    moved_seconds,
    rates,
)
from meshwright.cost.rank_view import RankView, grid, groups, stored_shape
from meshwright.cost.resident import frozen_of_rank, parameters
from meshwright.cost.traffic import Collective, gathers, reductions, stages_stay, update_traffic, weight_traffic
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.stacks import Stack, StackSpeed, efficiency_of
from meshwright.spec.arch import Arch
from meshwright.spec.communication import factors
from meshwright.spec.matrices import STEPS
from meshwright.spec.optimizers import ADAMW, DESCRIPTIONS, OptimizerSpec
from meshwright.spec.params import trained
from meshwright.spec.plan import Plan

# Of one parameter, what an update reads and writes beside the optimizer's states, which are in spec/optimizers.py.
HOST_BYTES = 12  # by the host: the gradient read, the master read and written, the weight written
HOST_REACH = 0.7  # of its memory's bandwidth, what the host's update reaches: a guess
ROUNDED_BYTES = {"split": 10, "none": 6}  # by one kernel of ours: the gradient, the weight and its low bits, if any
# By plain operators, what rounding bf16 states takes: some thirty passes of eight bytes make an element's draw.
STATE_ROUNDING_BYTES = 400
OUTER_BYTES = {"average": 28, "slowmo": 72, "diloco": 84}  # of a sync: deltas, their mean, the update, the checksum
ENCODED_BYTES, DECODED_BYTES = 44, 25  # of a delta in few bits, by plain operators: its own, and each replica's
# Of a gradient that is rounded, beside encoding it: what is owed added, decoded, subtracted and made finite; and of
# what is received: decoded, and added up. By plain operators in fp32, counted in parallel/grad_reduce.py.
OWED_BYTES, SUMMED_BYTES = 57, 37
# Of a gradient that PowerSGD factors: owed, two matmuls that read it, a third that writes it, and what is owed now.
FACTORED_BYTES = 60
QR_KERNELS = 4  # of each column of a matrix that is orthogonalized: a guess
# And decoding and encoding a quantized state: some twenty passes of one to eight bytes.
QUANTIZING_BYTES = 86
ROUNDS = 8  # of a pipeline, that its weights are followed through; longer steps go on in proportion
SHARDED = ("shard", "expert_shard", "node", "between_nodes")
GATHERED = (*SHARDED, "secondary")
COPIED = ("replicate", "expert_replicate")
V_SHAPED = ("zbv", "dualpipev")  # stages go down the ranks and up again


class WeightSeconds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is waited for, once a step, on one rank."""

    shard: float = 0.0
    replicate: float = 0.0
    tied: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    outer: float = 0.0

    @property
    def seconds(self) -> float:
        return self.shard + self.replicate + self.tied + self.optimizer + self.offload + self.outer


class OverlapWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Arithmetic of one microbatch that communication can hide behind."""

    forward: float
    backward: float


class WeightTraffic(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds that the weights of one rank take in a step, before anything hides them."""

    gather: float
    reduce: float
    copies: float  # sums over copies
    tied: float
    optimizer: float
    contended_shard: float  # what arithmetic loses to the gathers and scatters beside it
    contended_copies: float
    again: float = 0.0  # of `gather`, the backward's where neighbours share the weights in between
    update: float = 0.0  # of offloaded states, behind which the next forward begins
    outer: float = 0.0  # of a sync that comes once in so many steps, a step's share

    @property
    def exposed(self) -> float:
        """What nothing can hide."""
        return self.tied + self.optimizer + self.contended_shard + self.contended_copies + self.outer


class HostTransfers(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds of a step whose weights live in host memory, before arithmetic hides any."""

    arrive: float  # weights to the device
    leave: float  # gradients to the host
    update: float  # by the host, which has waited for the last gradient


def weight_seconds(job: Job, rank: int, at: Rates, behind: OverlapWindow) -> WeightSeconds:
    """What weights cost the rank of a pipeline stage."""
    plan, speed = job.plan, job.stack.speed
    every = sent(job, rank, at)
    update = exposed_update(every.update, behind.forward, job.arch.layers) if every.update else 0.0
    if (layout := state_layout(job)).cpu_offload:
        moved = _travels(job, layout, rank)
        update = exposed_travels(moved, plan, behind.forward * plan.grad_accum, behind.backward * plan.grad_accum)
    left = max(behind.backward - (every.reduce if plan.zero else 0.0), 0.0)
    return WeightSeconds(
        shard=_exposed_shard(every, job, behind) + every.contended_shard,
        replicate=exposed(every.copies, left, speed.overlap_replicate) + every.contended_copies,
        tied=every.tied,
        optimizer=every.optimizer,
        offload=update,
        outer=max(every.outer - behind_server(plan, behind), 0.0),
    )


def behind_server(plan: Plan, behind: OverlapWindow) -> float:
    """Arithmetic beside which gradients and weights travel to and from a parameter server; with staleness 0, none."""
    return (behind.forward + behind.backward) * plan.grad_accum if plan.staleness else 0.0


def least_seconds(job: Job, rank: int, at: Rates, behind: OverlapWindow) -> tuple[float, float]:
    """What weights add to a rank's work at least; and what its work and its weights take at least together.

    Gathers hide behind forwards, scatters behind backwards: together they hide no more than the rank works. Sums over
    copies may hide behind the last backward beside scatters, which is at most its own time and that of one forward.
    """
    every, speed = sent(job, rank, at), job.stack.speed
    alone = (1 - speed.overlap_shard) * (every.gather + every.reduce) + (1 - speed.overlap_replicate) * every.copies
    beside = max(behind.forward + behind.backward - every.reduce, 0.0) if job.plan.zero else 0.0
    together = every.gather + every.reduce + every.copies - min(every.copies, beside)
    waits = every.exposed - (every.outer if job.plan.staleness else 0.0)  # which may hide
    if (layout := state_layout(job)).cpu_offload:
        moved = _travels(job, layout, rank)
        waits += exposed_travels(moved, job.plan, math.inf, math.inf)
    return waits + alone, waits + together


def sent(job: Job, rank: int, at: Rates) -> WeightTraffic:
    """The collectives and the update of a rank's weights; long steps of a pipeline gather in proportion."""
    plan = job.plan
    brief = _essence(plan)
    apart = DESCRIPTIONS[job.optimizer].compresses
    found = _updated(job, rank, _sent(job.arch, brief, rank, job.cluster, job.stack, at, apart))
    if stages_stay(plan) or plan.grad_accum == brief.grad_accum:
        return found
    return msgspec.structs.replace(found, gather=found.gather * (plan.grad_accum / brief.grad_accum))


def _updated(job: Job, rank: int, found: WeightTraffic) -> WeightTraffic:
    """The same with an update that rounds, or of states that are elsewhere."""
    plan, layout = job.plan, state_layout(job)
    if plan.is_served:
        return msgspec.structs.replace(found, optimizer=0.0, outer=found.outer + server_seconds(job, layout, rank))
    if layout.cpu_offload:
        return msgspec.structs.replace(found, optimizer=0.0)  # the host's
    if layout.offloaded:
        update = offload_seconds(layout, held(job.arch, plan, rank), job.cluster)
        return msgspec.structs.replace(found, optimizer=0.0, update=update)
    spec, usual = layout.optimizer, job.stack.speed.optimizer_bytes
    shares = update_shares(job.arch, job.optimizer)
    moved = sum(share * _moved(job, layout, each) for each, share in zip(spec.members, shares, strict=True))
    sends = spec.whole or spec.quantized
    if moved == usual and not sends:
        return found
    sent = _update_seconds(job.arch, _essence(plan), rank, job.cluster, job.stack, job.optimizer) if sends else 0.0
    return msgspec.structs.replace(found, optimizer=found.optimizer / usual * moved + sent)


def server_seconds(job: Job, layout: StateLayout, rank: int) -> float:
    """A gradient's way to the host and over the network, the update of a server's rows, and the way of weights back.

    Hosts speak Gloo: their messages take the network, also inside a node.
    """
    elements, spec, workers = held(job.arch, job.plan, rank), layout.optimizer, job.plan.replicate
    sent = 2 * elements * layout.accum_bytes * (workers - 1) / workers / achieved(job.cluster.network)
    moved = elements / job.plan.replicate * (HOST_BYTES + spec.moved_bytes(4))
    travels = 2 * elements * layout.accum_bytes / achieved(job.cluster.host)
    return travels + sent + moved / (job.cluster.host_bandwidth * HOST_REACH)


def _moved(job: Job, layout: StateLayout, spec: OptimizerSpec) -> float:
    """Bytes of a parameter that one optimizer's update moves on the device."""
    by_kernel = spec.has_kernel and not (spec.orthogonalizes and job.master_weights == "none")  # which draws nothing
    plain = job.plan.kernels == "plain" or job.plan.deterministic or not by_kernel
    if spec.quantized and plain:
        return spec.rounded_bytes + QUANTIZING_BYTES * len(spec.states)
    if job.master_weights == "fp32" and spec.update_bytes:
        return spec.update_bytes
    if job.master_weights == "fp32":  # a stack's figure is of AdamW
        return job.stack.speed.optimizer_bytes - ADAMW.moved_bytes(4) + spec.moved_bytes(4)
    if plain:
        return spec.rounded_bytes + (STATE_ROUNDING_BYTES if layout.bf16_states else 0)
    matrices = 2 * layout.compute_bytes if spec.orthogonalizes else 0  # written to be orthogonalized, and read after it
    return ROUNDED_BYTES[job.master_weights] + spec.moved_bytes(layout.state_width) + matrices


@lru_cache(maxsize=256)
def update_shares(arch: Arch, optimizer: str) -> tuple[float, ...]:
    """The share of all parameters that each member of an optimizer updates."""
    spec, taken = DESCRIPTIONS[optimizer], Counter[str]()
    for param in trained(arch):
        taken[spec.of(param.name, len(param.shape)).name] += param.numel
    return tuple(taken[each.name] / taken.total() for each in spec.members)


@lru_cache(maxsize=16384)
def _update_seconds(arch: Arch, plan: Plan, rank: int, cluster: Cluster, stack: Stack, optimizer: str) -> float:
    """What an update of whole tensors waits for: its rounds follow each other, and nothing runs beside them.

    Whole matrices travel to their owners and back beside the orthogonalizing of others, but for the first batch and the
    last; what replicas exchange is waited for.
    """
    view = RankView(arch=arch, plan=plan, sequence=1, place={"pp": rank})
    seconds = {True: 0.0, False: 0.0}  # by whether anything runs beside
    for call in update_traffic(view, DESCRIPTIONS[optimizer]):
        seconds[call.overlappable] += call_seconds(call, plan, cluster, stack.speed.calls)
    teams = matrix_teams(view) if DESCRIPTIONS[optimizer].orthogonalizes else ()
    made = sum(orthogonalize_seconds(team, plan, cluster) for team in teams)
    batches = sum(len(team.batches) for team in teams)
    beside, sent = seconds[True], seconds[False]
    return sent + max(beside, made) + min(beside, made) / max(batches, 1)


def orthogonalize_seconds(team: MatrixTeam, plan: Plan, cluster: Cluster) -> float:
    """The matmuls of Newton–Schulz for the matrices that a rank owns, each batch as one of so many rows."""
    low = plan.precision in ("fp8", "fp16")  # bf16 then, as in optim/muon.py
    reached = cluster.efficiency or efficiency_of(cluster.gpu)
    at = rates(cluster.gpu, reached, "bf16" if low else plan.precision)
    seconds = 0.0
    for batch in team.batches:
        short, long = sorted((batch.cut.rows, batch.cut.columns))
        rows = batch.of_replica(team.replica)[team.member] * short
        matmuls = ((short, long), (short, short), (long, short))
        seconds += STEPS * sum(matmul_seconds(rows, columns, inner, at) for columns, inner in matmuls) if rows else 0.0
    return seconds


@lru_cache(maxsize=16384)
def _sent(arch: Arch, plan: Plan, rank: int, cluster: Cluster, stack: Stack, at: Rates, apart: bool) -> WeightTraffic:
    """`apart`: gradients stay each replica's own."""
    speed = stack.speed
    view = RankView(arch=arch, plan=plan, sequence=1, place={"pp": rank})
    calls = [_as_sent(call, plan, speed) for call in weight_traffic(view, over_tp=False, apart=apart)]
    timed = [(call, call_seconds(call, plan, cluster, speed.calls)) for call in calls]

    def contended(axes: tuple[str, ...], overlap: float) -> float:
        """Both want the device's memory and some of its processors."""
        if not speed.contention:
            return 0.0
        inside = sum(inside_seconds(call, plan, cluster) for call in calls if call.axis in axes)
        return speed.contention * overlap * inside

    rounding = rounding_seconds(view, at)
    scatters = ("reduce_scatter", "all_to_all")
    return WeightTraffic(
        gather=sum(seconds for call, seconds in timed if call.axis in GATHERED and call.kind == "all_gather")
        + rounding.gather,
        reduce=sum(seconds for call, seconds in timed if call.axis in SHARDED and call.kind in scatters)
        + rounding.reduce,
        copies=sum(seconds for call, seconds in timed if call.axis in COPIED) + rounding.copies,
        tied=sum(seconds for call, seconds in timed if call.axis == "tied"),
        optimizer=moved_seconds(held(arch, plan, rank) * speed.optimizer_bytes, at),
        contended_shard=contended(SHARDED, speed.overlap_shard),
        contended_copies=contended(COPIED, speed.overlap_replicate),
        again=sum(seconds for call, seconds in timed if call.axis == "secondary"),
        outer=sum(seconds / call.every for call, seconds in timed if call.axis == "outer" and not plan.is_served)
        + moved_seconds(held(arch, plan, rank) * outer_bytes(plan) / plan.sync_every, at),
    )


class RoundingSeconds(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the arithmetic of lossy communication takes of a step, beside the collectives that it belongs to."""

    gather: float = 0.0
    reduce: float = 0.0
    copies: float = 0.0


def rounding_seconds(view: RankView, at: Rates) -> RoundingSeconds:
    """Encoding, decoding, feedback and factors: passes over the device's memory, in the streams of the collectives."""
    plan = view.plan
    if not plan.reduces_lossily and plan.gather == "default":
        return RoundingSeconds()
    gathered = reduced = copied = kernels = 0.0
    fed_back = OWED_BYTES if plan.error_feedback else 0
    for group in groups(view):
        copies, shards = grid(group, plan)
        held = group.count * sum(math.prod(stored_shape(param, group, view)) for param in group.params)
        if plan.gather != "default" and shards > 1:
            forward, back = gathers(group, view)
            times = forward + (0 if plan.secondary_shard > 1 else back)
            gathered += times * held / group.count * (ENCODED_BYTES + shards * DECODED_BYTES)
        if plan.grad_reduce != "default" and shards > 1:
            rows = shards + plan.shard_nodes  # of its node's sum, a shard for each node
            reduced += reductions(plan) * rows * held * (ENCODED_BYTES + fed_back + SUMMED_BYTES)
        if plan.grad_reduce != "default" and copies > 1:
            part = ENCODED_BYTES + fed_back  # of the sum, which each rounds a part of
            copied += held * (ENCODED_BYTES + fed_back + SUMMED_BYTES + part / copies + DECODED_BYTES)
        if plan.powersgd and copies > 1:
            copied += held * FACTORED_BYTES
            found = (factors(param.shape, plan.powersgd) for param in group.params)
            kernels += group.count * sum(QR_KERNELS * each.rank for each in found if each)
    return RoundingSeconds(
        gather=moved_seconds(gathered, at),
        reduce=moved_seconds(reduced, at),
        copies=moved_seconds(copied, at) + kernels * at.kernel_seconds,
    )


def outer_bytes(plan: Plan) -> float:
    """Of one parameter, what a sync reads and writes: optim/outer.py, operator by operator, in fp32."""
    if not plan.has_outer_loop:
        return 0.0
    if plan.outer_quant == "none":
        return OUTER_BYTES[plan.outer]
    return OUTER_BYTES[plan.outer] + ENCODED_BYTES + plan.parts * DECODED_BYTES


def _as_sent(call: Collective, plan: Plan, speed: StackSpeed) -> Collective:
    """The same call in the widths of another stack."""
    if call.axis == "outer" or plan.reduces_lossily or plan.gather != "default":  # of our own trainer alone
        return call
    if call.kind == "all_gather":
        compute_bytes = 4 if plan.precision in ("fp32", "fp64") else 2
        width = speed.gather_bytes / compute_bytes if speed.gather_bytes else 1.0
    else:
        width = speed.reduce_bytes / 4
    return call if width == 1.0 else msgspec.structs.replace(call, bytes=round(call.bytes * width))


def _essence(plan: Plan) -> Plan:
    """The plan without what weights do not notice, and of a long step of a pipeline its beginning.

    A pipeline rank whose stages stay gathers each of them once, in whatever order and however many microbatches come.
    """
    grad_accum, schedule = plan.grad_accum, plan.schedule
    if plan.pp > 1 and stages_stay(plan):
        grad_accum = min(grad_accum, 2)
        schedule = "zbv" if schedule in V_SHAPED else "1f1b" if plan.chunks == 1 else "looped"
    elif plan.pp > 1:
        grad_accum = min(grad_accum, ROUNDS * plan.pp)
    return msgspec.structs.replace(
        plan,
        microbatch=1,
        grad_accum=grad_accum,
        schedule=schedule,
        bf16_params=False,
        kernels="auto",
        recompute="none",
        compile=False,
        deterministic=False,
        cp_kind="ring",
        activation_quant="none",
        activation_offload=False,
        optimizer_offload="none",
        cpu_offload=False,
    )


def _exposed_shard(every: WeightTraffic, job: Job, behind: OverlapWindow) -> float:
    """Gathers run behind the forward and, where weights are given up between, the backward; scatters behind that."""
    plan, speed, forth = job.plan, job.stack.speed, 1 + job.arch.compared  # gathers before the backward's
    each_time = plan.grad_accum if plan.pp == 1 else 1
    forwards = each_time if plan.zero == 3 else 1
    backwards = each_time if plan.zero >= 2 else 1
    early = every.gather * forth / (forth + 1) if plan.zero == 3 and plan.pp == 1 else every.gather
    early = every.gather - every.again if every.again else early
    return exposed(early, behind.forward * forwards, speed.overlap_shard) + exposed(
        every.gather - early + every.reduce, behind.backward * backwards, speed.overlap_shard
    )


def offload_seconds(layout: StateLayout, elements: float, cluster: Cluster) -> float:
    """An update of so many weights whose states are offloaded: its slowest part, as all parts run at once."""
    states, link, files = layout.offloaded, achieved(cluster.host), 0.0
    assert states is not None, "asked only of offloaded states"
    if layout.update == "device":
        slowest = states.bytes / link  # both ways at once
    else:
        spec = layout.optimizer
        halves = states.bytes == LOW_BYTES + spec.state_bytes(2)
        travels = layout.of("gradients") + (layout.of("weights") if halves else 0)
        passes = spec.bf16_state_bytes if halves else HOST_BYTES + spec.moved_bytes(4)
        slowest = max(travels / link, passes / (cluster.host_bandwidth * HOST_REACH))
    if states.location == "disk":
        far = max(1 - layout.resident_states / (elements * states.bytes), 0.0)
        files = 2 * states.bytes * far / cluster.disk_bandwidth  # read and written
    return elements * max(slowest, files)


def exposed_update(update: float, forward: float, layers: int) -> float:
    """What the next forward waits: it begins when the first block is moved, and ends after the last one is."""
    return max(update - forward * (1 - 1 / layers), update / layers)


def _travels(job: Job, layout: StateLayout, rank: int) -> HostTransfers:
    """What moves between a rank's host and its device."""
    arch, plan = job.arch, job.plan
    found = travels(plan, layout, held(arch, plan, rank), job.cluster, frozen_of_rank(arch, plan, rank))
    forth = 1 + arch.compared  # the reference of DPO goes forward as well
    return msgspec.structs.replace(found, arrive=found.arrive * (forth + 1) / 2)


def travels(plan: Plan, layout: StateLayout, elements: float, cluster: Cluster, frozen: int = 0) -> HostTransfers:
    """Of so many weights on a rank: every microbatch brings them twice, and takes their gradient away once.

    Beside them come so many bytes of what is frozen. Sums over copies leave with the last microbatch only.
    """
    link = achieved(cluster.host)
    spec = layout.optimizer
    passes = spec.rounded_bytes if layout.rounds else HOST_BYTES + spec.moved_bytes(4)
    passes += STATE_ROUNDING_BYTES if layout.bf16_states else 0
    sums = plan.grad_accum if plan.copies == 1 else 1
    return HostTransfers(
        arrive=(elements * layout.of("weights", "host") + frozen) * 2 * plan.grad_accum / link,
        leave=elements * layout.of("gradients", "host") * sums / link,
        update=elements * passes / (cluster.host_bandwidth * HOST_REACH),
    )


def exposed_travels(each: HostTransfers, plan: Plan, forward: float, backward: float) -> float:
    """What a step waits for, beside so much arithmetic of all its microbatches.

    Ranks that share weights fetch those of the next block meanwhile; what lies on one rank is fetched when it is used.
    A gradient that is added to an earlier one on the host is waited for.
    """
    half = each.arrive / 2
    leave = each.leave if plan.grad_accum == 1 or plan.copies > 1 else each.leave / plan.grad_accum
    always = each.leave - leave + each.update
    if plan.shards == 1:
        return always + each.arrive + max(leave - backward, 0.0)
    return always + max(half - forward, 0.0) + max(half - backward, leave - backward, 0.0)  # both ways at once


def held(arch: Arch, plan: Plan, rank: int) -> float:
    """Weights that a rank updates."""
    alike = msgspec.structs.replace(plan, replicate=1, shard=plan.data, zero=1)  # for every split of the data axes
    rest, experts = parameters(arch, alike, 0, rank)
    return rest / plan.shards + experts / (max(plan.shards // plan.ep, 1) if plan.zero else 1)
