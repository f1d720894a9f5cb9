"""The collectives that one optimizer step of a plan implies, as one rank issues them.

A test runs the real step and finds exactly these calls; docs/traffic.md has the formulas in words.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from meshwright.cost.activations import ITEM_BYTES, sent_rows
from meshwright.cost.flops import reads_gradient
from meshwright.cost.matrices import MEMBERS, matrix_teams
from meshwright.cost.rank_view import (
    ParamGroup,
    RankView,
    StageLayers,
    cut_shape,
    grid,
    groups,
    layers_gathered_back,
    local_shape,
    padded,
    parts,
    placement,
    servings,
    shard_dim,
    shard_shape,
    share,
    stored_shape,
    together,
    updated_elements,
)
from meshwright.spec.arch import Arch
from meshwright.spec.communication import (
    BITS,
    SCALE_BYTES,
    TALLY,
    TOLD,
    block_length,
    block_of,
    factors,
    message_bytes,
    packed_bytes,
    part_shape,
    served_rows,
)
from meshwright.spec.optimizers import DESCRIPTIONS, OptimizerSpec, Statistic, is_of
from meshwright.spec.params import Param, Split, held_split, kv_part, layer_params, moved, params, trained
from meshwright.spec.plan import FP8_MULTIPLE, Plan
from meshwright.spec.quantized import FORMATS, is_quantized
from meshwright.spec.schedule import IN_SIGHT, Schedule, actions
from meshwright.spec.tuning import MAGNITUDE, companion, is_adapter, pair_slots

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]

# Between which ranks. `shard` and `replicate` are as the weights see them, with cp folded in; the two of the experts
# are what ep leaves of those. `tied` are the two pipeline ranks that hold copies of an embedding. Replicas that sync
# rarely meet along `outer`; `peers` are all ranks of one of them.
Axis = Literal[
    "replicate", "shard", "expert_replicate", "expert_shard", "tp", "cp", "ep", "pp", "tied", "world", "outer", "peers",
    "shard_tp", "expert_shard_tp",  # those of shard and tp together, that hold one copy of a weight
    "secondary",  # neighbours among those of shard, that share the weights between forward and backward
    "node", "between_nodes",  # the same that sum rounded gradients first; and those at one place in all such
]  # fmt: skip

AMAX_BYTES = 4  # of a largest magnitude
DRAW_BYTES = 4  # of a router's random number
COUNT_BYTES = 8  # of the number of an expert's rows
DOUBLE = 8  # bytes: losses and squares are added in double precision
SIGNS: tuple[Kind, ...] = ("all_to_all", "all_gather")  # of momenta, in one bit an element
FIRST: Mapping[str, int] = {}  # the place of the first rank: every coordinate is 0


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size that one rank makes in one step, among the ranks of one axis.

    `bytes` are those of one call, counted on the side where the tensor is whole: the output of an all-gather, the
    input of a reduce-scatter, the tensor of an all-reduce or a broadcast, all that a rank gives to an all-to-all (its
    own part included), the message of a send. A receive is its sender's send, and not listed.
    """

    kind: Kind
    axis: Axis
    count: int
    bytes: int
    overlappable: bool = False  # the trainer starts it early enough for arithmetic to hide it
    every: int = 1  # steps between two such calls: replicas may sync rarely
    phase: str = ""  # of an optimizer that compresses, where a list has the steps of both: warm-up, compressed

    @property
    def total_bytes(self) -> int:
        """Bytes of all calls, in a step that has them."""
        return self.count * self.bytes

    @property
    def step_bytes(self) -> float:
        """The same of a step, on average."""
        return self.total_bytes / self.every


def traffic(
    arch: Arch,
    plan: Plan,
    sequence: int,
    *,
    place: Mapping[str, int] = FIRST,
    optimizer: str = "adamw",
    noise: bool = False,
    warm_up: bool = False,
) -> tuple[Collective, ...]:
    """What one rank sends in one step of training, validation losses left out.

    `place`: the rank's coordinates on the plan's axes. Ranks differ by their pipeline stages, and by the length of
    their part of an odd vocabulary. `optimizer`: one of the descriptions of spec/optimizers.py. `noise`: the gradient
    noise scale is measured. `warm_up`: the step is one of an optimizer that compresses, and sums gradients exactly.
    """
    view = RankView(arch=arch, plan=plan, sequence=sequence, place=place)
    meter = [Collective(kind="all_reduce", axis="world", count=int(noise and plan.world > 1), bytes=2 * DOUBLE)]
    spec = DESCRIPTIONS[optimizer]
    if arch.compared:  # how much likelier chosen answers are, and how often
        meter += [Collective(kind="all_reduce", axis="world", count=int(plan.world > 1), bytes=2 * DOUBLE)]
    updates = [*update_traffic(view, spec, warm_up), *meter]
    apart = spec.compresses
    if view.cuts_rows_only:  # deterministic, no axes but replicate and shard: weights, gradients and statistics travel
        return merged(chain(weight_traffic(view, apart=apart), _deterministic_statistics(view), updates))
    # All ranks agree on the step's loss, the gradient's square norm and how many must stop before anyone updates.
    axis: Axis = "world" if plan.parts == 1 else "peers"  # of one update
    agreed = [Collective(kind="all_reduce", axis=axis, count=int(plan.world > plan.parts), bytes=3 * DOUBLE)]
    if learned := moved(arch):  # how many tokens asked for each expert
        size = sum(param.numel for param in learned) * COUNT_BYTES
        agreed += [Collective(kind="all_reduce", axis="world", count=int(plan.world > 1), bytes=size)]
    return merged(chain(weight_traffic(view, apart=apart), _activation_traffic(view), agreed, updates))


