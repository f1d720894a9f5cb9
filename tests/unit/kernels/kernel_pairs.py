"""Every kernel beside its plain twin, as (fused, plain, tensors), for the interpreter and for a GPU alike."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import kernel_cases
import torch
from kernel_cases import draw
from torch import Tensor

from meshwright.kernels import attention, experts, gated, norm, softmax

EPS = 1e-5
Shape = tuple[int, ...]


class Pair(NamedTuple):
    """A kernel and its twin, called with the same tensors."""

    fused: Callable
    plain: Callable
    tensors: list[Tensor]


def pair(function: Callable, tensors: list[Tensor]) -> Pair:
    return Pair(partial(function, kernels="fused"), partial(function, kernels="plain"), tensors)


def softmax_pair(shape: Shape, dtype: torch.dtype, strides: str) -> Pair:
    return pair(softmax.softmax, [draw(shape, dtype, 1, strides)])


def norm_pair(kind: str, shape: Shape, dtype: torch.dtype, strides: str) -> Pair:
    x, residual = draw(shape, dtype, 1, strides), draw(shape, dtype, 2)
    weight, bias = (draw(shape[-1:], torch.float32, seed) for seed in (3, 4))
    calls = {
        "rms": (lambda x, w, kernels: norm.rms_norm(x, w, EPS, kernels), [x, weight]),
        "layer": (lambda x, w, b, kernels: norm.layer_norm(x, w, b, EPS, kernels), [x, weight, bias]),
        "layer, no bias": (lambda x, w, kernels: norm.layer_norm(x, w, None, EPS, kernels), [x, weight]),
        "rms of a sum": (lambda x, r, w, kernels: norm.rms_norm_sum(x, r, w, EPS, kernels), [x, residual, weight]),
        "layer of a sum": (
            lambda x, r, w, b, kernels: norm.layer_norm_sum(x, r, w, b, EPS, kernels),
            [x, residual, weight, bias],
        ),
    }
    return pair(*calls[kind])


NORMS = ("rms", "layer", "layer, no bias", "rms of a sum", "layer of a sum")


def gate_pair(kind: str, activation: gated.Activation, shape: Shape, dtype: torch.dtype, strides: str) -> Pair:
    x, up = draw(shape, dtype, 1, strides), draw(shape, dtype, 2)
    if kind == "gated":
        return pair(lambda x, up, kernels: gated.gated(x, up, activation, kernels), [x, up])
    return pair(lambda x, kernels: gated.activate(x, activation, kernels), [x])


GATES = ("alone", "gated")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def rope_pair(layout: str, heads: tuple[int, int], sizes: tuple[int, int, int], dtype: torch.dtype) -> Pair:
    """Queries and keys in (b, s, heads, head_dim), seen with heads before positions where the layout says so."""
    batch, sequence, head_dim = sizes
    q, k = (draw((batch, sequence, count, head_dim), dtype, seed) for seed, count in enumerate(heads))
    angles = draw((1 if layout.endswith("one rotation") else batch, sequence, 1, head_dim // 2), torch.float32, 3)
    table = angles.cos(), angles.sin()
    if layout.startswith("positions first"):
        return pair(lambda q, k, kernels: attention.apply_rope(q, k, table, kernels), [q, k])
    table_bshd = table[0].transpose(1, 2), table[1].transpose(1, 2)
    if layout.startswith("heads first, dense"):
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        return pair(lambda q, k, kernels: attention.apply_rope(q, k, table_bshd, kernels), [q, k])
    return pair(
        lambda q, k, kernels: attention.apply_rope(q.transpose(1, 2), k.transpose(1, 2), table_bshd, kernels),
        [q, k],
    )


LAYOUTS = ("positions first", "heads first", "heads first, dense", "positions first, one rotation")


def row_pair(kind: str, sizes: tuple[int, int, int], share: float, dtype: torch.dtype) -> Pair:
    """Tokens, choices and hidden elements; of the assignments this share is kept, and the others' rows come last."""
    tokens, choices, hidden = sizes
    kept = torch.rand(tokens, choices, generator=torch.Generator().manual_seed(5)) < share
    place = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(6))
    row = torch.where(kept.flatten(), place, place + tokens * choices).argsort().argsort().view(tokens, choices)
    assignment = row.flatten().argsort()
    tensors = assignment, assignment // choices, row, kept, torch.zeros(1)
    order = experts.Dispatch(*(x.to(kernel_cases.DEVICE) for x in tensors))
    if kind == "dispatched":
        return pair(lambda x, kernels: experts.dispatch_rows(x, order, kernels), [draw((tokens, hidden), dtype, 1)])
    gates = draw((tokens, choices), torch.float32, 2) * order.kept
    used = torch.arange(tokens * choices, device=gates.device)[:, None] < order.kept.sum()  # others have no gradient
    return pair(
        lambda rows, gates, kernels: experts.combine_rows(torch.where(used, rows, 0), gates, order, kernels),
        [draw((tokens * choices, hidden), dtype, 1), gates],
    )
