"""The arithmetic of offloaded states: halves that lose nothing, rounding that is right on average."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.run import Optim
from meshwright.optim import offload
from meshwright.optim.interface import UpdateTerms
from meshwright.optim.master_weights import join, round_stochastic, rounding_bits, split
from meshwright.optim.offload import StatePiece
from meshwright.optim.resident import rule_of

RULE = rule_of(Optim())
PIECE = StatePiece(group=0, weight=0, begin=0, end=0, last=True)


def terms(count=1.0, factor=1.0, finite=1.0, decay=0.0):
    numbers = (torch.tensor(value, dtype=torch.float64) for value in (factor, finite))
    return UpdateTerms(1e-2, decay, torch.tensor(count), *numbers)


@given(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=50), st.booleans())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_the_two_halves_of_a_wide_weight_lose_no_bit(values, negative):
    bits = [value - 2**31 for value in values] if negative else values  # every finite number, the smallest included
    master = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight, low = split(master)
    assert weight.dtype == torch.bfloat16
    assert low.dtype == torch.int16
    assert torch.equal(join(weight, low).view(torch.int32), master.view(torch.int32))


def test_a_number_halfway_between_two_narrow_ones_survives_too():
    bits = torch.arange(0x3F800000, 0x3F800000 + 0x40000, dtype=torch.int32)  # four narrow numbers and all between
    master = bits.view(torch.float32)
    weight, low = split(master)
    assert torch.equal(join(weight, low), master)
    # Half a unit of bf16, which has 8 bits: 2⁻⁸ of a number between 1 and 2, at most.
    assert (weight.float() - master).abs().max() <= 2.0**-8


def test_the_narrow_half_is_the_nearest_number():
    torch.manual_seed(0)
    master = torch.randn(100_000)
    weight, _ = split(master)
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~ties], master.bfloat16()[~ties])


def test_random_rounding_is_right_on_average_and_leaves_narrow_numbers_alone():
    count = torch.tensor(7.0)
    wide = torch.full((1 << 18,), 1.001)
    narrow = round_stochastic(wide, rounding_bits(3, 0, count, len(wide)) & 0xFFFF)
    assert sorted(set(narrow.tolist())) == [1.0, 1.0078125]
    # The mean of 2¹⁸ choices between neighbours 2⁻⁷ apart spreads by at most 2⁻⁷ ÷ 2 ÷ 2⁹; four times that is allowed.
    assert narrow.double().mean().item() == pytest.approx(wide[0].item(), abs=4 * 2.0**-17)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_stochastic(exact.float(), rounding_bits(3, 0, count, 1000) & 0xFFFF), exact)


def test_the_upper_bits_of_a_draw_are_as_even_as_the_lower():
    drawn = rounding_bits(0, 0, torch.tensor(1.0), 1 << 18)
    for lane in (drawn & 0xFFFF, (drawn >> 16) & 0xFFFF):
        counts = torch.bincount(lane.long() >> 8, minlength=256).double()
        # Of 256 bins with 1024 each, the sum of squared deviations ÷ 1024 is 255 ± 22.6: five times that is allowed.
        assert abs(((counts - 1024) ** 2 / 1024).sum().item() - 255) < 5 * 22.6


def test_draws_differ_by_weight_element_and_update_and_do_not_depend_on_the_cut():
    one = rounding_bits(0, 0, torch.tensor(1.0), 100)
    assert torch.equal(one[40:], rounding_bits(0, 40, torch.tensor(1.0), 60))
    assert (one == rounding_bits(1, 0, torch.tensor(1.0), 100)).sum() == 0
    assert (one == rounding_bits(0, 0, torch.tensor(2.0), 100)).sum() == 0


def test_a_moment_that_decays_slowly_goes_on_decaying_in_16_bits():
    size, steps, beta2 = 4096, 300, 0.999
    rule = rule_of(Optim(beta2=beta2))
    held = [torch.zeros(size, dtype=torch.int16), *(torch.full((size,), 1.0).bfloat16() for _ in range(2))]
    weight, gradient = torch.zeros(size).bfloat16(), torch.zeros(size).bfloat16()
    for step in range(steps):
        offload.update_bf16(rule, held, weight, gradient, terms(step + 1.0), PIECE)
    # Rounded to nearest it would never leave 1: a thousandth is less than half of bf16's last bit. The mean of 4096
    # moments, each off by a walk of 300 steps of at most 2⁻⁸, spreads by less than 2⁻⁸ · √300 ÷ 64 = 0.001.
    assert held[2].float().mean().item() == pytest.approx(beta2**steps, abs=0.004)


@pytest.mark.parametrize("size", [1, 17, 5000])
def test_an_update_in_halves_moves_the_wide_weight_as_the_wide_one_does(size):
    torch.manual_seed(1)
    master, gradient = torch.randn(size), torch.randn(size).bfloat16()
    wide = [master.clone(), torch.zeros(size), torch.zeros(size)]
    weight, low = split(master)
    halves = [low, torch.zeros(size).bfloat16(), torch.zeros(size).bfloat16()]
    narrow = weight.clone()
    offload.update_fp32(RULE, wide, narrow, gradient, terms(decay=0.1), PIECE)
    offload.update_bf16(RULE, halves, weight, gradient, terms(decay=0.1), PIECE)
    assert torch.equal(
        join(weight, halves[0]), wide[0]
    )  # the first update starts from moments of zero, which are exact


def test_an_update_that_is_left_out_leaves_every_bit():
    torch.manual_seed(2)
    weight, low = split(torch.randn(1000))
    held = [low, torch.randn(1000).bfloat16(), torch.rand(1000).bfloat16()]
    before = [weight.clone(), *(state.clone() for state in held)]
    bad = terms(factor=0.0, finite=0.0, decay=0.1)
    gradient = torch.full((1000,), float("nan")).bfloat16()
    offload.update_bf16(RULE, held, weight, gradient, bad, PIECE)
    assert all(torch.equal(now, then) for now, then in zip([weight, *held], before, strict=True))
