"""Expert parallelism: each rank holds a few whole experts of every MoE layer; all-to-alls dispatch and combine rows.

The ranks of an ep group are taken from those that shard or replicate the dense weights, so each has tokens of its own.
A rank sends every row to the owner of its expert; the owner computes the rows of all ranks at once. An expert's
gradient is therefore already the sum over its group, and only the ranks that hold the same expert add theirs to it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.mesh import Mesh, all_to_all
from meshwright.parallel.model_spec import note
from meshwright.parallel.tensor import hold_experts
from meshwright.spec.plan import Plan


def split(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Give each rank its experts of every MoE layer, and route rows to those of other ranks."""
    if plan.ep == 1:
        return model
    group = mesh.group("ep")
    for module in model.modules():
        if isinstance(module, MoELayer):
            hold_experts(module.experts, mesh)
            module.run = partial(run_over_ranks, group=group)
            note(module.experts, f"expert parallel over ep={plan.ep}")
    return model


def run_over_ranks(experts: Experts, x: Tensor, counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All experts of the group: x (T, hidden) sorted by expert, counts (experts,) rows for each; zeros past the last.

    Each rank takes part in
    - forward: one all-to-all of 8 · experts bytes, which says how many rows are coming; then two of rows, to their
      experts and back, where it sends rows · hidden · itemsize bytes and has as many returned, rows = Σ counts;
    - backward: the two of rows again, the gradients of what came back going first.
    What it receives for its own experts, and returns, the routers of all ranks decide. Nothing overlaps.
    """
    route = announced(counts, group)
    rows = x[: sum(route.sent)]  # dropped assignments lie past the last
    arrived = all_to_all(rows, group, route.sent, route.received)
    y = experts(permuted(arrived, route.by_expert, route.by_rank), route.counts)
    returned = all_to_all(permuted(y, route.by_rank, route.by_expert), group, route.received, route.sent)
    return F.pad(returned, (0, 0, 0, len(x) - len(rows)))


@dataclass(frozen=True, slots=True)
class ExpertRoute:
    """Where the rows of one MoE layer and microbatch go."""

    sent: list[int]  # rows to each rank of the group
    received: list[int]  # rows from each
    counts: Tensor  # (experts held,) rows for each, from all ranks
    by_expert: Tensor  # (rows received,) brings them from the order (rank, expert) to (expert, rank)
    by_rank: Tensor  # (rows received,) and back


def announced(counts: Tensor, group: dist.ProcessGroup) -> ExpertRoute:
    """Exchange how many rows each rank sends to each expert; waits for the device, once."""
    leaving = counts.view(group.size(), -1)  # (rank, expert it holds)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    sent, received = torch.stack([leaving, coming]).cpu()
    by_expert = sorted_by_expert(coming, int(received.sum()))
    return ExpertRoute(
        sent=sent.sum(1).tolist(),
        received=received.sum(1).tolist(),
        # On the host, where experts read it: on the device they would wait for the rows in flight.
        counts=received.sum(0),
        by_expert=by_expert,
        by_rank=by_expert.argsort(),
    )


def sorted_by_expert(coming: Tensor, rows: int) -> Tensor:
    """The order that sorts rows by expert, then rank, which lie by rank, then expert: coming (rank, expert) of each."""
    ranks, experts = coming.shape
    expert = torch.arange(experts, device=coming.device).repeat(ranks)
    return expert.repeat_interleave(coming.flatten(), output_size=rows).argsort(stable=True)


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The rows in another order; the gradient of plain indexing would need atomics, though no two rows meet."""
    return _Permute.apply(x, order, inverse)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return permuted(grads[0], inverse, order), None, None
