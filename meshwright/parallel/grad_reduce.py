"""Lossy gradient reduction: 16, 8 or 4 bits on the wire, sums in full width, error feedback; with shards, qgZ.

What a rank gives to a sum is rounded, with what rounding took from the gradient before (error feedback: Seide et al.
2014, Karimireddy et al. 2019), and goes to whoever adds it up by an all-to-all. Over the ranks that shard the weights
that is all: each keeps its shard of the sum. In two levels, as ZeRO++'s qgZ has it (Wang et al. 2023), the
ranks of a node sum first: each of them is given by its neighbours what the ranks at its place in every node are to
have, rounds that sum, and exchanges it with those alone. So between nodes a rank sends one shard to each other node,
where it would send one to every rank there. Over replicas each adds up one part, rounds the sum with a feedback of its
own, and an all-gather gives it to the others. Under replicate · shard the one follows the other: over the fast links
first, and over the slow ones no more than a shard.

    sent_r = round(gradient_r + error_r);   error_r ← gradient_r + error_r − sent_r;   sum = Σ sent_r
    nodes:    sent_n = round(sum_n + error_n);  error_n ← sum_n + error_n − sent_n;    sum = Σ sent_n
    replicas: result = round(sum + error);  error ← sum + error − result

PowerSGD (Vogels, Karimireddy, Jaggi 2019): replicas exchange two thin factors of each matrix's gradient.

One step of the power method, begun with the last step's factor (warm start), and error feedback. With M_r a replica's
gradient and what it is owed, transposed so that it has no more rows than columns, and n replicas:

    P = Σ M_r Q;   P ← an orthonormal basis of its columns;   Q ← Σ M_rᵀ P;   sum ≈ P Qᵀ;   owed: M_r − P Qᵀ / n

Of full rank P is square, P Pᵀ is one, and the sum is exact. Vectors are summed as they are, with P. A stack of
experts is so many matrices.

A replica is one rank or many. Where ranks shard its weights, gradients are reduce-scattered exactly, and tp leaves each
rank its part: a part of M_r makes some rows of P, or a part of their sums, and of Q likewise. The ranks of a replica
reduce-scatter what they have of a factor, sum over replicas the share of it that each is given, and all-gather it: over
the slow links goes one factor a replica, and what cuts a replica decides no number.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.config.run import Run
from meshwright.kernels.blockwise import BlockCodes
from meshwright.models.moe import Experts
from meshwright.parallel import precision
from meshwright.parallel.fsdp import param_groups
from meshwright.parallel.mesh import Mesh, join, local, sum_parts
from meshwright.spec.communication import (
    FACTOR,
    NODE_ERROR,
    REPLICA_ERROR,
    SHARD_ERROR,
    SUM_ERROR,
    Factors,
    block_of,
    factors,
    of_part,
    part_dim,
    part_shape,
)
from meshwright.spec.plan import Plan

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


@dataclass(frozen=True, slots=True)
class FactoredPart:
    """What a rank has of a gradient that PowerSGD factors; of a vector as it is."""

    weight: ReducedWeight
    shape: Factors | None  # None: a vector
    region: Region  # of the whole
    counts: bool  # False: another rank of tp, which has the same, gives it to the sums

    def piece(self, flat: Tensor) -> Tensor:
        """Of a group's gradient what is no filling: a view."""
        return inside(flat.view(self.weight.stored), self.region)

    def matrix(self, flat: Tensor) -> Tensor:
        """The same as matrices, which as wholes have no more rows than columns."""
        assert self.shape is not None, "a vector is no matrix"
        piece = self.piece(flat)
        stacked = piece.flatten(0, -3) if piece.dim() > 2 else piece[None]
        return stacked.mT if self.shape.transposed else stacked

    def of_whole(self, whole: Tensor) -> Tensor:
        """Of a whole tensor what is here: a view."""
        return whole[tuple(slice(*each) for each in self.region)]

    def of_first(self, factor: Tensor) -> Tensor:
        """The rows of the short side's factor that are of this part: a view."""
        return factor[self._matrices, self._rows[0]]

    def of_second(self, factor: Tensor) -> Tensor:
        """Those of the long side's."""
        return factor[self._matrices, self._rows[1]]

    @property
    def _matrices(self) -> slice:
        """Which of the stack: along its first dim alone is it ever cut."""
        if len(self.region) == 2:
            return slice(0, 1)
        inner = math.prod(self.weight.whole[1:-2])
        begin, end = self.region[0]
        return slice(begin * inner, end * inner)

    @property
    def _rows(self) -> tuple[slice, slice]:
        """Of the factors of the short and of the long side."""
        assert self.shape is not None, "a vector has no factors"
        rows, columns = (slice(*each) for each in self.region[-2:])
        return (columns, rows) if self.shape.transposed else (rows, columns)


