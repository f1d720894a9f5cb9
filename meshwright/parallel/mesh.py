"""The device mesh of a plan, what a rank holds of a tensor on it, and differentiable collectives over its groups.

All-gather and reduce-scatter are each other's gradient, an all-to-all is its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.spec.plan import AXES, Plan

DENSE = ("pp", "outer", "replicate", "shard", "tp")
EXPERT = ("pp", "outer", "replicate", "shard", "ep", "tp")
Groups = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]  # by an axis and the first ranks along it


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's coordinates, and the meshes of dense and expert weights."""

    # (pp, outer, replicate, shard, tp): where cp is folded into shard, or into replicate if zero is 0. Replicas that
    # sync rarely are along outer, and along replicate what adds up gradients in every step.
    dense: DeviceMesh
    expert: DeviceMesh  # (pp, outer, replicate, shard, ep, tp): the same ranks, ep taken out of shard (or replicate)
    fine: DeviceMesh  # (pp, replicate, shard, cp, tp): as the plan says it
    device: torch.device
    rank: int
    world: int
    data_rank: int  # which part of every batch this rank reads
    place: dict[str, int]  # this rank's coordinate on each axis of the plan
    parts: int = 1  # replicas that sync rarely, each of which makes updates of its own
    part: int = 0  # the one that this rank is in
    # Replicas whose gradients no backward adds up: the optimizer brings them together. They are along outer too.
    apart: int = 1
    peers: dist.ProcessGroup | None = None  # its ranks; None: all
    groups: Groups = field(default_factory=dict)  # those that were made

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on one axis only."""
        return (self.expert if axis == "ep" else self.fine).get_group(axis)

    def over_shard_and_tp(self, weights: Literal["dense", "expert"]) -> dist.ProcessGroup:
        """The ranks that together hold one copy of a weight; made when all ranks first ask for it."""
        ranks = (self.dense if weights == "dense" else self.expert).mesh
        if weights == "expert":
            ranks = ranks.movedim(-2, 0)  # those of ep hold other experts
        return _group("shard_tp", ranks.flatten(-2).flatten(0, -2).tolist(), self.groups)

    def secondary(self, ranks: int) -> DeviceMesh:
        """So many neighbours of this rank that share the weights, and those that have the same part in other such."""
        axes = ("secondary_copies", "secondary")
        groups, mine = self._cut_shards(ranks, axes)
        return DeviceMesh.from_group(list(groups), self.device.type, mine, mesh_dim_names=axes)

    def nodes(self, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Of those that share the weights: one rank of every node of so many, and the ranks of this rank's node."""
        return self._cut_shards(ranks, ("between_nodes", "node"))[0]

    def _cut_shards(
        self, ranks: int, axes: tuple[str, str]
    ) -> tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], Tensor]:
        """Groups across neighbourhoods of so many shards and inside them, and this rank's line of shards so cut."""
        rows = self.dense.mesh.movedim(DENSE.index("shard"), -1).reshape(-1, self.dense.size(DENSE.index("shard")))
        cut = rows.unflatten(1, (-1, ranks))  # by line of shards, by neighbourhood, by neighbour
        groups = (
            _group(axes[0], cut.mT.flatten(0, 1).tolist(), self.groups),
            _group(axes[1], cut.flatten(0, 1).tolist(), self.groups),
        )
        return groups, next(line for line in cut if (line == self.rank).any())


KEPT: dict[tuple[int, ...], Mesh] = {}  # by the shape of a plan; of this process, whose ranks meet once


def make(plan: Plan, device: torch.device, apart: bool = False) -> Mesh:
    """The device meshes of a plan, over an initialised process group; `apart`: gradients stay each replica's own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world == plan.world, f"{world} ranks started for a plan of {plan.world}"
    outer, copies = (plan.replicate, plan.copies // plan.replicate) if apart else (plan.parts, plan.copies)
    expert = (copies, plan.shards // plan.ep) if plan.zero else (copies // plan.ep, 1)
    groups: Groups = {}
    fine = _device_mesh(device, AXES, tuple(getattr(plan, axis) for axis in AXES), groups)
    coordinate = fine.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    place: dict[str, int] = dict(zip(AXES, coordinate, strict=True))
    return Mesh(
        dense=_device_mesh(device, DENSE, (plan.pp, outer, copies, plan.shards, plan.tp), groups),
        expert=_device_mesh(device, EXPERT, (plan.pp, outer, *expert, plan.ep, plan.tp), groups),
        fine=fine,
        device=device,
        rank=rank,
        world=world,
        data_rank=place["replicate"] * plan.shard + place["shard"],
        place=place,
        parts=plan.parts,
        part=place["replicate"] if outer > 1 else 0,
        apart=plan.replicate if apart else 1,
        peers=_peers(plan, fine, groups),
        groups=groups,
    )


def _peers(plan: Plan, fine: DeviceMesh, groups: Groups) -> dist.ProcessGroup | None:
    """This rank's replica, where replicas sync rarely."""
    if plan.parts == 1:
        return None
    return _group("peers", fine.mesh.movedim(AXES.index("replicate"), 0).reshape(plan.parts, -1).tolist(), groups)


