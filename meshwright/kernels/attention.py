"""Attention's surroundings: rotary position embedding (RoPE) by a kernel of ours, masks and scores by FlexAttention.

RoPE rotates queries and keys in one launch, in either order of heads and positions. Document masking is causal
attention within documents by a sparse block mask. A dense mask of s × s would be written, read and saved by every
layer: 64 MiB for a sample of 8,192 tokens, 16 GiB for one of 131,072. Packed documents are contiguous, so their starts
define the mask, and masked blocks are not computed. Sliding windows are further bounds of the same mask; softcapped
scores and attention sinks are made by the same kernels.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from meshwright.kernels.dispatch import Kernels, Pointer, Values, constexpr, fused, jit, power, tl, warps

BLOCK = 128  # queries and keys of a block: what FlexAttention's kernels are made for
LEAST_HEAD_DIM = 16  # that they take
TYPES = (torch.bfloat16, torch.float16)  # that they were tested in
MOST_SHAPES = 64  # that one process compiles attention for: lengths, heads, windows, with a gradient and without


class Scoring(NamedTuple):
    """What attention makes of dot products of queries and keys before their softmax."""

    scale: float | None = None  # None: 1 ÷ √head_dim
    window: int = 0  # keys that a query sees, itself among them; 0: all earlier ones
    softcap: float = 0.0  # c · tanh(score ÷ c); 0: none
    sinks: Tensor | None = None  # (heads,) a score that takes its part of the softmax, with values of zero

    @property
    def is_plain(self) -> bool:
        """Whether scores are dot products times a number."""
        return self.softcap == 0 and self.sinks is None


PLAIN = Scoring()


def visible(documents: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees, (b or 1, 1, s, s): itself and earlier ones of its document, in its window."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    if documents is None:
        return seen[None, None]
    return seen & (documents[:, None, :, None] == documents[:, None, None, :])


def scored_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, how: Scoring) -> Tensor:
    """Attention by all scores at once: the reference of whatever is made of them. `seen` broadcasts to (b, 1, s, s)."""
    accum = torch.promote_types(q.dtype, torch.float32)
    groups = q.unflatten(1, (k.shape[1], -1)).to(accum)  # (b, kv_heads, heads that share a key, s, head_dim)
    scores = groups @ k[:, :, None].to(accum).mT * (how.scale or q.shape[-1] ** -0.5)
    if how.softcap:
        scores = how.softcap * (scores / how.softcap).tanh()
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    if how.sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = how.sinks.to(accum).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return (weights @ v[:, :, None].to(accum)).flatten(1, 2).to(q.dtype)


def takes_documents(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such heads; a dense mask serves the others."""
    return head_dim >= LEAST_HEAD_DIM and dtype in TYPES


def document_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, how: Scoring = PLAIN) -> Tensor:
    """Attention of every position to itself and earlier ones of its document, by the blocks of the mask.

    q is (b, heads, s, head_dim), k and v are (b, kv_heads, s, head_dim).
    """
    attend = uncompiled if torch.compiler.is_compiling() else _compiled()
    return attend(q, k, v, mask, how)


def uncompiled(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, how: Scoring = PLAIN) -> Tensor:
    """The function that is compiled; uncompiled it computes the scores of all pairs of positions."""
    grouped, cap = q.shape[1] != k.shape[1], how.softcap

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return cap * (score / cap).tanh()

    change = capped if cap else None
    if how.sinks is None:
        found = flex_attention(q, k, v, score_mod=change, block_mask=mask, scale=how.scale, enable_gqa=grouped)
        assert isinstance(found, Tensor), "no log-sum-exp was requested"
        return found
    found, lse = flex_attention(
        q, k, v, score_mod=change, block_mask=mask, scale=how.scale, enable_gqa=grouped, return_lse=True
    )
    # A sink is one more score whose value is zero: it leaves exp(lse) ÷ (exp(lse) + exp(sink)) of the rest.
    share = (lse - how.sinks.to(lse.dtype)[None, :, None]).sigmoid()
    return (found * share[..., None]).to(q.dtype)


