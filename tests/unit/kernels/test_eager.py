"""Kernels in the place of a block's arithmetic: the same model, to the rounding of the type."""

import copy

import msgspec
import pytest
import torch
from kernel_cases import interpreted

from meshwright.config.presets import preset
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.parallel import fused_kernels

KINDS = {"llama": {}, "gpt": {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "bias": True}}


def pair(kind: str, kernels: str) -> tuple[Decoder, Decoder]:

    arch = msgspec.structs.replace(preset("tiny"), layers=2, **KINDS[kind])
    plain = Decoder(arch)
    fill_model(plain, arch, seed=1)
    other = copy.deepcopy(plain)
    fused_kernels.fuse_blocks(other, kernels)
    return plain, other


def gradients(model: Decoder) -> list[torch.Tensor]:
    tokens = torch.arange(48).view(2, 24) * 7 % 509
    positions = torch.arange(24).repeat(2, 1)
    logits = model(tokens, positions)
    logits.square().mean().backward()
    return [logits, *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("kernels", ["plain", pytest.param("fused", marks=interpreted)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_with_kernels(kind, kernels):
    plain, other = pair(kind, kernels)
    assert all(block.add_and_norm.func for block in other.blocks.values()), "every block has them"
    for mine, theirs in zip(gradients(other), gradients(plain), strict=True):
        # Float32, a few hundred terms to a sum: the order of addition moves the last bits.
        torch.testing.assert_close(mine, theirs, rtol=2.0**-14, atol=2.0**-20)
