"""What a rank holds of the model, its gradient and its optimizer: the rows of the state layout as bytes.

    weights, gradients     = elements of its shard, padded to equal parts × bytes of the row
    master, moments        = elements of its shard × bytes of the row
    all-gathered params    = whole model, or under ZeRO-3 what is outside the blocks and two of them × compute dtype
    unreduced gradients    = unsharded gradients that wait for the last microbatch, beyond the shard
    reduce buffers         = a block's gradient as it came, and its copy in fp32

A test builds the real model, takes a step and finds exactly these bytes; docs/axes/shard.md has the formulas in words.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache

import msgspec

from meshwright.cost.activations import padded_vocab
from meshwright.cost.job import Job
from meshwright.cost.layout import LedgerEntry, Location, Name, ResidentMemory, StateLayout, layout_of, state_layout
from meshwright.cost.matrices import matrix_teams
from meshwright.cost.rank_view import (
    ParamGroup,
    RankView,
    grid,
    groups,
    has_row_norms,
    is_multiplied_as_held,
    local_shape,
    padded,
    placement,
    servings,
    shard_columns,
    shard_shape,
    together,
    updated_elements,
)
from meshwright.cost.traffic import FIRST, in_sight, quantized_bytes, sent_elements, server_elements
from meshwright.spec.arch import Arch
from meshwright.spec.communication import factors, message_bytes, outer_states, packed_bytes
from meshwright.spec.optimizers import ADAMW, DESCRIPTIONS
from meshwright.spec.params import Split, count, frozen_bytes, params, trained
from meshwright.spec.plan import Plan
from meshwright.spec.quantized import FORMATS
from meshwright.spec.schedule import Schedule, actions

PIECE, SLOTS = 1 << 24, 4  # elements that are moved together, and pieces on their way, as in optim/offload.py
# fp32 tensors of one piece alive at once while it is rounded, beside its states: the gradient, the weight, what an
# update is made of, and the draws. Counted in optim/master_weights.py and optim/offload.py.
ROUNDING_COPIES, ROUNDING_BYTES = 6, 4
QUANTIZED_COPIES = 5  # of a quantized state: its codes as indices, its values, their scales, ratios, and new codes
STATE_DRAW_COPIES = 6  # of bf16 states: an element's index, its hash, and what is shifted out of that
# Of a whole weight in bf16, beyond its update's own: joined and split; widened, and of a piece the words of its draws.
SPLIT_COPIES, WIDENED_COPIES, DRAW_COPIES = 3, 1, 8
SYNC_COPIES = 3  # of a bucket that replicas exchange in few bits: the delta, the sum, and what is added to it
LOSSY_COPIES = 2  # of a gradient that is rounded: its rows, and what they became
DECODED_CHUNK, DECODED_BYTES = 1 << 22, 6  # elements decoded at a time: half an index, and an fp32 number of each
# What the moments of a step put in their place.
IN_FLIGHT: tuple[tuple[Name, float, str], ...] = (
    ("activations", 0, "saved for the backward by the microbatches in flight"),
    ("recompute", 0, "the blocks recomputed together, beyond what was saved of them"),
    ("activation_grads", 0, "gradients of activations inside one block"),
)


def states(
    arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, layout: StateLayout | None = None
) -> tuple[LedgerEntry, ...]:
    """What one rank's device holds of the model, its gradient and its optimizer.

    `place`: the rank's coordinates on the plan's axes. Ranks differ by their pipeline stages and, where a dim does not
    divide evenly, by the length of their part. `layout`: of AdamW with fp32 master weights, unless given.
    """
    layout = layout or layout_of(plan)
    view = RankView(arch=arch, plan=plan, sequence=0, place=place)  # states do not depend on the sequence
    held = tuple(groups(view))
    lines = _resident(layout, "device", held, view)
    summed = next(line.bytes for line in lines if line.name == "gradients")
    waiting = max(_unsummed(held, view, layout) - summed, 0)
    owed = sum(feedback_bytes(group, view) for group in held)
    return (
        *lines,
        *_reference(view),
        *([LedgerEntry(name="error_feedback", bytes=owed, why=_why_owed(plan))] if owed else []),
        LedgerEntry(name="all_gathered_params", bytes=_gathered(held, view, layout), why=_why_gathered(plan, layout)),
        LedgerEntry(
            name="unreduced_grads",
            bytes=waiting,
            why="unsharded gradients accumulated until the last microbatch, beyond the shard that stays"
            if layout.waits
            else "none: every microbatch reduce-scatters its gradients",
        ),
    )


def _reference(view: RankView) -> Iterator[LedgerEntry]:
    """The frozen copy that DPO compares with, where there is one.

    It is gathered before the first microbatch of a step goes forward, and let go: nothing is saved for a backward then,
    so that no step is at its peak there.
    """
    if not view.arch.copies_reference:
        return
    copied = msgspec.structs.replace(view, arch=view.arch.reference)
    among = f"sharded over {view.plan.shards} ranks" if view.plan.shards > 1 else "not sharded"
    why = f"a frozen copy of all weights, {view.compute_bytes} bytes each, {among}"
    yield LedgerEntry(name="reference", bytes=sum(_frozen_bytes(each, copied) for each in groups(copied)), why=why)


def feedback_bytes(group: ParamGroup, view: RankView) -> int:
    """What lossy reductions of a group's gradient keep from step to step: errors, and PowerSGD's second factors.

    A rank owes of what it gives to the shards: a whole gradient; of its node's sum: a shard for each node; to replicas:
    a shard; of their sum: its part. PowerSGD's second factors are whole on every rank.
    """
    plan, (copies, shards) = view.plan, grid(group, view.plan)
    if plan.powersgd:
        found = (factors(param.shape, plan.powersgd) for param in group.params)
        seconds = sum(each.second for each in found if each)
        return group.count * (seconds + plan.error_feedback * _all_elements(group, view)) * view.accum_bytes
    if plan.grad_reduce == "default" or not plan.error_feedback:
        return 0
    to_shards = shards * _all_elements(group, view) if shards > 1 else 0
    to_shards += plan.shard_nodes * _all_elements(group, view)
    to_replicas = (copies + 1) * _all_elements(group, view, copies) if copies > 1 else 0
    return group.count * (to_shards + to_replicas) * view.accum_bytes


def _all_elements(group: ParamGroup, view: RankView, parts: int = 1) -> int:
    return sum(elements for elements, _ in sent_elements(group, view, parts))


def _why_owed(plan: Plan) -> str:
    if plan.powersgd:
        return "what PowerSGD left out of a replica's last gradient, and the factors it begins with"
    whose = ["a whole gradient on its way to the shards"] if plan.shards > 1 else []
    whose += ["a rank's part of its node's sum on its way to other nodes"] if plan.shard_nodes else []
    whose += ["a rank's gradient on its way to the replicas, and its part of their sum"] if plan.copies > 1 else []
    return f"what rounding took from {', and from '.join(whose)}"


def host_states(
    arch: Arch, plan: Plan, place: Mapping[str, int] = FIRST, layout: StateLayout | None = None
) -> tuple[LedgerEntry, ...]:
    """What one rank's host holds of them where weights live there: what stays from step to step, and the sums."""
    layout = layout or layout_of(plan)
    if not layout.cpu_offload:
        return ()
    view = RankView(arch=arch, plan=plan, sequence=0, place=place)
    return tuple(line for line in _resident(layout, "host", tuple(groups(view)), view) if line.bytes)


