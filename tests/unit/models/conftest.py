"""Small architectures, one for every choice an Arch offers, and the model of one with its initial weights."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.spec.arch import Arch

LLAMA = Arch(vocab=31, layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, context=32)
MIXTURE = msgspec.structs.replace(LLAMA, experts=4, expert_ffn=8, top_k=2, balance_loss=0.3, z_loss=0.2)


def changed(arch: Arch, **fields) -> Arch:
    return msgspec.structs.replace(arch, **fields)


GPT = changed(LLAMA, norm="layer", positions="learned", mlp="gelu_tanh", bias=True, tied=True, kv_heads=4)
DENSE = {
    "llama": LLAMA,
    "gpt": GPT,
    "gpt-untied": changed(GPT, tied=False, mlp="gelu"),
    "llama3-rope": changed(LLAMA, rope_scaling="llama3", rope_factor=8.0, rope_original=8, rope_theta=100.0),
    "linear-rope": changed(LLAMA, rope_scaling="linear", rope_factor=4.0, tied=True),
    "no-positions": changed(LLAMA, positions="none"),
    "wide-heads": changed(LLAMA, head_dim=6),
}
MIXTURES = {
    "topk": MIXTURE,
    "topk-capacity": changed(MIXTURE, capacity=0.75),
    "noisy_topk": changed(MIXTURE, router="noisy_topk", shared_experts=2),
    "switch": changed(MIXTURE, router="switch", top_k=1, capacity=1.0, moe_every=2),
    "gshard": changed(MIXTURE, router="gshard", capacity=1.0, mlp="gelu", bias=True, shared_experts=1),
    "expert_choice": changed(MIXTURE, router="expert_choice", capacity=1.5),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=DENSE.values(), ids=DENSE.keys())
def dense(request) -> Arch:
    return request.param


@pytest.fixture(params=MIXTURES.values(), ids=MIXTURES.keys())
def mixture(request) -> Arch:
    return request.param


@pytest.fixture(params=(DENSE | MIXTURES).values(), ids=(DENSE | MIXTURES).keys())
def arch(request) -> Arch:
    return request.param


@pytest.fixture
def llama() -> Arch:
    return LLAMA


@pytest.fixture
def gpt() -> Arch:
    return GPT


@pytest.fixture
def topk() -> Arch:
    return MIXTURE


@pytest.fixture
def build() -> Callable[..., Decoder]:
    """A model with its initial weights, larger than in training so that layers matter and routers have opinions."""

    def build(arch: Arch, dtype: torch.dtype = torch.float64) -> Decoder:
        with torch.device("meta"):
            model = Decoder(arch)
        model = model.to_empty(device="cpu").to(dtype)
        fill_model(model, arch, seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(15)
            for layer, block in enumerate(model.blocks.values()):
                if arch.is_moe(layer) and block.mlp.noise is not None:  # begins at zero: give it something to learn
                    block.mlp.noise.weight.copy_(torch.linspace(-1, 1, block.mlp.noise.weight.numel()).view(4, -1))
        return model

    return build


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Four sequences of 12 tokens, as a model takes them."""
    tokens = torch.randint(0, 31, (4, 12), generator=torch.Generator().manual_seed(0))
    return {
        "tokens": tokens,
        "positions": torch.arange(12).expand(4, 12),
        "index": torch.arange(48).view(4, 12) + 1000,
    }
