"""AdamW in one pass: any number of tensors of any size are moved as float64 arithmetic moves them."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import STEP, TYPES, assert_near, draw, interpreted
from torch import Tensor, nn

from meshwright.config.run import Optim
from meshwright.kernels.adamw import BLOCK, AdamWGroup, AdamWStep
from meshwright.kernels.dispatch import Kernels
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel import precision
from meshwright.spec.plan import Plan

RATE, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
Shapes = list[tuple[int, ...]]


class Twin:
    """The same in float64, an operation at a time."""

    def __init__(self, masters: list[Tensor]):
        self.masters = [master.double() for master in masters]
        self.first, self.second = ([torch.zeros_like(master) for master in self.masters] for _ in range(2))

    def update(self, gradients: list[Tensor], factor: float, count: int) -> None:
        for i, gradient in enumerate(gradients):
            g = gradient.double() * factor
            self.first[i] = self.first[i] * BETA1 + g * (1 - BETA1)
            self.second[i] = self.second[i] * BETA2 + g.square() * (1 - BETA2)
            move = self.first[i] / (1 - BETA1**count) / ((self.second[i] / (1 - BETA2**count)).sqrt() + EPS)
            self.masters[i] = self.masters[i] * (1 - RATE * DECAY) - RATE * move


def moves(count: int, factor: float, finite: float = 1.0) -> AdamWStep:
    return AdamWStep(RATE, BETA1, BETA2, EPS, *(torch.tensor(float(number)) for number in (count, factor, finite)))


def group_of(shapes: Shapes, narrow: torch.dtype | None) -> AdamWGroup:
    masters = [draw(shape, torch.float32, seed) for seed, shape in enumerate(shapes)]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    copies = [] if narrow is None else [torch.zeros_like(master, dtype=narrow) for master in masters]
    return AdamWGroup(masters, first, second, copies)


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 50)),
            st.tuples(st.integers(1, 60), st.integers(1, 60)),
            st.sampled_from([(BLOCK,), (BLOCK + 1,), (3, 16)]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(TYPES),
    st.sampled_from((None, torch.bfloat16, torch.float16)),
    st.sampled_from(("dense", "turned", "second")),
)
def test_any_tensors_are_moved_as_in_float64(shapes, dtype, narrow, strides):
    group = group_of(shapes, narrow)
    twin = Twin(list(group.masters))
    for count in (1, 2):
        gradients = [draw(shape, dtype, 10 * count + seed, strides) for seed, shape in enumerate(shapes)]
        group.update(gradients, DECAY, moves(count, 0.5))
        twin.update(gradients, 0.5, count)
    held = [*zip(group.masters, twin.masters, strict=True), *zip(group.first, twin.first, strict=True)]
    for mine, exact in [*held, *zip(group.second, twin.second, strict=True)]:
        assert_near(mine, exact, STEP[torch.float32])
    for copy, master in zip(group.copies, group.masters, strict=False):
        assert_near(copy, master.double(), STEP[copy.dtype])  # the interpreter cuts off instead of rounding


@interpreted
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_a_gradient_that_is_not_finite_moves_nothing(narrow):
    group = group_of([(40,), (7, 9)], narrow)
    before = [tensor.clone() for tensor in (*group.masters, *group.first, *group.second, *group.copies)]
    group.update([torch.full((40,), float("nan")), torch.ones(7, 9)], DECAY, moves(1, 1.0, finite=0.0))
    after = [*group.masters, *group.first, *group.second, *group.copies]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@interpreted
def test_a_weight_without_a_gradient_does_not_change_what_others_are_read_as():
    def moved(kernels: Kernels) -> list[Tensor]:
        plan = Plan(microbatch=1, precision="bf16", bf16_params=True, grad_accum=2, kernels=kernels)
        model = nn.ParameterDict({name: draw((32, 32), torch.float32, 1) for name in ("spare", "used")})
        precision.attach([model], plan)
        optimizer = ResidentOptimizer(Optim(lr=RATE, weight_decay=0.0), model.parameters(), plan)
        model["used"].grad = draw((32, 32), torch.float32, 2)
        one = torch.ones((), dtype=torch.float64)
        optimizer.step(RATE, GradStats(one, one, one, one))
        return [precision.master(weight) for weight in model.values()]

    for mine, theirs in zip(moved("fused"), moved("plain"), strict=True):
        assert_near(mine, theirs, STEP[torch.float32])