def served(job: Job, place: Mapping[str, int] = FIRST) -> tuple[LedgerEntry, ...]:
    """What one rank's host holds as a parameter server; nothing without one.

    Gradients on their way: those that were pushed beyond the bound that a worker waits at, and of each a row from every
    worker. Weights twice: those that are complete, and those that arrive.
    """
    plan, layout = job.plan, state_layout(job)
    if plan.staleness is None:
        return ()
    view = RankView(arch=job.arch, plan=plan, sequence=0, place=place)
    elements, mine = server_elements(view), server_elements(view)[view.at("replicate")]
    states, rows = layout.of("moments", "host"), f"of this rank's rows, 1 of {plan.replicate} servers"
    moving = (plan.staleness + 1) * (sum(elements) + plan.replicate * mine) + 2 * plan.replicate * max(elements)
    return (
        LedgerEntry(name="weights", bytes=mine * layout.accum_bytes, why=f"fp32 master copy {rows}"),
        LedgerEntry(name="moments", bytes=mine * states, why=f"{layout.optimizer.held}, {rows}"),
        LedgerEntry(
            name="pieces", bytes=moving * layout.accum_bytes, why="gradients pushed and not yet used, weights to pull"
        ),
    )


def sharded(job: Job, place: Mapping[str, int]) -> ResidentMemory:
    """Of our own trainer, and of others that shard as `fully_shard` does."""
    plan, holds, layout = job.plan, job.stack.holds, state_layout(job)
    view = RankView(arch=job.arch, plan=plan, sequence=0, place=place)
    lines = {line.name: line for line in states(job.arch, plan, place, layout)}
    outside = 0  # gathered of what is outside the blocks: all there is between a forward and its backward
    if layout.reads != "stored":
        read = (group.trained if layout.reads == "resident" else group for group in groups(view))
        outside = sum(_gathered_once(group, view) for group in read if group.params and group.params[0].layer < 0)
    (block, beside), (_, summed) = _unsharded_bytes(view), _unsharded_elements(view)
    # Gathered weights when a lone backward reaches the first block: each block's go when its gradient is summed.
    keeps_all = plan.zero == 3 or layout.reads == "resident" or plan.grad_accum > 1 or plan.pp > 1
    frees = plan.zero == 3 and plan.pp == 1 and layout.reads != "resident"
    outside_sums = 0  # the gradient as it came, its copy in the precision of sums, and the part that leaves
    if layout.sums == "by_block" and plan.pp == 1:
        leaving = summed * view.accum_bytes // plan.shards if layout.cpu_offload else 0
        outside_sums = summed * (view.compute_bytes + view.accum_bytes) + leaving
    resides = layout.has("moments", "device")
    updated = sum(updated_elements(group, view) for group in groups(view)) if resides else 0
    largest = max(param.numel for param in trained(job.arch)) // plan.shards
    slots = 0  # for pieces of states on their way to an update on the device
    if (row := layout.offloaded) is not None and layout.update == "device":
        slots = SLOTS * min(PIECE, largest) * row.bytes
    multiplied, decodes = decoded_bytes(view)
    buffers = _reduce_buffers(job, layout, view)
    buffers += max((decoding_bytes(view), *(lossy_bytes(group, view) for group in groups(view))))
    return ResidentMemory(
        lines=(
            *((line.name, line.bytes, line.why) for line in lines.values()),
            *IN_FLIGHT,
            ("logits", 0, "log-probabilities, and at the loss their gradients"),
            ("reduce_buffers", buffers, "a block's gradients in the compute dtype, and in fp32 for the reduction"),
            ("update", slots, "temporaries of the optimizer step, and pieces of offloaded states in transit"),
            ("workspace", holds.workspace_bytes + multiplied, _why_workspace(multiplied, decodes)),
        ),
        buffered=False,
        block_share=max(trained_counts(job.arch)[0]) / trained_counts(job.arch)[2],
        begin_share=trained_counts(job.arch)[1] / trained_counts(job.arch)[2],
        gathered_at_loss=outside + secondary_bytes(view) if frees else lines["all_gathered_params"].bytes,
        gathered_at_end=block + beside if outside and not keeps_all else None,
        copy_stays=layout.reads == "resident",
        outside=outside,
        outside_sums=outside_sums,
        update=max(
            holds.update_bytes * updated
            + slots
            + rounding_bytes(layout, largest)
            + unfused_bytes(layout, largest)
            + matrix_bytes(layout, view),
            sync_bytes(view),
            sign_bytes(view, layout.optimizer.temporaries) if layout.optimizer.compresses else 0,
        ),
    )


