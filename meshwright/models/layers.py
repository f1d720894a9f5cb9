"""The layers of a decoder: norm, rotary positions, attention, feed-forward, block."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import Rope
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.dropout import dropout
from meshwright.spec.arch import Arch

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # queries, keys, values, and the document mask or None
ApplyRope = Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def accum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and exponentials that low precision would spoil: fp32, or fp64 where x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def norm(arch: Arch) -> nn.Module:
    """The normalization of an architecture, over the hidden dimension."""
    kind = nn.RMSNorm if arch.norm == "rms" else nn.LayerNorm
    return kind(arch.hidden, eps=arch.norm_eps)


def rope_frequencies(arch: Arch, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotary frequencies: radians per position of each pair of a head, (head_dim ÷ 2,)."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64, device=device).to(dtype) / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponents
    if arch.rope_scaling == "linear":
        return frequencies / arch.rope_factor
    if arch.rope_scaling == "llama3":
        return _llama3(arch, frequencies)
    return frequencies


def _llama3(arch: Arch, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: low frequencies ÷ `rope_factor`, high ones unchanged, a ramp between them."""
    rotations = arch.rope_original * frequencies / (2 * math.pi)  # of a pair over the original context
    fast = ((rotations - arch.rope_low) / (arch.rope_high - arch.rope_low)).clamp(0, 1)
    return (1 - fast) * frequencies / arch.rope_factor + fast * frequencies


def rope_table(arch: Arch, positions: Tensor, dtype: torch.dtype) -> Rope:
    """Cosines and sines for positions (b, s), with a dimension for the heads."""
    frequencies = rope_frequencies(arch, dtype, positions.device)
    angles = positions[:, None, :, None].to(dtype) * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + head_dim ÷ 2) of every head: the layout of published Llama weights."""
    cos, sin = rope  # fp32 where x is of low precision, so that the arithmetic is fp32 too
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope_qk(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """RoPE on queries and keys, which stay in memory as projections wrote them: token by token.

    Attention's result then lies so too, and the projection that reads it needs no copy.
    """
    cos, sin = rope
    by_token = cos.transpose(1, 2), sin.transpose(1, 2)
    q, k = (apply_rope(x.transpose(1, 2), by_token).transpose(1, 2) for x in (q, k))
    return q, k


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Attention of every position to itself and earlier ones, within its document where documents (b, s) are given."""
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
        self.rope: ApplyRope = apply_rope_qk  # transforms may put other functions here
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, rope: Rope | None, mask: Any) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        if rope is not None:
            q, k = self.rope(q, k, rope)
        y = self.attend(q, k, v, mask)  # (b, heads, s, head_dim)
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
        self.activate = ACTIVATIONS[arch.mlp]  # transforms may put another function here

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """`index` is for layers that route; a dense one treats every token alike."""
        return self.down(self.activate(self.up(x)) if self.gate is None else self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated product; transforms may put another function here."""
        return self.activate(gate) * up


class Block(nn.Module):
    """One layer of a decoder: attention, then a feed-forward layer, each added to its input.

    Normalized is what a sub-layer reads (pre-norm), or what the sum leaves (post-norm, the first transformers).
    """

    def __init__(self, arch: Arch, mlp: nn.Module) -> None:
        super().__init__()
        self.post_norm = arch.norm_position == "post"
        self.attn_norm = norm(arch)
        self.attn = Attention(arch)
        self.attn_dropout = dropout(arch.dropout)
        self.mlp_norm = norm(arch)
        self.mlp = mlp
        self.mlp_dropout = dropout(arch.dropout)

    def forward(self, x: Tensor, rope: Rope | None, mask: Any, index: Tensor | None) -> Tensor:
        if self.post_norm:
            x = self.attn_norm(x + self.attn_dropout(self.attn(x, rope, mask), index))
            return self.mlp_norm(x + self.mlp_dropout(self.mlp(x, index), index))
        # No name for what attention returns: it would live on beside the MLP.
        normed, x = self.add_and_norm(self.attn_dropout(self.attn(self.attn_norm(x), rope, mask), index), x)
        return x + self.mlp_dropout(self.mlp(normed, index), index)

    def add_and_norm(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum; transforms may put another function here."""
        x = x + y
        return self.mlp_norm(x), x


def weighted_loss(x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T: times a weight, to be differentiated, and unweighted."""
    total = token_loss_sum(F.linear(x, projection), targets)
    return total * weight.to(total.dtype), total


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of logits (b, s, vocab) over the targets (b, s) that are not IGNORE."""
    # The cast inside the softmax spares an fp32 copy of the logits, the largest tensor of a step.
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=accum_dtype(logits))
    return F.nll_loss(log_probabilities, targets.flatten(), ignore_index=IGNORE, reduction="sum")
