"""Causal attention within documents: torch's FlexAttention, told which blocks of scores a document touches.

A mask of s × s would be written, read and kept by every layer: 64 MiB of a sample of 8,192 tokens, 16 GiB of one of
131,072. Documents lie one behind another, so where each begins says all of it, and what lies outside is not computed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys of a block: what FlexAttention's kernels are made for
NARROWEST = 16  # numbers of a head that they take
TYPES = (torch.bfloat16, torch.float16)  # in which they were tried


def takes(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such heads; a dense mask serves the others."""
    return head_dim >= NARROWEST and dtype in TYPES


def attention(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
    """Attention of every position to itself and earlier ones of its document, by the blocks that are seen.

    q is (b, heads, s, head_dim), k and v are (b, kv_heads, s, head_dim).
    """
    attend = plain if torch.compiler.is_compiling() else _compiled()
    return attend(q, k, v, seen)


def plain(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
    """What is compiled; left as it is, it computes the scores of all pairs of positions."""
    found = flex_attention(q, k, v, block_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(found, Tensor), "no logarithms were asked for"
    return found


@cache
def _compiled() -> Any:
    """One kernel for each shape, faster than one for all; where that cannot be, an error and no slow way."""
    return torch.compile(plain, dynamic=False, fullgraph=True)


def blocks(documents: Tensor) -> BlockMask:
    """Which blocks of scores are computed, and which of them without a look at single positions.

    documents are (b, s) numbers, which change where a document ends. Queries see keys from the beginning of their
    document on: a block of them from where its first document begins, and all of them from where its last one does. A
    block that is cut short by the end of the sample is always looked at, as torch's own lists have it.

    Made once for all layers, and not by the compiler: it would choose strides that FlexAttention's kernels misread.
    """
    begin = begins(documents)
    length = begin.shape[1]
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
    """How many blocks of keys are chosen for each block of queries, and which, in their order; all heads alike."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def begins(documents: Tensor) -> Tensor:
    """Where the document of each position begins, (b, s)."""
    place = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(is_first, place, 0).cummax(dim=1).values