def decoded_bytes(view: RankView) -> tuple[int, bool]:
    """What the largest weight in few bits becomes while it is multiplied, and whether it is decoded for that.

    Decoded it is a weight of the arithmetic, of experts all that a rank holds, with what decoding makes. In FP8 its
    codes are multiplied: of them the backward makes the transpose.
    """
    plan, arch, found = view.plan, view.arch, [(0, False)]
    for param in (each for each in params(arch) if each.held != "bf16"):
        elements = param.numel // (plan.ep if param.expert else 1) // plan.tp
        if is_multiplied_as_held(param, plan) and not has_row_norms(param, arch):
            found.append((elements, False))
        else:
            found.append((elements * view.compute_bytes + min(elements, DECODED_CHUNK) * DECODED_BYTES, True))
    return max(found)


def _why_workspace(made: int, decodes: bool) -> str:
    what = "weight of one layer while it is decoded" if decodes else "transposed codes of one layer's weight"
    return f"of cuBLAS and other libraries{f', and the {what}' if made else ''}"


def sync_bytes(view: RankView) -> int:
    """What replicas that sync rarely make on the device for the largest of their buckets, when it is synced.

    Its delta, and the same as one tensor for the collective. In few bits: the delta, the sum and what is added to it,
    one weight as it is dequantized, what all replicas have sent, and this one's own message, which the
    collective may let go of only later.
    """
    plan = view.plan
    if not plan.has_outer_loop:
        return 0
    each = [msgspec.structs.replace(group, count=1) for group in groups(view)]
    if plan.outer_quant == "none":
        copies = 2 if outer_states(plan) else 1
        return copies * max(updated_elements(group, view) for group in each) * view.accum_bytes
    return max(
        SYNC_COPIES * updated_elements(group, view) * view.accum_bytes
        + max(updated_elements(msgspec.structs.replace(group, params=(one,)), view) for one in group.params)
        * view.accum_bytes
        + (plan.parts + 1) * quantized_bytes(group, view)
        + (updated_elements(group, view) if plan.outer_quant == "int4" else 0)  # its codes, a byte each
        for group in each
    )


