"""The noise scale by its own definition: gradients drawn with a known mean and covariance."""

import random

import pytest

from meshwright.runtime.records import StepRecord
from meshwright.train.noise_scale import estimate, noise_scale


def drawn(generator: random.Random, count: int) -> tuple[float, float]:
    """p and q of `count` microbatches in 64 dims, whose gradient has mean 1 and variance 4 in each."""
    parts = [[generator.gauss(1.0, 2.0) for _ in range(64)] for _ in range(count)]
    whole = [sum(column) / count for column in zip(*parts, strict=True)]
    return sum(x * x for part in parts for x in part) / count, sum(x * x for x in whole)


def step(number: int, variance: float | None, square: float | None, **fields) -> StepRecord:
    known = {"loss": 1.0, "norm": 1.0, "rate": 1.0, "tokens": 800, "seconds": 1.0, "data_seconds": 0.0}
    return StepRecord(
        step=number, memory_bytes=0, flops=0.0, gradient_variance=variance, gradient_square=square, **known | fields
    )


@pytest.mark.parametrize("count", [2, 4, 16])
def test_estimates_are_right_on_average(count):
    generator = random.Random(1)
    found = [estimate(*drawn(generator, count), count) for _ in range(2000)]
    variance, square = (sum(column) / len(found) for column in zip(*found, strict=True))
    # 2,000 draws of 64 dims: one standard error is below 1 % of the variance and 2 % of the square with 2 microbatches.
    assert variance == pytest.approx(64 * 4.0, rel=0.04)
    assert square == pytest.approx(64 * 1.0, rel=0.08)


def test_microbatches_that_are_alike_have_no_noise():
    assert estimate(3.0, 3.0, 8) == (0.0, 3.0)


def test_the_noise_scale_averages_both_parts_of_the_ratio():
    records = [step(1, 300.0, 1.0), step(2, 100.0, 3.0), step(3, 5.0, 9.0, skipped=True), step(4, None, None)]
    found = noise_scale(records, batch=8)
    assert found is not None
    assert (found.tokens, found.sequences, found.steps) == (100.0, 1.0, 2)  # 800 tokens in 8 sequences


def test_without_a_measurement_or_a_gradient_there_is_none():
    assert noise_scale([step(1, None, None)], batch=8) is None
    assert noise_scale([step(1, 5.0, -1.0)], batch=8) is None
    assert noise_scale([], batch=8) is None
