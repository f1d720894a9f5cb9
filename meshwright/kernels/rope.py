"""Rotary position embedding (RoPE) on queries and keys in one launch, in either order of heads and positions."""

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.dispatch import Kernels, Pointer, Values, constexpr, fused, jit, power, tl, warps

Rope = tuple[Tensor, Tensor]  # cosine and sine, which broadcast over the heads: (b, 1, s, half) or (b, s, 1, half)


def reference(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + head_dim ÷ 2) of every head."""
    cos, sin = rope
    dtype = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope(q: Tensor, k: Tensor, rope: Rope, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """Queries and keys, (b, heads, s, head_dim) or (b, s, heads, head_dim) like the table; it gets no gradient."""
    if fused(q, kernels) and k.dtype == q.dtype and k.numel() > 0:
        return _Rope.apply(q, k, *rope)
    return reference(q, rope), reference(k, rope)


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
