"""What one rank holds: its stages of the model, and its part of every weight in the groups that travel together."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec

from meshwright.cost.activations import ITEM_BYTES, ActivationPolicy, chunk_rows, has_chunks, policy_of
from meshwright.spec.arch import Arch
from meshwright.spec.communication import Serving, serving
from meshwright.spec.params import Param, Split, held_split, params, stored
from meshwright.spec.plan import FP8_MULTIPLE, Plan
from meshwright.spec.schedule import Schedule, stage_ranks
from meshwright.spec.tuning import MAGNITUDE, companion


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one plan, at work on one model."""

    arch: Arch
    plan: Plan
    sequence: int
    place: Mapping[str, int] = {}  # coordinates on the plan's axes; one that is missing is 0

    def at(self, axis: str) -> int:
        """The coordinate on one axis."""
        return self.place.get(axis, 0)

    @property
    def positions(self) -> int:
        """Positions of every sequence in this rank's cp slice."""
        return self.sequence // self.plan.cp

    @property
    def hidden_states(self) -> int:
        """Elements of the hidden states of one microbatch, whole over tp."""
        return self.plan.microbatch * self.positions * self.arch.hidden

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype: activations and gathered weights."""
        return ITEM_BYTES[self.plan.precision]

    @property
    def accum_bytes(self) -> int:
        """Bytes of an element where low precision would spoil it: gradients' sums, losses, routers."""
        return max(self.compute_bytes, 4)

    @property
    def cuts_rows_only(self) -> bool:
        """Whether ranks share weights by rows of dim 0 alone, whose sums deterministic mode adds in a fixed order."""
        return self.plan.deterministic

    @property
    def forwards(self) -> int:
        """How often a microbatch goes forward: the reference of DPO does as well."""
        return 1 + self.arch.compared

    @property
    def loss_rows(self) -> int:
        """Rows of a microbatch whose logits exist at one time; all of them where the loss is not in chunks."""
        rows = self.plan.microbatch * self.positions
        return min(chunk_rows(self.arch, self.plan), rows) if has_chunks(self.arch, self.plan) else rows


class RecomputedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a part that the backward recomputes."""

    cut_short: int  # runs of them, computed together, whose output nobody needs: but for what norms read
    dense: int
    moe: int
    normed_moe: int  # of these, those whose output a norm of the block reads
    ahead: int  # of all these, blocks of multi-token prediction
    by_operation: bool  # what collectives returned is kept, where they return anything
    to_the_end: bool  # even what nobody needs: the output of a run

    @property
    def layers(self) -> int:
        return self.dense + self.moe


class GradFlow(NamedTuple):
    """Whether these tensors of a layer have a gradient."""

    attn_in: bool = True  # what the projections read
    attended: bool = True  # queries, keys and values
    attn_out: bool = True
    mlp_in: bool = True  # what the feed-forward layer reads
    mlp_out: bool = True
    out: bool = True  # what the layer returns


EVERYWHERE = GradFlow()


class StageLayers(msgspec.Struct, frozen=True, kw_only=True):
    """A run of layers on a rank, one pipeline stage or the whole model."""

    stage: int
    begin: int  # its first layer
    dense: int  # layers without experts
    moe: int  # MoE layers
    first: bool  # begins the model: embedding and positions
    last: bool  # ends it: norm, projection, loss
    recomputed: RecomputedBlocks  # of its layers, those that the backward computes once more
    flow: tuple[GradFlow, ...]  # how far the backward goes down in each of its layers

    @property
    def layers(self) -> int:
        return self.dense + self.moe


class ParamGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are gathered and whose gradients are summed by one call."""

    params: tuple[Param, ...]
    stage: int
    count: int = 1  # layers of the stage with such a group
    shared_by_ep: bool = False  # experts, of which the ranks of ep hold different ones

    @property
    def trained(self) -> "ParamGroup":
        """The group without what is frozen."""
        return _trained(self)


@lru_cache(maxsize=4096)
def _trained(group: ParamGroup) -> ParamGroup:
    kept = tuple(param for param in group.params if param.trained)
    return group if len(kept) == len(group.params) else msgspec.structs.replace(group, params=kept)


