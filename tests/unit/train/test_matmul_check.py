"""Checksums of matmuls: what they find, how small it may be, and that rounding alone is never found."""

import random
from types import SimpleNamespace

import pytest
import torch

from meshwright.config import load
from meshwright.runtime.failure import Exit, FailureError
from meshwright.spec.problem import InputError
from meshwright.train import matmul_check
from meshwright.train.inject import FaultyMatmuls
from meshwright.train.matmul_check import (
    Checked,
    MatmulCheck,
    Matmuls,
    Product,
    folded,
    group_of,
    judged,
    product_of,
    residual,
    signs_of,
)

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def product(a, b, bias=None):
    args = (a, b) if bias is None else (bias, a, b)
    found = product_of(MM if bias is None else ADDMM, args, {}, torch.mm(a, b) if bias is None else ADDMM(*args))
    assert found is not None
    return found


def drawn(rows, inner, columns, dtype, seed=0):
    """A layer's matmul: x times a transposed weight."""
    chance = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inner, generator=chance), torch.randn(columns, inner, generator=chance)
    return product(x.to(dtype), weight.to(dtype).t())


def worst(one: Product) -> float:
    return residual(one).scores.max().item()


def test_rounding_is_never_found_in_products_of_many_kinds():
    """Two thousand products: every dtype, odd shapes, scales, outliers, sums that cancel and sums that do not."""
    chance, torch_chance = random.Random(0), torch.Generator().manual_seed(0)
    largest = dict.fromkeys(DTYPES, 0.0)
    for number in range(2000):
        dtype = DTYPES[number % 4]
        rows, inner, columns = (chance.choice([1, 2, 3, 8, 31, 64, 100, 192]) for _ in range(3))
        a, b = torch.randn(rows, inner, generator=torch_chance), torch.randn(inner, columns, generator=torch_chance)
        match number // 4 % 5:
            case 1:
                a, b = a.abs(), b.abs()  # all terms have one sign
            case 2:
                a[:, chance.randrange(inner)] *= 300  # an outlier in every row, as hidden states have
            case 3:
                a, b = a * 10.0 ** chance.randint(-4, 1), b * 10.0 ** chance.randint(-3, 1)
            case 4:
                a = torch.cat([a, -a + 1e-3 * a.flip(1)], 1)  # sums that nearly vanish
                b = torch.cat([b, b])
        b = b.t().contiguous().t() if number % 2 else b
        bias = torch.randn(columns, generator=torch_chance).to(dtype) if number % 3 == 0 else None
        largest[dtype] = max(largest[dtype], worst(product(a.to(dtype), b.to(dtype), bias)))
    assert all(0 < score < 0.4 for score in largest.values()), largest


