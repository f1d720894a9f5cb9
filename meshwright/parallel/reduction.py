"""What stands in for torch's gradient reduction, from outside: its weights, and what it keeps between steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.config.run import Run
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.communication import part_dim, part_shape

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FeedbackPart:
    """A part of what a rank keeps from one reduction to the next, as a checkpoint has it."""

    name: str
    shape: tuple[int, ...]  # of the whole
    region: Region
    tensor: Tensor
    writes: bool


class Reduction(Protocol):
    """How the gradients of one group of weights are reduced."""

    def begin(self, run: Run, mesh: Mesh) -> None:
        """Make room for what is kept from step to step."""
        ...

    def kept(self) -> list[Tensor]:
        """All of it."""
        ...

    def states(self, mesh: Mesh) -> Iterator[FeedbackPart]:
        """The same by weights."""
        ...


@dataclass(frozen=True, slots=True)
class ReducedWeight:
    """A weight of a group, as torch lays out its gradient."""

    name: str
    whole: tuple[int, ...]
    stored: tuple[int, ...]  # a rank's shard, filled up to equal length
    dim: int  # along which it is sharded
    here: Region  # of the whole: what tp leaves to this rank, gathered over its shards
    cut_by_tp: bool
    source: Any  # torch's own record

    @property
    def elements(self) -> int:
        """Of a shard."""
        return math.prod(self.stored)

    def shard_region(self, shard: int) -> Region:
        """What one of the ranks that share it has of the whole, without filling."""
        return within(self.here, self.dim, self.stored[self.dim], shard)

    def parts_of(self, stored: Tensor, ranks: int) -> Tensor:
        """A shard as rows, one for each of the ranks that share out the sum."""
        dim = part_dim(self.stored, ranks)
        short, after = -self.stored[dim] % ranks, len(self.stored) - 1 - dim
        x = stored.view(self.stored)
        x = F.pad(x, (0, 0) * after + (0, short)) if short else x
        return x.unflatten(dim, (ranks, -1)).movedim(dim, 0).reshape(ranks, -1)

    def joined(self, rows: Tensor) -> Tensor:
        """The reverse: a shard, flat."""
        ranks, dim = len(rows), part_dim(self.stored, len(rows))
        parts = rows.reshape(ranks, *part_shape(self.stored, ranks)).movedim(0, dim).flatten(dim, dim + 1)
        return parts.narrow(dim, 0, self.stored[dim]).reshape(-1)


def within(region: Region, dim: int, length: int, number: int) -> Region:
    """One of the equal lengths of a region along a dim; the last ones may be short or empty."""
    first, last = region[dim]
    begin, end = (min(first + length * each, last) for each in (number, number + 1))
    return (*region[:dim], (begin, end), *region[dim + 1 :])


def inside(x: Tensor, region: Region) -> Tensor:
    """The beginning of a tensor that is not filling."""
    return x[tuple(slice(0, end - begin) for begin, end in region)]


def reduced_weight(source: Any, names: Mapping[tuple[int, str], str]) -> ReducedWeight:
    """A weight as torch has wrapped it; `names`: by its module's id and its key there."""
    # How tp cuts it: earlier versions of torch have another name for that.
    spec = getattr(source, "_unsharded_dtensor_spec", None) or getattr(source, "_tp_spec", None)
    whole = tuple(source.sharded_param.shape)
    shape, offset = whole, (0,) * len(whole)
    if spec is not None:
        shape, offset = compute_local_shape_and_global_offset(whole, spec.mesh, spec.placements)
    info = source._module_info
    return ReducedWeight(
        name=names[id(info.module), info.param_name],
        whole=whole,
        stored=tuple(source.padded_sharded_param_size),
        dim=source.fsdp_placement.dim,
        here=tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True)),
        cut_by_tp=spec is not None and any(isinstance(each, Shard) for each in spec.placements),
        source=source,
    )


def take_earlier(gradient: Tensor, weights: Sequence[ReducedWeight]) -> None:
    """Add what earlier microbatches left in this rank's sharded gradients, to which torch will add the result."""
    for weight, piece in zip(weights, gradient.split([weight.elements for weight in weights]), strict=True):
        if weight.source.sharded_param.grad is not None:
            held = local(weight.source.sharded_param.grad)
            inside(piece.view(weight.stored), tuple((0, size) for size in held.shape)).add_(held)
            held.zero_()
