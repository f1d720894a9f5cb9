"""Attention within documents: its blocks are those of the dense mask, and so is its result."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from meshwright.config.presets import preset
from meshwright.cost import activations
from meshwright.kernels import attention
from meshwright.kernels.attention import (
    BLOCK,
    LEAST_HEAD_DIM,
    TYPES,
    build_mask,
    document_starts,
    takes_documents,
    uncompiled,
)
from meshwright.models.decoder import Decoder
from meshwright.models.layers import Attention, causal_attention
from meshwright.parallel.precision import compute_dtype
from meshwright.spec.plan import LOW_PRECISIONS, Plan

LENGTHS = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 300, 4 * BLOCK, 700, 8 * BLOCK]
SAMPLES = 3


def cut(length: int, many: int) -> Tensor:
    """Samples cut at random into up to `many` + 1 documents, numbered from 0 or more."""
    generator = torch.Generator().manual_seed(length * 100 + many)
    ends = torch.randint(0, length + 1, (SAMPLES, many), generator=generator).sort().values
    places = torch.arange(length).expand(SAMPLES, length).contiguous()
    return torch.searchsorted(ends, places, right=True)


def lists(mask: BlockMask) -> list[list[list[int]]]:
    """What a mask names for each sample and block: of keys, of keys as a whole, of queries, of queries as a whole."""
    pairs = (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    )
    found = []
    for counts, order in pairs:
        assert counts is not None
        assert order is not None
        rows = zip(counts.flatten().tolist(), order.flatten(0, -2).tolist(), strict=True)
        found.append([row[:count] for count, row in rows])
    return found


@pytest.mark.parametrize("many", [0, 1, 4, 30])
@pytest.mark.parametrize("length", LENGTHS)
class TestOfRandomDocuments:
    def test_a_document_begins_where_its_number_is_first_seen(self, length, many):
        documents = cut(length, many)
        wanted = (documents[:, :, None] == documents[:, None, :]).int().argmax(dim=2)
        assert torch.equal(document_starts(documents).long(), wanted)

    def test_its_blocks_are_those_that_torch_finds_in_the_whole_mask(self, length, many):
        documents = cut(length, many)

        def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (documents[sample, query] == documents[sample, key])

        theirs = create_block_mask(sees, SAMPLES, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
        mine = build_mask(documents)
        assert lists(mine) == lists(theirs)
        assert mine.shape == theirs.shape
        for name in ("kv_num_blocks", "kv_indices", "full_q_num_blocks", "full_q_indices"):  # kernels count on strides
            assert getattr(mine, name).is_contiguous()

    @pytest.mark.filterwarnings("ignore:flex_attention called without")
    def test_the_result_is_the_dense_masks(self, length, many):
        documents = cut(length, many)
        q, k, v = (torch.randn(SAMPLES, heads, length, 16, dtype=torch.float64) for heads in (4, 2, 2))
        torch.testing.assert_close(uncompiled(q, k, v, build_mask(documents)), causal_attention(q, k, v, documents))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_decoder_that_tells_blocks_computes_the_same_logits():
    arch = preset("tiny")
    model = Decoder(arch).double()
    tokens = torch.randint(0, arch.vocab, (SAMPLES, 200))
    positions = torch.arange(200).expand(SAMPLES, -1)
    with torch.no_grad():
        wanted = model(tokens, positions, cut(200, 4))
        model.build_mask = lambda documents, window, positions: build_mask(documents, window)
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = uncompiled
        torch.testing.assert_close(model(tokens, positions, cut(200, 4)), wanted)


def test_the_ledger_knows_which_heads_and_precisions_these_are():
    assert activations.SMALLEST_HEAD == LEAST_HEAD_DIM
    plans = {
        precision: Plan(microbatch=1, precision=precision) for precision in ("bf16", "fp16", "fp8", "fp32", "fp64")
    }
    low = [precision for precision, plan in plans.items() if compute_dtype(plan) in TYPES]
    assert tuple(low) == LOW_PRECISIONS


def test_heads_too_narrow_and_wide_numbers_keep_the_dense_mask():
    assert takes_documents(16, torch.bfloat16)
    assert not takes_documents(8, torch.bfloat16)
    assert not takes_documents(16, torch.float32)


def test_a_process_may_attend_over_many_lengths(monkeypatch):
    """Torch gives up after eight shapes of one function: a run would end at the ninth."""
    monkeypatch.setattr(attention.torch, "compile", partial(torch.compile, backend="eager"))
    with dynamo.patch(recompile_limit=8), torch.no_grad():
        attend = attention._compiled.__wrapped__()  # as no earlier call has made it
        for blocks in range(1, 11):
            q = torch.randn(1, 1, blocks * BLOCK, 16)
            attend(q, q, q, build_mask(torch.zeros(1, q.shape[2], dtype=torch.int64)))
