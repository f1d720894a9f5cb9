"""Tensor parallelism: matrices cut by the parameter table, the sequence cut between them, the loss over cut logits.

Between matrices a rank holds its part of the sequence (b, s ÷ tp, hidden). It is gathered before a column-cut product
and summed and scattered after the row-cut one: per layer two gathers and two scatters in the forward, and their mirror
images in the backward. Logits stay cut by vocabulary; the loss needs only their maxima and sums.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from meshwright.models.decoder import Decoder
from meshwright.models.moe import Mixture
from meshwright.parallel import mixture
from meshwright.parallel.mesh import Mesh
from meshwright.spec.params import Split, params
from meshwright.spec.plan import Plan

SEQUENCE = Shard(1)


def split(model: Decoder, plan: Plan, mesh: Mesh) -> Decoder:
    """Cut every matrix as the parameter table says."""
    if plan.tp == 1:
        return model
    axis = mesh.dense["tp"]
    parallelize_module(model, axis, dict(styles(model)))
    if model.head is None and model.embed is not None and model.norm is not None:
        model.norm.register_forward_hook(_gather_for_tied_projection)
    for module in model.modules():
        if isinstance(module, Mixture):
            mixture.split(module, plan, mesh)
    return model


def loss_context(plan: Plan) -> AbstractContextManager[Any]:
    """Where a loss over cut logits is computed and differentiated."""
    return loss_parallel() if plan.tp > 1 else nullcontext()


def styles(model: Decoder) -> Iterator[tuple[str, ParallelStyle]]:
    """How each module of a (part of a) decoder is cut. Mixtures are cut as a whole, beside this table."""
    modules = dict(model.named_modules())
    dense = [
        param for param in params(model.arch) if param.name.endswith(".weight") and not _in_mixture(model, param.name)
    ]
    for param in dense:
        name = param.name.removesuffix(".weight")
        if name in modules:
            yield name, _style(name, param.split)
    for name, block in model.blocks.items():
        yield f"blocks.{name}.attn", _gathered(3)
        if not isinstance(block.mlp, Mixture):
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


def _gather_for_tied_projection(module: nn.Module, arguments: Any, x: Tensor) -> Tensor:
    """A tied model projects with the embedding itself, which is no module that could ask for the whole sequence."""
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[Replicate()])


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