def test_long_sums_of_one_sign_stay_within_the_tolerance():
    """The worst case of rounding in sums: every partial sum is as large as it can be."""
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.rand(4, 20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert worst(product(ones, ones.t())) < 0.5


# The least change that is found, as a share of a typical element (K = 256): see `tolerances`.
LEAST = {torch.float32: 1.0e-3, torch.bfloat16: 0.5, torch.float16: 0.06, torch.float64: 2e-12}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_is_found_down_to_the_stated_size(dtype):
    one = drawn(64, 256, 128, dtype)
    tolerance = residual(one).tolerance
    typical = one.c.float().std().item()
    assert LEAST[dtype] / 4 < tolerance.max().item() / typical < LEAST[dtype]
    changed = one.c.clone()
    changed[17, 5] += torch.tensor(2.2 * LEAST[dtype] * typical).to(dtype)
    assert worst(one._replace(c=changed)) > 1
    scores = residual(one._replace(c=changed)).scores
    assert divmod(scores.argmax().item(), scores.shape[1])[0] == 17


@pytest.mark.parametrize(("dtype", "found"), [(torch.float32, range(12)), (torch.bfloat16, range(8))], ids=str)
def test_sign_exponent_and_high_mantissa_bits_are_found(dtype, found):
    """Of an element of typical size, in the order of bits: sign, exponent, and of fp32 the highest of the mantissa."""
    one = drawn(64, 256, 128, dtype)
    typical = one.c.float().std().item()
    place = divmod((one.c.float() - 1.2 * typical).abs().argmin().item(), 128)
    for bit in found:
        changed = one.c.clone()
        value = changed[place].reshape(1).clone()
        number = 8 * value.element_size() - 1 - bit
        value.view(torch.uint8)[number // 8] ^= 1 << number % 8
        changed[place] = value[0]
        assert worst(one._replace(c=changed)) > 1, bit


def test_what_is_not_finite_is_found_where_it_cannot_be_an_overflow():
    one = drawn(32, 64, 64, torch.float16)
    for wrong in (torch.inf, torch.nan):
        changed = one.c.clone()
        changed[3, 4] = wrong
        assert worst(one._replace(c=changed)) == torch.inf
    large = product(one.a * 1000, one.b * 1000)  # overflows by itself
    assert not large.c.isfinite().all()
    assert worst(large) < 1
    unknown = one.a.clone()
    unknown[0] = torch.nan  # another's fault: what came in was no number
    assert worst(product(unknown, one.b)) < 1


def test_groups_divide_and_transposed_views_are_summed_alike():
    assert [group_of(columns) for columns in (4096, 50257, 96, 7, 13, 53)] == [32, 29, 32, 7, 13, 53]
    x = torch.randn(64, 96)
    assert torch.equal(signs_of(32, x.dtype, x.device).abs(), torch.ones(32))
    signs = signs_of(32, x.dtype, x.device)
    torch.testing.assert_close(folded(x, signs), folded(x.t().contiguous().t(), signs))
    torch.testing.assert_close(folded(x, signs), (x.unflatten(1, (3, 32)) * signs).sum(-1))


def test_large_matrices_are_taken_in_parts(monkeypatch):
    one = drawn(100, 64, 96, torch.bfloat16)
    whole = residual(one)
    monkeypatch.setattr(matmul_check, "CHUNK", 96 * 40)
    torch.testing.assert_close(residual(one).expected, whole.expected)
    torch.testing.assert_close(residual(one).scores, whole.scores)


def test_a_passing_flip_is_right_when_multiplied_again_and_a_lasting_one_is_not(monkeypatch):
    one = drawn(100, 64, 96, torch.float32)
    one.c[70, 3] += 100.0
    first, again = judged(one).tolist()
    assert first > 1 > again
    faulty = FaultyMatmuls(1.0, random.Random(0), bit=1)
    monkeypatch.setattr(matmul_check, "multiply", lambda product, a: faulty.multiply(original, product, a))
    assert min(judged(one).tolist()) > 1
    assert faulty.flips == 1


original = matmul_check.multiply


def test_matmuls_with_other_factors_are_left_alone():
    a, bias = torch.randn(4, 4), torch.randn(4)
    assert product_of(ADDMM, (bias, a, a), {"beta": 2}, a) is None
    assert product_of(ADDMM, (a, a, a), {}, a) is None
    assert product_of(MM, (a[:0], a), {}, a[:0]) is None


class Judge(MatmulCheck):
    """Of a rank without a model: scores are handed in."""

    def add(self, step, first, again):
        self.pending.append(Checked(step, ("output of blocks.1.mlp.up",), torch.tensor([[first, again]]), None))
        return self.read(step)


@pytest.fixture
def judge():
    run = load.load(None, ["faults.check_matmuls_every=1"]).run
    return Judge(run, SimpleNamespace(chunks=[], step=0), SimpleNamespace(device=torch.device("cpu")), 5)


def test_one_passing_flip_is_told_and_a_second_ends_the_run(judge):
    assert judge.add(1, 0.1, 0.1) == []
    (flip,) = judge.add(2, 3.0, 0.1)
    assert (flip.step, flip.persists) == (2, False)
    assert judge.add(3, 0.1, 0.1) == []
    with pytest.raises(FailureError, match=r"rank 5 computes wrong matmuls.* step 2 was before") as error:
        judge.add(60, 3.0, 0.1)
    report = error.value.report
    assert (report.code, report.rank, report.step, report.good_until) == (Exit.HARDWARE, 5, 60, 1)
    assert len(report.lines()) <= 6


def test_a_lasting_flip_ends_the_run_at_once(judge):
    judge.add(1, 0.1, 0.1)
    with pytest.raises(FailureError, match="computed again it still is"):
        judge.add(2, 3.0, 2.0)


def test_what_was_saved_since_an_odd_step_is_in_doubt(judge):
    judge.add(1, 0.1, 0.1)
    judge.add(2, 0.1, 0.1)
    judge.suspect(2, 10)  # its loss was odd
    judge.add(3, 0.1, 0.1)
    with pytest.raises(FailureError, match="computed again it still is") as error:
        judge.add(4, 3.0, 2.0)
    assert error.value.report.good_until == 1


def test_a_suspicion_that_finds_nothing_passes(judge):
    judge.suspect(2, 10)
    judge.add(12, 0.1, 0.1)
    assert judge.clean == 0
    judge.add(13, 0.1, 0.1)
    assert judge.clean == 13


def test_two_flips_far_apart_are_chance(judge):
    assert len(judge.add(1, 3.0, 0.1)) == 1
    assert judge.add(matmul_check.RECURS, 0.1, 0.1) == []
    assert len(judge.add(matmul_check.RECURS + 1, 3.0, 0.1)) == 1
    assert judge.clean == 0


def test_negative_intervals_are_refused():
    with pytest.raises(InputError, match=r"faults\.check_matmuls_every = -1 is negative"):
        load.load(None, ["faults.check_matmuls_every=-1"])


def test_matmuls_are_seen_and_nothing_else():
    seen = []
    with Matmuls(lambda operator, args, kwargs, c: seen.append(operator)):
        x = torch.nn.functional.linear(torch.randn(2, 3, 4), torch.randn(5, 4))
        torch.nn.functional.linear(x, torch.randn(4, 5), torch.randn(4)).sum()
    assert seen == [MM, ADDMM]
