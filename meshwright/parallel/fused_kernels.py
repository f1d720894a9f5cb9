"""Fused kernels in the place of plain PyTorch: linear cross-entropy, attention, experts, RoPE, gates and norms."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from meshwright.kernels import attention, cross_entropy
from meshwright.kernels.attention import PLAIN, Scoring, apply_rope
from meshwright.kernels.dispatch import Kernels, settle
from meshwright.kernels.experts import (
    combine_rows,
    dispatch_rows,
    grouped_matmul,
    grouped_matmul_fp8,
    low_rank_matmul,
    takes_fp8,
    takes_grouped,
)
from meshwright.kernels.gated import Activation, activate, gated
from meshwright.kernels.norm import layer_norm_sum, rms_norm_sum
from meshwright.models.decoder import Decoder
from meshwright.models.layers import (
    Attend,
    Attention,
    Block,
    Mlp,
    OffsetRMSNorm,
    apply_rope_qk,
    causal_attention,
    weighted_loss,
)
from meshwright.models.lora import AdaptedExperts, FrozenLinear
from meshwright.models.moe import Experts, MoELayer, grouped, mix_grouped
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import ModelSpec
from meshwright.parallel.precision import compute_dtype
from meshwright.parallel.tensor import vocab_parallel_loss
from meshwright.spec.plan import Plan

# By measurement on an H200 (results/profile-h200.json): cuDNN takes 0.5 to 0.6 of flash's time on every shape there.
FASTEST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
# The kernels' names of the activations.
NAMES: dict[str, Activation] = {
    **{"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"},
    **{"gelu": "gelu", "gelu_tanh": "gelu_tanh"},
}


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Put fused kernels into our own decoder on a GPU; other models and the CPU run plain PyTorch.

    Under tp the loss is chunked on every device, by kernels or by their references: one path, proved in float64.
    """
    choice = settle(plan.kernels, mesh.device, compute_dtype(plan))
    if not isinstance(model, Decoder) or plan.kernels == "plain":
        return model
    chunked = plan.pp == 1  # a pipeline's last stage hands all its logits over
    capped = {"softcap": model.arch.logit_softcap} if model.arch.logit_softcap else {}
    if chunked and plan.tp > 1:
        model.loss = partial(vocab_parallel_loss, kernels=choice.kind, **capped)
    if choice.kind == "plain" or mesh.device.type != "cuda":
        return model
    if chunked and plan.tp == 1:
        model.loss = partial(cross_entropy.weighted_loss, **capped) if capped else cross_entropy.weighted_loss
    for module in model.modules():
        if isinstance(module, Attention) and _whole_attention(module.attend) is causal_attention:
            bound = isinstance(module.attend, partial)
            module.attend = partial(cast(Any, module.attend), attend=fastest_attention) if bound else fastest_attention
    if plan.attends_whole and attention.takes_documents(model.arch.head_dim, compute_dtype(plan)):
        model.build_mask = partial(_block_mask, by_blocks=not model.arch.scores_plainly, ranks=plan.cp)
    group_experts(model, plan, mesh)
    decode_fused(model)
    if not plan.compile and plan.tp == 1:  # the compiler fuses by itself; under tp the residual is sharded
        fuse_blocks(model)
    return model


def group_experts(model: Decoder, plan: Plan, mesh: Mesh) -> None:
    """Let grouped matmuls compute all experts of a layer at once, where this GPU has them; in FP8 if the plan says."""
    widths = model.arch.hidden, model.arch.expert_ffn // plan.tp
    if not takes_grouped(mesh.device, compute_dtype(plan), *widths):
        return
    # Under tp a rank would scale its own part of a row: they stay in bf16.
    eight = plan.precision == "fp8" and plan.tp == 1 and takes_fp8(mesh.device, *widths)
    how = {"scaling": plan.fp8_scaling, "accumulate": plan.fp8_accumulate, "splits": plan.splits_backward}
    by_plan = partial(grouped_matmul_fp8, **how)
    for module in model.modules():
        if isinstance(module, Experts):
            module.compute = grouped
            module.multiply = by_plan if eight else grouped_matmul
            if isinstance(module, AdaptedExperts):
                module.low_rank = low_rank_matmul
        elif isinstance(module, MoELayer) and plan.compile and plan.tp == 1 and plan.ep == 1:
            module.mix = mix_grouped  # of what it leaves to fuse the compiler makes a few kernels


