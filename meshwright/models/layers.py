"""The layers of a decoder: norm, rotary positions, attention, feed-forward, block."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.cross_entropy import IGNORE
from meshwright.spec.arch import Arch

Rotation = tuple[Tensor, Tensor]  # cosine and sine of every position's angles, (b, 1, s, head_dim ÷ 2)
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # the last: what the model tells of documents, or None
Turn = Callable[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def wide(x: Tensor) -> torch.dtype:
    """The type for arithmetic that low precision would spoil; float64 stays float64."""
    return torch.promote_types(x.dtype, torch.float32)


def norm(arch: Arch) -> nn.Module:
    """The normalization of an architecture, over the hidden dimension."""
    kind = nn.RMSNorm if arch.norm == "rms" else nn.LayerNorm
    return kind(arch.hidden, eps=arch.norm_eps)


def rope_frequencies(arch: Arch, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians each pair of a head turns per position, (head_dim ÷ 2,)."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64, device=device).to(dtype) / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponents
    if arch.rope_scaling == "linear":
        return frequencies / arch.rope_factor
    if arch.rope_scaling == "llama3":
        return _llama3(arch, frequencies)
    return frequencies


def _llama3(arch: Arch, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: slow pairs turn `rope_factor` times slower, fast ones as before, a ramp between them."""
    turns = arch.rope_original * frequencies / (2 * math.pi)  # of a pair over the original context
    fast = ((turns - arch.rope_low) / (arch.rope_high - arch.rope_low)).clamp(0, 1)
    return (1 - fast) * frequencies / arch.rope_factor + fast * frequencies


def rotation(arch: Arch, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines for positions (b, s), with a dimension for the heads."""
    frequencies = rope_frequencies(arch, dtype, positions.device)
    angles = positions[:, None, :, None].to(dtype) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn the pairs (i, i + head_dim ÷ 2) of every head: the layout of published Llama weights."""
    cos, sin = turn  # wider than x in low precision, so the products are wide too
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_both(q: Tensor, k: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned alike."""
    return rotate(q, turn), rotate(k, turn)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Attention of every position to itself and earlier ones, within its document where documents (b, s) are told."""
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril(), enable_gqa=True)


class Attention(nn.Module):
    """Multi-head attention. The heads are counted from the tensors, so projections may be cut by head."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.q = nn.Linear(arch.hidden, arch.q_width, bias=arch.bias)
        self.k = nn.Linear(arch.hidden, arch.kv_width, bias=arch.bias)
        self.v = nn.Linear(arch.hidden, arch.kv_width, bias=arch.bias)
        self.out = nn.Linear(arch.q_width, arch.hidden, bias=arch.bias)
        self.turn: Turn = rotate_both  # other functions may be put here
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, turn: Rotation | None, documents: Any) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        if turn is not None:
            q, k = self.turn(q, k, turn)
        y = self.attend(q, k, v, documents)  # (b, heads, s, head_dim)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(b, s, heads · head_dim) as (b, heads, s, head_dim)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """A dense feed-forward layer; gated when the architecture says swiglu."""

    def __init__(self, arch: Arch, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(arch.hidden, width, bias=arch.bias) if arch.mlp == "swiglu" else None
        self.up = nn.Linear(arch.hidden, width, bias=arch.bias)
        self.down = nn.Linear(width, arch.hidden, bias=arch.bias)
        self.activate = ACTIVATIONS[arch.mlp]  # another function may be put here

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """`index` is for layers that route; a dense one treats every token alike."""
        return self.down(self.activate(self.up(x)) if self.gate is None else self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """One tensor as the gate of another; another function may be put here."""
        return self.activate(gate) * up


class Block(nn.Module):
    """One layer of a decoder: attention, then a feed-forward layer, each normalized before and added to its input."""

    def __init__(self, arch: Arch, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = norm(arch)
        self.attn = Attention(arch)
        self.mlp_norm = norm(arch)
        self.mlp = mlp

    def forward(self, x: Tensor, turn: Rotation | None, documents: Any, index: Tensor | None) -> Tensor:
        normed, x = self.add_and_norm(self.attn(self.attn_norm(x), turn, documents), x)
        return x + self.mlp(normed, index)

    def add_and_norm(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum; another function may be put here."""
        x = x + y
        return self.mlp_norm(x), x


def weighed_loss(x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T: times a weight, to be differentiated, and as it is."""
    total = token_loss_sum(F.linear(x, projection), targets)
    return total * weight.to(total.dtype), total


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of logits (b, s, vocab) over the targets (b, s) that are not IGNORE."""
    # Widening inside the softmax spares a wide copy of the logits, the largest tensor of a step.
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=wide(logits))
    return F.nll_loss(log_probabilities, targets.flatten(), ignore_index=IGNORE, reduction="sum")
