"""Which numbers the arithmetic runs in. Weights live once, wide; a narrow copy is made when they are gathered."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.kernels.linear8 import Linear8, RowLinear8, takes
from meshwright.parallel.anatomy import Anatomy
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
EIGHT = {"tensor": Linear8, "row": RowLinear8}


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: Anatomy) -> nn.Module:
    """Let the linear layers of all blocks run in FP8, if the plan says so; what is outside the blocks stays wider."""
    if plan.precision != "fp8":
        return model
    for block in anatomy.blocks(model).values():
        for module in block.modules():
            if type(module) is nn.Linear and takes(module):
                module.__class__ = EIGHT[plan.scaling]
    return model


def is_low(plan: Plan) -> bool:
    """Whether the arithmetic is narrower than the weights."""
    return plan.precision in LOW


def weight_dtype(plan: Plan) -> torch.dtype:
    """In which weights, gradients' sums and optimizer states are held."""
    return torch.float64 if plan.precision == "fp64" else torch.float32


def compute_dtype(plan: Plan) -> torch.dtype:
    """In which activations are."""
    return LOW.get(plan.precision, weight_dtype(plan))


def policy(plan: Plan) -> MixedPrecisionPolicy:
    """What gathered weights are cast to; gradients are summed over ranks and microbatches in fp32."""
    if not is_low(plan):
        return MixedPrecisionPolicy()
    # Blocks are handed rotary cosines and sines, which must stay wide, so inputs are not cast: the embedding's output
    # already has the low precision of its weights.
    return MixedPrecisionPolicy(param_dtype=LOW[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False)
