import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models import init
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill, fill_model, initial, key, normal, uniform
from meshwright.spec.params import Param, params

MATRIX = Param(name="blocks.0.attn.q.weight", shape=(500, 400), std=0.02)


def splitmix64(state: int) -> int:
    """The hash in Python's own integers."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def slow_normal(stream: int, index: int) -> float:
    total = 0
    for draw in (1, 2):
        word = splitmix64(stream + (2 * index + draw) * 0x9E3779B97F4A7C15)
        total += sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 262140) / math.sqrt(8 * (65536**2 - 1) / 12)


def test_the_hash_is_splitmix64():
    # The first outputs of the published generator for the seed 0, of which a uniform number has the first 24 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [splitmix64(n * 0x9E3779B97F4A7C15) for n in (1, 2)] == published
    assert uniform(0, torch.arange(2)).tolist() == [(word >> 40) / 2**24 for word in published]


def test_a_normal_number_is_the_sum_of_eight_uniform_ones():
    index = torch.tensor([0, 1, 2, 77, 10**12, 2**40 + 3])
    found = normal(key(3, "x"), index)
    # The scale is rounded to float32 and so is the product: two halves of 2⁻²³.
    assert found.tolist() == pytest.approx([slow_normal(key(3, "x"), i) for i in index.tolist()], rel=2e-7)


def test_a_uniform_number_is_the_top_of_a_hash():
    index = torch.tensor([0, 5, 10**12])
    expected = [(splitmix64(9 + (i + 1) * 0x9E3779B97F4A7C15) >> 40) / 2**24 for i in index.tolist()]
    assert uniform(9, index).tolist() == expected


def test_uniform_numbers_fill_the_unit_interval():
    numbers = uniform(key(1, "draws"), torch.arange(100_000)).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.003  # three standard errors: 3 · 0.289 ÷ √100000
    assert abs(numbers.var() * 12 - 1) < 0.01


def test_normal_numbers_have_the_promised_moments():
    numbers = normal(key(1, "weights"), torch.arange(1_000_000)).double()
    # Four standard errors of a million draws: 0.001 of the mean, 0.0007 of the deviation, 0.005 of the kurtosis.
    assert abs(numbers.mean()) < 0.004
    assert abs(numbers.std() - 1) < 0.003
    assert abs((numbers**4).mean() / numbers.var() ** 2 - 3 + 0.15) < 0.02
    assert numbers.abs().max() < 4.9


def test_neighbours_and_names_are_not_correlated():
    numbers = normal(key(1, "a"), torch.arange(100_000)).double()
    other = normal(key(1, "b"), torch.arange(100_000)).double()
    for twin in (numbers.roll(1), numbers.roll(400), other):
        assert abs((numbers * twin).mean()) < 0.0127  # four standard errors: 4 ÷ √100000


@st.composite
def regions(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple(shape), tuple(slice(start, stop) for start, stop in bounds)


@given(regions(), st.sampled_from([1, 4, 1 << 15]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_region_is_the_slice_of_the_whole(case, block):
    shape, region = case
    param = Param(name="w", shape=shape)
    whole = initial(param, 7)
    before = init.CPU_BLOCK
    try:
        init.CPU_BLOCK = block  # the blocks in which the work is done must not show
        assert torch.equal(initial(param, 7, region=region), whole[region])
        assert torch.equal(initial(param, 7), whole)
    finally:
        init.CPU_BLOCK = before


def test_a_large_region_is_the_slice_of_the_whole():
    whole = initial(MATRIX, 1)
    for region in [(slice(100, 300), slice(None)), (slice(None), slice(399, 400)), (slice(3, 499), slice(17, 300))]:
        assert torch.equal(initial(MATRIX, 1, region=region), whole[region])


def test_an_element_depends_on_its_global_index_alone():
    index = torch.arange(MATRIX.numel).view(MATRIX.shape)
    expected = normal(key(1, MATRIX.name), index).double() * 0.02
    assert torch.allclose(initial(MATRIX, 1).double(), expected, rtol=3e-7, atol=0)  # three roundings to float32


def test_seeds_and_names_give_other_weights():
    other = Param(name="blocks.1.attn.q.weight", shape=MATRIX.shape)
    assert not torch.equal(initial(MATRIX, 1), initial(MATRIX, 2))
    assert not torch.equal(initial(MATRIX, 1), initial(other, 1))


def test_every_type_holds_the_same_numbers():
    weights = initial(MATRIX, 1)
    assert torch.equal(initial(MATRIX, 1, dtype=torch.float64), weights.double())
    assert torch.equal(initial(MATRIX, 1, dtype=torch.bfloat16), weights.bfloat16())


def test_threads_do_not_show():
    weights = initial(MATRIX, 1)
    torch.set_num_threads(2)
    assert torch.equal(initial(MATRIX, 1), weights)


def test_fill_writes_where_it_is_told():
    store = torch.zeros(500, 800)
    fill(store[:, ::2], MATRIX, 1)  # not contiguous
    assert torch.equal(store[:, ::2], initial(MATRIX, 1))
    assert store[:, 1::2].abs().max() == 0


def test_fill_refuses_a_tensor_of_another_shape():
    with pytest.raises(AssertionError, match="does not hold"):
        fill(torch.zeros(400, 500), MATRIX, 1)


def test_a_model_is_filled_as_its_table_says(arch):
    model = Decoder(arch)
    fill_model(model, arch, seed=5)
    weights = dict(model.named_parameters())
    for param in params(arch):
        weight = weights[param.name]
        assert weight.requires_grad
        if param.init == "normal":
            assert abs(weight.std() / param.std - 1) < 0.25  # as few as 64 numbers: three standard errors of 1 ÷ √(2n)
        else:
            assert weight.unique().tolist() == [1.0 if param.init == "ones" else 0.0]
