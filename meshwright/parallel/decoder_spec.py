"""The anatomy of our own decoder: blocks by layer, matrices cut as the parameter table says, stages by deletion."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from meshwright.models.decoder import Decoder
from meshwright.models.dropout import Dropout
from meshwright.models.moe import MoELayer
from meshwright.parallel import precision
from meshwright.parallel.model_spec import ModelSpec, Stage
from meshwright.spec.arch import Arch
from meshwright.spec.params import Split, params
from meshwright.spec.plan import Plan

SEQUENCE = Shard(1)


def blocks(model: nn.Module) -> Mapping[str, nn.Module]:
    """The layers, under their names in the whole model."""
    layers = cast(Decoder, model).blocks
    return {f"blocks.{name}": block for name, block in layers.items()}


def splits(model: nn.Module) -> Mapping[str, ParallelStyle]:
    """How each module is cut. Mixtures are cut as a whole, beside this table."""
    return dict(_styles(cast(Decoder, model)))


def part(model: nn.Module, stage: Stage) -> nn.Module:
    """One stage; the last one of a tied model projects with a copy of the embedding."""
    decoder = cast(Decoder, model)
    tied = decoder.arch.tied
    for layer in list(decoder.blocks):
        if int(layer) not in stage.blocks:
            del decoder.blocks[layer]
    if not stage.first:
        decoder.positions = None
        if not (stage.last and tied):
            decoder.embed = None
    if not stage.last:
        decoder.norm = None
        decoder.head = None
    if tied and (stage.first or stage.last):
        decoder.tied_across_stages = frozenset({"embed.weight"})
    return decoder


# Every microbatch uses all parameters: an expert without tokens has a gradient, of zeros.
DECODER = ModelSpec(blocks=blocks, splits=splits, part=part, find_unused_parameters=False)


def stream(arch: Arch, plan: Plan, tokens: Tensor, stage: int) -> Tensor:
    """What a stage is sent for a microbatch, or what leaves the last one, described without its numbers."""
    if stage == 0:
        return tokens
    batch, positions = tokens.shape
    dtype = precision.compute_dtype(plan)
    if stage == len(plan.stages):
        return torch.empty(batch, positions, arch.vocab, dtype=dtype, device="meta")
    shape = (batch, positions // plan.tp, arch.hidden)
    return torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)


def _styles(model: Decoder) -> Iterator[tuple[str, ParallelStyle]]:
    modules = dict(model.named_modules())
    ends_tied = model.head is None and model.embed is not None and model.norm is not None
    dense = [
        param for param in params(model.arch) if param.name.endswith(".weight") and not _in_mixture(model, param.name)
    ]
    for param in dense:
        name = param.name.removesuffix(".weight")
        if name in modules:
            yield name, TiedNorm() if name == "norm" and ends_tied else _style(name, param.split)
    yield from ((name, SlicedIndex()) for name, module in modules.items() if isinstance(module, Dropout))
    for name, block in model.blocks.items():
        yield f"blocks.{name}.attn", _gathered(3)
        if not isinstance(block.mlp, MoELayer):
            yield f"blocks.{name}.mlp", _gathered(2)


def _style(name: str, split: Split) -> ParallelStyle:
    if name == "embed":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)
    if name == "head":
        return ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False)
    if name == "positions":
        return SlicedTable()
    return {
        Split.COLUMN: ColwiseParallel(),
        Split.ROW: RowwiseParallel(output_layouts=SEQUENCE),
        Split.NONE: SequenceParallel(),
    }[split]


def _gathered(arguments: int) -> PrepareModuleInput:
    """The whole sequence for a module whose first argument is hidden states."""
    rest = (None,) * (arguments - 1)
    return PrepareModuleInput(input_layouts=(SEQUENCE, *rest), desired_input_layouts=(Replicate(), *rest))


def _in_mixture(model: Decoder, name: str) -> bool:
    head, _, rest = name.partition(".")
    if head != "blocks":
        return False
    layer, inner, *_ = rest.split(".")
    return inner == "mlp" and model.arch.is_mixture(int(layer))


class TiedNorm(ParallelStyle):
    """A norm of a rank's part of the sequence, and then the whole sequence.

    A tied model projects with the embedding itself, which is no module that could ask for it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = SequenceParallel()._apply(module, device_mesh)
        module.register_forward_hook(_whole)
        return module


def _whole(module: nn.Module, arguments: Any, x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[Replicate()])


class SlicedIndex(ParallelStyle):
    """Dropout of a rank's part of the sequence, keyed by the index of those tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def sliced(module: nn.Module, arguments: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            x, index = arguments
            return x, None if index is None else index.chunk(device_mesh.size(), 1)[device_mesh.get_local_rank()]

        module.register_forward_pre_hook(sliced)
        return module


class SlicedTable(ParallelStyle):
    """A table that every rank holds whole and looks up for its part of the sequence only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inward: Any = _slice_input  # torch's annotations forget that these return what they made
        outward: Any = _to_local
        return distribute_module(module, device_mesh, _hold_whole, inward, outward)


def _hold_whole(name: str, module: nn.Module, axis: DeviceMesh) -> None:
    for key, weight in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(weight.data, axis, [Replicate()])))


def _slice_input(module: nn.Module, arguments: tuple[Tensor, ...], axis: DeviceMesh) -> tuple[Tensor, ...]:
    (index,) = arguments
    return (DTensor.from_local(index, axis, [Replicate()]).redistribute(placements=[SEQUENCE]),)


def _to_local(module: nn.Module, output: Any, axis: DeviceMesh) -> Tensor:
    return output.to_local()
