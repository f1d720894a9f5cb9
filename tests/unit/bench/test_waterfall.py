"""A step taken apart: parts add up to it, and nothing is called the peak's that was faster or slower."""

import pytest

from meshwright.bench.measure import shares
from meshwright.config.presets import preset
from meshwright.cost.flops import attention_flops, step_flops

SPENT = {"matmul": 0.16, "attention": 0.08, "optimizer": 0.01}


def test_matmuls_and_attention_are_each_held_to_the_peak():
    found = {part.name: part.seconds for part in shares(SPENT, {"matmul": 0.12, "attention": 0.05}, 0.27)}
    assert found == pytest.approx(
        {
            "matmul at peak": 0.12, "matmul above peak": 0.04, "attention at peak": 0.05,
            "attention above peak": 0.03, "optimizer": 0.01, "nothing running": 0.02,
        }
    )  # fmt: skip


@pytest.mark.parametrize("ideal", [{}, {"matmul": 0.2, "attention": 0.01}, {"matmul": 0.1}])
@pytest.mark.parametrize("wall", [0.2, 0.25, 0.4])  # kernels of a trace may end after the clock
def test_shares_add_up_whatever_is_known_of_the_peak(ideal, wall):
    found = shares(SPENT, ideal, wall)
    assert sum(part.share for part in found) == pytest.approx(1)
    assert sum(part.seconds for part in found) == pytest.approx(max(wall, sum(SPENT.values())))
    assert all(part.seconds >= 0 for part in found)


def test_attention_has_its_part_of_the_models_operations():
    arch = preset("gpt2")
    short, long = (attention_flops(arch, length, 1) / step_flops(arch, length, 1) for length in (128, 1024))
    # Of GPT-2's 12 layers: 4 · 768 · s operations a token beside 2 of each of 124 M matrix elements.
    assert long == pytest.approx(4 * 12 * 768 * 1024 / (4 * 12 * 768 * 1024 + 2 * 123.5e6), rel=0.01)
    assert short < long / 6
