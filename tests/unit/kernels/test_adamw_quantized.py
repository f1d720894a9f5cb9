"""AdamW with quantized moments in one pass: the codes, scales and weights of the plain codec and arithmetic."""

from itertools import pairwise

import msgspec
import pytest
import torch
from kernel_cases import DEVICE, interpreted
from torch import Tensor, nn

from meshwright.config import load
from meshwright.kernels import adamw_quantized as kernel
from meshwright.kernels.adamw import AdamWStep
from meshwright.kernels.adamw_quantized import QuantizedGroup, QuantizedMoments
from meshwright.kernels.blockwise import MAPS, Codec, codecs, dynamic_map, packed, unpacked, values_by_code
from meshwright.kernels.dispatch import Pointer, constexpr, jit, tl
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.quantized import FORMATS

RATE, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
# Rows of whole blocks, of a block and a part, of less than one; rows of an odd length; rows cut inside a block; and an
# adapter's B.
SHAPES = (((9, 512), 0), ((5, 300), 0), ((9, 64), 0), ((3, 3, 77), 0), ((3, 160), 96), ((4, 256), 64), ((20, 16), 0))
DTYPES = ("int8", "int4", "fp8")


def nearest(x: Tensor, values: list[float]) -> Tensor:
    """By looking at every value of a map; of two that are equally near the lower."""
    return (x[..., None] - torch.tensor(values, dtype=x.dtype)).abs().argmin(-1)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("moment", [0, 1])
def test_codes_are_those_of_the_nearest_value(state_dtype, moment):
    values, codec = MAPS[state_dtype][moment], codecs(state_dtype, torch.float64, torch.device("cpu"))[moment]
    assert len(values) == (2 ** FORMATS[state_dtype].bits if state_dtype != "fp8" else (253, 126)[moment])
    assert all(low < high for low, high in pairwise(values))
    x = torch.randn(40, 300, dtype=torch.float64) ** 3
    x = x if moment == 0 else x.abs()
    scales = codec.scales(x, 0)
    block = FORMATS[state_dtype].block
    for number in range(scales.shape[1]):
        part = x[:, number * block : (number + 1) * block]
        assert torch.equal(scales[:, number], part.abs().amax(1) / max(values))
        codes = codec.encode(x, scales, 0)
        codes = unpacked(codes, x.shape[1]) if state_dtype == "int4" else codes
        mine, near = codes[:, number * block : (number + 1) * block], nearest(part / scales[:, number, None], values)
        if state_dtype == "fp8":  # its bytes are torch's own numbers
            assert torch.equal(mine.view(torch.float8_e4m3fn).double(), torch.tensor(values, dtype=torch.float64)[near])
        else:
            assert torch.equal(mine.long(), near)


def test_the_dynamic_map_is_the_papers_but_for_its_zero():
    """Decades of 1, 2, 4 … intervals; figures as in Dettmers et al. 2022, appendix, of four bits and of eight."""
    upper = [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1]
    assert dynamic_map(4, signed=True)[7:] == pytest.approx(upper)
    eight = dynamic_map(8, signed=True)
    assert eight[127] == 0
    assert eight[:127] == [-value for value in reversed(eight[128:255])]
    assert min(dynamic_map(8, signed=False)) == pytest.approx(1e-7)


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_no_second_moment_beside_others_becomes_zero(state_dtype):
    codec = codecs(state_dtype, torch.float32, torch.device("cpu"))[1]
    x = torch.tensor([[1.0, 1e-3, 1e-9, 0.0]])
    scales = codec.scales(x, 0)
    assert (codec.decode(codec.encode(x, scales, 0), scales, 0, 4) > 0).all()


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("moment", [0, 1])
def test_a_block_of_zeros_stays_zeros_and_new_states_are_zeros(state_dtype, moment):
    codec = codecs(state_dtype, torch.float32, torch.device("cpu"))[moment]
    zeros = torch.zeros(2, 300)
    scales = codec.scales(zeros, 0)
    codes = codec.encode(zeros, scales, 0)
    assert torch.equal(codec.decode(codes, scales, 0, 300), zeros)
    assert torch.equal(codec.decode(torch.zeros_like(codes), scales, 0, 300), zeros)