def decode_fused(model: Decoder) -> None:
    """Have one kernel decode each frozen weight that is held in NF4."""
    for module in model.modules():
        if isinstance(module, FrozenLinear) and module.quantized is not None:
            module.quantized = replace(module.quantized, is_fused=True)
        elif isinstance(module, AdaptedExperts):
            module.quantized = {stack: replace(how, is_fused=True) for stack, how in module.quantized.items()}


def fuse_blocks(model: Decoder, kernels: Kernels = "auto") -> None:
    """Give every block the fused kernels of RoPE, its gate, and its residual sum with the norm."""
    name = NAMES.get(model.arch.mlp)
    for module in model.modules():
        if isinstance(module, Attention) and module.rope is apply_rope_qk:
            module.rope = partial(apply_rope, kernels=kernels)
        elif isinstance(module, (Mlp, Experts)) and name is not None:
            module.activate = partial(activate, activation=name, kernels=kernels)
            module.gated = partial(gated, activation=name, kernels=kernels)
        elif isinstance(module, MoELayer):
            module.dispatch = partial(dispatch_rows, kernels=kernels)
            module.combine = partial(combine_rows, kernels=kernels)
        elif isinstance(module, Block) and module.norms_sum and module.mlp_norm is not None:
            module.add_and_norm = partial(_add_and_norm, module.mlp_norm, kernels)


def _add_and_norm(norm: nn.Module, kernels: Kernels, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None, "our norms have an eps"
        weight = 1 + norm.weight if isinstance(norm, OffsetRMSNorm) else norm.weight
        return rms_norm_sum(y, x, weight, norm.eps, kernels)
    assert isinstance(norm, nn.LayerNorm), f"unknown norm: {type(norm).__name__}"
    if norm.bias is None:
        return norm(x + y), x + y
    return layer_norm_sum(y, x, norm.weight, norm.bias, norm.eps, kernels)


def chosen(plan: Plan, device: torch.device, chunks: Iterable[nn.Module], one_pass: bool) -> str:
    """Which kernels a run uses, or why it uses none, for the screen and the record."""
    choice = settle(plan.kernels, device, compute_dtype(plan))
    if choice.kind == "plain":
        return f"plain PyTorch ({choice.reason})"
    modules = [module for chunk in chunks for module in chunk.modules()]
    attentions = [module for module in modules if isinstance(module, Attention)]
    experts = [module for module in modules if isinstance(module, Experts) and module.compute is grouped]
    placed = {
        "the loss with its projection": any(map(has_loss, modules)),
        "the fastest attention": any(_whole_attention(each.attend) is fastest_attention for each in attentions),
        "grouped matmuls of experts": any(each.multiply is grouped_matmul for each in experts),
        "grouped FP8 matmuls of experts": any(isinstance(each.multiply, partial) for each in experts),
        "RoPE, gates and norms of sums": any(each.rope is not apply_rope_qk for each in attentions),
        "one-pass updates": one_pass,
    }
    names = ", ".join(name for name, is_used in placed.items() if is_used)
    return f"fused: {names}" if names else "fused, but this plan has no place for any"


def _whole_attention(attend: Attend) -> Attend:
    """The attention on whole sequences: that of Ulysses is bound to it, ring attention has none."""
    return attend.keywords.get("attend", attend) if isinstance(attend, partial) else attend


def has_loss(model: nn.Module) -> bool:
    """Whether a model computes its loss without all its logits."""
    if not isinstance(model, Decoder):
        return False
    loss = model.loss.func if isinstance(model.loss, partial) else model.loss
    return loss is not weighted_loss


def _block_mask(documents: Tensor | None, window: int, positions: Tensor, by_blocks: bool, ranks: int) -> Any:
    """The mask of a layer's attention by blocks; None where all earlier positions are seen and scores are plain."""
    if documents is None and not window and not by_blocks:
        return None
    one = torch.zeros_like(positions).repeat(1, ranks) if documents is None else documents  # of the whole sequence
    return attention.build_mask(one, window)


def fastest_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | None, how: Scoring = PLAIN) -> Tensor:
    """Causal attention by the fastest kernel that takes the shape; within documents, by the block mask."""
    if isinstance(mask, BlockMask):
        return attention.document_attention(q, k, v, mask, how)
    if mask is not None or how.window or not how.is_plain:
        return causal_attention(q, k, v, mask, how)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(list(FASTEST), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=grouped)
