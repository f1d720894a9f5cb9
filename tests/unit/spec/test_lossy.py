"""How gradients are cut, rounded and factored on their way: pure numbers."""

import math

import pytest

from meshwright.spec.communication import block_of, factors, message_bytes, part_dim, part_shape


@pytest.mark.parametrize(
    ("shape", "parts", "dim", "part"),
    [
        ((64, 32), 2, 0, (32, 32)),
        ((257, 32), 2, 0, (129, 32)),  # filled up
        ((3, 64, 32), 2, 1, (3, 32, 32)),  # between rows of experts rather than filled up
        ((3, 5, 32), 2, 0, (2, 5, 32)),
        ((33,), 4, 0, (9,)),
        ((3, 4), 4, 0, (1, 4)),  # never within a row, whose elements share scales
    ],
)
def test_a_sum_is_shared_out_in_parts_that_cut_no_row(shape, parts, dim, part):
    assert (part_dim(shape, parts), part_shape(shape, parts)) == (dim, part)
    assert math.prod(part) * parts >= math.prod(shape)


def test_a_message_has_vectors_as_they_are_and_of_matrices_codes_and_scales():
    tensors = [(64, 0), (1024, block_of((8, 128))), (33, block_of((1, 33)))]
    assert block_of((8, 128)) == 16  # which eight ranks of tp may cut into rows of 16
    assert message_bytes("int8", tensors, 4) == 64 * 4 + (64 + 1) * 4 + 1024 + 33
    assert message_bytes("int4", tensors, 4) == 64 * 4 + (64 + 1) * 4 + (1024 + 33 + 1) // 2
    assert message_bytes("bf16", tensors, 4) == message_bytes("fp16", tensors, 8) == 2 * (64 + 1024 + 33)


def test_factors_have_the_short_side_first_and_no_more_rank_than_it():
    wide, tall, stack = factors((8, 32), 2), factors((32, 8), 20), factors((4, 8, 16), 3)
    assert wide is not None
    assert tall is not None
    assert stack is not None
    assert (wide.first, wide.second, wide.transposed) == (16, 64, False)
    assert (tall.rank, tall.first, tall.second, tall.transposed) == (8, 64, 256, True)
    assert (stack.first, stack.second) == (4 * 8 * 3, 4 * 16 * 3)
    assert factors((8,), 2) is None
