import math

import pytest
import torch

from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.layers import token_loss_sum


def test_the_sum_is_over_valid_targets():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, IGNORE, 4], [IGNORE, 0, 2]])
    expected = 0.0
    for row, column in [(0, 0), (0, 2), (1, 1), (1, 2)]:
        expected -= math.log(logits[row, column].softmax(0)[targets[row, column]])
    assert token_loss_sum(logits, targets).item() == pytest.approx(expected, rel=1e-14)


def test_ignored_targets_have_no_gradient():
    logits = torch.randn(1, 2, 5, requires_grad=True)
    token_loss_sum(logits, torch.tensor([[IGNORE, 3]])).backward()
    assert logits.grad[0, 0].abs().max() == 0
    assert logits.grad[0, 1].abs().max() > 0


def test_nothing_valid_costs_nothing():
    assert token_loss_sum(torch.randn(1, 2, 5), torch.full((1, 2), IGNORE)) == 0


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_the_loss_is_computed_wide(dtype, wide):
    logits = torch.randn(2, 3, 50).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (2, 3))
    loss = token_loss_sum(logits, targets)
    loss.backward()
    assert loss.dtype == wide
    assert logits.grad.dtype == dtype
    exact = token_loss_sum(logits.double(), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)  # float32 keeps seven digits; bfloat16 would keep two