def sign_bytes(view: RankView, temporaries: int) -> int:
    """What optimizers that compress make on the device for the largest group of weights whose momenta travel together.

    A worker's momenta and those that all receive; beside them the momenta with their errors and in rows, the signs, a
    byte each twice over, and the messages; or what the update of one weight makes.
    """
    replicas, found = view.plan.replicate, [0]
    for group in together(view):
        served = servings(group, view)
        rows = replicas * sum(each.length for each in served)
        largest = max(math.prod(shard_shape(param, group, view)) for param in group.params)
        made = max((2 * view.accum_bytes + 2) * rows, temporaries * view.accum_bytes * largest)
        found.append(2 * view.accum_bytes * rows + made + 4 * replicas * packed_bytes(served, view.accum_bytes))
    return max(found)


def buffered(job: Job, place: Mapping[str, int]) -> ResidentMemory:
    """Weights and one gradient buffer for the whole step; the optimizer's copy and moments, from zero 1 in shares."""
    holds, plan = job.stack.holds, job.plan
    rest, experts = parameters(job.arch, plan, padded_vocab(job), place.get("pp", 0))
    elements = rest + experts
    data = plan.replicate * plan.shard * plan.cp
    shared = rest / data + experts / max(data // plan.ep, 1)  # an expert's copies are on fewer ranks
    moved = shared if plan.zero else elements
    kept = shared if plan.zero == 3 else elements
    summed = shared if plan.zero >= 2 else elements
    spec, usual = DESCRIPTIONS[job.optimizer], min(ADAMW.state_bytes(4), holds.optimizer_bytes)
    table = params(job.arch)
    moments = usual * spec.total_bytes(table, 4) / ADAMW.total_bytes(table, 4)  # a stack's figures are of AdamW
    among = f"sharded over {data} ranks" if plan.zero and data > 1 else "not sharded"
    copied: list[tuple[Name, float, str]] = []
    if job.arch.copies_reference:
        copied = [("reference", holds.weight_bytes * kept, "a frozen copy of all weights, as they are held")]
    return ResidentMemory(
        lines=(
            ("weights", holds.weight_bytes * kept, f"{holds.weight_bytes:g} bytes a parameter"),
            *copied,
            ("master", (holds.optimizer_bytes - usual) * moved, f"the optimizer's fp32 copy, {among}"),
            ("gradients", holds.gradient_bytes * summed, f"one buffer, {holds.gradient_bytes:g} bytes a parameter"),
            ("moments", moments * moved, f"{spec.held}, in fp32, {among}"),
            ("all_gathered_params", 0, "all-gathered inputs whose memory cannot be reused at once"),
            *IN_FLIGHT,
            ("logits", 0, "of the loss, forward and backward"),
            ("reduce_buffers", holds.bucket_bytes * elements * (data > 1), "buckets in which gradients are reduced"),
            ("update", 0, "temporaries of the optimizer step"),
            ("workspace", holds.workspace_bytes, "of cuBLAS and other libraries"),
        ),
        buffered=True,
        update=holds.update_bytes * moved,
    )


@lru_cache(maxsize=4096)
def parameters(arch: Arch, plan: Plan, vocab: int, rank: int) -> tuple[int, int]:
    """Elements of a rank's trained weights before they are sharded, those of experts that ep shares out apart.

    `vocab`: entries of a padded vocabulary; 0: as the model has it.
    """
    view = RankView(arch=arch, plan=plan, sequence=0, place={"pp": rank})
    found = {False: 0, True: 0}
    for group in groups(view):
        for param in group.trained.params:
            in_vocab = vocab and param.layer < 0 and param.split in (Split.VOCAB, Split.COLUMN)
            elements = vocab // plan.tp * param.shape[1] if in_vocab else math.prod(local_shape(param, view))
            found[group.shared_by_ep] += group.count * elements
    return found[False], found[True]


@cache
def largest_weight(arch: Arch) -> int:
    """Numbers of the largest weight that is trained."""
    return max(param.numel for param in trained(arch))


@cache
def trained_counts(arch: Arch) -> tuple[tuple[int, ...], int, int]:
    """Trained parameters of each block, of what is before the blocks and nowhere else, and all of them."""
    blocks = Counter[int]()
    for param in trained(arch):
        blocks[param.layer] += param.numel
    begin = sum(
        param.numel
        for param in trained(arch)
        if param.name.startswith("positions") or (param.name.startswith("embed") and not arch.tied)
    )
    return tuple(blocks[layer] for layer in range(arch.blocks)), begin, blocks.total()


def rounding_bytes(layout: StateLayout, largest: int) -> int:
    """What rounding makes on the device while it goes through the pieces of a weight; none if the host does."""
    if layout.optimizer.whole:
        return 0
    copies = ROUNDING_COPIES + len(layout.optimizer.states)
    if layout.bf16_states:  # widened, and the words of eight bytes of which their draws are made
        copies += len(layout.optimizer.states) + STATE_DRAW_COPIES
    if layout.optimizer.quantized:
        copies += QUANTIZED_COPIES * len(layout.optimizer.states)
    makes = layout.rounds or layout.optimizer.quantized
    return copies * ROUNDING_BYTES * min(PIECE, largest) if makes and not layout.cpu_offload else 0


def unfused_bytes(layout: StateLayout, largest: int) -> int:
    """What an update without a fused kernel makes on the device while it is at the largest weight."""
    if layout.update == "host" or (layout.rounds and not layout.optimizer.whole):
        return 0
    own = layout.optimizer.temporaries * layout.accum_bytes * largest
    if not layout.rounds or (layout.optimizer.has_kernel and layout.of("master")):
        return own
    if layout.of("master"):
        return own + SPLIT_COPIES * layout.accum_bytes * largest
    return own + layout.accum_bytes * (WIDENED_COPIES * largest + DRAW_COPIES * min(PIECE, largest))


def matrix_bytes(layout: StateLayout, view: RankView) -> int:
    """Gathered matrices, those on their way and what they are multiplied with: one team is at work at a time."""
    teams = matrix_teams(view) if layout.optimizer.orthogonalizes else ()
    return max((team.peak_elements(view.cuts_rows_only) for team in teams), default=0) * layout.compute_bytes


def _resident(
    layout: StateLayout, location: Location, held: tuple[ParamGroup, ...], view: RankView
) -> tuple[LedgerEntry, ...]:
    """The rows of one location as bytes of a rank: weights and gradients padded, the others not."""
    stored = sum(_stored(group.trained, view) for group in held)
    updated = sum(updated_elements(group, view) for group in held)
    sizes = {
        row.name: (stored if row.name in ("weights", "gradients") else updated) * layout.of(row.name, location)
        for row in layout.rows
    }
    frozen = sum(_frozen_bytes(group, view) for group in held)
    if layout.has("weights", location):
        sizes["weights"] += frozen
    if not layout.optimizer.is_elementwise and layout.has("moments", location):
        sizes["moments"] = sum(_state_bytes(group, view, layout) for group in held)
    some: tuple[Name, ...] = ("master", "outer_states")
    names: tuple[Name, ...] = ("weights", "gradients", "moments", *(name for name in some if layout.of(name, location)))
    return tuple(
        LedgerEntry(
            name=name,
            bytes=sizes.get(name, 0),
            why=_why(name, layout, location, view.plan)
            + (_frozen_why(layout, view) if name == "weights" and frozen else ""),
        )
        for name in names
    )


def _frozen_why(layout: StateLayout, view: RankView) -> str:
    """What is said of weights that are frozen."""
    share = 1 - sum(param.numel for param in trained(view.arch)) / count(view.arch)
    if view.arch.adapter.held == "bf16":
        return f"; {share:.1%} are frozen, at {layout.compute_bytes} bytes each"
    each = frozen_bytes(view.arch, layout.compute_bytes) / (share * count(view.arch))
    return f"; {share:.1%} are frozen, matrices of blocks in {view.arch.adapter.held.upper()}: {each:.2f} bytes each"


def _why(name: Name, layout: StateLayout, location: Location, plan: Plan) -> str:
    """The dtype of a state, among how many ranks it is sharded, or where it is instead."""
    among = f"sharded over {plan.shards} ranks" if plan.shards > 1 else "not sharded"
    spec = layout.optimizer
    if name == "outer_states":
        momentum = " and the outer momentum" if plan.outer != "average" else ""
        return f"the weights as last synced{momentum}, {among}"
    if name == "moments" and plan.is_served:
        return "none: the parameter servers on the hosts have them"
    size = layout.state_width if name == "moments" else layout.of(name, location)
    dtype = {0: "", 2: plan.precision if plan.precision == "fp16" else "bf16", 4: "fp32", 8: "fp64"}[size]
    is_offloaded = layout.cpu_offload and location == "device"
    files = {"host": "host memory", "disk": "files"}.get(layout.offloaded.location if layout.offloaded else "", "")
    if name == "master":
        return f"the 16 low bits of the fp32 master weights, {among}"
    if name == "gradients" and is_offloaded:
        waits = f"{dtype}, {among}, until the last microbatch is reduced over replicas"
        return waits if size else "each block's are offloaded to host memory once reduced"
    if name == "gradients":
        return f"{dtype}, {among}, after the last backward"
    if name == "moments":
        kept = f"{'are' if len(spec.states) > 1 else 'is'} in {files or 'host memory'}"
        if spec.quantized:
            dtype = f"{spec.quantized} in blocks of {FORMATS[spec.quantized].block}, small ones in {dtype}"
        shares = (
            among
            if spec.is_elementwise or spec.quantized or plan.shards == 1
            else f"those of a rank's shards, over {plan.shards} ranks"
        )
        return f"{spec.held} {kept}" if is_offloaded or files else f"{spec.held}, {dtype}, {shares}"
    if is_offloaded:
        return "in host memory"
    if files:
        return f"{dtype}, {among}: the fp32 master weights are in {files}"
    return f"{dtype}, {among}" + (", padded" if plan.shards > 1 else "")


def _stored(group: ParamGroup, view: RankView) -> int:
    """Elements of a rank's shard as it is stored: every rank's is as long as the longest."""
    _, shards = grid(group, view.plan)
    return group.count * sum(padded(local_shape(param, view), shards) // shards for param in group.params)


def _frozen_bytes(group: ParamGroup, view: RankView) -> int:
    """Bytes of a rank's shard of what is frozen."""
    _, shards = grid(group, view.plan)
    return group.count * sum(
        padded(local_shape(param, view), shards) // shards * (param.item or view.compute_bytes)
        for param in group.params
        if not param.trained
    )


@lru_cache(maxsize=4096)
def frozen_of_rank(arch: Arch, plan: Plan, rank: int) -> int:
    """Bytes of what is frozen on the rank of a pipeline stage."""
    view = RankView(arch=arch, plan=plan, sequence=0, place={"pp": rank})
    return sum(_frozen_bytes(group, view) for group in groups(view))


def _state_bytes(group: ParamGroup, view: RankView, layout: StateLayout) -> int:
    """Bytes of a group's optimizer states where parameters do not have them alike."""
    spec, width = layout.optimizer, layout.state_width
    weights = group.trained.params
    parts = ((param.shape, shard_columns(param, group, view)) for param in weights)
    served = sum(each.elements for each in servings(group, view)) if spec.compresses else 0
    return group.count * (served * width) + group.count * sum(
        spec.bytes_of(param.name, shard_shape(param, group, view), width, part)
        for param, part in zip(weights, parts, strict=True)
    )


def _unsummed(held: Iterable[ParamGroup], view: RankView, layout: StateLayout) -> int:
    """The most bytes that gradients take while a later microbatch will add to them."""
    if view.plan.pp == 1:
        return sum(_unscattered(group, view) for group in held) * view.accum_bytes if layout.waits else 0
    whole, shard = Counter[int](), Counter[int]()
    for group in held:
        whole[group.stage] += _unscattered(group, view)
        shard[group.stage] += _stored(group.trained, view)
    return max(
        (sum(whole[stage] for stage in then.in_fp32) + sum(shard[stage] for stage in then.summed)) * view.accum_bytes
        + sum(whole[stage] for stage in then.as_they_came) * view.compute_bytes
        for then in _waiting(*_order(view.plan), view.at("pp"), view.compute_bytes < view.accum_bytes)
    )


def _unscattered(group: ParamGroup, view: RankView) -> int:
    """Elements of a group's gradient before it is scattered, as torch leaves it.

    That of an embedding that tp cuts has rows for the whole vocabulary on every rank, widened too, unless the gradient
    of a tied projection is added, which has a rank's own.
    """
    projects = view.arch.tied and group.stage == len(placement(view.plan)) - 1
    return group.count * sum(
        param.numel if param.split is Split.VOCAB and not projects else math.prod(local_shape(param, view))
        for param in group.trained.params
    )


class _Waiting(msgspec.Struct, frozen=True):
    """The stages of a pipeline rank whose gradients wait whole, in fp32 or in the dtype they came in, or are summed."""

    in_fp32: frozenset[int]
    as_they_came: frozenset[int]
    summed: frozenset[int]


@lru_cache(maxsize=4096)
def _waiting(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int, low: bool) -> frozenset[_Waiting]:
    """Every place that the gradients of a rank's stages are in after some backward; `low`: in low precision.

    Torch widens them at the end of a backward that reaches a stage's input. The weights' half of a split backward does
    not, so in low precision what it leaves lies beside the fp32 sum until the stage's next backward.
    """
    in_fp32, as_they_came, summed = set[int](), set[int](), set[int]()
    backwards = Counter[int]()
    found = set[_Waiting]()
    for action in actions(schedule, pp, chunks, microbatches)[rank]:
        stage = action.stage
        if action.kind == "F" or (action.kind == "I" and stage == 0):  # the first stage leaves both halves to the W
            continue
        if action.kind == "W" and stage > 0 and low:
            as_they_came.add(stage)
        elif action.kind != "I" or stage in as_they_came:
            as_they_came.discard(stage)
            in_fp32.add(stage)
        found.add(_Waiting(frozenset(in_fp32), frozenset(as_they_came), frozenset(summed)))
        backwards[stage] += action.kind != "I"
        if backwards[stage] == microbatches:
            in_fp32.discard(stage)
            as_they_came.discard(stage)
            summed.add(stage)
    return frozenset(found)


def _order(plan: Plan) -> tuple[Schedule, int, int, int]:
    """What decides the order of a pipeline's actions."""
    return plan.schedule, plan.pp, plan.chunks, plan.grad_accum


def _gathered(held: Iterable[ParamGroup], view: RankView, layout: StateLayout) -> int:
    """The most that is gathered at one time, in the precision of the arithmetic; what is on its way is counted too."""
    if layout.reads == "stored":
        return 0
    if layout.reads == "resident":  # frozen weights are stored as they are read
        return sum(group.count * _gathered_once(group.trained, view) for group in held)
    if view.plan.zero < 3:  # of a pipeline too: no stage has its last backward before every other one has been used
        return sum(group.count * _gathered_once(group, view) for group in held)
    if view.plan.pp > 1:
        return _gathered_by_stages(held, view)
    return _two_blocks(held, view) + secondary_bytes(view)


def secondary_bytes(view: RankView) -> int:
    """What a rank keeps of all blocks between forward and backward, where neighbours share them (ZeRO++'s hpZ)."""
    if view.plan.secondary_shard == 1:
        return 0
    blocks = (group.count * _gathered_once(group, view) for group in groups(view) if group.params[0].layer >= 0)
    return sum(blocks) // view.plan.secondary_shard


def decoding_bytes(view: RankView) -> int:
    """What a quantized gather makes beside the largest group of weights: all messages, and elements in both dtypes."""
    plan, found = view.plan, [0]
    for group in groups(view) if plan.gather != "default" else ():
        _, shards = grid(group, plan)
        message = message_bytes(plan.gather, sent_elements(group, view), view.compute_bytes)
        found.append(shards * (message + _all_elements(group, view) * (view.accum_bytes + view.compute_bytes)))
    return max(found)


def _why_gathered(plan: Plan, layout: StateLayout) -> str:
    if layout.reads == "stored":
        return "none: the weights are used in place"
    if plan.pp > 1 and plan.zero == 3:
        return f"{plan.precision}, the stages computed next, of {placement(plan).count(0)} on a rank"
    if plan.pp > 1:
        return f"{plan.precision}, all stages of the rank until their last backward"
    if layout.reads == "resident":
        return f"{plan.precision}, a resident copy of the whole model"
    if plan.zero == 3:
        again = f"; of all blocks 1/{plan.secondary_shard} for the backward" if plan.secondary_shard > 1 else ""
        return f"{plan.precision}, embedding and output, one block and the prefetched next one{again}"
    return f"{plan.precision}, the whole model until the last backward"


def _gathered_once(group: ParamGroup, view: RankView) -> int:
    """Bytes of one layer's group when it is gathered."""
    _, shards = grid(group, view.plan)
    return sum(padded(local_shape(param, view), shards) * (param.item or view.compute_bytes) for param in group.params)


def _two_blocks(held: Iterable[ParamGroup], view: RankView) -> int:
    """What is outside the blocks, a block, and of the one before it what the backward has already asked for.

    Experts that have a group of their own are asked for after the rest of their block. What lies on one rank is copied
    when it is used, and not before.
    """
    arch, outside, dense, experts = view.arch, 0, Counter[tuple[bool, bool]](), Counter[tuple[bool, bool]]()
    for group in held:
        layer = group.params[0].layer
        if layer < 0:
            outside += _gathered_once(group, view)
        else:
            kind = experts if group.shared_by_ep else dense
            alike = arch.is_moe(layer), arch.looks_ahead(layer)  # some may be frozen, which are gathered too
            kind[alike] = max(kind[alike], _gathered_once(group, view))
    layers = [(arch.is_moe(layer), arch.looks_ahead(layer)) for layer in range(arch.blocks)]
    before = [0, *(dense[alike] if view.plan.shards > 1 else 0 for alike in layers)]
    return outside + max(dense[alike] + experts[alike] + more for alike, more in zip(layers, before, strict=False))


def _gathered_by_stages(held: Iterable[ParamGroup], view: RankView) -> int:
    """At the fullest instant of a pipeline rank under zero 3: what lies on several ranks is there when it is asked for.

    The rest is copied when it is used.
    """
    asked, used = Counter[int](), Counter[int]()
    for group in held:
        _, shards = grid(group, view.plan)
        (asked if shards > 1 else used)[group.stage] += group.count * _gathered_once(group, view)
    return max(
        sum(asked[stage] for stage in stages) + sum(used[stage] for stage in computed)
        for stages, computed in _instants(*_order(view.plan), view.at("pp"))
    )


@lru_cache(maxsize=4096)
def _instants(
    schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int
) -> frozenset[tuple[frozenset[int], frozenset[int]]]:
    """Every state of a pipeline rank during a step: stages that torch's runtime has asked for, and also used."""
    used = frozenset[int]()
    found = set[tuple[frozenset[int], frozenset[int]]]()
    for sight in in_sight(schedule, pp, chunks, microbatches, rank):
        asked = frozenset(sight)
        used = (used & asked) | {sight[0]}
        found.add((asked, used))
    return frozenset(found)


def _reduce_buffers(job: Job, layout: StateLayout, view: RankView) -> int:
    """The largest block's gradient as it came, and its copy in the precision of sums.

    What is outside the blocks is summed last, so the output projection's gradient waits as it came; a pipeline keeps
    all gradients in fp32, among those that wait. To and from host memory travel this rank's part of the summed
    gradients, and of a block's weights the part cast for the gather, with one of them as it is stored.
    """
    if layout.sums in ("never", "in_place"):
        return 0
    if layout.sums == "by_param":
        largest = max(math.prod(local_shape(param, view)) for group in groups(view) for param in group.trained.params)
        return largest * (view.compute_bytes + view.accum_bytes)
    largest, outside = _unsharded_elements(view)
    shards, moving = job.plan.shards, 0
    if layout.cpu_offload:
        narrowed = _unsharded_bytes(view)[0] // shards if shards > 1 else 0
        moving = largest * view.accum_bytes // shards + largest_weight(job.arch) * view.accum_bytes // shards + narrowed
    waiting = outside * view.compute_bytes if job.plan.pp == 1 else 0
    return largest * (view.compute_bytes + view.accum_bytes) + waiting + moving


def lossy_bytes(group: ParamGroup, view: RankView) -> int:
    """What rounding a group's gradient makes on the device: messages sent and received, and what was sent, decoded."""
    plan, (copies, shards) = view.plan, grid(group, view.plan)
    if plan.grad_reduce == "default":
        return 0
    found = [0]
    for ranks, parts in ((shards, 1), (copies, copies)):
        if ranks > 1:
            message = message_bytes(plan.grad_reduce, sent_elements(group, view, parts), view.accum_bytes)
            found.append(ranks * (2 * message + LOSSY_COPIES * _all_elements(group, view, parts) * view.accum_bytes))
    return max(found)


def _unsharded_elements(view: RankView) -> tuple[int, int]:
    """Trained elements in the largest block, and outside the blocks, before they are cut into shards."""
    return _unsharded([group.trained for group in groups(view)], view, {})


def _unsharded_bytes(view: RankView) -> tuple[int, int]:
    """Bytes of all weights there, as they are gathered."""
    return _unsharded(groups(view), view, {0: view.compute_bytes})


def _unsharded(held: Iterable[ParamGroup], view: RankView, sizes: Mapping[int, int]) -> tuple[int, int]:
    blocks, outside = [0], 0
    for group in held:
        if not group.params:
            continue
        size = sum(math.prod(local_shape(param, view)) * sizes.get(param.item, 1) for param in group.params)
        if group.params[0].layer >= 0:
            blocks.append(size)
        else:
            outside += size
    return max(blocks), outside
