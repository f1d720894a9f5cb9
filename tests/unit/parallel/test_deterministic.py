import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from meshwright.parallel.deterministic import Tree, described, fold, tree_sum
from meshwright.spec.plan import Plan

QUICK = settings(deadline=None, max_examples=40, derandomize=True)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def halves(terms: Tensor) -> Tensor:
    """A binary tree over neighbours as one would draw it: the first part is the largest power of two short of all."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << ((len(terms) - 1).bit_length() - 1)
    return halves(terms[:middle]) + halves(terms[middle:])


def added(tree: Tree, terms: Tensor) -> Tensor:
    sums = [tree.add(term) for term in terms]
    assert all(partial is None for partial in sums[:-1])
    assert sums[-1] is not None
    return sums[-1]


@QUICK
@given(st.integers(1, 70))
def test_terms_that_come_one_by_one_are_added_as_the_tree(count):
    terms = random(count, 5)
    tree = Tree(count)
    for _ in range(2):  # a finished tree begins anew
        assert torch.equal(added(tree, terms), halves(terms))
        assert tree.seen == 0


def test_the_tree_is_not_the_sum_from_left_to_right():
    terms = random(64, 100)
    assert not torch.equal(added(Tree(64), terms), terms.cumsum(0)[-1])


def test_a_tree_keeps_log2_of_its_terms_and_leaves_them_as_they_are():
    terms = random(16, 3)
    before, tree, held = terms.clone(), Tree(16), []
    for term in terms:
        tree.add(term)
        held.append(len(tree.parts))
    assert max(held) == 4
    assert torch.equal(terms, before)


@QUICK
@given(st.integers(0, 6), st.integers(0, 6))
def test_ranks_that_add_their_own_terms_first_change_nothing(terms_log2, ranks_log2):
    count = 2**terms_log2
    ranks = 2 ** min(ranks_log2, terms_log2)
    terms = random(count, 5)
    subtrees = torch.stack([added(Tree(count // ranks), mine) for mine in terms.chunk(ranks)])
    assert torch.equal(tree_sum(subtrees), added(Tree(count), terms))


@QUICK
@given(st.integers(1, 300), st.integers(1, 9))
def test_a_row_folds_alike_whoever_holds_it(width, rows):
    x = random(rows, width).double()
    whole = fold(x.clone())
    torch.testing.assert_close(whole, x.sum(-1), rtol=1e-9, atol=1e-12)  # two orders of at most 300 sums of 1e-16 each
    assert torch.equal(whole, torch.cat([fold(row[None].clone()) for row in x]))


def test_no_rows_fold_to_no_sums():
    assert fold(torch.ones(0, 7)).shape == (0,)


def test_the_log_says_the_mode_and_its_buffers_or_nothing():
    model = torch.nn.Linear(10, 10, bias=False)
    assert described(Plan(microbatch=2, grad_accum=4), [model]) == []
    (line,) = described(Plan(microbatch=2, grad_accum=4, replicate=2, deterministic=True), [model])
    assert "over 8 global microbatches of 2" in line
    assert "2 buffers of 400 bytes" in line
