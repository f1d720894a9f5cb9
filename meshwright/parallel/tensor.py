"""Tensor parallelism: matrices cut by the model's split table, the loss over cut logits.

Of our decoder, a rank holds its part of the sequence between matrices, (b, s ÷ tp, hidden). It is gathered before a
column-cut product and summed and scattered after the row-cut one: per layer two gathers and two scatters in the
forward, and their mirror images in the backward. Logits stay cut by vocabulary; the loss needs only their maxima and
sums, and its chunked form never has all of them.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from meshwright.kernels import cross_entropy
from meshwright.kernels.choose import Kernels
from meshwright.kernels.cross_entropy import Part
from meshwright.models.moe import Mixture
from meshwright.parallel import mixture
from meshwright.parallel.anatomy import Anatomy, resolved
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan


def split(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: Anatomy) -> nn.Module:
    """Cut every matrix as the model's split table says."""
    if plan.tp == 1:
        return model
    assert anatomy.splits is not None, "refused before ranks start"
    parallelize_module(model, mesh.dense["tp"], resolved(anatomy.splits(model), model))
    for module in model.modules():
        if isinstance(module, Mixture):
            mixture.split(module, plan, mesh)
    return model


def loss_context(plan: Plan) -> AbstractContextManager[Any]:
    """Where a loss over cut logits is computed and differentiated."""
    return loss_parallel() if plan.tp > 1 else nullcontext()


def cut_loss(
    x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor]:
    """The weighed loss of a projection cut by vocabulary: chunk by chunk, no rank ever having a whole row of logits.

    It sends what the loss over all logits sends, for each chunk.
    """
    assert isinstance(x, DTensor)
    assert isinstance(projection, DTensor)
    if x.placements != (Replicate(),):  # a tied model's norm has gathered it already
        x = x.redistribute(placements=[Replicate()])
    # Each rank's gradient of x is the share of its entries.
    entering = x.to_local(grad_placements=[Partial()])
    return cross_entropy.weighed_loss(entering, projection.to_local(), targets, weight, part_of(projection), kernels)


def part_of(projection: DTensor) -> Part:
    """The entries of the vocabulary that this rank holds."""
    group = projection.device_mesh.get_group()
    vocab, ranks = len(projection), group.size()
    largest = -(-vocab // ranks)
    return Part(
        first=min(group.rank() * largest, vocab),
        largest=largest,
        ranks=ranks,
        highest=partial(_over, group, dist.ReduceOp.MAX),
        added=partial(_over, group, dist.ReduceOp.SUM),
    )


def _over(group: dist.ProcessGroup, kind: dist.ReduceOp.RedOpType, numbers: Tensor) -> Tensor:
    dist.all_reduce(numbers, kind, group=group)
    return numbers
