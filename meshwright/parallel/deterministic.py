"""Deterministic mode: reductions in an order that does not depend on the number of ranks or on a library.

Gradients and losses are summed by one binary tree over the global microbatches of a step. A rank's microbatches are
neighbours, so each rank sums a subtree of its own, then ranks that shard the weights, then replicas.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from meshwright.parallel.mesh import Mesh, join, local
from meshwright.spec.plan import Plan

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes of an element


class Tree:
    """A running sum by a binary tree over neighbours.

    Like the bits of a counter: two terms make a pair, two pairs a four. It buffers at most log₂ of the terms.
    """

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self.seen = 0  # of the sum under way
        self.parts: list[Tensor] = []

    def add(self, term: Tensor) -> Tensor | None:
        """Add the next term, which is not written to; with the last one, return the sum and begin again."""
        self.seen += 1
        last = self.seen == self.terms
        trailing_zeros = (self.seen & -self.seen).bit_length() - 1
        pairs = len(self.parts) if last else trailing_zeros
        for _ in range(pairs):
            term = self.parts.pop().add_(term)
        if last:
            self.seen = 0
            return term
        self.parts.append(term if pairs else term.clone())
        return None


def tree_sum(terms: Tensor) -> Tensor:
    """The sum over dim 0, a power of two long, by the same tree as `Tree`."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def fold(x: Tensor) -> Tensor:
    """The sum over the last dim, in place: the second half is added to the first until one element is left.

    Elementwise additions round alike on every device; a library's sum chooses its order by the shape.
    """
    while (length := x.shape[-1]) > 1:
        half = (length + 1) // 2
        x[..., : length - half] += x[..., half:]
        x = x[..., :half]
    return x[..., 0]


def bit_sum(tensor: Tensor) -> Tensor:
    """A sum that any single changed bit changes: of the elements' bits, as whole numbers that may wrap."""
    return tensor.contiguous().view(WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def odd_ones(rows: Sequence[Sequence[float]]) -> list[int]:
    """Which of several equal rows are not: those outside the majority; all of them where there is none."""
    votes = Counter(tuple(row) for row in rows)
    (usual, most), *_ = votes.most_common()
    if most * 2 <= len(rows):
        return list(range(len(rows)))
    return [number for number, row in enumerate(rows) if tuple(row) != usual]


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A reduce-scatter by an all-to-all of the parts, and `tree_sum` of those received."""
    if group.size() == 1:
        return x
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    return tree_sum(parts.view(group.size(), -1))


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """An all-reduce as `scattered` and an all-gather: as many bytes as a library's."""
    if group.size() == 1:
        return x
    padded = F.pad(x, (0, -x.numel() % group.size()))
    return join(scattered(padded, group), 0, group)[: x.numel()]


def total(x: Tensor, plan: Plan, mesh: Mesh) -> Tensor:
    """An all-reduce of a few elements over all ranks: by the tree in this mode, else by the library."""
    if plan.deterministic:
        return over_world(x, mesh)
    if mesh.world > 1:
        dist.all_reduce(x)
    return x


def over_world(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum over all ranks: an all-gather, and the same tree on each rank."""
    if mesh.world == 1:
        return x
    everyone = dist.group.WORLD
    assert everyone is not None, "the process group is initialized"
    return tree_sum(join(x[None], 0, everyone))


class GradientSum(ReduceScatter):
    """The gradient reduction of one FSDP group, in the place of torch's reduce-scatter and all-reduce.

    Torch calls it with every microbatch's gradient, laid out by shards. Only the last call communicates.
    """

    def __init__(self, plan: Plan, replicas: dist.ProcessGroup) -> None:
        self.tree = Tree(plan.grad_accum)
        self.shards = plan.shards
        self.replicas = replicas

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a gradient, or of a shard of one."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum over microbatches, then over the ranks that shard the weights."""
        whole = self.tree.add(input_tensor)
        if whole is None:
            output_tensor.zero_()  # torch accumulates what it gets over microbatches: nothing, until the last
        else:
            output_tensor.copy_(scattered(whole, group))

    def over_replicas(self, gradient: Tensor) -> None:
        """Sum this rank's shard over replicas."""
        if self.shards == 1:  # without shards torch calls no reduce-scatter: microbatches are summed here
            whole = self.tree.add(gradient)
            gradient.copy_(torch.zeros_like(gradient) if whole is None else whole)
        if self.tree.seen == 0:
            # Torch adds this to the zeros of earlier microbatches, if there were any; so does the zero here, always,
            # because a negative zero would not survive it.
            gradient.copy_(summed(gradient, self.replicas) + 0.0)


def attach(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Let a sharded model reduce its gradients by the tree."""
    if not plan.deterministic:
        return model
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gradients = GradientSum(plan, mesh.dense.get_group("replicate"))
            module.set_custom_reduce_scatter(gradients)
            module.set_all_reduce_hook(gradients.over_replicas)
    return model


def pin(plan: Plan, device: torch.device) -> None:
    """Fix what else the bits of a microbatch depend on, for the rest of this process."""
    if not plan.deterministic:
        return
    torch.set_num_threads(1)  # the number of threads decides how a matmul is split
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)


def measured(chunks: Sequence[nn.Module], loss_sum: Tensor, mesh: Mesh, asked: float) -> tuple[Tensor, Tensor, Tensor]:
    """The job's sum of losses, the gradient's square norm, both the same bits under every plan, and stop requests."""
    weights = [weight for chunk in chunks for weight in chunk.parameters() if weight.requires_grad]
    loss, stops = over_world(torch.stack([loss_sum.double(), flag(asked, mesh)]), mesh).unbind()
    return loss, square_norm(weights), stops


def flag(raised: float, mesh: Mesh) -> Tensor:
    """A number on the device, filled there: a copy from the host would synchronize."""
    return torch.full((), float(raised), dtype=torch.float64, device=mesh.device)


def square_norm(weights: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all gradients, in float64.

    Weights are sharded along dim 0 only, so every row is whole on some rank: each is folded there, the sums of rows are
    all-gathered (8 bytes a row) and folded on every rank alike.
    """
    first = weights[0]
    assert isinstance(first, DTensor)
    shards = first.device_mesh.size()
    lengths = [math.ceil(len(weight) / shards) for weight in weights]
    squares = zip(map(_row_squares, weights), lengths, strict=True)
    mine = torch.cat([F.pad(rows, (0, length - len(rows))) for rows, length in squares])
    rows = join(mine[None], 0, first.device_mesh.get_group()) if shards > 1 else mine[None]
    parts = zip(weights, rows.split(lengths, dim=1), strict=True)
    return fold(torch.stack([fold(part.flatten()[: len(weight)]) for weight, part in parts]))


def _row_squares(weight: Tensor) -> Tensor:
    """The sums of squares of this rank's rows of a gradient; a row is what one index of dim 0 leaves."""
    gradient = local(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    squares = gradient.double().square()
    return fold(squares.flatten(1)) if squares.dim() > 1 else squares


def described(plan: Plan, chunks: Sequence[nn.Module]) -> list[str]:
    """A line for the log about what this mode does and costs; none when it is off."""
    if not plan.deterministic:
        return []
    buffers = plan.grad_accum.bit_length() - 1
    weights = [weight for chunk in chunks for weight in chunk.parameters() if weight.requires_grad]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return [
        f"deterministic: gradients summed in a fixed tree over {plan.grad_accum * plan.data} global microbatches of "
        f"{plan.microbatch}; {buffers} buffers of {size:,} bytes on each rank"
    ]
