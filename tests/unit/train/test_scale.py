import torch

from meshwright.optim.clip import FIRST, GROW_AFTER, LossScale
from meshwright.spec.plan import Plan

CPU = torch.device("cpu")
YES, NO = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)


def test_other_precisions_have_a_scale_of_one_that_stays():
    scale = LossScale(Plan(microbatch=1, precision="bf16"), CPU)
    scale.update(NO)
    assert scale.value == 1.0


def test_it_halves_at_an_overflow_and_never_below_one():
    scale = LossScale(Plan(microbatch=1, precision="fp16"), CPU)
    scale.update(NO)
    assert scale.value == FIRST / 2
    for _ in range(100):
        scale.update(NO)
    assert scale.value == 1.0


def test_it_doubles_after_a_streak_that_an_overflow_breaks():
    scale = LossScale(Plan(microbatch=1, precision="fp16"), CPU)
    for _ in range(GROW_AFTER - 1):
        scale.update(YES)
    assert scale.value == FIRST
    scale.update(YES)
    assert scale.value == 2 * FIRST
    for _ in range(GROW_AFTER - 1):
        scale.update(YES)
    scale.update(NO)
    assert scale.value == FIRST
    scale.update(YES)
    assert scale.value == FIRST
