"""Kernels in the place of a block's element-wise arithmetic, where the compiler does not fuse it."""

from functools import partial

from torch import Tensor, nn

from meshwright.kernels.choose import Kernels
from meshwright.kernels.gate import Activation, activate, gated
from meshwright.kernels.norm import layer_norm_sum, rms_norm_sum
from meshwright.kernels.rope import rotate
from meshwright.models.decoder import Decoder
from meshwright.models.layers import Attention, Block, Mlp, rotate_both

NAMES: dict[str, Activation] = {
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
}  # the kernels' words for the activations


def place(model: Decoder, kernels: Kernels = "auto") -> None:
    """Give every block the kernels of its rotation, its gate, and its sum with the norm of it."""
    name = NAMES[model.arch.mlp]
    for module in model.modules():
        if isinstance(module, Attention) and module.turn is rotate_both:
            module.turn = partial(rotate, kernels=kernels)
        elif isinstance(module, Mlp):
            module.activate = partial(activate, activation=name, kernels=kernels)
            module.gated = partial(gated, activation=name, kernels=kernels)
        elif isinstance(module, Block):
            module.add_and_norm = partial(_add_and_norm, module.mlp_norm, kernels)


def _add_and_norm(norm: nn.Module, kernels: Kernels, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(norm, nn.RMSNorm):
        assert norm.eps is not None, "our norms have one"
        return rms_norm_sum(y, x, norm.weight, norm.eps, kernels)
    assert isinstance(norm, nn.LayerNorm), f"a norm of an unknown kind: {type(norm).__name__}"
    return layer_norm_sum(y, x, norm.weight, norm.bias, norm.eps, kernels)
