"""Tiny models whose every weight matters: matrices that move the logits, norms and biases off their start."""

import torch
from torch import Tensor

from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, buffers, params

SIZES = {"vocab": 61, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "context": 64}
GPT = SIZES | {"kv_heads": 4, "norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "bias": True}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 16, "rope_theta": 500.0}
ARCHS = {
    "gpt2": Arch(**GPT, tied=True),
    "gpt1": Arch(**GPT | {"mlp": "gelu"}),
    "llama": Arch(**SIZES),
    "llama tied llama3": Arch(**SIZES, tied=True, **LLAMA3),
    "llama linear wide heads": Arch(**SIZES | {"head_dim": 12}, rope_scaling="linear", rope_factor=4.0),
    "mixtral": Arch(**SIZES | {"ffn": 24}, experts=3, expert_ffn=24, top_k=2, balance_loss=0.02),
}


def weights_of(arch: Arch, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {param.name: _value(param, generator).to(dtype) for param in (*params(arch), *buffers(arch))}


def _value(param: Param, generator: torch.Generator) -> Tensor:
    return 0.3 * torch.randn(param.shape, generator=generator) + (1.0 if param.init == "ones" else 0.0)
