"""The layers of a decoder: norm, rotary positions, attention, feed-forward, block."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import PLAIN, Rope, Scoring, scored_attention, visible
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.dropout import dropout
from meshwright.spec.arch import Arch
from meshwright.spec.params import has_bias

# Queries, keys, values, the mask or None, and what is made of scores.
Attend = Callable[..., Tensor]
ApplyRope = Callable[[Tensor, Tensor, Rope], tuple[Tensor, Tensor]]
LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the others have

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "swiglu_clamped": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
CLAMP, STEEPNESS = 7.0, 1.702  # of gpt-oss


def accum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums and exponentials that low precision would spoil: fp32, or fp64 where x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + its weight, which so begins at zero and decays towards the identity."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.rms_norm(x, tuple(self.normalized_shape), 1 + self.weight, self.eps)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head (b, heads, s, head_dim) without bias, whose weight is another for every head."""

    def __init__(self, width: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight = nn.Parameter(torch.ones(width))  # one after the other, so that tp may cut it by head

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (-1, 1, self.head_dim))
        return F.layer_norm(x, (self.head_dim,), eps=self.eps) * weight


def norm(arch: Arch) -> nn.Module:
    """The normalization of an architecture, over the hidden dimension."""
    if arch.norm == "layer":
        return nn.LayerNorm(arch.hidden, eps=arch.norm_eps, bias=arch.norm_bias)
    return rms_norm(arch, arch.hidden, arch.norm_eps)


def rms_norm(arch: Arch, width: int, eps: float) -> nn.RMSNorm:
    """RMSNorm as an architecture stores its weight."""
    return (OffsetRMSNorm if arch.norm_offset else nn.RMSNorm)(width, eps=eps)


def rope_frequencies(
    arch: Arch, dtype: torch.dtype, device: torch.device, is_local: bool = False, length: int = 0
) -> Tensor:
    """The rotary frequencies: radians per position of each pair of a head, (rotated ÷ 2,).

    Those of a local layer, one with a window, have a base of their own where the architecture says so. LongRoPE has
    others for sequences of a length beyond its original context.
    """
    exponents = torch.arange(0, arch.rotated, 2, dtype=torch.int64, device=device).to(dtype) / arch.rotated
    if is_local and arch.rope_local_theta:
        return 1.0 / arch.rope_local_theta**exponents
    frequencies = 1.0 / arch.rope_theta**exponents
    if arch.rope_scaling == "linear":
        return frequencies / arch.rope_factor
    if arch.rope_scaling == "llama3":
        return _llama3(arch, frequencies)
    if arch.rope_scaling == "longrope":
        factors = arch.rope_long if length > arch.rope_original else arch.rope_short
        return frequencies / torch.tensor(factors, dtype=dtype, device=device)
    return _yarn(arch, frequencies) if arch.rope_scaling == "yarn" else frequencies


def _llama3(arch: Arch, frequencies: Tensor) -> Tensor:
    """Llama 3.1's scaling: low frequencies ÷ `rope_factor`, high ones unchanged, a ramp between them."""
    rotations = arch.rope_original * frequencies / (2 * math.pi)  # of a pair over the original context
    fast = ((rotations - arch.rope_low) / (arch.rope_high - arch.rope_low)).clamp(0, 1)
    return (1 - fast) * frequencies / arch.rope_factor + fast * frequencies


def _yarn(arch: Arch, frequencies: Tensor) -> Tensor:
    """YaRN (Peng 2023): the same idea with a ramp that is linear in the number of the pair."""

    def pair(turns: float) -> float:
        """The pair, counted in elements, that turns so often over the original context."""
        return arch.rotated * math.log(arch.rope_original / (turns * 2 * math.pi)) / (2 * math.log(arch.rope_theta))

    low, high = pair(arch.rope_beta_fast), pair(arch.rope_beta_slow)
    if arch.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, arch.rotated - 1)
    number = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    slow = ((number - low) / (high - low or 0.001)).clamp(0, 1)
    return slow * frequencies / arch.rope_factor + (1 - slow) * frequencies


