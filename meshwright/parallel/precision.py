"""Which numbers the arithmetic runs in. Weights live once, wide; a narrow copy is made when they are gathered."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.kernels.fp8 import Fp8Linear, RowwiseFp8Linear, takes
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import ModelSpec
from meshwright.spec.plan import Plan

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
EIGHT = {"tensorwise": Fp8Linear, "rowwise": RowwiseFp8Linear}


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Let the linear layers of all blocks run in FP8, if the plan says so; what is outside the blocks stays wider."""
    if plan.precision != "fp8":
        return model
    for block in anatomy.blocks(model).values():
        for module in block.modules():
            if type(module) is nn.Linear and takes(module):
                module.__class__ = EIGHT[plan.fp8_scaling]
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


def attach(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Let every weight be the narrow copy of a wide one, once it has its first value."""
    if not plan.bf16_params:
        return
    for chunk in chunks:
        for weight in chunk.parameters():
            weight.master = weight.data  # pyright: ignore[reportAttributeAccessIssue]
            weight.data = weight.data.to(compute_dtype(plan))
            if plan.grad_accum > 1:
                weight.grad_dtype = torch.float32


def wide(weight: Tensor) -> Tensor:
    """This rank's part of a weight as the optimizer moves it."""
    return getattr(weight, "master", local(weight.detach()))


def is_shadow(weight: Tensor) -> bool:
    """Whether a weight is the narrow copy of another."""
    return hasattr(weight, "master")


@torch.no_grad()
def refresh(chunks: Iterable[nn.Module]) -> None:
    """Make the narrow copies anew after the wide weights were written to."""
    for chunk in chunks:
        for weight in chunk.parameters():
            if is_shadow(weight):
                weight.copy_(wide(weight))
