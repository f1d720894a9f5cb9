"""What a model says about itself so that it can be split: its blocks, its split table and its cut points.

Copies, shards and precision need none of it. Whoever brings a model of their own brings a `ModelSpec` for the rest;
`DECODER` is that of our own: blocks by layer, matrices sharded as the parameter table says, stages by deletion.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from meshwright.models.decoder import Decoder
from meshwright.models.dropout import Dropout
from meshwright.models.layers import HeadLayerNorm
from meshwright.models.lora import DoraLinear, FrozenLinear, LoraLinear
from meshwright.models.moe import MoELayer
from meshwright.parallel.local_parts import (
    LocalPart,
    SharedHeadNorm,
    SharedHeads,
    SplitNorm,
    hold,
    read_partial,
    reading_locally,
)
from meshwright.parallel.mesh import sum_over
from meshwright.spec.arch import Arch
from meshwright.spec.params import Split, params, shares_heads
from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem
from meshwright.spec.quantized import BLOCK, SCALES
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP

Blocks = Mapping[str, nn.Module]
SEQUENCE = Shard(1)


@dataclass(frozen=True, slots=True)
class Stage:
    """Which of a model's blocks one pipeline stage has, and whether it begins or ends the model."""

    blocks: range
    first: bool
    last: bool


def stage_of(plan: Plan, number: int) -> Stage:
    """A stage of a plan."""
    end = list(accumulate(plan.stages))[number]
    return Stage(range(end - plan.stages[number], end), number == 0, number == len(plan.stages) - 1)


def longest_list(model: nn.Module) -> Blocks:
    """The modules of the longest `nn.ModuleList`, which most models keep their layers in; none if there is no list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return {".".join(filter(None, (name, key))): block for key, block in longest.named_children()}


def one_unit(model: nn.Module) -> Blocks:
    """No blocks: the weights of the whole model are gathered together."""
    return {}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The three answers. What is left out is refused by the plans that would need it."""

    # The units, in the order they run, that gather their weights by themselves; names are those of `named_modules`.
    blocks: Callable[[nn.Module], Blocks] = longest_list
    # How tensor parallelism cuts each module: torch's own styles by name, where * stands for one word of a name.
    tp_plan: Callable[[nn.Module], Mapping[str, ParallelStyle]] | None = None
    # The model without what other pipeline stages have. It is given a copy to take apart; weights keep their names.
    stage_fn: Callable[[nn.Module, Stage], nn.Module] | None = None
    # Whether the data decides which parameters a rank uses. Finding out costs one number a parameter in the all-reduce
    # of the gradient's norm, and blocks must be called in their order, each at most once a forward.
    find_unused_parameters: bool = True


