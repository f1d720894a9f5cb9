"""The device mesh of a plan."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.spec.plan import AXES, Plan

DENSE = ("pp", "replicate", "shard", "tp")
EXPERT = ("pp", "replicate", "shard", "ep", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's coordinates, and the meshes of dense and expert weights."""

    dense: DeviceMesh  # (pp, replicate, shard, tp): where cp is folded into shard, or into replicate if zero is 0
    expert: DeviceMesh  # (pp, replicate, shard, ep, tp): the same ranks, ep taken out of shard (or replicate)
    fine: DeviceMesh  # (pp, replicate, shard, cp, tp): as the plan says it
    device: torch.device
    rank: int
    world: int
    data_rank: int  # which part of every batch this rank reads
    place: dict[str, int]  # this rank's coordinate on each axis of the plan

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on one axis only."""
        return (self.expert if axis == "ep" else self.fine)[axis].get_group()


def make(plan: Plan, device: torch.device) -> Mesh:
    """The device meshes of a plan, over an initialised process group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world == plan.world, f"{world} ranks started for a plan of {plan.world}"
    expert = (plan.copies, plan.shards // plan.ep) if plan.zero else (plan.copies // plan.ep, 1)
    fine = init_device_mesh(device.type, tuple(getattr(plan, axis) for axis in AXES), mesh_dim_names=AXES)
    coordinate = fine.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    place: dict[str, int] = dict(zip(AXES, coordinate, strict=True))
    return Mesh(
        dense=init_device_mesh(device.type, (plan.pp, plan.copies, plan.shards, plan.tp), mesh_dim_names=DENSE),
        expert=init_device_mesh(device.type, (plan.pp, *expert, plan.ep, plan.tp), mesh_dim_names=EXPERT),
        fine=fine,
        device=device,
        rank=rank,
        world=world,
        data_rank=place["replicate"] * plan.shard + place["shard"],
        place=place,
    )


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, as an index into it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def copies(weight: Tensor, mesh: Mesh) -> int:
    """How many ranks of this rank's pipeline stage hold the same part of a weight."""
    if not isinstance(weight, DTensor):
        return mesh.world
    axes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    held_alike = [size for size, placement in axes if isinstance(placement, Replicate)]
    if "tp" not in (weight.device_mesh.mesh_dim_names or ()):  # a split table left it whole on each of those ranks
        held_alike.append(mesh.dense["tp"].size())
    return math.prod(held_alike)