@pytest.mark.parametrize("columns", [1, 2, 77, 128])
def test_two_codes_share_a_byte(columns):
    codes = torch.randint(0, 16, (3, columns), dtype=torch.uint8)
    assert packed(codes).shape == (3, (columns + 1) // 2)
    assert torch.equal(unpacked(packed(codes), columns), codes)


def test_zero_has_one_code_in_fp8():
    """A sum of nothing is −0 under some plans and 0 under others."""
    codec = codecs("fp8", torch.float32, torch.device("cpu"))[0]
    x = torch.tensor([[1.0, -0.0, 0.0, -1e-9]])
    assert codec.encode(x, codec.scales(x, 0), 0).tolist() == [[0x7E, 0, 0, 0]]


def test_parts_of_a_row_have_the_blocks_of_the_whole():
    """Two ranks that cut a block have the codes of the whole row, once its scale is the largest of both."""
    for codec in (each for name in DTYPES for each in codecs(name, torch.float64, torch.device("cpu"))):
        x = torch.rand(6, 400, dtype=torch.float64) ** 2
        x[:, 230] = 2.0  # the largest of the block that is cut is on the second rank
        scales = codec.scales(x, 0)
        whole = codec.encode(x, scales, 0)
        per_byte = 8 // codec.format.bits
        for begin, end in ((0, 200), (200, 400)):
            lead, blocks = begin % codec.format.block, codec.format.blocks((begin, end))
            mine = codec.encode(x[:, begin:end], scales[:, blocks.start : blocks.stop], lead)
            assert torch.equal(mine, whole[:, begin // per_byte : end // per_byte])
        # With scales of its own the part would have other codes.
        own = codec.encode(x[:, :200], codec.scales(x[:, :200], 0), 0)
        assert not torch.equal(own, whole[:, : 200 // per_byte])


@jit
def _through_the_map(
    x: Pointer, codes: Pointer, values: Pointer,
    moment: constexpr, lines: constexpr, kind: constexpr, bits: constexpr, size: constexpr,
) -> None:  # fmt: skip
    """Codes of some elements, and the values of those codes."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    if moment == 0:
        code = kernel._first_code(tl.load(x + at), lines, kind, bits)
        value = kernel._first_value(code, kind, bits)
    else:
        code = kernel._second_code(tl.load(x + at), lines, kind, bits)
        value = kernel._second_value(code, kind, bits)
    tl.store(codes + at, code)
    tl.store(values + at, value)


@interpreted
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("moment", [0, 1])
def test_the_kernels_lines_are_the_map(state_dtype, moment):
    """On both sides of every border, at every value, and over ten decades."""
    codec, size = codecs(state_dtype, torch.float64, torch.device("cpu"))[moment], 4096
    values, middles = torch.tensor(MAPS[state_dtype][moment], dtype=torch.float64), codec.middles
    over = 10 ** (-10 * torch.rand(11 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    # 2 · 10⁻⁶ beside a border is half a hundredth of the narrowest interval; the lowest one begins at 0.
    x = torch.cat([values, middles * (1 - 2e-6), middles * (1 + 2e-6), over * codec.largest, torch.zeros(1)])
    x = torch.cat([x, -x]) if moment == 0 else x
    x = x[(x.abs() <= codec.largest) & ((x[:, None] / middles - 1).abs().amin(1) > 1e-6)].float()
    x = torch.nn.functional.pad(x, (0, -len(x) % size)).to(DEVICE)
    codes, found = torch.zeros_like(x, dtype=torch.int32), torch.zeros_like(x)
    bits = FORMATS[state_dtype].bits
    _through_the_map[(len(x) // size,)](
        x, codes, found, moment=moment, lines=kernel._lines(state_dtype), kind=state_dtype, bits=bits, size=size
    )
    index = torch.bucketize(x.double().cpu(), middles)
    exact = index.int() if codec.codes is None else codec.codes[index].int()
    assert torch.equal(codes.cpu(), exact)
    by_code = torch.tensor(values_by_code(state_dtype, moment))[exact]
    torch.testing.assert_close(found.cpu(), by_code, rtol=1e-6, atol=0)


def made(state_dtype: str, form: str) -> tuple[QuantizedGroup, list[Tensor]]:
    random, format = torch.Generator().manual_seed(1), FORMATS[state_dtype]
    masters, moments, beside = [], [], []
    for shape, lead in SHAPES:
        columns = (lead, lead + shape[-1])
        codes, blocks = len(format.code_bytes(columns)), len(format.blocks(columns))
        states = []
        for _ in range(2):
            states += [torch.zeros(*shape[:-1], codes, dtype=torch.uint8), torch.zeros(*shape[:-1], blocks)]
        moments.append(QuantizedMoments(*(state.to(DEVICE) for state in states), lead % format.block))
        weight = torch.randn(shape, generator=random).to(DEVICE)
        masters.append(weight if form == "fp32" else weight.bfloat16())
        if form == "split":
            beside.append(torch.zeros(shape, dtype=torch.int16, device=DEVICE))
    return QuantizedGroup(state_dtype, form, masters, moments, beside), masters


def plain_update(codec: tuple[Codec, Codec], w: Tensor, g: Tensor, held: QuantizedMoments, count: int) -> Tensor:
    """A whole-tensor update by the reference; states are written, the weight returned."""
    columns = w.shape[-1]
    m = codec[0].decode(held.first, held.first_scales, held.lead, columns) * BETA1 + g * (1 - BETA1)
    v = codec[1].decode(held.second, held.second_scales, held.lead, columns) * BETA2 + g * g * (1 - BETA2)
    for each, x, codes, scales in (
        (codec[0], m, held.first, held.first_scales),
        (codec[1], v, held.second, held.second_scales),
    ):
        scales.copy_(each.scales(x, held.lead))
        codes.copy_(each.encode(x, scales, held.lead))
    return w * (1 - RATE * DECAY) - RATE * (m / (1 - BETA1**count)) / ((v / (1 - BETA2**count)).sqrt() + EPS)


@interpreted
@pytest.mark.parametrize("way", ["at once", "measured first"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_the_kernel_moves_as_the_reference(state_dtype, way):
    group, masters = made(state_dtype, "fp32")
    twin, exact = made(state_dtype, "fp32")
    codec = codecs(state_dtype, torch.float32, torch.device(DEVICE))
    random = torch.Generator().manual_seed(2)
    for count in (1, 2, 3):
        gradients = [torch.randn(master.shape, generator=random).to(DEVICE) for master in masters]
        step = AdamWStep(RATE, BETA1, BETA2, EPS, *(torch.tensor(float(x), device=DEVICE) for x in (count, 1.0, 1.0)))
        if way == "at once":
            group.update(gradients, DECAY, step)
        else:
            group.update_with(gradients, DECAY, step, group.measured(gradients, DECAY, step))
        for number, (gradient, held) in enumerate(zip(gradients, twin.moments, strict=True)):
            exact[number] = plain_update(codec, exact[number], gradient, held, count)
    for mine, theirs in zip(group.moments, twin.moments, strict=True):
        for one, other in ((mine.first, theirs.first), (mine.second, theirs.second)):
            # A value on the border of two codes may fall the other way, and the next update begin from there.
            assert (one == other).float().mean() > 0.995
        torch.testing.assert_close(mine.first_scales, theirs.first_scales, rtol=1e-4, atol=0)
        torch.testing.assert_close(mine.second_scales, theirs.second_scales, rtol=1e-4, atol=0)
    for mine, other in zip(masters, exact, strict=True):
        assert torch.isclose(mine, other, rtol=1e-6, atol=1e-6).float().mean() > 0.99


@interpreted
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_a_gradient_that_is_not_finite_changes_nothing(state_dtype):
    group, masters = made(state_dtype, "split")
    before = [master.clone() for master in masters]
    step = AdamWStep(RATE, BETA1, BETA2, EPS, *(torch.tensor(x, device=DEVICE) for x in (1.0, 1.0, 0.0)))
    group.update([torch.full_like(master, float("nan")) for master in masters], DECAY, step)
    assert all(torch.equal(one, other) for one, other in zip(before, masters, strict=True))
    assert not any(each.first_scales.any() or each.first.any() for each in group.moments)


def moved(state_dtype: str, kind: str, way: str) -> list[Tensor]:
    """Weights and states after some updates of an optimizer, one of them skipped."""
    keys = (f"optim.state_dtype={state_dtype}", f"optim.master_weights={kind}", "optim.weight_decay=0.1")
    rounding = f"optim.stochastic_rounding={str(kind == 'none').lower()}"
    precision = "fp32" if kind == "fp32" else "bf16"
    run = load.load(None, [*keys, rounding, f"plan.precision={precision}"], ranks=1).run
    random, dtype = torch.Generator().manual_seed(3), torch.float32 if kind == "fp32" else torch.bfloat16
    tensors = [torch.randn(shape, generator=random).to(dtype) for shape in ((16, 512), (40, 300), (70, 77), (33,))]
    weights = nn.ParameterDict({f"w{i}": nn.Parameter(tensor) for i, tensor in enumerate(tensors)}).to(DEVICE)
    master_weights.attach([weights], run)
    optimizer = ResidentOptimizer(run.optim, weights.values(), msgspec.structs.replace(run.plan, kernels=way))
    assert optimizer.is_one_pass is (way == "fused")
    for finite in (1.0, 0.0, 1.0):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=random).to(dtype).to(DEVICE)
        factor, one = (torch.tensor(number, dtype=torch.float64, device=DEVICE) for number in (0.5, 1.0))
        optimizer.step(1e-2, GradStats(loss=one, norm=one, finite=one * finite, factor=factor))
    return [tensor for held in optimizer.held().values() for tensor in wide_weights(held).values()]


def wide_weights(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """A split weight as the fp32 number that it is: of its low bits each has its own rounding."""
    low = held.get("low")
    if low is None:
        return held
    joined = master_weights.join(held["weight"], low.view(torch.int16))
    return {name: tensor for name, tensor in held.items() if name != "low"} | {"weight": joined}


@interpreted
@pytest.mark.parametrize("kind", ["fp32", "split", "none"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_an_optimizer_moves_as_by_plain_operations(state_dtype, kind):
    fused, plain = (moved(state_dtype, kind, way) for way in ("fused", "plain"))
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.dtype == torch.float32:  # a moment or a master weight; a code on a border may fall the other way
            # A ratio's rounding is 10⁻⁵ of an interval, so that 0.2 do of 12,000: of 80 scales one may follow.
            apart = ~torch.isclose(mine, theirs, rtol=2.0**-18, atol=1e-7)
            assert apart.sum() <= max(1, 0.01 * apart.numel())
        else:  # codes, bf16 weights
            assert (mine.view(torch.uint8) == theirs.view(torch.uint8)).float().mean() > 0.98
