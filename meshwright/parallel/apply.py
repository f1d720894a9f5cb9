"""From a plain model to what this rank runs: the transforms in their order."""

from collections.abc import Callable
from functools import partial

from torch import nn

from meshwright.parallel import (
    activation_offload,
    compile,
    context,
    expert,
    fsdp,
    fused_kernels,
    grad_reduce,
    pipeline,
    precision,
    recompute,
    tensor,
    zeropp,
)
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import ModelSpec
from meshwright.spec.plan import Plan

Transform = Callable[[nn.Module, Plan, Mesh, ModelSpec], nn.Module]


def apply(
    model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec, in_fp8: Transform | None = None
) -> list[nn.Module]:
    """Turn a plain model into the chunks this rank runs; a proof may say otherwise what linear layers do in FP8."""
    names = [name for name, _ in model.named_parameters()]
    chunks = pipeline.cut(model, plan, mesh, model_spec)  # first: everything after works on fewer layers
    for transform in (partial(tensor.split, model_spec=model_spec), expert.split, context.split):  # what a rank holds
        chunks = [transform(chunk, plan, mesh) for chunk in chunks]
    # How it runs. The compiler must see selective recomputation; whole blocks are recomputed as it compiled them. What
    # either saves for the backward is then quantized or offloaded: outermost, to see all of it.
    how = (
        in_fp8 or precision.wrap,
        fused_kernels.wrap,
        recompute.keep_costly,
        compile.wrap,
        recompute.keep_inputs,
        activation_offload.wrap,
    )
    for transform in how:
        chunks = [transform(chunk, plan, mesh, model_spec) for chunk in chunks]
    chunks = [fsdp.wrap(chunk, plan, mesh, model_spec) for chunk in chunks]  # last: it must see the final parameters
    for transform in (zeropp.wrap, grad_reduce.wrap):  # what it sends, rounded on the way
        chunks = [transform(chunk, plan, mesh) for chunk in chunks]
    return fsdp.find_unused(chunks, names, plan, mesh, model_spec)