def rope_table(arch: Arch, positions: Tensor, dtype: torch.dtype, is_local: bool = False, length: int = 0) -> Rope:
    """Cosines and sines for positions (b, s) of sequences of a length, with a dimension for the heads."""
    frequencies = rope_frequencies(arch, dtype, positions.device, is_local, length)
    angles = positions[:, None, :, None].to(dtype) * frequencies
    if arch.rope_scaling not in ("yarn", "longrope") or (is_local and arch.rope_local_theta):
        return angles.cos(), angles.sin()
    factor = arch.rope_attention or _usual_factor(arch)
    return angles.cos() * factor, angles.sin() * factor


def _usual_factor(arch: Arch) -> float:
    """What cosines and sines are multiplied by where the architecture does not say."""
    if arch.rope_scaling == "yarn":
        return 0.1 * math.log(arch.rope_factor) + 1
    longer = arch.context / arch.rope_original
    return math.sqrt(1 + math.log(longer) / math.log(arch.rope_original)) if longer > 1 else 1.0


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + head_dim ÷ 2) of every head: the layout of published Llama weights."""
    cos, sin = rope  # fp32 where x is of low precision, so that the arithmetic is fp32 too
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope_neighbours(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of every head."""
    cos, sin = rope
    first, second = x[..., ::2], x[..., 1::2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def apply_rope_qk(
    q: Tensor, k: Tensor, rope: Rope, rotate: Callable[[Tensor, Rope], Tensor] = apply_rope
) -> tuple[Tensor, Tensor]:
    """RoPE on queries and keys, which stay in memory as projections wrote them: token by token.

    Attention's result then lies so too, and the projection that reads it needs no copy.
    """
    cos, sin = rope
    by_token = cos.transpose(1, 2), sin.transpose(1, 2)
    q, k = (rotate(x.transpose(1, 2), by_token).transpose(1, 2) for x in (q, k))
    return q, k


def apply_rope_part(
    q: Tensor, k: Tensor, rope: Rope, rotate: Callable[[Tensor, Rope], Tensor]
) -> tuple[Tensor, Tensor]:
    """RoPE on the first dimensions of every head, as many as the table has."""
    width = 2 * rope[0].shape[-1]

    def rotated(x: Tensor, rope: Rope) -> Tensor:
        return torch.cat((rotate(x[..., :width], rope), x[..., width:]), dim=-1)

    return apply_rope_qk(q, k, rope, rotated)


def rope_of(arch: Arch) -> ApplyRope:
    """How an architecture rotates: all of a head, or of what latent attention hands over, is the usual way."""
    rotate = apply_rope_neighbours if arch.rope_interleaved else apply_rope
    if arch.rotated < arch.head_dim and not arch.is_latent:
        return partial(apply_rope_part, rotate=rotate)
    return partial(apply_rope_qk, rotate=rotate) if arch.rope_interleaved else apply_rope_qk


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, how: Scoring = PLAIN) -> Tensor:
    """Attention of every position to itself and earlier ones, within its document where documents (b, s) are given."""
    length = q.shape[2]
    window = how.window if how.window < length else 0
    if documents is None and not window and how.is_plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=True)
    seen = visible(documents, length, window, q.device)
    if not how.is_plain:
        return scored_attention(q, k, v, seen, how)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=how.scale, enable_gqa=True)