@cache
def _compiled() -> Any:
    """One kernel per shape, faster than one for all; an error where it cannot be compiled, and no slow fallback."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, MOST_SHAPES)  # after 8, torch's own, it would end the run
    return torch.compile(uncompiled, dynamic=False, fullgraph=True)


def build_mask(documents: Tensor, window: int = 0) -> BlockMask:
    """The block mask: which blocks of scores are computed, and which of them without masking single positions.

    documents are (b, s) integers, which change where a document ends. Queries see keys from the beginning of their
    document on, or of their window if that is later: a block of them from where its first query's begin, and all of
    them from where its last one's do. A block that is cut short by the end of the sample is always masked, as in
    torch's own lists.

    Made once for all layers, and not by the compiler: it would choose strides that FlexAttention's kernels misread.
    """
    begin = document_starts(documents)
    length = begin.shape[1]
    if window:
        begin = begin.maximum(torch.arange(length, dtype=begin.dtype, device=begin.device) - (window - 1))
    first = torch.arange(0, length, BLOCK, device=begin.device)  # position of each block
    last = first + BLOCK - 1
    earlier = first < first[:, None]
    seen = (last >= begin[:, first, None]) & (earlier | (first == first[:, None]))  # (b, blocks of queries, of keys)
    whole = (first >= begin[:, last.clamp(max=length - 1), None]) & earlier & (last < length)[:, None]

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (begin[sample, query] <= key)

    lists = (*_listed(seen & ~whole), *_listed(whole))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number of chosen key blocks for each query block, and their indices in order, the same for all heads."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def document_starts(documents: Tensor) -> Tensor:
    """Where the document of each position begins, (b, s)."""
    position = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(is_first, position, 0).cummax(dim=1).values


Rope = tuple[Tensor, Tensor]  # cosine and sine, which broadcast over the heads: (b, 1, s, half) or (b, s, 1, half)


def rope_reference(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + head_dim ÷ 2) of every head."""
    cos, sin = rope
    dtype = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope(q: Tensor, k: Tensor, rope: Rope, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """Queries and keys, (b, heads, s, head_dim) or (b, s, heads, head_dim) like the table; it gets no gradient."""
    if fused(q, kernels) and k.dtype == q.dtype and k.numel() > 0:
        return _Rope.apply(q, k, *rope)
    return rope_reference(q, rope), rope_reference(k, rope)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, (cos, sin), backwards=False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return *_rotate(dq, dk, (cos, sin), backwards=True), None, None


def _rotate(q: Tensor, k: Tensor, rope: Rope, backwards: bool) -> tuple[Tensor, Tensor]:
    """Rotate by the angle, or by minus the angle: the gradient of a rotation is the inverse rotation."""
    heads = 2 if rope[0].shape[2] == 1 and rope[0].shape[1] == q.shape[1] else 1  # the dimension of the heads
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = torch.empty_like(q), torch.empty_like(k)  # the order of dimensions in memory stays
    batch, sequence, half = q.shape[0], q.shape[3 - heads], q.shape[-1] // 2
    cos, sin = (_angles(x, heads, batch, sequence) for x in rope)
    many, few = q.shape[heads], k.shape[heads]
    strides = [step for x in (q, k, *out) for step in (x.stride(0), x.stride(3 - heads), x.stride(heads))]
    _rope[(batch * sequence,)](
        q, k, *out, cos, sin, sequence, half, many, few, *strides, *cos.stride()[:2], *sin.stride()[:2],
        backwards=backwards, q_heads=power(many), k_heads=power(few), block=power(half),
        num_warps=warps(power(many) * power(half)),
    )  # fmt: skip
    return out


def _angles(x: Tensor, heads: int, batch: int, sequence: int) -> Tensor:
    """Cosines or sines as (b, s, half), the last dimension contiguous; a broadcast batch stays one copy."""
    x = x.squeeze(heads)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.expand(batch, sequence, x.shape[-1])


@jit
def _rope(
    q: Pointer, k: Pointer, q_out: Pointer, k_out: Pointer, cos: Pointer, sin: Pointer,
    sequence: int, half: int, many: int, few: int,
    q_b: int, q_s: int, q_h: int, k_b: int, k_s: int, k_h: int,
    qo_b: int, qo_s: int, qo_h: int, ko_b: int, ko_s: int, ko_h: int,
    cos_b: int, cos_s: int, sin_b: int, sin_s: int,
    backwards: constexpr, q_heads: constexpr, k_heads: constexpr, block: constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0)
    b = (token // sequence).to(tl.int64)
    s = (token % sequence).to(tl.int64)
    pair = tl.arange(0, block)[None, :]
    c = tl.load(cos + b * cos_b + s * cos_s + pair, mask=pair < half, other=0.0).to(tl.float32)
    d = tl.load(sin + b * sin_b + s * sin_s + pair, mask=pair < half, other=0.0).to(tl.float32)
    if backwards:
        d = -d
    head = tl.arange(0, q_heads)[:, None]
    inside = (head < many) & (pair < half)
    _pairs(
        q + b * q_b + s * q_s + head * q_h + pair, q_out + b * qo_b + s * qo_s + head * qo_h + pair, half, c, d, inside
    )
    head = tl.arange(0, k_heads)[:, None]
    inside = (head < few) & (pair < half)
    _pairs(
        k + b * k_b + s * k_s + head * k_h + pair, k_out + b * ko_b + s * ko_s + head * ko_h + pair, half, c, d, inside
    )


@jit
def _pairs(source: Values, target: Values, half: int, c: Values, d: Values, inside: Values) -> None:
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, first * c - second * d, mask=inside)
    tl.store(target + half, second * c + first * d, mask=inside)