class Absent(nn.Module):
    """Stands where a module was that another stage has; its first argument passes through."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def sequential_stage(model: nn.Module, stage: Stage, before: Sequence[str], after: Sequence[str]) -> nn.Module:
    """The part of a model whose own forward runs the modules `before`, then its longest list, then those `after`.

    Bind the names with `functools.partial` for `ModelSpec.stage_fn`.
    """
    absent = [name for number, name in enumerate(longest_list(model)) if number not in stage.blocks]
    absent += () if stage.first else before
    absent += () if stage.last else after
    for name in absent:
        model.set_submodule(name, Absent())
    return model


def present_blocks(model: nn.Module, model_spec: ModelSpec) -> list[nn.Module]:
    """The blocks that a (part of a) model has."""
    return [block for block in model_spec.blocks(model).values() if not isinstance(block, Absent)]


def with_weights(blocks: Blocks) -> Iterator[nn.Module]:
    """The blocks that hold any; of a part, those that are there."""
    return (block for block in blocks.values() if any(True for _ in block.parameters()))


def resolved(table: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, ParallelStyle]:
    """The split table with every * written out, for the modules that a (part of a) model has."""
    names = [name for name, _ in model.named_modules()]
    return {name: style for pattern, style in table.items() for name in names if _fits(name, pattern)}


def unmatched(table: Mapping[str, ParallelStyle], model: nn.Module) -> list[str]:
    """The lines of a split table that cut nothing of the whole model."""
    names = [name for name, _ in model.named_modules()]
    return [pattern for pattern in table if not any(_fits(name, pattern) for name in names)]


def _fits(name: str, pattern: str) -> bool:
    words, patterns = name.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


def unanswered(model_spec: ModelSpec, plan: Plan) -> Iterator[Problem]:
    """What a plan asks of a model that its ModelSpec does not say."""
    without = "or spread its weights with plan.shard or plan.replicate, which need no answer"
    if plan.tp > 1 and model_spec.tp_plan is None:
        what = f"plan.tp = {plan.tp} needs the model's split table, and its ModelSpec has no `tp_plan`"
        yield Problem(what, f"give ModelSpec(tp_plan=…), {without}", "plan.tp")
    if plan.pp > 1 and model_spec.stage_fn is None:
        what = f"plan.pp = {plan.pp} needs the model's cut points, and its ModelSpec has no `stage_fn`"
        yield Problem(what, f"give ModelSpec(stage_fn=…), {without}", "plan.pp")


def note(module: nn.Module, transform: str) -> None:
    """Show what a transform did to a module when the model is printed.

    Sharding needs no note, as `fully_shard` renames classes (`FSDPBlock`), nor does FP8, whose layers are `Fp8Linear`.
    """
    # Text, not a function of the module: a reference to itself would keep its weights until a garbage collection.
    module.extra_repr = partial(str, ", ".join(filter(None, (module.extra_repr(), transform))))


def _decoder_blocks(model: nn.Module) -> Blocks:
    """The layers, under their names in the whole model."""
    return {f"blocks.{name}": block for name, block in cast(Decoder, model).blocks.items()}


def _decoder_tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """How each module is sharded. MoE layers are sharded as a whole, beside this table."""
    decoder = cast(Decoder, model)
    modules = dict(decoder.named_modules())
    ends_tied = decoder.head is None and decoder.embed is not None and decoder.norm is not None
    table: dict[str, ParallelStyle] = {}
    for param in params(decoder.arch):
        name = param.name.removesuffix(".weight")
        in_moe = param.layer >= 0 and decoder.arch.is_moe(param.layer) and name.split(".")[2] == "mlp"
        if param.name.endswith(".weight") and name in modules and not in_moe:
            table[name] = _style(name, param.split, decoder.arch, modules[name])
    if decoder.norm is not None:  # the last one; after norms that follow their sub-layers, an identity
        table["norm"] = TiedNorm() if ends_tied else SequenceParallel()
    table |= {name: SlicedIndex() for name, module in modules.items() if isinstance(module, Dropout)}
    for name, block in decoder.blocks.items():
        table[f"blocks.{name}.attn"] = _gathered(3)
        if not isinstance(block.mlp, MoELayer):
            table[f"blocks.{name}.mlp"] = _gathered(2)
    return table


def _style(name: str, split: Split, arch: Arch, module: nn.Module) -> ParallelStyle:
    adapted = isinstance(module, FrozenLinear)
    if name == "embed":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
    if name == "head":
        return ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False)
    if name == "positions":
        return SlicedTable()
    if ".attn." in name and (inner := _inside_attention(name, split, module)) is not None:
        return inner
    if name.endswith(".join"):
        return SequenceLinear()
    # What a norm after a sub-layer returns is added to the residual stream, a rank's own part.
    after = arch.norm_position in ("post", "output") or name.endswith("output_norm")
    return {
        Split.COLUMN: AdaptedColwise() if adapted else ColwiseParallel(),
        Split.ROW: (AdaptedRowwise if adapted else RowwiseParallel)(output_layouts=SEQUENCE),
        Split.NONE: SequenceParallel(use_local_output=after),
    }[split]


def _inside_attention(name: str, split: Split, module: nn.Module) -> ParallelStyle | None:
    """The style of what only some families have."""
    last = name.rpartition(".")[2]
    if split is Split.NONE:
        return LocalPart(Replicate())
    if last in ("q_norm", "k_norm"):
        return LocalPart(Shard(0)) if isinstance(module, HeadLayerNorm) else SplitNorm()
    if last not in ("q_up", "kv_up"):
        return None
    return AdaptedPart(Shard(0)) if isinstance(module, FrozenLinear) else LocalPart(Shard(0))


def shared_heads(table: Mapping[str, ParallelStyle], model: nn.Module, tp: int) -> dict[str, ParallelStyle]:
    """A split table where keys and values of fewer heads than ranks are whole on each of them."""
    if not isinstance(model, Decoder) or not shares_heads(model.arch, tp):
        return dict(table)
    heads = model.arch.kv_heads
    norms: dict[str, ParallelStyle] = {"full": SplitNorm(heads), "layer": SharedHeadNorm(heads)}
    shared: dict[str, ParallelStyle] = dict.fromkeys((".attn.k", ".attn.v"), SharedHeads(heads))
    if model.arch.qk_norm in norms:
        shared[".attn.k_norm"] = norms[model.arch.qk_norm]
    return {name: shared.get(f".{'.'.join(name.split('.')[-2:])}", style) for name, style in table.items()}


def _gathered(arguments: int) -> PrepareModuleInput:
    """The whole sequence for a module whose first argument is hidden states."""
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(input_layouts=(SEQUENCE, *rest), desired_input_layouts=(Replicate(), *rest))


def _decoder_stage(model: nn.Module, stage: Stage) -> nn.Module:
    """One stage; the last one projects with a copy of the embedding where that is tied, or looks tokens up in one."""
    decoder = cast(Decoder, model)
    twice = decoder.arch.embeds_at_both_ends
    for layer in list(decoder.blocks):
        if int(layer) not in stage.blocks:
            del decoder.blocks[layer]
    if not stage.first:
        decoder.positions = None
        if not (stage.last and twice):
            decoder.embed = None
    if not stage.last:
        decoder.norm = None
        decoder.head = None
    if twice and (stage.first or stage.last):
        decoder.tied_across_stages = frozenset({"embed.weight"})
    return decoder


# Every microbatch uses all parameters: an expert without tokens has a gradient, of zeros.
DECODER = ModelSpec(
    blocks=_decoder_blocks, tp_plan=_decoder_tp_plan, stage_fn=_decoder_stage, find_unused_parameters=False
)


class SequenceLinear(ParallelStyle):
    """A linear layer of a rank's part of the sequence, whose weight every rank holds whole.

    Multi-token prediction joins two normed streams by it: no sequence need be gathered for that.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters(recurse=False)):
            hold(module, name, weight, device_mesh, [Replicate()])
        compute = module.forward

        def forward(x: DTensor) -> Tensor:
            with reading_locally(module, read_partial):  # its gradient is that of these positions
                return compute(x.to_local())

        module.forward = forward
        return module