class Attention(nn.Module):
    """Multi-head attention. The heads are counted from the tensors, so projections may be cut by head."""

    def __init__(self, arch: Arch, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.sinks = nn.Parameter(torch.empty(arch.heads)) if arch.sinks else None
        self._build(arch)
        self.how = Scoring(arch.attention_scale or None, arch.window_of(layer), arch.attention_softcap)
        self.rope: ApplyRope = rope_of(arch)  # transforms may put other functions here
        self.attend: Attend = causal_attention

    def _build(self, arch: Arch) -> None:
        bias = has_bias(arch, "qkv")
        self.q = nn.Linear(arch.hidden, arch.q_width, bias=bias)
        self.k = nn.Linear(arch.hidden, arch.kv_width, bias=bias)
        self.v = nn.Linear(arch.hidden, arch.v_width, bias=bias)
        self.out = nn.Linear(arch.out_width, arch.hidden, bias=has_bias(arch, "out"))
        self.per_head = arch.qk_norm in ("head", "layer")
        self.q_norm = self.k_norm = None
        widths = (arch.head_dim,) * 2 if arch.qk_norm == "head" else (arch.q_width, arch.kv_width)
        if arch.qk_norm == "layer":
            self.q_norm, self.k_norm = (HeadLayerNorm(width, arch.head_dim, arch.norm_eps) for width in widths)
        elif arch.qk_norm != "none":
            self.q_norm, self.k_norm = (rms_norm(arch, width, arch.norm_eps) for width in widths)

    def forward(self, x: Tensor, rope: Rope | None, mask: Any) -> Tensor:
        q, k, v = self.project(x, rope)
        how = self.how if self.sinks is None else self.how._replace(sinks=self.sinks)
        y = self.attend(q, k, v, mask, how=how)  # (b, heads, s, head_dim)
        return self.out(y.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, rotated."""
        q, k = self._normed(self.q, self.q_norm, x), self._normed(self.k, self.k_norm, x)
        if rope is not None:
            q, k = self.rope(q, k, rope)
        return q, k, self.heads(self.v(x), self.head_dim)

    def _normed(self, project: nn.Module, norm: nn.Module | None, x: Tensor) -> Tensor:
        y = project(x)
        y = norm(y) if norm is not None and not self.per_head else y
        y = self.heads(y, self.head_dim)
        return norm(y) if norm is not None and self.per_head else y

    def heads(self, x: Tensor, width: int) -> Tensor:
        """(b, s, heads · width) as (b, heads, s, width)."""
        return x.unflatten(-1, (-1, width)).transpose(1, 2)


class LatentAttention(Attention):
    """Multi-head latent attention (MLA, DeepSeek-V2): queries, keys and values are made of short vectors a token.

    Of a head's elements the last few are rotated; those of keys are one vector for all heads.
    """

    def _build(self, arch: Arch) -> None:
        bias = has_bias(arch, "qkv")
        self.latent, self.rotated, self.v_head = arch.kv_rank, arch.rope_dim, arch.v_head
        self.short = arch.q_rank > 0
        if self.short:
            self.q_down = nn.Linear(arch.hidden, arch.q_rank, bias=bias)
            self.q_down_norm = rms_norm(arch, arch.q_rank, LATENT_EPS)
            self.q_up = nn.Linear(arch.q_rank, arch.q_width, bias=False)
        else:
            self.q = nn.Linear(arch.hidden, arch.q_width, bias=False)
        self.kv_down = nn.Linear(arch.hidden, arch.kv_rank + arch.rope_dim, bias=bias)
        self.kv_down_norm = rms_norm(arch, arch.kv_rank, LATENT_EPS)
        inner = arch.heads * (arch.head_dim - arch.rope_dim + arch.v_head)
        self.kv_up = nn.Linear(arch.kv_rank, inner, bias=False)
        self.out = nn.Linear(arch.out_width, arch.hidden, bias=has_bias(arch, "out"))

    def project(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, rotated."""
        plain = self.head_dim - self.rotated
        q = self.heads(self.q_up(self.q_down_norm(self.q_down(x))) if self.short else self.q(x), self.head_dim)
        latent, k_rope = self.kv_down(x).split([self.latent, self.rotated], dim=-1)
        kv = self.heads(self.kv_up(self.kv_down_norm(latent)), plain + self.v_head)
        k, v = kv.split([plain, self.v_head], dim=-1)
        q, q_rope = q.split([plain, self.rotated], dim=-1)
        k_rope = k_rope[:, None]
        if rope is not None:
            q_rope, k_rope = self.rope(q_rope, k_rope, rope)
        k_rope = k_rope.expand(-1, k.shape[1], -1, -1)
        return _joined(q, q_rope), _joined(k, k_rope), v


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """Parts of heads (b, heads, s, …), joined; in memory token by token, so that attention's result lies so too."""
    return torch.cat((first.transpose(1, 2), second.transpose(1, 2)), dim=-1).transpose(1, 2)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated product of gpt-oss: both clamped, the gate's sigmoid steeper, one added to what is gated."""
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (up + 1) * (gate * (gate * STEEPNESS).sigmoid())


class Mlp(nn.Module):
    """A dense feed-forward layer; gated when the architecture says so."""

    def __init__(self, arch: Arch, width: int) -> None:
        super().__init__()
        bias = has_bias(arch, "mlp")
        self.gate = nn.Linear(arch.hidden, width, bias=bias) if arch.gated else None
        self.up = nn.Linear(arch.hidden, width, bias=bias)
        self.down = nn.Linear(width, arch.hidden, bias=bias)
        self.activate = ACTIVATIONS[arch.mlp]  # transforms may put another function here
        if arch.mlp == "swiglu_clamped":
            self.gated = clamped_swiglu

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """`index` is for layers that route; a dense one treats every token alike."""
        return self.down(self.activate(self.up(x)) if self.gate is None else self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated product; transforms may put another function here."""
        return self.activate(gate) * up


class Block(nn.Module):
    """One layer of a decoder: attention, then a feed-forward layer, each added to its input.

    Normalized is what a sub-layer reads (pre-norm), what it returns (output), either (both), or what the sum leaves
    (post-norm, the first transformers). With a parallel residual both sub-layers read the block's own input.
    """

    def __init__(self, arch: Arch, mlp: nn.Module, layer: int = 0) -> None:
        super().__init__()
        self.norms, self.parallel, self.scale = arch.norm_position, arch.parallel_residual, arch.residual_scale
        self.attn_norm = norm(arch)
        self.attn = (LatentAttention if arch.is_latent else Attention)(arch, layer)
        self.attn_dropout = dropout(arch.dropout)
        self.attn_output_norm = norm(arch) if self.norms == "both" else None
        self.mlp_norm = norm(arch) if self.parallel != "one_norm" else None
        self.mlp = mlp
        self.mlp_dropout = dropout(arch.dropout)
        self.mlp_output_norm = norm(arch) if self.norms == "both" else None

    @property
    def norms_sum(self) -> bool:
        """Whether a norm reads the sum of the residual stream and what attention returns, which one kernel may do."""
        return self.norms == "pre" and self.parallel == "none"

    def forward(self, x: Tensor, rope: Rope | None, mask: Any, index: Tensor | None) -> Tensor:
        if self.norms_sum:
            # No name for what attention returns: it would live on beside the MLP.
            normed, x = self.add_and_norm(self._scaled(self.attended(self.attn_norm(x), rope, mask, index)), x)
            return x + self._scaled(self.fed(normed, index))
        if self.parallel != "none":
            normed = self.attn_norm(x)
            other = normed if self.mlp_norm is None else self.mlp_norm(x)
            return x + self._scaled(self.attended(normed, rope, mask, index)) + self._scaled(self.fed(other, index))
        if self.norms == "post":
            assert self.mlp_norm is not None, "one norm is for parallel residuals"
            x = self.attn_norm(x + self.attended(x, rope, mask, index))
            return self.mlp_norm(x + self.fed(x, index))
        before, after = self.sublayer_norms
        x = x + self._scaled(after[0](self.attended(before[0](x), rope, mask, index)))
        return x + self._scaled(after[1](self.fed(before[1](x), index)))

    @property
    def sublayer_norms(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """What is done to the inputs of the two sub-layers, and to what they return."""
        named = (self.attn_norm, self.mlp_norm)
        if self.norms == "output":
            return (_as_it_is, _as_it_is), named
        return named, (self.attn_output_norm, self.mlp_output_norm)

    def attended(self, x: Tensor, rope: Rope | None, mask: Any, index: Tensor | None) -> Tensor:
        """What attention returns, dropped out."""
        return self.attn_dropout(self.attn(x, rope, mask), index)

    def fed(self, x: Tensor, index: Tensor | None) -> Tensor:
        """What the feed-forward layer returns, dropped out."""
        return self.mlp_dropout(self.mlp(x, index), index)

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1 else y * self.scale

    def add_and_norm(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum; transforms may put another function here."""
        assert self.mlp_norm is not None, "one norm is for parallel residuals"
        x = x + y
        return self.mlp_norm(x), x


def _as_it_is(x: Tensor) -> Tensor:
    return x


def softcapped(x: Tensor, cap: float) -> Tensor:
    """c · tanh(x ÷ c), x itself where c is 0."""
    return cap * (x / cap).tanh() if cap else x


def weighted_loss(
    x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T: times a weight, to be differentiated, and unweighted."""
    total = token_loss_sum(softcapped(F.linear(x, projection), softcap), targets)
    return total * weight.to(total.dtype), total


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of logits (b, s, vocab) over the targets (b, s) that are not IGNORE."""
    # The cast inside the softmax spares an fp32 copy of the logits, the largest tensor of a step.
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=accum_dtype(logits))
    return F.nll_loss(log_probabilities, targets.flatten(), ignore_index=IGNORE, reduction="sum")
