from itertools import pairwise

import pytest

from meshwright.config.run import Optim
from meshwright.optim.interface import learning_rate


def rates(steps=100, **fields):
    optim = Optim(lr=1.0, min_lr_ratio=0.1, **fields)
    return [learning_rate(optim, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_a_straight_rise_that_never_starts_at_zero(schedule):
    curve = rates(schedule=schedule, warmup=4)
    assert curve[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert curve[4] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_it_falls_to_the_floor_at_the_last_step(schedule):
    curve = rates(schedule=schedule, warmup=10)
    assert curve[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(curve[10:]))


def test_constant_is_constant():
    assert set(rates(schedule="constant")) == {1.0}


def test_wsd_is_stable_until_its_decay():
    curve = rates(schedule="wsd", decay_fraction=0.25, warmup=5)
    assert set(curve[5:76]) == {1.0}
    assert curve[76] < 1.0


def test_cosine_is_halfway_in_the_middle():
    assert rates(steps=101, schedule="cosine")[50] == pytest.approx(0.55)


def test_a_run_of_one_step_or_a_warm_up_longer_than_it_has_a_rate():
    assert rates(steps=1, schedule="cosine") == [1.0]
    assert all(0 < rate < 1 for rate in rates(steps=5, schedule="linear", warmup=10))
