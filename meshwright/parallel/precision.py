"""Mixed precision: fp32 master weights, low-precision compute, FP8 linear layers.

Without `plan.bf16_params` the parameters are the masters, and are cast when they are gathered.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.kernels.fp8 import Fp8Linear, frozen_product, takes
from meshwright.kernels.quantized import FrozenPart
from meshwright.models.layers import Attention
from meshwright.models.lora import FrozenLinear
from meshwright.models.moe import MoELayer
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import ModelSpec
from meshwright.parallel.shared_fp8 import share, sharing_of
from meshwright.spec.plan import Plan

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def pin(plan: Plan, device: torch.device) -> None:
    """Choose how matmuls of fp32 numbers round, for the rest of this process: IEEE's way, or TF32's where allowed."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if plan.tf32 else "highest")


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Let the linear layers of all blocks run in FP8 if the plan says so; those outside the blocks stay in bf16."""
    if plan.precision != "fp8":
        return model
    for block in model_spec.blocks(model).values():
        routed = [module for module in block.modules() if isinstance(module, MoELayer)]
        still = {id(module) for layer in routed for module in (layer.router, layer.noise)}  # in fp32, by the layer
        inside = {id(module) for layer in routed for module in layer.modules()}
        for name, module in block.named_modules():
            if isinstance(module, FrozenLinear):
                _multiply_codes(module, plan, name)
            elif type(module) is nn.Linear and takes(module) and id(module) not in still:
                converted = _converted(module, plan)
                if plan.tp > 1:
                    share(converted, name, block, in_moe=id(module) in inside)
        for module in block.modules():
            if isinstance(module, Attention) and isinstance(module.out, Fp8Linear):
                module.out.input_stays = True  # attention's backward needs its result
    return model


def _converted(linear: nn.Linear, plan: Plan) -> Fp8Linear:
    linear.__class__ = Fp8Linear
    assert isinstance(linear, Fp8Linear)
    linear.scaling, linear.accumulate, linear.grad_format = plan.fp8_scaling, plan.fp8_accumulate, plan.fp8_grad
    linear.splits = plan.splits_backward
    return linear


def _multiply_codes(linear: FrozenLinear, plan: Plan, name: str) -> None:
    """Let a frozen weight that is held in FP8 be multiplied as it is held."""
    if linear.quantized is None or linear.quantized.held != "fp8" or not takes(linear):
        return
    sharing = sharing_of(linear, name) if plan.tp > 1 else None
    linear.quantized_matmul = partial(
        _fp8_matmul,
        scaling=plan.fp8_scaling,
        accumulate=plan.fp8_accumulate,
        grad_format=plan.fp8_grad,
        sharing=sharing,
    )


def _fp8_matmul(x: Tensor, how: FrozenPart, codes: Tensor, scales: Tensor, **keys: Any) -> Tensor:
    return frozen_product(x, codes, scales, **keys)


def is_low(plan: Plan) -> bool:
    """Whether the compute dtype is of lower precision than the master weights."""
    return plan.precision in LOW_PRECISION


def weight_dtype(plan: Plan) -> torch.dtype:
    """The dtype of master weights, accumulated gradients and optimizer states."""
    return torch.float64 if plan.precision == "fp64" else torch.float32


def compute_dtype(plan: Plan) -> torch.dtype:
    """The dtype of activations."""
    return LOW_PRECISION.get(plan.precision, weight_dtype(plan))


def policy(plan: Plan) -> MixedPrecisionPolicy:
    """FSDP's dtypes: gathered weights in the compute dtype, gradients summed over ranks and microbatches in fp32."""
    if not is_low(plan):
        return MixedPrecisionPolicy()
    # Blocks get rotary cosines and sines, which must stay fp32, so inputs are not cast: the embedding's output already
    # has the low precision of its weights.
    return MixedPrecisionPolicy(
        param_dtype=LOW_PRECISION[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def attach(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Make every fp32 parameter a bf16 copy of a master weight, once it has its first value."""
    if not plan.bf16_params:
        return
    for chunk in chunks:
        for weight in (each for each in chunk.parameters() if each.requires_grad):
            if weight.dtype != compute_dtype(plan):  # else it has no master weight, or a split one
                weight.master = weight.data  # pyright: ignore[reportAttributeAccessIssue]
                weight.data = weight.data.to(compute_dtype(plan))
            if plan.grad_accum > 1:
                weight.grad_dtype = torch.float32


def master(weight: Tensor) -> Tensor:
    """This rank's part of a weight as the optimizer updates it."""
    return getattr(weight, "master", local(weight.detach()))


def has_master(weight: Tensor) -> bool:
    """Whether a parameter is the low-precision copy of a master weight."""
    return hasattr(weight, "master")


@torch.no_grad()
def refresh(chunks: Iterable[nn.Module]) -> None:
    """Recompute the low-precision copies after the master weights were written to."""
    for chunk in chunks:
        for weight in chunk.parameters():
            if has_master(weight):
                weight.copy_(master(weight))
