"""Hand-written kernels put where plain arithmetic was: the loss with its projection, and the fastest attention."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.kernels import cross_entropy
from meshwright.kernels.choose import settle
from meshwright.models.decoder import Decoder
from meshwright.models.layers import Attention, causal_attention
from meshwright.models.loss import weighed_loss
from meshwright.parallel.anatomy import Anatomy
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan

# By measurement on an H200 (results/profile-h200.json): cuDNN takes 0.5 to 0.6 of flash's time on every shape there.
FASTEST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: Anatomy) -> nn.Module:
    """Put kernels into our own decoder, on a GPU; anyone else's model and the CPU keep their arithmetic."""
    if (
        not isinstance(model, Decoder)
        or mesh.device.type != "cuda"
        or settle(plan.kernels, mesh.device, lambda text: None) == "plain"
    ):
        return model
    if plan.tp == 1 and plan.pp == 1:  # logits cut by vocabulary and those of a pipeline's last stage exist as a whole
        model.loss = cross_entropy.weighed_loss
    for module in model.modules():
        if isinstance(module, Attention) and module.attend is causal_attention:
            module.attend = fastest_attention
    return model


def described(chunks: Iterable[nn.Module]) -> list[str]:
    """Which kernels take the place of plain arithmetic, in words; nothing where none do."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    told = ["the loss with its projection"] if any(has_loss(module) for module in modules) else []
    if any(isinstance(module, Attention) and module.attend is fastest_attention for module in modules):
        told.append("the fastest attention")
    return [f"kernels: {' and '.join(told)}, one-pass updates"] if told else []


def has_loss(model: nn.Module) -> bool:
    """Whether a model computes its loss without all its logits."""
    return isinstance(model, Decoder) and model.loss is not weighed_loss


def fastest_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Causal attention by the first of the kernels that takes the shape."""
    if documents is not None:
        return causal_attention(q, k, v, documents)
    with sdpa_kernel(list(FASTEST), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