def placement(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return _placement(plan.schedule, plan.pp, plan.chunks)


@lru_cache(maxsize=1024)
def _placement(schedule: Schedule, pp: int, chunks: int) -> tuple[int, ...]:
    return stage_ranks(schedule, pp, chunks) if pp > 1 else (0,)


def stage_lengths(arch: Arch, plan: Plan) -> tuple[int, ...]:
    """Layers of each stage; a model without a pipeline is one."""
    return plan.stages if plan.pp > 1 else (arch.blocks,)


def parts(view: RankView) -> tuple[StageLayers, ...]:
    """The stages on this rank, in the order of the model."""
    lengths = stage_lengths(view.arch, view.plan)
    return _parts(view.arch, lengths, placement(view.plan), view.at("pp"), policy_of(view.plan))


@lru_cache(maxsize=4096)
def _parts(
    arch: Arch, lengths: tuple[int, ...], ranks: tuple[int, ...], rank: int, policy: ActivationPolicy
) -> tuple[StageLayers, ...]:
    found = []
    for stage, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        if ranks[stage] != rank:
            continue
        layers, moe, recomputed_moe = range(end - length, end), 0, list[int]()
        runs = policy.runs(length, arch.looks_ahead(end - 1))
        runs = [run for run in runs if grad_flow(arch)[layers[run[-1]]].out]  # others have no backward
        if arch.experts:
            moe = sum(map(arch.is_moe, layers))
            recomputed_moe = [layer for run in runs for number in run if arch.is_moe(layer := layers[number])]
        found.append(
            StageLayers(
                stage=stage,
                begin=end - length,
                dense=length - moe,
                moe=moe,
                first=stage == 0,
                last=stage == len(ranks) - 1,
                flow=grad_flow(arch)[end - length : end],
                recomputed=RecomputedBlocks(
                    cut_short=sum(not arch.ends_in_norm and not arch.looks_ahead(layers[run[-1]]) for run in runs),
                    dense=sum(map(len, runs)) - len(recomputed_moe),
                    moe=len(recomputed_moe),
                    normed_moe=sum(arch.ends_in_norm or arch.looks_ahead(layer) for layer in recomputed_moe),
                    ahead=sum(arch.looks_ahead(layers[number]) for run in runs for number in run),
                    by_operation=policy.by_operation,
                    to_the_end=policy.to_the_end,
                ),
            )
        )
    return tuple(found)


def groups(view: RankView) -> Iterator[ParamGroup]:
    """The weights of a rank as they travel together: each block, under ep its experts apart, and all the rest."""
    return (group for part in parts(view) for group in _groups(view.arch, part, view.plan.tp, view.plan.ep > 1))


def together(view: RankView) -> Iterator[ParamGroup]:
    """The same where all that is outside of blocks travels as one, also on a rank that begins the model and ends it."""
    outside = [group for group in groups(view) if group.params[0].layer < 0]
    yield from (group for group in groups(view) if group.params[0].layer >= 0)
    if outside:
        yield msgspec.structs.replace(outside[0], params=tuple(chain.from_iterable(each.params for each in outside)))


@lru_cache(maxsize=4096)
def _groups(arch: Arch, part: StageLayers, tp: int, apart: bool) -> tuple[ParamGroup, ...]:
    """The groups of one part; `apart`: its experts are one of their own."""
    found = []
    kinds = _kinds(arch)[part.begin : part.begin + part.layers]
    for layer, count in sorted(Counter(kinds).items(), key=lambda kind: arch.is_moe(kind[0])):
        block = _block(arch, layer, tp)
        experts = tuple(param for param in block if param.expert and apart)
        rest = tuple(param for param in block if param not in experts)
        found.append(ParamGroup(params=rest, stage=part.stage, count=count))
        found.append(ParamGroup(params=experts, stage=part.stage, count=count, shared_by_ep=True))
    found.append(ParamGroup(params=_outside(arch, part.first, part.last), stage=part.stage))
    return tuple(group for group in found if group.params)


def grid(group: ParamGroup, plan: Plan) -> tuple[int, int]:
    """Ranks that hold the same shard of a group, and ranks that share one copy; ep takes its own out of those."""
    ep = plan.ep if group.shared_by_ep else 1
    return (plan.copies, plan.shards // ep) if plan.zero else (plan.copies // ep, 1)


def local_shape(param: Param, view: RankView) -> tuple[int, ...]:
    """A rank's part of a weight, gathered over shard: what tp and ep leave of it."""
    return cut_shape(param, (view.plan.tp, view.at("tp")), view.plan.ep)


def cut_shape(param: Param, tp: tuple[int, int], ep: int) -> tuple[int, ...]:
    """The same for so many ranks of tp, of which this is one, and of ep."""
    shape = list(param.shape)
    if param.expert:
        shape[0] //= ep
    if param.split is not Split.NONE:
        dim = (1 if param.split is Split.ROW else 0) + param.expert
        shape[dim] = share(shape[dim], *tp)
    return tuple(shape)


def is_multiplied_as_held(param: Param, plan: Plan) -> bool:
    """Whether matmuls read the codes of a frozen weight: those in FP8, of a shape that suits them, and of no stack."""
    suits = not param.expert and all(size % FP8_MULTIPLE == 0 for size in param.shape)
    return plan.precision == "fp8" and param.held == "fp8" and suits


def has_row_norms(param: Param, arch: Arch) -> bool:
    """Whether every forward needs the norms of a weight's rows, which DoRA makes of its numbers."""
    return arch.adapter.kind == "dora" and param.name in _row_normed(arch)


@cache
def _row_normed(arch: Arch) -> frozenset[str]:
    names = {param.name for param in params(arch)}
    return frozenset(name for name in names if companion(name, MAGNITUDE) in names)


def updated_elements(group: ParamGroup, view: RankView) -> int:
    """Elements of a rank's shard without its padding: the optimizer sees no more."""
    return group.count * sum(math.prod(shard_shape(param, group, view)) for param in group.trained.params)


def shard_shape(param: Param, group: ParamGroup, view: RankView) -> tuple[int, ...]:
    """A rank's part of a weight as the optimizer sees it: sharded, without padding."""
    (_, shards), shape = grid(group, view.plan), list(local_shape(param, view))
    dim = shard_dim(tuple(shape), shards, view.cuts_rows_only)
    if shards > 1:
        shape[dim] = share(shape[dim], shards, _shard_rank(group, view))
    return tuple(shape)


def shard_columns(param: Param, group: ParamGroup, view: RankView) -> tuple[int, int]:
    """The first and one past the last column of that part in the whole weight."""
    plan, (_, shards), shape, begin = view.plan, grid(group, view.plan), local_shape(param, view), 0
    if param.split is Split.ROW:
        begin = view.at("tp") * math.ceil(param.shape[-1] / plan.tp)
    if shards > 1 and shard_dim(shape, shards, view.cuts_rows_only) == len(shape) - 1:
        begin += _shard_rank(group, view) * math.ceil(shape[-1] / shards)
    begin = min(begin, param.shape[-1])
    return begin, begin + shard_shape(param, group, view)[-1]


def shard_region(param: Param, group: ParamGroup, view: RankView) -> tuple[tuple[int, int], ...]:
    """Where that part is in the whole weight, dim by dim."""
    plan, shape, place = view.plan, local_shape(param, view), [0] * len(param.shape)
    if group.shared_by_ep:
        place[0] += (view.at("shard") * plan.cp + view.at("cp")) % plan.ep * shape[0]
    if param.split is not Split.NONE:
        dim = (1 if param.split is Split.ROW else 0) + param.expert
        place[dim] += view.at("tp") * math.ceil(param.shape[dim] / plan.tp)
    _, shards = grid(group, plan)
    dim = shard_dim(shape, shards, view.cuts_rows_only)
    place[dim] += (_shard_rank(group, view) if shards > 1 else 0) * math.ceil(shape[dim] / shards)
    begins = [min(begin, size) for begin, size in zip(place, param.shape, strict=True)]
    return tuple((begin, begin + size) for begin, size in zip(begins, shard_shape(param, group, view), strict=True))


def servings(group: ParamGroup, view: RankView) -> list[Serving]:
    """How replicas share out, as servers, a rank's part of each weight of a group."""
    regions = ((param.shape, shard_region(param, group, view)) for param in group.params)
    return [serving(shape, region, view.plan.replicate) for shape, region in regions]


def _shard_rank(group: ParamGroup, view: RankView) -> int:
    """This rank's number among those that share one copy of a group."""
    return (view.at("shard") * view.plan.cp + view.at("cp")) // (view.plan.ep if group.shared_by_ep else 1)


def shard_dim(shape: tuple[int, ...], shards: int, rows_only: bool) -> int:
    """The dim along which a weight of a rank's local shape is sharded, as parallel/fsdp.py has it."""
    if len(shape) != 3 or rows_only:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % shards == 0), 0)


