import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.models.layers import causal_attention
from meshwright.parallel.context import (
    AttentionBlock,
    block_attention,
    block_gradients,
    join,
    meeting,
    merge,
    plain,
    take,
)

TOLERANCE = 1e-14  # float64 sums of a dozen terms of size 1
cuts = st.tuples(st.integers(1, 6), st.integers(1, 4))  # cp, positions in a slice
often = settings(deadline=None, max_examples=30, derandomize=True)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def draw(b: int = 2, heads: int = 6, kv_heads: int = 2, rows: int = 5, columns: int = 5) -> tuple[Tensor, ...]:
    """q, k and v of a block, float64."""
    sizes = ((heads, rows), (kv_heads, columns), (kv_heads, columns))
    return tuple(torch.randn(b, count, length, 4, dtype=torch.float64) for count, length in sizes)


@often
@given(cuts)
def test_every_position_is_held_once(cut):
    cp, size = cut
    sequence = 2 * cp * size
    held = torch.cat([take(torch.arange(sequence), 0, cp, rank) for rank in range(cp)])
    assert torch.equal(held.sort().values, torch.arange(sequence))


@often
@given(cuts)
def test_every_rank_has_the_same_causal_work(cut):
    cp, size = cut
    sequence = 2 * cp * size
    work = {int((take(torch.arange(sequence), 0, cp, rank) + 1).sum()) for rank in range(cp)}  # position p sees p + 1
    assert work == {sequence * (sequence + 1) // 2 // cp}


@often
@given(cuts)
def test_a_rank_holds_its_positions_in_order(cut):
    cp, size = cut
    x = torch.randn(3, 2 * cp * size, 2)
    for rank in range(cp):
        positions = take(torch.arange(2 * cp * size), 0, cp, rank)
        assert torch.equal(take(x, 1, cp, rank), x[:, positions])
        assert torch.equal(positions, positions.sort().values)


@often
@given(cuts)
def test_joining_undoes_taking(cut):
    cp, size = cut
    x = torch.randn(3, 2 * cp * size, 2)
    assert torch.equal(join([take(x, 1, cp, rank) for rank in range(cp)], 1), x)


def test_a_sequence_that_cannot_be_cut_is_our_mistake():
    with pytest.raises(AssertionError, match="12 positions in 8 slices"):
        take(torch.arange(12), 0, 4, 0)


@often
@given(cuts)
def test_a_meeting_holds_just_what_causality_leaves(cut):
    cp, size = cut
    for rank in range(cp):
        for owner in range(cp):
            queries, keys = (take(torch.arange(2 * cp * size), 0, cp, each) for each in (rank, owner))
            rows, columns, causal = meeting(rank, owner, 2 * size)
            seen = torch.zeros(2 * size, 2 * size, dtype=torch.bool)
            seen[rows, columns] = True
            assert torch.equal(seen.tril() if causal else seen, queries[:, None] >= keys)


def test_one_block_is_all_of_attention():
    q, k, v = draw()
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    for told in (None, documents):
        same = None if told is None else told[:, :, None] == told[:, None]
        out, _ = block_attention(AttentionBlock(q, k, v, True, same))
        assert (out - causal_attention(q, k, v, told)).abs().max() < TOLERANCE


def test_gradients_of_one_block_are_those_of_attention():
    inputs = [x.requires_grad_() for x in draw()]
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    block = AttentionBlock(*inputs, True, documents[:, :, None] == documents[:, None])
    grad = torch.randn_like(block.q)
    expected = torch.autograd.grad(causal_attention(*inputs, documents), inputs, grad)
    with torch.no_grad():
        out, lse = block_attention(block)
        given = block_gradients(block, out, lse, grad)
    for mine, theirs in zip(given, expected, strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_blocks_merge_into_the_whole(cut):
    q, k, v = draw(columns=7)
    same = torch.rand(2, 5, 7) < 0.5
    same[..., 0] = True  # the first block must leave no row empty, as the own block of a rank does not
    out, lse = plain(AttentionBlock(q, k[:, :, :cut], v[:, :, :cut], False, same[..., :cut]))
    merge(out, lse, *plain(AttentionBlock(q, k[:, :, cut:], v[:, :, cut:], False, same[..., cut:])))
    whole, whole_lse = plain(AttentionBlock(q, k, v, False, same))
    assert (out - whole).abs().max() < TOLERANCE
    assert (lse - whole_lse).abs().max() < TOLERANCE


def test_merging_into_nothing_takes_the_block_as_it_is():
    more, more_lse = plain(AttentionBlock(*draw(), True, None))
    out, lse = torch.zeros_like(more), torch.full_like(more_lse, -torch.inf)
    merge(out, lse, more, more_lse)
    assert torch.equal(out, more)
    assert torch.equal(lse, more_lse)


def test_a_row_that_sees_nothing_changes_nothing():
    q, k, v = draw()
    out, lse = plain(AttentionBlock(q, k, v, True, None))
    before, before_lse = out.clone(), lse.clone()
    empty, empty_lse = plain(AttentionBlock(q, k, v, False, torch.zeros(2, 5, 5, dtype=torch.bool)))
    assert empty.isfinite().all()
    merge(out, lse, empty, empty_lse)
    assert torch.equal(out, before)
    assert torch.equal(lse, before_lse)


def test_a_row_that_sees_nothing_has_no_gradient():
    q, k, v = draw()
    out, lse = plain(AttentionBlock(q, k, v, True, None))  # what the row saw elsewhere
    block = AttentionBlock(q, k, v, False, torch.zeros(2, 5, 5, dtype=torch.bool))
    for grad in block_gradients(block, out, lse, torch.randn_like(q)):
        assert grad.abs().max() == 0


def test_scores_too_large_for_an_exponential_are_merged():
    q, k, v = draw(b=1, heads=1, kv_heads=1, columns=2)
    k = torch.stack((k[:, :, 0] * 1e4, k[:, :, 1] * -1e4), dim=2)  # e^10000 is no float64
    out, lse = plain(AttentionBlock(q, k[:, :, :1], v[:, :, :1], False, None))
    merge(out, lse, *plain(AttentionBlock(q, k[:, :, 1:], v[:, :, 1:], False, None)))
    whole, _ = plain(AttentionBlock(q, k, v, False, None))
    assert out.isfinite().all()
    assert (out - whole).abs().max() < TOLERANCE


def test_low_precision_is_widened_and_float64_stays():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        q, k, v = (x.to(dtype) for x in draw())
        block = AttentionBlock(q, k, v, True, None)
        out, lse = plain(block)
        grads = block_gradients(block, out, lse, torch.ones_like(q))
        assert {x.dtype for x in (out, lse, *grads)} == {expected}
