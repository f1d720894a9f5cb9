"""The norm of a gradient, however long its tensors are."""

import pytest
import torch

from meshwright.optim.clip import LONG, ROW, square_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_tensor_in_host_memory_loses_nothing(dtype):
    gradient = torch.full((1 << 22,), 1e-3, dtype=dtype)  # of equals a running sum is furthest off: 0.6 % here
    truth = gradient.double().square().sum()
    # Sixteen lanes of 2¹⁰ additions each, every one wrong by at most 2⁻²⁴ of the sum.
    assert square_norm([gradient]).item() == pytest.approx(truth.item(), rel=1e-4)


@pytest.mark.parametrize("numel", [1, LONG - 1, LONG, LONG + 1, LONG + ROW + 7])
def test_every_element_counts_once(numel):
    tensors = [torch.randn(numel, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)]
    truth = sum(tensor.square().sum().item() for tensor in tensors)
    assert square_norm(tensors).item() == pytest.approx(truth, rel=1e-14)


def test_a_part_may_be_empty_and_one_element_may_spoil_all():
    assert square_norm([torch.zeros(0), torch.ones(4)]) == 4
    for place in (0, ROW, LONG):
        spoiled = torch.zeros(LONG + 1)
        spoiled[place] = torch.inf
        assert not square_norm([spoiled]).isfinite()
