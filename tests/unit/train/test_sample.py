"""The token that follows."""

import pytest
import torch

from meshwright.train.step import draw

LOGITS = torch.tensor([1.0, 3.0, -2.0])


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-38])
def test_near_temperature_zero_it_is_the_likeliest(temperature):
    assert draw(LOGITS, temperature, torch.Generator().manual_seed(1)).tolist() == [1]


@pytest.mark.parametrize("logits", [[1.0, float("nan"), 0.0], [float("inf"), 1.0, float("inf")]])
def test_logits_that_are_not_finite_still_give_a_token(logits):
    (token,) = draw(torch.tensor(logits), 0.8, torch.Generator().manual_seed(1)).tolist()
    assert 0 <= token < 3


def test_else_every_token_comes_as_often_as_it_is_likely():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.cat([draw(LOGITS, 1.0, generator) for _ in range(1000)])
    shares = torch.bincount(drawn, minlength=3) / 1000
    torch.testing.assert_close(shares, LOGITS.softmax(-1), atol=0.04, rtol=0.0)
