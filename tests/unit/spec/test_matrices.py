"""Whole matrices are shared out over all ranks that hold them: once each, evenly, and the same everywhere."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec import matrices
from meshwright.spec.matrices import MatrixCut, owned_flops, share_out

CUTS = st.builds(
    MatrixCut,
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    tp=st.integers(1, 4),
    tp_dim=st.integers(0, 1),
    shard=st.integers(1, 5),
    shard_dim=st.integers(0, 1),
)


@settings(deadline=None)
@given(CUTS)
def test_the_pieces_of_a_matrix_are_all_of_it_once(cut):
    seen = Counter(
        (row, column)
        for member in range(cut.ranks)
        for row in range(*cut.region(member)[0].indices(cut.rows))
        for column in range(*cut.region(member)[1].indices(cut.columns))
    )
    assert set(seen.values()) == {1}
    assert len(seen) == cut.elements
    assert sum(math.prod(cut.piece(member)) for member in range(cut.ranks)) == cut.elements


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([(8, 8), (8, 32), (2, 8), (16, 4)]), st.integers(0, 90)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 100, 1 << 26]),
)
def test_every_matrix_has_one_owner_and_no_owner_much_more_than_another(shapes, replicas, ranks, most):
    held = {MatrixCut(rows=rows, columns=columns, shard=ranks): count for (rows, columns), count in shapes.items()}
    before, matrices.BATCH_ELEMENTS = matrices.BATCH_ELEMENTS, most
    try:
        batches = share_out(held, replicas)
        copied = [[list(batch.copies(member)) for member in range(ranks)] for batch in batches]
    finally:
        matrices.BATCH_ELEMENTS = before
    made = Counter((batch.cut, one) for batch in batches for each in range(replicas) for one in batch.made_by(each))
    assert made == Counter((cut, one) for cut, count in held.items() for one in range(count))
    loads = [owned_flops(batches, owner) for owner in range(replicas * ranks)]
    # The costliest come first, each rest to whoever has least: one matrix more at most.
    assert max(loads) - min(loads) <= max((cut.flops for cut in held), default=0)
    for batch, members in zip(batches, copied, strict=True):
        assert max(batch.owned) * batch.cut.elements <= max(most, batch.cut.elements)
        for slices in members:
            taken = [place for part in slices for place in range(part.start, part.stop)]
            assert taken == list(range(batch.largest if replicas > 1 else 0))


def test_a_few_matrices_go_to_several_replicas_before_several_ranks_of_one():
    (batch,) = share_out({MatrixCut(rows=4, columns=4, shard=2): 2}, replicas=2)
    assert batch.owned == (1, 0, 1, 0)
    assert batch.largest == 1


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (3, 2)])
def test_operations_are_those_of_the_products(rows, columns):
    gram, square, product = 2 * 2 * 2 * 3, 2 * 2**3, 2 * 2 * 2 * 3
    assert MatrixCut(rows=rows, columns=columns).flops == 5 * (gram + square + product)