class TiedNorm(ParallelStyle):
    """A norm of a rank's part of the sequence, and then the whole sequence.

    A tied model projects with the embedding itself, which is no module that could ask for it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = SequenceParallel()._apply(module, device_mesh)
        module.register_forward_hook(lambda module, args, x: x.redistribute(placements=[Replicate()]))
        return module


def product_over_tp(linear: FrozenLinear, product: Callable[[Tensor], Tensor], rows_cut: bool, x: Tensor) -> Tensor:
    """The product of a layer that tp cuts, and of its adapter, by a rank's own tensors.

    Of A and B the one that lies along the cut is cut too, the other is whole. Of columns, each rank has its part of the
    result; of rows, a part of the sum that the layer's own reduction completes, and only then is a bias added. A weight
    that is whole has a part of its gradient on each rank.
    """
    assert isinstance(x, DTensor)
    near = x.to_local(grad_placements=None if rows_cut else [Partial()])
    with reading_locally(linear, read_partial):
        y = product(near)
    placement = Partial() if rows_cut else Shard(x.dim() - 1)
    whole = DTensor.from_local(y, x.device_mesh, [placement], run_check=False)
    return whole.redistribute(placements=[SEQUENCE]) if rows_cut else whole


class AdaptedColwise(ColwiseParallel):
    """A column-parallel linear layer and its adapter, of which B is cut by columns too and A is whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        assert isinstance(module, FrozenLinear)
        hold_adapted(module, device_mesh, rows_cut=False)
        module.product = partial(product_over_tp, module, module.product, False)


class AdaptedPart(LocalPart):
    """The ways up of latent attention with an adapter, of which B is cut by heads too and A is whole."""

    def hold(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        assert isinstance(module, FrozenLinear)
        hold_adapted(module, device_mesh, rows_cut=False)


class AdaptedRowwise(RowwiseParallel):
    """A row-parallel linear layer and its adapter, of which A is cut by rows too and B is whole."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        assert isinstance(module, FrozenLinear)
        hold_adapted(module, device_mesh, rows_cut=True)
        module.product = partial(product_over_tp, module, module.product, True)


def hold_adapted(linear: FrozenLinear, device_mesh: DeviceMesh, rows_cut: bool) -> None:
    """Let a rank hold its part of a layer, of its adapter and of what stands for its weight."""
    whole = {"bias", UP, MAGNITUDE} if rows_cut else {DOWN}
    if linear.quantized is not None:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()
        whole |= {SCALES} if rows_cut or linear.quantized.held == "nf4" else set()
        blocks, rows = linear.in_features // BLOCK // ranks, -(-linear.out_features // ranks)
        places = {"block": rank * blocks} if rows_cut else {"row": rank * rows}
        linear.quantized = replace(linear.quantized, **places)
    for key, weight in list(linear.named_parameters(recurse=False)):
        hold(linear, key, weight, device_mesh, [Replicate() if key in whole else Shard(int(rows_cut))])
    if rows_cut and isinstance(linear, LoraLinear):
        linear.first = device_mesh.get_local_rank() * -(-linear.in_features // device_mesh.size())
    if rows_cut and isinstance(linear, DoraLinear):
        linear.across = partial(sum_over, group=device_mesh.get_group())


class SlicedIndex(ParallelStyle):
    """Dropout of a rank's part of the sequence, keyed by the index of those tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sliced(module: nn.Module, args: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            x, index = args
            return x, None if index is None else index.chunk(device_mesh.size(), 1)[device_mesh.get_local_rank()]

        module.register_forward_pre_hook(sliced)
        return module


class SlicedTable(ParallelStyle):
    """A table that every rank holds whole and looks up for its part of the sequence only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sliced(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (DTensor.from_local(args[0], device_mesh, [Replicate()]).redistribute(placements=[SEQUENCE]),)

        for key, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(weight.data, device_mesh, [Replicate()])))
        module.register_forward_pre_hook(sliced)
        module.register_forward_hook(lambda module, args, output: output.to_local())
        return module
