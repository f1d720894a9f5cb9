"""Tensor parallelism: matrices cut by the model's split table, the loss over cut logits.

Of our decoder, a rank holds its part of the sequence between matrices, (b, s ÷ tp, hidden). It is gathered before a
column-cut product and summed and scattered after the row-cut one: per layer two gathers and two scatters in the
forward, and their mirror images in the backward. Logits stay cut by vocabulary; the loss needs only their maxima and
sums.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

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