def bytes_by_axis(collectives: Iterable[Collective]) -> dict[Axis, int]:
    """Bytes of all calls on each axis; of what comes in some steps only, the mean over all of them."""
    totals: dict[Axis, float] = {}
    for each in collectives:
        totals[each.axis] = totals.get(each.axis, 0) + each.step_bytes
    return {axis: round(size) for axis, size in totals.items()}


def of_every_step(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Those that no step is without: what replicas that sync rarely send between two syncs."""
    return tuple(each for each in collectives if each.every == 1)


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """One entry for calls that differ in nothing, in the order in which they first come."""
    counts: dict[Collective, int] = {}
    for each in collectives:
        alike = msgspec.structs.replace(each, count=1)
        counts[alike] = counts.get(alike, 0) + each.count
    return tuple(msgspec.structs.replace(alike, count=count) for alike, count in counts.items() if count > 0)


def _activation_traffic(view: RankView) -> Iterator[Collective]:
    """Everything that is sent because ranks share a sequence, a matrix, the experts or the layers."""
    for part in parts(view):
        yield from _over_tp(part, view)
        yield from _norms_over_tp(part, view)
        yield from _magnitudes_over_tp(part, view)
        yield from _scales_over_tp(part, view)
        yield from _loss_over_tp(part, view)
        if view.plan.cp > 1:
            yield from (_ring if view.plan.cp_kind == "ring" else _ulysses)(part, view)
        yield from _margins_over_cp(part, view)
        yield from _routers_over_cp(part, view)
        yield from _over_ep(part, view)
        yield from _over_pp(part, view)


def _over_tp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Hidden states are gathered before and summed and scattered after attention and the feed-forward layer.

    The backward mirrors it, so there are as many of the one as of the other; embedding and projection add half a pair
    each way, and those of multi-token prediction as much again. It ends at the first weight that is trained. Of layers
    recomputed the last sum is not needed: it is the output of their run. What a compiler made is computed to its end
    all the same.
    """
    if view.plan.tp == 1:
        return
    recomputed, forwards, ahead = part.recomputed, view.forwards, part.last * view.arch.mtp_layers
    projected, looked_up = part.last + ahead, part.first + ahead
    forward_gathers, forward_scatters = (forwards * (2 * part.layers + end) for end in (projected, looked_up))
    back_gathers = sum(flow.attn_out + flow.mlp_out for flow in part.flow)
    back_gathers += looked_up if view.arch.trains("embed.weight") else 0
    back_scatters = sum(flow.attn_in + flow.mlp_in for flow in part.flow) + projected
    gathers = scatters = 2 * recomputed.layers
    if not recomputed.to_the_end:
        scatters -= recomputed.cut_short
    if recomputed.by_operation:
        gathers, scatters = recomputed.moe, recomputed.normed_moe
    passes: tuple[tuple[Kind, int], ...] = (
        ("all_gather", forward_gathers + back_gathers + gathers),
        ("reduce_scatter", forward_scatters + back_scatters + scatters),
    )
    for kind, times in passes:
        count = view.plan.grad_accum * times
        yield Collective(kind=kind, axis="tp", count=count, bytes=view.hidden_states * view.compute_bytes)


def _norms_over_tp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Of a norm over all heads together, each position's sum of squares, and going back its gradient."""
    if view.plan.tp == 1 or view.arch.qk_norm != "full":
        return
    count = 2 * view.plan.grad_accum * ((1 + view.forwards) * part.layers + part.recomputed.layers)
    size = view.plan.microbatch * view.positions * view.accum_bytes
    yield Collective(kind="all_reduce", axis="tp", count=count, bytes=size)


def _magnitudes_over_tp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Square norms of DoRA's rows, where tp cuts these: once for every forward, and never going back."""
    rows = Counter[tuple[bool, int]]()
    cut = {companion(param.name, MAGNITUDE) for param in params(view.arch) if param.split is Split.ROW}
    for param in trained(view.arch) if view.plan.tp > 1 else ():
        if param.init == "norms" and param.name in cut:  # what every rank holds whole has whole rows
            rows[view.arch.is_moe(param.layer), math.prod(local_shape(param, view))] += 1
    layers = Counter(view.arch.is_moe(layer) for layer in range(view.arch.layers))
    again = part.recomputed
    passes = {False: part.dense + again.dense, True: part.moe + again.moe}
    for (moe, size), found in rows.items():
        count = view.plan.grad_accum * passes[moe] * found // layers[moe]
        yield Collective(kind="all_reduce", axis="tp", count=count, bytes=size * view.accum_bytes)


def _scales_over_tp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Largest magnitudes from which ranks of tp make the scales of FP8 matmuls: a call for each linear layer."""
    again, tokens = part.recomputed, view.plan.microbatch * view.positions
    for moe, layers, recomputed in ((False, part.dense, again.dense), (True, part.moe, again.moe)):
        forwards = view.forwards * layers + (0 if again.by_operation else recomputed)
        for size, forward, backward in fp8_scales(view.arch, view.plan, tokens, moe) if layers else ():
            unasked = _without_gradient(view.arch, part.begin, part.layers) if backward else 0
            count = view.plan.grad_accum * (forward * forwards + backward * layers - unasked)
            yield Collective(kind="all_reduce", axis="tp", count=count, bytes=size)
    if part.last and view.arch.mtp_layers:
        forwards = view.forwards + (0 if again.by_operation else again.ahead)
        for size, forward, backward in fp8_scales_ahead(view.arch, view.plan):
            count = view.plan.grad_accum * (forward * forwards + backward)
            yield Collective(kind="all_reduce", axis="tp", count=count, bytes=size)


@lru_cache(maxsize=4096)
def _without_gradient(arch: Arch, begin: int, layers: int) -> int:
    """Frozen weights in FP8 that are cut by columns and whose inputs have no gradient: they have no backward."""
    held = (param for param in params(arch) if param.held == "fp8" and begin <= param.layer < begin + layers)
    return sum(param.split is not Split.ROW and not reads_gradient(arch, param) for param in held)


@lru_cache(maxsize=4096)
def fp8_scales(arch: Arch, plan: Plan, tokens: int, moe: bool) -> tuple[tuple[int, int, int], ...]:
    """The bytes of such calls, and how many of them a layer, with experts or without, has going forward and back.

    In a row-parallel layer ranks have parts of the input and of the weight, along rows; in a column-parallel one other
    rows of the weight, and going back parts of the gradient's rows and of the transposed weight's. A frozen weight has
    scales of its own already. Routed experts are in bf16 under tp, and routers in fp32. Of what several ranks compute
    alike (the way down of latent attention, heads that ranks share) the gradient itself is summed going back.
    """
    if plan.precision != "fp8" or plan.tp == 1:
        return ()
    calls = dict[int, tuple[int, int]]()
    for param in layer_params(arch, moe):
        if _is_fp8_over_tp(param, arch, plan.tp):
            for size, forward, backward in _fp8_calls(param, arch, plan, tokens):
                before = calls.get(size, (0, 0))
                calls[size] = before[0] + forward, before[1] + backward
    return tuple((size, *times) for size, times in calls.items())


def _is_fp8_over_tp(param: Param, arch: Arch, tp: int) -> bool:
    """Whether ranks of tp share an FP8 matmul by a weight; adapters are in bf16, and routers are not shared."""
    if param.expert or len(param.shape) != 2 or is_adapter(param.name):
        return False
    shared = held_split(param, arch, tp) is not Split.NONE or ".attn." in param.name
    return shared and not any(size % FP8_MULTIPLE for size in param.shape)


def _fp8_calls(param: Param, arch: Arch, plan: Plan, tokens: int) -> Iterator[tuple[int, int, int]]:
    """The calls of one weight's three matmuls: bytes, and how often forward and back."""
    by_row, (out, into) = plan.fp8_scaling == "rowwise", param.shape
    if held_split(param, arch, plan.tp) is Split.NONE:  # its output's gradient
        yield tokens * out * ITEM_BYTES[plan.precision], 0, 1
    if param.held == "fp8":
        forward = param.split is Split.ROW
        yield (tokens if by_row else 1) * AMAX_BYTES, int(forward), int(not forward)
    elif param.split is Split.ROW:
        yield (tokens + out if by_row else 2) * AMAX_BYTES, 1, 0
    elif param.split is not Split.NONE:
        yield ((tokens + into) * AMAX_BYTES, 0, 1) if by_row else (AMAX_BYTES, 1, 1)


def fp8_scales_ahead(arch: Arch, plan: Plan) -> tuple[tuple[int, int, int], ...]:
    """The same of what joins multi-token prediction, of which ranks of tp have the rows of their own tokens."""
    out, into = arch.hidden, 2 * arch.hidden
    if plan.precision != "fp8" or plan.tp == 1 or out % FP8_MULTIPLE:
        return ()
    by_row = plan.fp8_scaling == "rowwise"
    return (((out + into) * AMAX_BYTES, 0, 1),) if by_row else ((AMAX_BYTES, 1, 1),)


def _loss_over_tp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """For every position the maximum of its logits, the sum of their exponentials, and the target's own.

    In chunks of positions, the last of which may be smaller.
    """
    if view.plan.tp > 1 and part.last:
        rows = view.loss_rows
        chunks, rest = divmod(view.plan.microbatch * view.positions, rows)
        for elements, times in ((rows, chunks), (rest, 1)):
            if elements:
                count = 3 * view.plan.grad_accum * times * view.forwards * (1 + view.arch.mtp_layers)
                yield Collective(kind="all_reduce", axis="tp", count=count, bytes=elements * view.accum_bytes)


def _ring(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Keys and values go round forward and backward, and their gradients backward; the last of those is waited for."""
    plan = view.plan
    back = sum(flow.attended for flow in part.flow)
    times = back * plan.grad_accum
    forward = (view.forwards * part.layers + part.recomputed.layers) * plan.grad_accum
    elements = plan.microbatch * view.positions * kv_part(view.arch, plan.tp)
    for count, size, overlappable in (
        ((times + forward) * (plan.cp - 1), elements * view.compute_bytes, True),
        (times * (plan.cp - 2), elements * view.accum_bytes, True),
        (times, elements * view.accum_bytes, False),
    ):
        yield Collective(kind="send", axis="cp", count=count, bytes=size, overlappable=overlappable)


def _ulysses(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Queries, keys and values change places before attention and its output after; gradients the other way."""
    arch, plan = view.arch, view.plan
    back = sum(flow.attended for flow in part.flow)
    times = plan.grad_accum * (view.forwards * part.layers + back + part.recomputed.layers)
    for width in (arch.q_width // plan.tp + kv_part(arch, plan.tp), arch.out_width // plan.tp):
        size = plan.microbatch * view.positions * width * view.compute_bytes
        yield Collective(kind="all_to_all", axis="cp", count=times, bytes=size)


def _margins_over_cp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """How much more than the reference a model prefers the chosen answers, of whose tokens each rank has some."""
    plan = view.plan
    if plan.cp > 1 and part.last and view.arch.compared:
        size = plan.microbatch * pair_slots(view.sequence) * view.accum_bytes
        yield Collective(kind="all_reduce", axis="cp", count=plan.grad_accum, bytes=size)


def _routers_over_cp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """A router sees whole sequences: its logits are gathered, and going back their gradients summed and scattered."""
    if view.plan.cp == 1:
        return
    passes, tokens = _moe_passes(part, view), view.plan.microbatch * view.sequence
    calls: tuple[tuple[Kind, int], ...] = (("all_gather", passes.forward), ("reduce_scatter", passes.logits))
    for kind, count in calls:
        yield Collective(kind=kind, axis="cp", count=count, bytes=tokens * view.arch.experts * view.accum_bytes)
    if view.arch.router == "gshard":  # the reference of DPO draws nothing
        draws = (part.moe + part.recomputed.moe) * view.plan.grad_accum
        yield Collective(kind="all_gather", axis="cp", count=draws, bytes=tokens * DRAW_BYTES)


class _MoePasses(NamedTuple):
    """How often a step goes through layers with experts."""

    forward: int
    back: int  # where what experts return has a gradient
    rows: int  # where what they read has one
    logits: int  # where the router's logits have one


def _moe_passes(part: StageLayers, view: RankView) -> _MoePasses:
    arch, times = view.arch, view.plan.grad_accum
    layers = [layer for layer in range(part.begin, part.begin + part.layers) if arch.is_moe(layer)]
    flows = {layer: part.flow[layer - part.begin] for layer in layers}
    routed = [flow.mlp_in or arch.trains(f"blocks.{layer}.mlp.router.weight") for layer, flow in flows.items()]
    return _MoePasses(
        forward=(view.forwards * part.moe + part.recomputed.moe) * times,
        back=sum(flow.mlp_out for flow in flows.values()) * times,
        rows=sum(flow.mlp_in for flow in flows.values()) * times,
        logits=sum(routed) * times,
    )


def _over_ep(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """Each token's rows go to the experts' ranks and come back, and so do their gradients.

    Without a capacity ranks first tell how many, and no token is dropped: what a rank sends is exact. With one, all
    slots of every expert are sent, filled or not. The way there hides behind shared experts, where there are any.
    """
    if view.plan.ep == 1:
        return
    arch, plan = view.arch, view.plan
    passes = _moe_passes(part, view)
    if not arch.capacity:
        yield Collective(kind="all_to_all", axis="ep", count=passes.forward, bytes=arch.experts * COUNT_BYTES)
    size = sent_rows(arch, plan, view.sequence) * arch.hidden * view.compute_bytes
    for hides, back in ((arch.shared_experts > 0, passes.rows), (False, passes.back)):
        count = passes.forward + back
        yield Collective(kind="all_to_all", axis="ep", count=count, bytes=size, overlappable=hides)


def _over_pp(part: StageLayers, view: RankView) -> Iterator[Collective]:
    """A stage hands its output to the next and its input's gradient to the one before, where another rank has it."""
    ranks = placement(view.plan)
    size = view.hidden_states // view.plan.tp * view.compute_bytes
    for neighbour, times in ((part.stage + 1, view.forwards), (part.stage - 1, 1)):
        if 0 <= neighbour < len(ranks) and ranks[neighbour] != ranks[part.stage]:
            count = times * view.plan.grad_accum
            yield Collective(kind="send", axis="pp", count=count, bytes=size, overlappable=True)


def weight_traffic(view: RankView, over_tp: bool = True, apart: bool = False) -> Iterator[Collective]:
    """Everything that is sent because several ranks hold, or share, a weight.

    Without tp: between ranks that see other data, and between tied copies. `apart`: gradients stay each replica's own.
    """
    for group in groups(view):
        yield from _over_shard(group, view)
        yield from _over_replicate(group, view) if not apart else ()
        yield from _over_outer(group, view)
        if over_tp:
            yield from _weights_over_tp(group, view)
    yield from _reference_over_shard(view)
    yield from _over_tied(view)
    if view.plan.is_served:
        yield from _over_servers(view)
    elif view.plan.parts > 1:  # the few values that replicas tell each other, whenever a fragment is synced
        size, times = view.plan.parts * TALLY * DOUBLE, view.plan.outer_fragments
        yield Collective(kind="all_gather", axis="outer", count=times, bytes=size, every=view.plan.sync_every)


def update_traffic(view: RankView, optimizer: OptimizerSpec, warm_up: bool = False) -> Iterator[Collective]:
    """What the update of whole tensors reduces: for each of its rounds, one call for each axis and operation.

    One that compresses sends signs of momenta; in its warm-up, gradients that no backward has summed over replicas.
    """
    if optimizer.compresses:
        yield from _unsummed_traffic(view) if warm_up else _sign_traffic(view)
    yield from _matrix_traffic(view) if optimizer.orthogonalizes else ()
    for spec in optimizer.members:
        for statistics in spec.reduced(warm_up):
            sizes = Counter[tuple[Axis, str]]()
            for group in groups(view):
                for param in group.trained.params:
                    if optimizer.of(param.name, len(param.shape)) == spec:
                        for axis, op, elements in _reduced(param, group, view, statistics):
                            sizes[axis, op] += group.count * elements
            for (axis, _), elements in sizes.items():
                if elements:
                    yield Collective(kind="all_reduce", axis=axis, count=1, bytes=elements * view.accum_bytes)

    yield from _scales(view, optimizer)


def _unsummed_traffic(view: RankView) -> Iterator[Collective]:
    """A rank's part of each group's gradients, which no backward has summed over replicas."""
    for group in together(view) if view.plan.replicate > 1 else ():
        size = updated_elements(msgspec.structs.replace(group, count=1), view) * view.accum_bytes
        yield Collective(kind="all_reduce", axis="replicate", count=group.count, bytes=size)


def _sign_traffic(view: RankView) -> Iterator[Collective]:
    """Each group's momenta, one bit an element: from every worker to the servers, and from every server to all.

    Before each of the two, ranks that have parts of the same weights add up magnitudes of every chunk.
    """
    replicas = view.plan.replicate
    for group in together(view) if replicas > 1 else ():
        size = replicas * packed_bytes(servings(group, view), view.accum_bytes)
        for kind in SIGNS:
            yield Collective(kind=kind, axis="replicate", count=group.count, bytes=size)
        weights = Counter[Axis](axis for param in group.params for axis, _ in weight_cuts(param, group, view))
        for axis, number in weights.items():
            ranks = {"tp": view.plan.tp, "ep": view.plan.ep}.get(axis, grid(group, view.plan)[1])
            size = ranks * number * replicas * view.accum_bytes
            yield Collective(kind="all_gather", axis=axis, count=2 * group.count, bytes=size)


def _scales(view: RankView, optimizer: OptimizerSpec) -> Iterator[Collective]:
    """What ranks that cut blocks of quantized states agree on: for each axis that does, all scales of such rows."""
    sizes = Counter[Axis]()
    for param, group, axes in cut_blocks(view, optimizer):
        blocks = len(FORMATS[optimizer.quantized].blocks((0, param.shape[-1])))
        elements = math.prod(shard_shape(param, group, view)[:-1]) * blocks * len(optimizer.states)
        sizes.update(dict.fromkeys(axes, group.count * elements))
    for axis, elements in sizes.items():
        if elements:
            yield Collective(kind="all_reduce", axis=axis, count=1, bytes=elements * view.accum_bytes)


def cut_blocks(view: RankView, optimizer: OptimizerSpec) -> Iterator[tuple[Param, ParamGroup, list[Axis]]]:
    """The weights of which several ranks share blocks of quantized states, and the axes over which they do."""
    if not optimizer.quantized:
        return
    for group in groups(view):
        for param in (each for each in group.trained.params if is_quantized(each.shape)):
            axes: list[Axis] = [axis for axis, dim in weight_cuts(param, group, view) if dim == len(param.shape) - 1]
            shards = grid(group, view.plan)[1]
            parts = math.prod(view.plan.tp if axis == "tp" else shards for axis in axes)
            if FORMATS[optimizer.quantized].cuts_block(param.shape[-1], parts):
                yield param, group, axes


def _matrix_traffic(view: RankView) -> Iterator[Collective]:
    """Whole matrices on their way to who orthogonalizes them, and back, while others are made; then to replicas."""
    for team in matrix_teams(view):
        for kind, axis, elements in team.exchanged():
            beside = kind == "all_to_all"
            yield Collective(kind=kind, axis=axis, count=1, bytes=elements * view.compute_bytes, overlappable=beside)


def _reduced(
    param: Param, group: ParamGroup, view: RankView, statistics: Iterable[Statistic]
) -> Iterator[tuple[Axis, str, int]]:
    """The axes over which statistics of a parameter are reduced, how, and the elements of each on this rank."""
    dims = len(param.shape)
    for statistic in statistics:
        if is_of(statistic.of, dims):
            for axis, dim in weight_cuts(param, group, view):
                if dim in statistic.over(dims):
                    yield axis, statistic.op, statistic.elements(shard_shape(param, group, view))


def weight_cuts(param: Param, group: ParamGroup, view: RankView) -> Iterator[tuple[Axis, int]]:
    """The axes over which a parameter is cut, each with its dim."""
    plan, (_, shards) = view.plan, grid(group, view.plan)
    if shards > 1:
        shape = local_shape(param, view)
        yield "expert_shard" if group.shared_by_ep else "shard", shard_dim(shape, shards, view.cuts_rows_only)
    if param.expert and plan.ep > 1:
        yield "ep", 0
    if param.split is not Split.NONE and plan.tp > 1:
        yield "tp", (1 if param.split is Split.ROW else 0) + param.expert


def gathers(group: ParamGroup, view: RankView) -> tuple[int, int]:
    """How often a step gathers the weights of a group's layers: once, under zero 3 for every forward; and going back.

    A pipeline keeps also then the weights of the stages that a rank computes next. What is outside the blocks (the
    root) ends a forward and begins the backward, and is not gathered between. Where the same weights without an adapter
    go forward first, as the reference of DPO, they leave gathered what the plan does.
    """
    plan, root = view.plan, group.params[0].layer < 0
    compared = view.arch.compared and not view.arch.copies_reference
    if plan.zero < 3:
        return group.count, 0
    if plan.pp > 1:
        rank = placement(plan)[group.stage]
        before = compared * plan.grad_accum * (not stages_stay(plan))
        fetched = _fetches(plan.schedule, plan.pp, plan.chunks, plan.grad_accum, rank)[group.stage]
        return group.count * (before + fetched), 0
    if root:
        return plan.grad_accum, 0
    return plan.grad_accum * group.count * (1 + compared), plan.grad_accum * layers_gathered_back(group, view)


def reference_gathers(plan: Plan, root: bool) -> int:
    """The same of a frozen copy, which goes forward once for every microbatch."""
    stays = stages_stay(plan) if plan.pp > 1 else plan.zero < 3 or root
    return 1 if stays else plan.grad_accum


def stages_stay(plan: Plan) -> bool:
    """Whether every stage of a pipeline rank, once gathered, stays so until its last backward."""
    return plan.zero < 3 or plan.chunks <= IN_SIGHT


def reductions(plan: Plan) -> int:
    """How often a step scatters each gradient: once, or from zero 2 on, where no rank keeps a whole one, every time."""
    return plan.grad_accum if plan.zero >= 2 and plan.pp == 1 else 1


@lru_cache(maxsize=1024)
def _fetches(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> Counter[int]:
    """How often a pipeline rank gathers each of its stages, when it holds those in sight."""
    counts, held = Counter[int](), list[int]()
    for sight in in_sight(schedule, pp, chunks, microbatches, rank):
        counts.update(stage for stage in sight if stage not in held)
        held = sight
    return counts


def in_sight(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> list[list[int]]:
    """At each action of a pipeline rank, the IN_SIGHT stages that it computes next, its own first."""
    sights, ahead = list[list[int]](), list[int]()
    for action in reversed(actions(schedule, pp, chunks, microbatches)[rank]):
        ahead = [action.stage, *(other for other in ahead if other != action.stage)][:IN_SIGHT]
        sights.append(ahead)
    return sights[::-1]


def _elements(group: ParamGroup, view: RankView, shards: int) -> int:
    if view.cuts_rows_only:  # nothing but dim 0 is ever cut
        return sum(rows(param.shape[0], shards) * shards * math.prod(param.shape[1:]) for param in group.params)
    return _gathered(group.params, (view.plan.tp, view.at("tp")), view.plan.ep, shards)


def gathered_bytes(group: ParamGroup, view: RankView) -> int:
    """Bytes of one layer's group when it is gathered: in the precision of the arithmetic, or in few bits."""
    _, shards = grid(group, view.plan)
    quantized = tuple(param for param in group.params if param.item)
    if not quantized:
        return _elements(group, view, shards) * view.compute_bytes
    plain = tuple(param for param in group.params if not param.item)
    codes, rest = (msgspec.structs.replace(group, params=some) for some in (quantized, plain))
    return _elements(codes, view, shards) + _elements(rest, view, shards) * view.compute_bytes


@lru_cache(maxsize=16384)
def _gathered(weights: tuple[Param, ...], tp: tuple[int, int], ep: int, shards: int) -> int:
    """Elements of some weights when they are gathered, padding included; `tp`: its ranks, and which of them."""
    return sum(padded(cut_shape(param, tp, ep), shards) for param in weights)


def _over_shard(group: ParamGroup, view: RankView) -> Iterator[Collective]:
    """Weights are gathered in the precision of the arithmetic, gradients summed in that of the weights.

    In deterministic mode each gradient changes hands once, whatever zero says.
    """
    _, shards = grid(group, view.plan)
    if shards == 1:
        return
    axis = shard_axis(group)
    forward, back = gathers(group, view)
    size = gathered_bytes(group, view)
    if view.plan.secondary_shard > 1:
        yield Collective(kind="all_gather", axis="secondary", count=back, bytes=size, overlappable=True)
        back = 0
    if view.plan.gather != "default":
        size = shards * message_bytes(view.plan.gather, sent_elements(group, view), view.compute_bytes)
    yield Collective(kind="all_gather", axis=axis, count=forward + back, bytes=size, overlappable=True)
    kind, times = ("all_to_all", 1) if view.cuts_rows_only else ("reduce_scatter", reductions(view.plan))
    count, size, message = group.count * times, _elements(group.trained, view, shards) * view.accum_bytes, 0
    if view.plan.grad_reduce != "default":
        kind, message = "all_to_all", message_bytes(view.plan.grad_reduce, sent_elements(group, view), view.accum_bytes)
        size, axis = shards * message, "node" if view.plan.shard_nodes else axis
    if size:
        yield Collective(kind=kind, axis=axis, count=count, bytes=size, overlappable=True)
    if between := view.plan.shard_nodes * message:
        yield Collective(kind=kind, axis="between_nodes", count=count, bytes=between, overlappable=True)


def _reference_over_shard(view: RankView) -> Iterator[Collective]:
    """A frozen copy of the weights is gathered as they are, and has no gradient."""
    if not view.arch.copies_reference:
        return
    copied = msgspec.structs.replace(view, arch=view.arch.reference)
    for group in groups(copied):
        _, shards = grid(group, view.plan)
        count = group.count * reference_gathers(view.plan, group.params[0].layer < 0) if shards > 1 else 0
        size, axis = gathered_bytes(group, copied), shard_axis(group)
        yield Collective(kind="all_gather", axis=axis, count=count, bytes=size, overlappable=True)


def shard_axis(group: ParamGroup) -> Axis:
    """The ranks that shard a group: with experts that ep distributes, those that hold the same ones."""
    return "expert_shard" if group.shared_by_ep else "shard"


def sent_elements(group: ParamGroup, view: RankView, parts: int = 1) -> list[tuple[int, int]]:
    """Of each weight of a group: elements of a rank's shard, or of one of its parts; and those that share a scale."""
    shapes = ((param, part_shape(stored_shape(param, group, view), parts)) for param in group.params)
    return [(math.prod(shape), block_of(param.shape)) for param, shape in shapes]


def _over_replicate(group: ParamGroup, view: RankView) -> Iterator[Collective]:
    """Copies add up their shard of the gradient once a step, after the last microbatch.

    In deterministic mode, and where they are rounded, each of them adds up one part and gives the sum to the others.
    """
    copies, shards = grid(group, view.plan)
    if copies == 1:
        return
    axis: Axis = "expert_replicate" if group.shared_by_ep else "replicate"
    size = _elements(group.trained, view, shards) // shards * view.accum_bytes
    calls: tuple[tuple[Kind, int], ...] = (("all_reduce", size),)
    if view.cuts_rows_only:
        size = math.ceil(size / view.accum_bytes / copies) * copies * view.accum_bytes
        calls = ("all_to_all", size), ("all_gather", size)
    elif view.plan.grad_reduce != "default":
        size = copies * message_bytes(view.plan.grad_reduce, sent_elements(group, view, copies), view.accum_bytes)
        calls = ("all_to_all", size), ("all_gather", size)
    elif view.plan.powersgd:
        yield from _factors_over_replicate(group, view)
        return
    for kind, each in calls if size else ():
        yield Collective(kind=kind, axis=axis, count=group.count, bytes=each, overlappable=True)


def _factors_over_replicate(group: ParamGroup, view: RankView) -> Iterator[Collective]:
    """PowerSGD's two factors, one after the other: a replica's ranks sum theirs, and each sends a share of them on."""
    plan = view.plan
    holders, within = plan.shards * plan.tp, MEMBERS[plan.shards > 1, plan.tp > 1, False]
    for elements in factored(group, view):
        share = math.ceil(elements / holders) * view.accum_bytes
        steps: tuple[tuple[Kind, Axis, int], ...] = (("all_reduce", "replicate", share),)
        if within is not None:
            whole = holders * share
            steps = ("reduce_scatter", within, whole), *steps, ("all_gather", within, whole)
        for kind, axis, size in steps:
            yield Collective(kind=kind, axis=axis, count=group.count, bytes=size, overlappable=True)


def factored(group: ParamGroup, view: RankView) -> tuple[int, int]:
    """Elements that PowerSGD sums over replicas of one group: first factors and vectors, then second factors."""
    found = [(param, factors(param.shape, view.plan.powersgd)) for param in group.params]
    vectors = sum(param.numel for param, each in found if each is None)
    return vectors + sum(each.first for _, each in found if each), sum(each.second for _, each in found if each)


def _over_outer(group: ParamGroup, view: RankView) -> Iterator[Collective]:
    """Replicas that sync rarely average what each has of a weight, or all-gather it in few bits."""
    plan = view.plan
    if not plan.has_outer_loop:
        return
    if not group.trained.params:
        return
    each = msgspec.structs.replace(group, count=1)
    kind: Kind = "all_reduce" if plan.outer_quant == "none" else "all_gather"
    size = updated_elements(each, view) * view.accum_bytes
    if plan.outer_quant != "none":
        size = plan.parts * quantized_bytes(each, view)
    yield Collective(kind=kind, axis="outer", count=group.count, bytes=size, every=plan.sync_every)


def _over_servers(view: RankView) -> Iterator[Collective]:
    """A worker pushes its gradient to the parameter servers; they agree on its norm, and give new rows to all.

    Nobody waits for a push; rows are those of the server that has most, from each.
    """
    served = server_elements(view)
    yield Collective(kind="all_to_all", axis="outer", count=1, bytes=sum(served) * view.accum_bytes, overlappable=True)
    yield Collective(kind="all_reduce", axis="outer", count=1, bytes=TOLD * DOUBLE, overlappable=True)
    size = len(served) * max(served) * view.accum_bytes
    yield Collective(kind="all_gather", axis="outer", count=1, bytes=size, overlappable=True)


def server_elements(view: RankView) -> list[int]:
    """Elements of every parameter server's rows."""
    servers = view.plan.replicate
    return [
        sum(
            len(range(*served_rows(param.shape[0], servers, server))) * math.prod(param.shape[1:])
            for param in params(view.arch)
        )
        for server in range(servers)
    ]


def quantized_bytes(group: ParamGroup, view: RankView) -> int:
    """A rank's part of a group's delta as it is sent: codes and a scale for each block; vectors as they are."""
    plain = scales = codes = 0
    for param in group.trained.params:
        elements = updated_elements(msgspec.structs.replace(group, params=(param,), count=1), view)
        if len(param.shape) == 1:
            plain += elements * view.accum_bytes
        else:
            scales += elements // block_length(param.shape[-1]) * SCALE_BYTES
            codes += elements
    return plain + scales + math.ceil(codes * BITS[view.plan.outer_quant] / 8)


def _weights_over_tp(group: ParamGroup, view: RankView) -> Iterator[Collective]:
    """A weight that all ranks of tp hold has seen a part of the sequence on each, so its gradients are added up.

    The bias after a row-cut matmul in a dense layer is the exception: it meets the gathered gradient. In an MoE layer,
    where every gradient is a part of a sum, there is none.
    """
    plan = view.plan
    if plan.tp == 1:
        return
    # What waits for the last microbatch waits in fp32; the gradient of one microbatch has its weight's dtype.
    waited = plan.pp > 1 or (plan.grad_accum > 1 and reductions(plan) == 1)
    size = view.accum_bytes if waited else view.compute_bytes
    for param in group.trained.params:
        if param.split is Split.NONE and not param.name.endswith((".attn.out.bias", ".mlp.down.bias")):
            count = group.count * reductions(plan)
            elements = math.prod(local_shape(param, view))  # of experts, those that the rank holds
            yield Collective(kind="all_reduce", axis="tp", count=count, bytes=elements * size)


def _over_tied(view: RankView) -> Iterator[Collective]:
    """Where the first and the last stage each have an embedding, their gradients, sharded, are added up."""
    plan, ranks = view.plan, placement(view.plan)
    holds = any(part.first or part.last for part in parts(view))
    embedding = params(view.arch)[0]
    if not view.arch.embeds_at_both_ends or not holds or ranks[0] == ranks[-1] or not embedding.trained:
        return
    rows, *rest = local_shape(embedding, view)
    mine = share(rows, plan.shards, view.at("shard") * plan.cp + view.at("cp") if plan.zero else 0)
    yield Collective(kind="all_reduce", axis="tied", count=1, bytes=mine * math.prod(rest) * view.accum_bytes)


def _deterministic_statistics(view: RankView) -> Iterator[Collective]:
    """A loss and a wish to stop from every rank, and a sum of squares for every row of every weight."""
    plan = view.plan
    if plan.world > 1:
        yield Collective(kind="all_gather", axis="world", count=1, bytes=plan.world * 2 * DOUBLE)
    if plan.shards > 1:
        size = sum(rows(param.shape[0], plan.shards) for param in trained(view.arch)) * plan.shards * DOUBLE
        yield Collective(kind="all_gather", axis="shard", count=1, bytes=size)


def rows(size: int, shards: int) -> int:
    """The rows of a dim 0 of some size that every rank makes room for."""
    return math.ceil(size / shards)