def padded(shape: tuple[int, ...], shards: int) -> int:
    """Numbers that travel when a weight is gathered from its shards: equal parts, the last ones filled up.

    A stack of experts is cut along the first dim that comes out even, so it needs no filling if it has one.
    """
    if len(shape) == 3 and any(size % shards == 0 for size in shape):
        return math.prod(shape)
    return math.ceil(shape[0] / shards) * shards * math.prod(shape[1:])


def stored_shape(param: Param, group: ParamGroup, view: RankView) -> tuple[int, ...]:
    """A rank's shard of a weight as it is stored and as its gradient travels: as long as the longest."""
    shape, (_, shards) = local_shape(param, view), grid(group, view.plan)
    dim = shard_dim(shape, shards, view.cuts_rows_only)
    return (*shape[:dim], math.ceil(shape[dim] / shards), *shape[dim + 1 :])


def share(size: int, ranks: int, rank: int) -> int:
    """What a rank has of a dim cut into as equal parts as torch's chunk makes: the last ones may be short or empty."""
    most = math.ceil(size / ranks)
    return max(0, min(most, size - rank * most))


@cache
def _kinds(arch: Arch) -> tuple[int, ...]:
    """For every layer the first one whose weights are alike but for their names: MoE or not, frozen or not."""
    trains, first = dict[int, list[bool]](), dict[tuple[bool, bool, tuple[bool, ...]], int]()
    for param in params(arch) if arch.tuning is not msgspec.UNSET else ():
        trains.setdefault(param.layer, []).append(param.trained)
    kinds = (
        (arch.is_moe(layer), arch.looks_ahead(layer), tuple(trains.get(layer, ()))) for layer in range(arch.blocks)
    )
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


