"""A run's state as the tensors of a checkpoint: every weight and its two moments, by this rank's parts."""

from collections.abc import Iterator
from functools import cache

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.checkpoint import slices as regions
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.slices import writers
from meshwright.parallel.mesh import DENSE, EXPERT, Mesh
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.run import Run
from meshwright.train.gather import owner_of
from meshwright.train.state import State, region_of


def holdings(state: State, run: Run, mesh: Mesh) -> list[Holding]:
    """Every part that this rank has, and whether it is the one to write it."""
    return list(_holdings(state, run, mesh))


def _holdings(state: State, run: Run, mesh: Mesh) -> Iterator[Holding]:
    owners = {param.name: owner_of(param, run.plan) for param in params(run.arch)}
    state.optimizer.settle()
    held, seen = state.optimizer.held(), set[str]()
    for name, weight in (pair for chunk in state.chunks for pair in chunk.named_parameters()):
        # A tied embedding may be on two stages, which hold the same numbers: the first has it to write.
        mine = owners[name] == mesh.place["pp"] and name not in seen
        seen.add(name)
        copy, copies = standing(weight, mesh)
        for kind, tensor in held[id(weight)].items():
            writes = mine and chosen(run.arch, copies, tuple(held[id(weight)]))[f"{kind}/{name}"] == copy
            yield Holding(f"{kind}/{name}", tuple(weight.shape), regions.region_of(region_of(weight)), tensor, writes)


@cache
def chosen(arch: Arch, copies: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Which of its equal holders writes each tensor, of so many."""
    sizes = {f"{kind}/{param.name}": param.numel for param in params(arch) for kind in kinds}
    return dict(zip(sizes, writers(list(sizes.values()), copies), strict=True))


def standing(weight: Tensor | nn.Parameter, mesh: Mesh) -> tuple[int, int]:
    """This rank's number among those of its stage that hold the same part of a weight, and how many they are."""
    if not isinstance(weight, DTensor):
        return mesh.rank, mesh.world
    names = weight.device_mesh.mesh_dim_names or ()
    cut = {
        name for name, placement in zip(names, weight.placements, strict=True) if not isinstance(placement, Replicate)
    }
    grid, axes = (mesh.expert, EXPERT) if "ep" in names else (mesh.dense, DENSE)
    place = grid.get_coordinate()
    assert place is not None, "every rank is in the grid"
    copy, copies = 0, 1
    for axis, number, length in zip(axes, place, grid.shape, strict=True):
        if axis != "pp" and axis not in cut:
            copy, copies = copy * length + number, copies * length
    return copy, copies
