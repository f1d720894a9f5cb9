"""A mixture of experts under tensor parallelism: experts cut inside, everything else computed alike on every rank.

The layer's input is gathered and its output summed and scattered, as of a dense layer. Between the two every rank works
on the whole sequence with its part of each expert, so what it computes is a part of a sum, and so is every gradient:
that of the router too, which therefore is added up over the ranks, and the auxiliary loss, of which each injects a
share.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import stateless

from meshwright.models.moe import Experts, Mixture
from meshwright.parallel.collective import gather, scatter
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.plan import Plan


def split(layer: Mixture, plan: Plan, mesh: Mesh) -> None:
    """Cut one mixture over tp, in place."""
    axis = mesh.dense["tp"]
    for module, name, weight in list(_outside_experts(layer)):
        _hold(module, name, weight, axis, [_placement(name, module, layer)])
    hold_experts(layer.experts, mesh)
    layer.share /= plan.tp
    group = mesh.group("tp")
    compute = layer.forward

    def forward(x: Tensor, index: Tensor | None = None) -> Tensor:
        whole = gather(local(x), 1, group)
        with reading_locally(layer, _read_partial, skip=layer.experts):
            y = compute(whole, index)
        return scatter(y, 1, group)

    layer.forward = forward


def hold_experts(experts: Experts, mesh: Mesh) -> None:
    """Give each rank its experts (ep) and its part inside each (tp); done once, by whichever axis comes first."""
    if isinstance(experts.up, DTensor):
        return
    axes = mesh.expert["ep", "tp"]
    for name, weight in list(experts.named_parameters(recurse=False)):
        inside = Shard(2) if name == "down" else Shard(1)
        _hold(experts, name, weight, axes, [Shard(0), inside])
    compute = experts.forward

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        with reading_locally(experts, _read_own):
            return compute(x, counts)

    experts.forward = forward


@contextmanager
def reading_locally(
    module: nn.Module, read: Callable[[DTensor], Tensor], skip: nn.Module | None = None
) -> Iterator[None]:
    """While it lasts, the module's weights are this rank's parts, as plain tensors."""
    hidden = set() if skip is None else {id(weight) for weight in skip.parameters()}
    weights = {
        name: read(weight)
        for name, weight in module.named_parameters()
        if isinstance(weight, DTensor) and id(weight) not in hidden
    }
    with stateless._reparametrize_module(module, weights):
        yield


def _read_own(weight: DTensor) -> Tensor:
    """A part that nobody else holds: its gradient is complete."""
    return weight.to_local()


def _read_partial(weight: DTensor) -> Tensor:
    """A weight all ranks hold has a gradient that is a part of a sum; a cut one has its own."""
    (placement,) = weight.placements
    return weight.to_local(grad_placements=[Partial() if isinstance(placement, Replicate) else placement])


def _outside_experts(layer: Mixture) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in layer.modules():
        if not isinstance(module, Experts):
            for name, weight in module.named_parameters(recurse=False):
                yield module, name, weight


def _placement(name: str, module: nn.Module, layer: Mixture) -> Placement:
    shared = layer.shared
    if shared is None or module in (layer.router, layer.noise):
        return Replicate()
    if module is shared.down:
        return Shard(1) if name == "weight" else Replicate()
    return Shard(0)


def _hold(module: nn.Module, name: str, weight: Tensor, axes: DeviceMesh, placements: list[Any]) -> None:
    module.register_parameter(name, nn.Parameter(distribute_tensor(weight.data, axes, placements)))