@cache
def _block(arch: Arch, layer: int, tp: int) -> tuple[Param, ...]:
    """The weights of a block, as tp cuts them."""
    mine = (param for param in stored(arch) if param.layer == layer)
    return tuple(msgspec.structs.replace(param, split=held_split(param, arch, tp)) for param in mine)


@cache
def _outside(arch: Arch, first: bool, last: bool) -> tuple[Param, ...]:
    """The weights of a part that are in no block; the last part may read the embedding too."""
    begins = {"embed": first or (last and arch.embeds_at_both_ends), "positions": first, "norm": last, "head": last}
    return tuple(param for param in params(arch) if param.layer < 0 and begins[param.name.split(".")[0]])


@cache
def grad_flow(arch: Arch) -> tuple[GradFlow, ...]:
    """How far a backward goes down, for every layer: beneath the first trained weight nothing has a gradient."""
    begins = any(param.trained for param in params(arch) if param.name.startswith(("embed", "positions")))
    if begins:
        return (EVERYWHERE,) * arch.blocks
    of_layer: dict[int, list[Param]] = {}
    for param in params(arch):
        of_layer.setdefault(param.layer, []).append(param)
    found, flows = [], False
    for layer in range(arch.blocks):
        trained = {param.name.removeprefix(f"blocks.{layer}.") for param in of_layer[layer] if param.trained}
        found.append(_through(arch, trained, flows))
        flows = found[-1].out
    return tuple(found)


@cache
def still_blocks(arch: Arch) -> int:
    """The first blocks that a backward never reaches, as neither they nor what is before them is trained."""
    return sum(not flow.out for flow in grad_flow(arch))


def layers_gathered_back(group: ParamGroup, view: RankView) -> int:
    """Of the layers of a group, those whose weights are gathered for a backward too, in a model without a pipeline.

    Those that it reaches, and what lies before the last of these, which is prefetched: experts that have a group of
    their own lie before the rest of their block.
    """
    alike, gathered = group.params[0].layer, _gathered_back(view.arch, view.plan.ep > 1)
    return sum((layer, group.shared_by_ep) in gathered for layer, kind in enumerate(_kinds(view.arch)) if kind == alike)


@cache
def _gathered_back(arch: Arch, apart: bool) -> frozenset[tuple[int, bool]]:
    """Layers, and whether it is their experts; `apart`: these are gathered by themselves."""
    order, found = [], set[tuple[int, bool]]()
    for layer, flow in enumerate(grad_flow(arch)):
        order += [((layer, True), flow.mlp_out)] if apart and arch.is_moe(layer) else []
        order.append(((layer, False), flow.out))
    order.append(((arch.blocks, False), True))  # what is outside the blocks, which every backward begins with
    for number, (each, reached) in enumerate(order):
        if reached:
            found.update((each, order[max(number - 1, 0)][0]))
    return frozenset(found)


@cache
def reaches_projection_input(arch: Arch) -> bool:
    """Whether what the output projection reads has a gradient: not where it alone is trained."""
    return grad_flow(arch)[-1].out or any(param.trained for param in params(arch) if param.name.startswith("norm."))


def _through(arch: Arch, trained: set[str], flows: bool) -> GradFlow:
    """Of a layer of which some weights are trained, and whose input has a gradient or not."""

    def any_of(*begins: str) -> bool:
        return any(name.startswith(begins) for name in trained)

    pre = arch.norm_position in ("pre", "both")  # norms are of what sub-layers read
    attn_in = flows or (pre and any_of("attn_norm."))
    attended = attn_in or any(name.startswith("attn.") and not name.startswith("attn.out.") for name in trained)
    attn_out = attended or any_of("attn.out.")
    summed = flows or attn_out or any_of("attn_output_norm.") or (not pre and any_of("attn_norm."))
    read = {"none": summed, "two_norms": flows, "one_norm": attn_in}[arch.parallel_residual]
    mlp_in = read or (pre and any_of("mlp_norm."))
    mlp_out = mlp_in or any_of("mlp.")
    out = summed or mlp_out or any_of("mlp_output_norm.", "mlp_norm.")
    return GradFlow(attn_in, attended, attn_out, mlp_in, mlp_out, out)