class PowerSGD:
    """The gradient reduction of one group of weights over replicas, each of which may be many ranks."""

    def __init__(
        self, plan: Plan, group: Any, weights: Sequence[ReducedWeight], mesh: Mesh, holds_experts: bool
    ) -> None:
        """`holds_experts`: those that ranks of ep share out, each stack sharded by fewer ranks."""
        self.group, self.replicas = group, mesh.dense.get_group("replicate")
        self.holders = mesh.over_shard_and_tp("dense") if plan.shards * plan.tp > 1 else None  # of one replica
        self.feeds_back = plan.error_feedback
        self.weights, self.lengths = list(weights), [weight.elements for weight in weights]
        grid = mesh.expert if holds_experts else mesh.dense
        shard, first_of_tp = grid.get_local_rank("shard"), mesh.place["tp"] == 0
        self.parts = [
            FactoredPart(
                weight,
                factors(weight.whole, plan.powersgd),
                weight.shard_region(shard),
                first_of_tp or weight.cut_by_tp,
            )
            for weight in weights
        ]
        self.matrices = [number for number, part in enumerate(self.parts) if part.shape]
        self.factors: list[Tensor] = []  # of each matrix the long one, Q, whole on every rank
        self.error: Tensor | None = None

    def begin(self, run: Run, mesh: Mesh) -> None:
        dtype = precision.weight_dtype(run.plan)
        self.factors = [
            first_factor(run.seed, part.weight.name, part.shape).to(mesh.device, dtype)
            for part in self.parts
            if part.shape
        ]
        if self.feeds_back:
            self.error = torch.zeros(sum(self.lengths), dtype=dtype, device=mesh.device)

    def over_replicas(self, gradient: Tensor) -> None:
        """Sum a group's gradient over replicas, with the last microbatch of a step."""
        if not self.group.all_reduce_grads:
            return  # torch adds it to this rank's own
        take_earlier(gradient, self.weights)
        if self.error is not None:
            gradient.add_(self.error)
        pieces = gradient.split(self.lengths)
        parts = [self.parts[number] for number in self.matrices]
        held = [part.matrix(pieces[number]) for number, part in zip(self.matrices, parts, strict=True)]
        summed = self._summed([*self._firsts(parts, held), *self._vectors(pieces)])
        bases = [torch.linalg.qr(first).Q for first in summed[: len(parts)]]
        seconds = self._summed(self._seconds(parts, held, bases))
        if self.error is not None:
            self.error.copy_(gradient)
        for part, matrix, base, second, factor in zip(parts, held, bases, seconds, self.factors, strict=True):
            matrix.copy_(part.of_first(base) @ part.of_second(second).mT)
            # What is not finite is skipped by the update, and must not be what the next step begins with.
            factor.copy_(torch.where(second.isfinite().all(), second, factor))
        if self.error is not None:
            self.error.sub_(gradient, alpha=1 / self.replicas.size()).nan_to_num_(0.0, 0.0, 0.0)
        vectors = [number for number, part in enumerate(self.parts) if part.shape is None]
        for number, total in zip(vectors, summed[len(parts) :], strict=True):
            part, piece = self.parts[number], pieces[number]
            part.piece(piece).copy_(part.of_whole(total))
        for error, part in zip(self._errors(), self.parts, strict=False):
            if part.shape is None:
                error.zero_()

    def _firsts(self, parts: Sequence[FactoredPart], held: Sequence[Tensor]) -> list[Tensor]:
        """What this rank's parts add to the first factors."""
        found = list[Tensor]()
        for part, matrix, factor in zip(parts, held, self.factors, strict=True):
            assert part.shape is not None, "matrices alone"
            first = factor.new_zeros(part.shape.stack, part.shape.short, part.shape.rank)
            if part.counts:
                part.of_first(first).copy_(matrix @ part.of_second(factor))
            found.append(first)
        return found

    def _seconds(self, parts: Sequence[FactoredPart], held: Sequence[Tensor], bases: Sequence[Tensor]) -> list[Tensor]:
        """What they add to the second ones."""
        found = list[Tensor]()
        for part, matrix, base, factor in zip(parts, held, bases, self.factors, strict=True):
            second = torch.zeros_like(factor)
            if part.counts:
                part.of_second(second).copy_(matrix.mT @ part.of_first(base))
            found.append(second)
        return found

    def _vectors(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Vectors as wholes, of which this rank has its part."""
        found = list[Tensor]()
        for part, piece in zip(self.parts, pieces, strict=True):
            if part.shape is None:
                whole = piece.new_zeros(part.weight.whole)
                if part.counts:
                    part.of_whole(whole).copy_(part.piece(piece))
                found.append(whole)
        return found

    def _errors(self) -> Sequence[Tensor]:
        return () if self.error is None else self.error.split(self.lengths)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each summed over all ranks: over replicas by one collective, of which a replica's ranks have a share each."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.holders is None:
            dist.all_reduce(flat, group=self.replicas)
        else:
            share = sum_parts(F.pad(flat, (0, -len(flat) % self.holders.size())), 0, self.holders)
            dist.all_reduce(share, group=self.replicas)
            flat = join(share, 0, self.holders)[: len(flat)]
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def kept(self) -> list[Tensor]:
        return [*self.factors, *(() if self.error is None else (self.error,))]

    def states(self, mesh: Mesh) -> Iterator[FeedbackPart]:
        replica, remaining = mesh.dense.get_local_rank("replicate"), iter(self.factors)
        first = replica == mesh.dense.get_local_rank("shard") == mesh.place["tp"] == 0
        for part in self.parts:
            if part.shape is not None:
                factor = next(remaining)
                region = tuple((0, size) for size in factor.shape)
                yield FeedbackPart(f"{FACTOR}/{part.weight.name}", tuple(factor.shape), region, factor, first)
        for part, error in zip(self.parts, self._errors(), strict=False):
            name = f"{of_part(REPLICA_ERROR, replica)}/{part.weight.name}"
            yield FeedbackPart(name, part.weight.whole, part.region, part.piece(error), part.counts)


def first_factor(seed: int, name: str, shape: Factors) -> Tensor:
    """What a run begins with: normal draws that follow from its seed and the weight's name, on every replica alike."""
    draws = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape.stack, shape.long, shape.rank, generator=draws, dtype=torch.float64)


