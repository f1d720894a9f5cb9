"""The loss with its projection: the twin is torch's loss, parts of a vocabulary are the whole, the kernels the twin."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STEP, STRIDES, TYPES, assert_near, draw, interpreted
from loss_cases import ROUNDING, WEIGHT, answering, assert_exact, gradient_over, in_parts, some_targets

from meshwright.kernels import cross_entropy
from meshwright.kernels import cross_entropy as logits_kernels
from meshwright.kernels.cross_entropy import IGNORE, VocabShard, softmax_gradient, weighted_loss, whole
from meshwright.models.layers import softcapped
from meshwright.spec import plan as spec

KERNELS = ["plain", pytest.param("fused", marks=interpreted)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_chunks_losses_and_gradients_are_torchs(kernels):
    logits, targets = draw((7, 40), torch.float32, 1), some_targets(7, 40)
    over = logits.clone()
    assert_exact((gradient_over(over, targets, whole(40), kernels), over), logits, targets)


@pytest.mark.parametrize("cuts", [(20,), (1,), (13, 26, 39), (0, 40)], ids=str)
def test_parts_of_a_vocabulary_are_the_whole(cuts):
    logits, targets = draw((9, 40), torch.float64, 1), some_targets(9, 40)
    assert_exact(in_parts(logits, targets, cuts, "plain"), logits, targets)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_in_one_part_is_seen_by_all_and_not_where_nothing_is_predicted(bad, kernels):
    logits, targets = draw((3, 10), torch.float32, 1), torch.tensor([1, 9, IGNORE])
    logits[0, 7] = bad
    logits[2, 7] = bad
    losses, gradient = in_parts(logits, targets, (5,), kernels)
    assert losses.isfinite().tolist() == [False, True, True]
    assert gradient[0, :5].isfinite().sum() < 5  # the part that does not hold it
    assert not gradient[2].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_far_beyond_the_exponentials_range_are_no_trouble(kernels):
    logits, targets = draw((4, 30), torch.float32, 1) * 1e4, torch.tensor([0, 29, 15, 3])
    assert_exact(in_parts(logits, targets, (11,), kernels), logits, targets)


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_several_blocks_is_walked_along(dtype):
    logits, targets = draw((3, 8192 + 77), dtype, 1), some_targets(3, 8192 + 77)
    over = logits.clone()
    assert_exact((gradient_over(over, targets, whole(8269), "fused"), over), logits, targets)
    assert_exact(in_parts(logits, targets, (8200,), "fused"), logits, targets)


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_rises_beyond_its_first_block_is_brought_down_again(monkeypatch, dtype):
    monkeypatch.setitem(logits_kernels.LAUNCH, "block", 16)
    rises = torch.arange(77).div(16, rounding_mode="floor") * 50.0  # the second block stays within reach, others do not
    logits, targets = (draw((5, 77), torch.float32, 1) + rises).to(dtype), torch.tensor([76, 0, 40, 70, IGNORE])
    over = logits.clone()
    assert_exact((gradient_over(over, targets, whole(77), "fused"), over), logits, targets)
    assert_exact(in_parts(logits, targets, (30,), "fused"), logits, targets)


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 6), st.integers(2, 300)),
    st.sampled_from(TYPES),
    st.sampled_from(("dense", "slice")),  # logits are a product's result: neighbours are beside each other
    st.floats(0.0, 1.0),
)
def test_any_shape_row_stride_and_cut_will_do(shape, dtype, strides, share):
    logits, targets = draw(shape, dtype, 1, strides), some_targets(*shape)
    cut = round(share * shape[1])
    assert_exact(in_parts(logits, targets, (cut,), "fused"), logits, targets)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(deadline=None, max_examples=6, derandomize=True, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 20), st.integers(2, 50)),
    st.sampled_from(STRIDES),
    st.sampled_from(STRIDES),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.7]),
)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(kernels, sizes, x_strides, strides, rows, softcap):
    dtype = torch.float64 if kernels == "plain" else torch.float32
    batch, sequence, hidden, vocab = sizes
    x = draw((batch, sequence, hidden), dtype, 1, x_strides).requires_grad_()
    projection = draw((vocab, hidden), dtype, 2, strides).requires_grad_()
    targets = some_targets(batch * sequence, vocab).reshape(batch, sequence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "LOGIT_ROWS", rows)  # with the next line: as many rows in a chunk
        patch.setattr(spec, "LOGIT_BYTES", 1)
        weighed, total = weighted_loss(x, projection, targets, WEIGHT, kernels=kernels, softcap=softcap)
        (weighed * 3).backward()
    leaves = [each.detach().double().requires_grad_() for each in (x, projection)]
    logits = softcapped(leaves[0] @ leaves[1].t(), softcap).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (expected * WEIGHT * 3).backward()
    step = STEP.get(dtype, ROUNDING)
    assert_near(total, expected.detach(), step)
    assert_near(weighed.detach(), expected.detach() * WEIGHT, step)
    for mine, theirs in zip((x, projection), leaves, strict=True):
        assert_near(mine.grad, theirs.grad, step)


def test_logits_of_one_chunk_exist_at_a_time(monkeypatch):
    monkeypatch.setattr(spec, "LOGIT_ROWS", 4)
    monkeypatch.setattr(spec, "LOGIT_BYTES", 1)
    seen = []
    monkeypatch.setattr(
        cross_entropy,
        "softmax_gradient",
        lambda logits, *rest: seen.append(tuple(logits.shape)) or softmax_gradient(logits, *rest),
    )
    weighted_loss(draw((1, 10, 6), torch.float32, 1), draw((20, 6), torch.float32, 2), some_targets(10, 20), WEIGHT)
    assert seen == [(4, 20), (4, 20), (2, 20)]


def test_without_gradients_nothing_is_multiplied_for_them(monkeypatch):
    x, projection = (draw(shape, torch.float32, 1).requires_grad_() for shape in ((1, 10, 6), (20, 6)))
    made = []
    monkeypatch.setattr(cross_entropy._GradientSum, "add", lambda self, gradient, x: made.append(x))
    with torch.no_grad():
        weighed, _ = weighted_loss(x, projection, some_targets(10, 20), WEIGHT)
    assert made == []
    assert not weighed.requires_grad


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_target_far_beneath_another_parts_logits_keeps_its_gradient(kernels):
    """A factor so small that bf16 has no number for it would take the target's gradient with it."""
    logits, targets = draw((4, 40), torch.bfloat16, 1), torch.tensor([3, 7, 0, 19])
    logits[:, 20:] += 100.0
    weight = torch.tensor(2.5e-7)
    told: list[torch.Tensor] = []
    for among in (torch.amax, torch.sum, torch.sum, None):
        heard = []
        for first in (0, 20):
            said: list[torch.Tensor] = []
            answer = answering(told, said)
            part = VocabShard(first=first, largest=20, ranks=2, max=answer, sum=answer)
            piece = logits[:, first : first + 20].clone()
            _, factors = softmax_gradient(piece, targets, weight, part, kernels)
            heard.append(said)
            if among is None and first == 0:
                rows = torch.ones(4, 8, dtype=torch.bfloat16)
                entering = rows if factors is None else torch.mul(rows, factors, out=torch.empty_like(rows))
                gradient = (piece.t().float() @ entering.float())[targets]
                torch.testing.assert_close(gradient, torch.full_like(gradient, -2.5e-7), rtol=0.02, atol=0.0)
        if among is not None:
            told.append(among(torch.stack([said[len(told)] for said in heard]), 0))


def test_narrow_logits_give_a_wide_loss_and_narrow_gradients():
    x = draw((1, 10, 6), torch.bfloat16, 1).requires_grad_()
    projection = draw((20, 6), torch.bfloat16, 2).requires_grad_()
    weighed, total = weighted_loss(x, projection, some_targets(10, 20), WEIGHT)
    weighed.backward()
    assert (total.dtype, weighed.dtype) == (torch.float32, torch.float32)
    assert x.grad is not None
    assert projection.grad is not None
    assert (x.grad.dtype, projection.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("vocab", "rows", "frozen"), [(50304, 20480, 5120), (128256, 8192, 2048), (2**31, 1024, 1024)])
def test_a_chunk_is_two_gibibytes_of_logits_or_the_fewest_rows(vocab, rows, frozen):
    assert spec.logit_rows(vocab, 2, is_frozen=False) == rows
    assert spec.logit_rows(vocab, 2, is_frozen=True) == frozen  # half a gibibyte