def kept(plan: Plan, device: torch.device, apart: bool = False) -> Mesh:
    """The device meshes of a plan, made once for all of its shape: a group of Gloo's polls for as long as it lives."""
    shape = (*(getattr(plan, axis) for axis in AXES), plan.ep, plan.zero > 0, plan.parts, apart)
    if shape not in KEPT:
        KEPT[shape] = make(plan, device, apart)
    return KEPT[shape]


def _device_mesh(device: torch.device, axes: tuple[str, ...], shape: tuple[int, ...], groups: Groups) -> DeviceMesh:
    """A mesh of all ranks, as `init_device_mesh` makes it but for its groups, which meshes of one plan share."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    mine = [_group(axis, ranks.movedim(dim, -1).flatten(0, -2).tolist(), groups) for dim, axis in enumerate(axes)]
    return DeviceMesh.from_group(mine, device.type, ranks, mesh_dim_names=axes)


def _group(axis: str, rows: list[list[int]], groups: Groups) -> dist.ProcessGroup:
    """This rank's group of those that an axis has: made once, for it costs threads, sockets and time to start.

    Two axes over the same ranks have each a group of its own, since they may be at work at the same time; those of
    one rank have nothing to send.
    """
    world = dist.group.WORLD
    assert world is not None, "the ranks have met"
    if len(rows) == 1:
        return world
    key = (axis if len(rows[0]) > 1 else "alone", tuple(rows[0]))
    if key not in groups:
        if world.bound_device_id is None:
            made, _ = dist.new_subgroups_by_enumeration(rows, group_desc=f"mesh_{key[0]}")
        else:  # NCCL: every group of the axis in one call
            made = dist.split_group(world, rows, group_desc=f"mesh_{key[0]}")
        assert isinstance(made, dist.ProcessGroup), "every rank is in a row"
        groups[key] = made
    return groups[key]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, as an index into it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    place, found = tensor.device_mesh.get_coordinate(), list[slice]()
    assert place is not None, "every rank is in the mesh"
    for dim, size in enumerate(tensor.shape):
        start = 0
        for axis in _axes_that_cut(tensor, dim):
            most = math.ceil(size / tensor.device_mesh.size(axis))
            before = min(place[axis] * most, size)
            start, size = start + before, min(size - before, most)
        found.append(slice(start, start + size))
    return tuple(found)


def whole_of(tensor: Tensor) -> Tensor:
    """All ranks' parts of a tensor put together, along one axis of the mesh after the other.

    Where FSDP has cut what tp had cut before, DTensor's `full_tensor` searches all ways to get there, a quarter of a
    second for each shape; and the way is always the cuts, backwards.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.to_local().detach()
    for dim, size in enumerate(tensor.shape):
        sizes = list[tuple[int, dist.ProcessGroup]]()
        for axis in _axes_that_cut(tensor, dim):
            group = tensor.device_mesh.get_group(axis)
            sizes.append((size, group))
            most = math.ceil(size / group.size())
            size = min(max(size - group.rank() * most, 0), most)
        for before, group in reversed(sizes):  # parts are as large as the first, those at the end less, or empty
            lacks = math.ceil(before / group.size()) - whole.shape[dim]
            filled = torch.cat([whole, whole.new_zeros(*whole.shape[:dim], lacks, *whole.shape[dim + 1 :])], dim)
            whole = join(filled if lacks else whole, dim, group).narrow(dim, 0, before)
    return whole


