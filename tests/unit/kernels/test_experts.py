"""Rows of a mixture of experts: the kernels are their plain twins, whatever was kept."""

import pytest
import torch
from kernel_cases import TYPES, assert_same, interpreted
from kernel_pairs import row_pair

from meshwright.kernels.experts import takes_grouped


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("kind", ["dispatched", "combined"])
def test_the_kernel_is_its_twin(kind, share, dtype):
    assert_same(*row_pair(kind, (7, 3, 20), share, dtype))


def test_grouped_matmuls_are_for_hopper_alone():
    assert not takes_grouped(torch.device("cpu"), torch.bfloat16, 64)
