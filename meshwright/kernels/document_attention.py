"""Document masking by FlexAttention: causal attention within documents, with a sparse block mask.

A dense mask of s × s would be written, read and saved by every layer: 64 MiB for a sample of 8,192 tokens, 16 GiB for
one of 131,072. Packed documents are contiguous, so their starts define the mask, and masked blocks are not computed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys of a block: what FlexAttention's kernels are made for
LEAST_HEAD_DIM = 16  # that they take
TYPES = (torch.bfloat16, torch.float16)  # that they were tested in


def takes(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such heads; a dense mask serves the others."""
    return head_dim >= LEAST_HEAD_DIM and dtype in TYPES


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention of every position to itself and earlier ones of its document, by the blocks of the mask.

    q is (b, heads, s, head_dim), k and v are (b, kv_heads, s, head_dim).
    """
    attend = plain if torch.compiler.is_compiling() else _compiled()
    return attend(q, k, v, mask)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """The function that is compiled; uncompiled it computes the scores of all pairs of positions."""
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(found, Tensor), "no log-sum-exp was requested"
    return found


@cache
def _compiled() -> Any:
    """One kernel per shape, faster than one for all; an error where it cannot be compiled, and no slow fallback."""
    return torch.compile(plain, dynamic=False, fullgraph=True)


def build_mask(documents: Tensor) -> BlockMask:
    """The block mask: which blocks of scores are computed, and which of them without masking single positions.

    documents are (b, s) integers, which change where a document ends. Queries see keys from the beginning of their
    document on: a block of them from where its first document begins, and all of them from where its last one does. A
    block that is cut short by the end of the sample is always masked, as in torch's own lists.

    Made once for all layers, and not by the compiler: it would choose strides that FlexAttention's kernels misread.
    """
    begin = document_starts(documents)
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
    """The number of chosen key blocks for each query block, and their indices in order, the same for all heads."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def document_starts(documents: Tensor) -> Tensor:
    """Where the document of each position begins, (b, s)."""
    position = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(is_first, position, 0).cummax(dim=1).values
