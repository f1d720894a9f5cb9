"""Rows of a mixture of experts: the kernels are their plain twins, whatever was kept."""

import pytest
import torch
from kernel_cases import TYPES, assert_same, interpreted
from kernel_pairs import row_pair

from meshwright.kernels.experts import ALIGNED, low_rank_by_segment, low_rank_matmul, takes_grouped, widened


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("kind", ["dispatched", "combined"])
def test_the_kernel_is_its_twin(kind, share, dtype):
    assert_same(*row_pair(kind, (7, 3, 20), share, dtype))


def test_grouped_matmuls_are_for_hopper_alone():
    assert not takes_grouped(torch.device("cpu"), torch.bfloat16, 64)


@pytest.mark.parametrize("rank", [3, 8])
def test_a_rank_that_grouped_matmuls_do_not_take_is_filled_up(rank):
    torch.manual_seed(1)
    x, ends = torch.randn(10, 16), torch.tensor([4, 4, 9], dtype=torch.int32)
    a, b = torch.randn(3, rank, 16), torch.randn(3, 24, rank)
    wide, high = widened(a.bfloat16(), b.bfloat16())
    assert wide.shape[1] == high.shape[2] == 8
    assert wide.stride(1) * wide.element_size() % ALIGNED == high.stride(1) * high.element_size() % ALIGNED == 0
    plain = low_rank_by_segment(x, a, b, ends)
    assert torch.allclose(low_rank_matmul(x, a, b, ends)[:9], plain[:9], rtol=1e-5, atol=1e-5)
    assert torch.allclose(plain[4:9], x[4:9] @ a[2].T @ b[2].T, rtol=1e-5, atol=1e-5)
