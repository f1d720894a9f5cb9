"""Modules of which each rank of tp computes its own part, by plain tensors: what torch's styles have no word for.

Inside attention a rank has the whole sequence and some heads. A weight that all heads read (a norm of heads, the way
down of latent attention) is held whole by every rank, whose gradient is its heads' share; a weight of heads is cut.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.utils import stateless

from meshwright.models.layers import HeadLayerNorm, OffsetRMSNorm, accum_dtype
from meshwright.parallel.mesh import sum_over


def hold(module: nn.Module, name: str, weight: Tensor, axes: DeviceMesh, placements: list[Any]) -> None:
    """Let a rank hold its part of a weight."""
    held = distribute_tensor(weight.data, axes, placements)
    module.register_parameter(name, nn.Parameter(held, requires_grad=weight.requires_grad))


@contextmanager
def reading_locally(
    module: nn.Module, read: Callable[[DTensor], Tensor], skip: nn.Module | None = None
) -> Iterator[None]:
    """A context where the module's weights are this rank's local tensors."""
    hidden = set() if skip is None else {id(weight) for weight in skip.parameters()}
    weights = {
        name: read(weight)
        for name, weight in module.named_parameters()
        if isinstance(weight, DTensor) and id(weight) not in hidden
    }
    with stateless._reparametrize_module(module, weights):
        yield


def read_partial(weight: DTensor) -> Tensor:
    """A replicated weight has a partial gradient; a sharded one has its own."""
    (placement,) = weight.placements
    return weight.to_local(grad_placements=[Partial() if isinstance(placement, Replicate) else placement])


def entering(x: Tensor) -> Tensor:
    """A whole input, of whose gradient each rank has a part."""
    return x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x


class LocalPart(ParallelStyle):
    """A module that computes its own features of a whole input, or all of them for the heads of this rank."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def hold(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Let a rank hold its part of the weights."""
        for name, weight in list(module.named_parameters(recurse=False)):
            hold(module, name, weight, device_mesh, [self.placement])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.hold(module, device_mesh)
        compute = module.forward

        def forward(x: Tensor) -> Tensor:
            with reading_locally(module, read_partial):
                return compute(entering(x))

        module.forward = forward
        return module


class SharedHeads(ParallelStyle):
    """A projection to fewer heads than there are ranks: all hold it whole, and each computes the head that it reads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear), "keys and values are projected"
        for name, weight in list(module.named_parameters(recurse=False)):
            hold(module, name, weight, device_mesh, [Replicate()])
        mine = read_head(self.heads, device_mesh)

        def forward(input: Tensor) -> Tensor:
            weight, bias = (None if whole is None else mine(whole) for whole in (module.weight, module.bias))
            assert weight is not None
            return F.linear(entering(input), weight, bias)

        module.forward = forward
        return module


def read_head(heads: int, device_mesh: DeviceMesh) -> Callable[[Any], Tensor]:
    """Reads of a weight of all heads, fewer than ranks, the rows of the one that this rank computes."""
    head, ranks = device_mesh.get_local_rank() * heads // device_mesh.size(), device_mesh.size()
    assert ranks % heads == 0, "as many ranks for each head"

    def mine(weight: DTensor) -> Tensor:
        return read_partial(weight).chunk(heads)[head]

    return mine


class SharedHeadNorm(ParallelStyle):
    """LayerNorm of keys' heads, fewer than ranks, of which each holds all weights."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, HeadLayerNorm), "others are split or the same for all heads"
        hold(module, "weight", module.weight, device_mesh, [Replicate()])
        mine, compute = read_head(self.heads, device_mesh), module.forward

        def forward(x: Tensor) -> Tensor:
            with stateless._reparametrize_module(module, {"weight": mine(module.weight)}):
                return compute(x)

        module.forward = forward
        return module


class SplitNorm(ParallelStyle):
    """RMSNorm over features that ranks share: the sum of squares is that of all of them.

    Where heads are fewer than ranks, several have the same one, and its squares as often in the sum.
    """

    def __init__(self, heads: int = 0) -> None:
        super().__init__()
        self.heads = heads  # 0: each rank has features of its own

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm), "queries and keys have no other norm"
        hold(module, "weight", module.weight, device_mesh, [Replicate() if self.heads else Shard(0)])
        eps, group, offset = module.eps or 0.0, device_mesh.get_group(), isinstance(module, OffsetRMSNorm)
        often = device_mesh.size() // self.heads if self.heads else 1
        width, mine = (
            module.normalized_shape[0] * often,
            read_head(self.heads, device_mesh) if self.heads else read_partial,
        )

        def forward(x: Tensor) -> Tensor:
            upcast = x.to(accum_dtype(x))
            square = summed(upcast.square().sum(-1, keepdim=True), group) / width
            assert isinstance(module.weight, DTensor)
            weight = mine(module.weight)
            return (upcast * (square + eps).rsqrt() * (1 + weight if offset else weight)).to(x.dtype)

        module.forward = forward
        return module


def hold_sinks(attention: nn.Module, axes: DeviceMesh) -> None:
    """Give each rank the sinks of its heads."""
    sinks = attention.sinks
    if not isinstance(sinks, Tensor):
        return
    hold(attention, "sinks", sinks, axes, [Shard(0)])
    compute = attention.forward

    def forward(*args: Any) -> Tensor:
        held = attention.sinks
        assert isinstance(held, DTensor)
        with stateless._reparametrize_module(attention, {"sinks": held.to_local()}):
            return compute(*args)

    attention.forward = forward


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, which each of them reads; going back, the sum of their gradients."""
    return _Summed.apply(x, group)


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over(grads[0], ctx.group), None


def shared_out(x: Tensor, ranks: int) -> Tensor:
    """x itself, of whose whole gradient, which each rank has, each gives a share to a sum over them."""
    return _SharedOut.apply(x, ranks)


class _SharedOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def read_together(x: Tensor, group: dist.ProcessGroup, parts: int = 1) -> Tensor:
    """x itself, of whose gradient each rank has a part: going back, all have their sum.

    Where the output has several parts, one for every ranks ÷ parts of the ranks in their order, x is this rank's.
    """
    return _ReadTogether.apply(x, group, parts)


class _ReadTogether(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mine = ctx.group.rank() * ctx.parts // ctx.group.size()
        whole = placed(mine, ctx.parts)(grads[0])
        return sum_over(whole, ctx.group).chunk(ctx.parts, -1)[mine].contiguous(), None, None


def placed(rank: int, ranks: int) -> Callable[[Tensor], Tensor]:
    """Where a rank's part of an output's bias belongs, zeros elsewhere: ranks' outputs are then summed."""

    def place(part: Tensor) -> Tensor:
        width = part.shape[-1]
        return F.pad(part, (rank * width, (ranks - 1 - rank) * width))

    return place