class LossyReduction(ReduceScatter):
    """The gradient reduction of one FSDP group, in the place of torch's reduce-scatter and all-reduce."""

    def __init__(self, plan: Plan, group: Any, weights: Sequence[ReducedWeight], mesh: Mesh) -> None:
        self.group, self.weights, self.replicas = group, list(weights), mesh.dense.get_group("replicate")
        self.shards, self.copies, self.feeds_back = plan.shards, plan.copies, plan.error_feedback
        self.node = plan.grad_reduce_node  # ranks of one; 1: all shards sum at once
        self.nodes = mesh.nodes(self.node) if self.node > 1 else None
        blocks = [block_of(weight.whole) for weight in weights]
        self.lengths = [weight.elements for weight in weights]
        self.parts = [math.prod(part_shape(weight.stored, self.copies)) for weight in weights]
        self.to_shards = BlockCodes(plan.grad_reduce, self.lengths, blocks)
        self.to_replicas = BlockCodes(plan.grad_reduce, self.parts, blocks)
        self.shard_error: Tensor | None = None
        self.node_error: Tensor | None = None
        self.replica_error: Tensor | None = None
        self.sum_error: Tensor | None = None

    def begin(self, run: Run, mesh: Mesh) -> None:
        if not self.feeds_back:
            return
        at = {"dtype": precision.weight_dtype(run.plan), "device": mesh.device}
        if self.shards > 1:
            self.shard_error = torch.zeros(self.shards, sum(self.lengths), **at)
        if self.nodes:
            self.node_error = torch.zeros(self.shards // self.node, sum(self.lengths), **at)
        if self.copies > 1:
            self.replica_error = torch.zeros(self.copies, sum(self.parts), **at)
            self.sum_error = torch.zeros(1, sum(self.parts), **at)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a gradient, or of a shard of one."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum over the ranks that shard the weights."""
        rows = input_tensor.view(group.size(), -1)
        assert rows.shape[1] == sum(self.lengths), "every weight of the group has a gradient"
        sent, dtype = rounded(rows, self.to_shards, self.shard_error), rows.dtype
        if self.nodes:
            between, inside = self.nodes
            by_place = sent.unflatten(0, (-1, self.node)).transpose(0, 1)  # place in a node, node, bytes of a shard
            summed = _summed(by_place, self.to_shards, inside, dtype)  # over this node, of one shard of every node
            sent, group = rounded(summed, self.to_shards, self.node_error), between
        output_tensor.copy_(_summed(sent[:, None], self.to_shards, group, dtype)[0])

    def over_replicas(self, gradient: Tensor) -> None:
        """Sum this rank's shard over replicas, with the last microbatch of a step."""
        if self.copies == 1 or not self.group.all_reduce_grads:
            return  # torch adds it to this rank's sharded gradient
        take_earlier(gradient, self.weights)
        pieces = zip(self.weights, gradient.split(self.lengths), strict=True)
        rows = torch.cat([weight.parts_of(piece, self.copies) for weight, piece in pieces], 1)
        sent = rounded(rows, self.to_replicas, self.replica_error)
        total = _summed(sent[:, None], self.to_replicas, self.replicas, gradient.dtype)
        received = join(rounded(total, self.to_replicas, self.sum_error), 0, self.replicas)
        parts = self.to_replicas.decode(received, gradient.dtype).split(self.parts, 1)
        joined = [weight.joined(part) for weight, part in zip(self.weights, parts, strict=True)]
        torch.cat(joined, out=gradient)

    def kept(self) -> list[Tensor]:
        errors = (self.shard_error, self.node_error, self.replica_error, self.sum_error)
        return [error for error in errors if error is not None]

    def states(self, mesh: Mesh) -> Iterator[FeedbackPart]:
        shard, replica = (mesh.dense.get_local_rank(axis) for axis in ("shard", "replicate"))
        writes = mesh.place["tp"] == 0
        begins = [sum(self.lengths[:number]) for number in range(len(self.weights))]
        part_begins = [sum(self.parts[:number]) for number in range(len(self.weights))]
        for weight, begin, part_begin in zip(self.weights, begins, part_begins, strict=True):
            mine = writes or weight.cut_by_tp
            for name, number, row in self._owed_to_shards(shard, mesh.data_rank):
                region = weight.shard_region(number)
                piece = row[begin : begin + weight.elements].view(weight.stored)
                yield FeedbackPart(f"{name}/{weight.name}", weight.whole, region, inside(piece, region), mine)
            if self.replica_error is None or self.sum_error is None:
                continue
            part, dim = part_shape(weight.stored, self.copies), part_dim(weight.stored, self.copies)
            rows = [(of_part(REPLICA_ERROR, replica), number, row) for number, row in enumerate(self.replica_error)]
            for kind, number, row in [*rows, (SUM_ERROR, replica, self.sum_error[0])]:
                region = within(weight.shard_region(shard), dim, part[dim], number)
                piece = row[part_begin : part_begin + math.prod(part)].view(part)
                yield FeedbackPart(f"{kind}/{weight.name}", weight.whole, region, inside(piece, region), mine)

    def _owed_to_shards(self, shard: int, data_rank: int) -> Iterator[tuple[str, int, Tensor]]:
        """Errors by name and by the shard that they are of: a rank's of every one, a node's of those at its place."""
        if self.shard_error is not None:
            name = of_part(SHARD_ERROR, data_rank)
            yield from ((name, number, row) for number, row in enumerate(self.shard_error))
        if self.node_error is not None:
            name, place = of_part(NODE_ERROR, data_rank // self.node), shard % self.node
            yield from ((name, number * self.node + place, row) for number, row in enumerate(self.node_error))


def rounded(rows: Tensor, codes: BlockCodes, error: Tensor | None) -> Tensor:
    """The bytes of a gradient, to which what is owed from the last time is added in place; and what is owed now.

    A gradient that is not finite stays so on its way, and the update is skipped: it leaves nothing owed.
    """
    if error is None:
        return codes.encode(rows)
    sent = codes.encode(rows.add_(error))
    torch.sub(rows, codes.decode(sent, rows.dtype), out=error)
    error.nan_to_num_(0.0, 0.0, 0.0)
    return sent


def _summed(sent: Tensor, codes: BlockCodes, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """This rank's rows of the sum of what all have sent (to each its rows), in full width and in the order of ranks."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = codes.decode(received[0], dtype)
    for other in received[1:]:
        total += codes.decode(other, dtype)
    return total


def wrap(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Let a sharded model reduce its gradients lossily."""
    if not plan.reduces_lossily:
        return model
    names = {
        (id(module), key): f"{path}.{key}".lstrip(".")
        for path, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    }
    found: list[Reduction] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            weights = [reduced_weight(each, names) for each in group.fsdp_params if each.sharded_param.requires_grad]
            if plan.powersgd:
                reduction = PowerSGD(plan, group, weights, mesh, plan.ep > 1 and isinstance(module, Experts))
            else:
                reduction = LossyReduction(plan, group, weights, mesh)
                module.set_custom_reduce_scatter(reduction)
            module.set_all_reduce_hook(reduction.over_replicas)
            found.append(reduction)
    model.lossy_reductions = found  # pyright: ignore[reportArgumentType]
    return model


def begun(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> list[Reduction]:
    """The lossy reductions of a rank's chunks, with room for what they keep; none if sums are exact."""
    found: list[Any] = [each for chunk in chunks for each in getattr(chunk, "lossy_reductions", ())]
    for reduction in found:
        reduction.begin(run, mesh)
    return found
