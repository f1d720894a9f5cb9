"""The parameter table of an Arch: every weight by name, shape, how tensor parallelism cuts it, how it begins.

The table is the model: a test builds the real module and finds exactly these names and shapes.
"""

import math
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Literal

import msgspec

from meshwright.spec.arch import Arch

STD = 0.02  # GPT-2's; projections back into the residual stream shrink by the root of their number


class Split(Enum):
    """How tensor parallelism cuts a weight."""

    NONE = "none"  # the same on every rank
    COLUMN = "column"  # output features over ranks: dim 0 of a Linear
    ROW = "row"  # input features over ranks: dim 1 of a Linear; its products are summed
    VOCAB = "vocab"  # rows of an embedding over ranks


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One weight of the model."""

    name: str
    shape: tuple[int, ...]
    split: Split = Split.NONE
    init: Literal["normal", "ones", "zeros"] = "normal"
    std: float = STD
    layer: int = -1  # the block that holds it; -1 outside the blocks
    expert: bool = False  # dim 0 counts routed experts

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@cache
def params(arch: Arch) -> tuple[Param, ...]:
    """Every parameter, in the order in which the model holds them."""
    return tuple(_decoder(arch))


@cache
def count(arch: Arch) -> int:
    """Parameters held."""
    return sum(param.numel for param in params(arch))


@cache
def active(arch: Arch) -> int:
    """Parameters one token passes through: of the routed experts only the chosen ones."""
    if arch.experts == 0:
        return count(arch)
    routed = sum(param.numel for param in params(arch) if param.expert)
    return count(arch) - routed + routed * arch.top_k // arch.experts


def _decoder(arch: Arch) -> Iterator[Param]:
    yield Param(name="embed.weight", shape=(arch.vocab, arch.hidden), split=Split.VOCAB)
    if arch.positions == "learned":
        yield Param(name="positions.weight", shape=(arch.context, arch.hidden))
    for layer in range(arch.layers):
        for param in _block(arch, layer):
            yield msgspec.structs.replace(param, name=f"blocks.{layer}.{param.name}", layer=layer)
    if arch.norm_position == "pre":
        yield from _norm(arch, "norm")
    if not arch.tied:
        yield Param(name="head.weight", shape=(arch.vocab, arch.hidden), split=Split.COLUMN)


def _block(arch: Arch, layer: int) -> Iterator[Param]:
    residual = STD / math.sqrt(2 * arch.layers)
    yield from _norm(arch, "attn_norm")
    yield from _linear(arch, "attn.q", (arch.q_width, arch.hidden), Split.COLUMN)
    yield from _linear(arch, "attn.k", (arch.kv_width, arch.hidden), Split.COLUMN)
    yield from _linear(arch, "attn.v", (arch.kv_width, arch.hidden), Split.COLUMN)
    yield from _linear(arch, "attn.out", (arch.hidden, arch.q_width), Split.ROW, residual)
    yield from _norm(arch, "mlp_norm")
    if arch.is_mixture(layer):
        yield from _mixture(arch, residual)
    else:
        yield from _mlp(arch, "mlp", arch.ffn, residual)


def _mlp(arch: Arch, name: str, width: int, residual: float) -> Iterator[Param]:
    if arch.mlp == "swiglu":
        yield from _linear(arch, f"{name}.gate", (width, arch.hidden), Split.COLUMN)
    yield from _linear(arch, f"{name}.up", (width, arch.hidden), Split.COLUMN)
    yield from _linear(arch, f"{name}.down", (arch.hidden, width), Split.ROW, residual)


def _mixture(arch: Arch, residual: float) -> Iterator[Param]:
    inward = (arch.experts, arch.expert_ffn, arch.hidden)
    outward = (arch.experts, arch.hidden, arch.expert_ffn)
    yield Param(name="mlp.router.weight", shape=(arch.experts, arch.hidden))
    if arch.router == "noisy_topk":
        yield Param(name="mlp.noise.weight", shape=(arch.experts, arch.hidden), init="zeros")
    if arch.mlp == "swiglu":
        yield Param(name="mlp.experts.gate", shape=inward, split=Split.COLUMN, expert=True)
    yield Param(name="mlp.experts.up", shape=inward, split=Split.COLUMN, expert=True)
    yield Param(name="mlp.experts.down", shape=outward, split=Split.ROW, std=residual, expert=True)
    if arch.shared_experts:
        yield from _mlp(arch, "mlp.shared", arch.shared_experts * arch.expert_ffn, residual)


def _linear(arch: Arch, name: str, shape: tuple[int, int], split: Split, std: float = STD) -> Iterator[Param]:
    yield Param(name=f"{name}.weight", shape=shape, split=split, std=std)
    if arch.bias:  # a row split's bias is added once, after the sum, so every rank holds it whole
        bias_split = Split.NONE if split is Split.ROW else split
        yield Param(name=f"{name}.bias", shape=shape[:1], split=bias_split, init="zeros")


def _norm(arch: Arch, name: str) -> Iterator[Param]:
    yield Param(name=f"{name}.weight", shape=(arch.hidden,), init="ones")
    if arch.norm == "layer":
        yield Param(name=f"{name}.bias", shape=(arch.hidden,), init="zeros")