def _axes_that_cut(tensor: DTensor, dim: int) -> list[int]:
    """The axes of a mesh that cut a dim, in the order of cuts: a strided one is made after those of axes within it."""
    cuts = [(isinstance(each, _StridedShard), axis) for axis, each in enumerate(tensor.placements) if _cuts(each, dim)]
    return [axis for _, axis in sorted(cuts)]


def _cuts(placement: Placement, dim: int) -> bool:
    assert not placement.is_partial(), "parts of a sum have no place in the whole"
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def copies(weight: Tensor, mesh: Mesh) -> int:
    """How many ranks of this rank's pipeline stage hold the same part of a weight."""
    if not isinstance(weight, DTensor):
        return mesh.world
    axes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    held_alike = [size for size, placement in axes if isinstance(placement, Replicate)]
    names = weight.device_mesh.mesh_dim_names or ()
    if "tp" not in names:  # a split table left it whole on each of those ranks
        held_alike.append(mesh.dense.size(DENSE.index("tp")))
    if "replicate" not in names:  # gradients are summed over replicas by a hook, or there are none
        held_alike.append((mesh.expert if "ep" in names else mesh.dense).size(DENSE.index("replicate")))
    return math.prod(held_alike) * mesh.apart


CUT_AXES = ("shard", "expert_shard", "ep", "tp")  # over which a weight may be cut, in the order of reductions


@dataclass(frozen=True, slots=True)
class Cut:
    """A dim of a tensor that is cut among the ranks of a group."""

    dim: int
    axis: str  # of CUT_AXES
    group: dist.ProcessGroup


def cuts(weight: Tensor) -> tuple[Cut, ...]:
    """Along which dims a weight is cut, and among whom; experts that ep shares out are sharded by fewer ranks."""
    if not isinstance(weight, DTensor):
        return ()
    grid, found = weight.device_mesh, []
    sizes = dict(zip(grid.mesh_dim_names or (), grid.shape, strict=True))
    for axis, placement in zip(sizes, weight.placements, strict=True):
        if (dim := cut_dim(placement, weight)) is not None and sizes[axis] > 1:
            name = "expert_shard" if axis == "shard" and sizes.get("ep", 1) > 1 else axis
            found.append(Cut(dim, name, grid.get_group(axis)))
    return tuple(found)


def cut_dim(placement: Placement, tensor: Tensor) -> int | None:
    """The dim of a tensor that a placement cuts; None if it is held whole."""
    if isinstance(placement, Replicate):
        return None
    return placement.dim % tensor.dim()  # pyright: ignore[reportAttributeAccessIssue]


# torch 2.13 renamed both, and warns at every use of the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Where the compiler looks on, the collectives below are functional: torch 2.11 loses what others write in a backward
# that it compiles, and hands on what the memory held before.


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, joined along a dim; going back, gradients are summed and each rank gets its part."""
    return _GatherOrScatter.apply(x, dim, group, True)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, of which each gets its part along a dim; going back, the parts are joined."""
    return _GatherOrScatter.apply(x, dim, group, False)


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts along a dim, in the order of ranks; not differentiable."""
    first = x.movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_gather_tensor(first, 0, group)).movedim(0, dim)
    whole = first.new_empty(first.shape[0] * group.size(), *first.shape[1:])
    all_gather(whole, first, group=group)
    return whole.movedim(0, dim)


def sum_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along a dim of the sum over all ranks; not differentiable."""
    first = x.movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.reduce_scatter_tensor(first, "sum", 0, group)).movedim(0, dim)
    part = first.new_empty(first.shape[0] // group.size(), *first.shape[1:])
    reduce_scatter(part, first, group=group)
    return part.movedim(0, dim)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks; not differentiable."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_once(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, of which each makes the same number; going back, each has the gradient of its own part.

    A number that all ranks make, and that counts once, gives each of them the whole gradient of the sum.
    """
    return _SumOnce.apply(x, group)


def all_to_all(
    x: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """What each rank sends of dim 0, in the order of ranks: equal parts, or `sent` rows to and `received` from each.

    Going back, gradients go the same way back.
    """
    return _AllToAll.apply(x, group, sent, received)


class _GatherOrScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, gathers: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.gathers = dim, group, gathers
        return (join if gathers else sum_parts)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return (sum_parts if ctx.gathers else join)(grads[0], ctx.dim, ctx.group), None, None, None


class _SumOnce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), received, sent, group))
    arrived = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived
