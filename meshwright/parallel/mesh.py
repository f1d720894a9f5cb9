"""The ranks as a grid whose axes are the plan's."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in the grid."""

    axes: DeviceMesh  # (replicate, shard), outermost first
    device: torch.device
    rank: int
    world: int
    data_rank: int  # which part of every batch this rank reads
    copies: int  # ranks that hold the same part of the weights


def make(plan: Plan, device: torch.device) -> Mesh:
    """The grid of a plan, over a process group that already stands."""
    world = dist.get_world_size()
    assert world == plan.world, f"{world} ranks started for a plan of {plan.world}"
    axes = init_device_mesh(device.type, (plan.replicate, plan.shard), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    return Mesh(axes=axes, device=device, rank=rank, world=world, data_rank=rank, copies=plan.replicate)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
