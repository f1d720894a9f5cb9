"""Optimizer states in int8, int4 and fp8: the codes of a whole-tensor implementation, update by update."""

import math

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import load
from meshwright.config.run import Run, digest
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.quantized import CPU_BLOCK
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.problem import InputError
from meshwright.spec.quantized import FORMATS, is_quantized

RATE, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
DTYPES = ("int8", "int4", "fp8")
BLOCKS = {"int8": 256, "int4": 128, "fp8": 128}
# Rows of whole blocks, of some and a part, of an odd length, a stack, more rows than a piece, the rows of an adapter's
# B; a vector, a small matrix, rows too short.
SHAPES = ((24, 512), (40, 300), (60, 77), (3, 20, 96), (2 * CPU_BLOCK // 64, 64), (512, 8), (300,), (40, 64), (700, 7))


class Twin:
    """AdamW on whole tensors with quantized moments, block by block, in float64; written from the papers."""

    def __init__(self, weight: Tensor, state_dtype: str) -> None:
        self.weight, self.block = weight.double(), BLOCKS[state_dtype]
        self.quantized = weight.dim() > 1 and weight.numel() >= 4096 and weight.shape[-1] >= 8
        self.values = VALUES[state_dtype]
        self.codes = [torch.zeros(weight.shape, dtype=torch.long) for _ in range(2)]
        self.moments = [torch.zeros_like(self.weight) for _ in range(2)]
        self.count = 0

    def update(self, gradient: Tensor) -> None:
        g = gradient.double()
        self.count += 1
        m, v = self.moments
        m, v = m * BETA1 + g * (1 - BETA1), v * BETA2 + g * g * (1 - BETA2)
        move = (m / (1 - BETA1**self.count)) / ((v / (1 - BETA2**self.count)).sqrt() + EPS)
        self.weight = self.weight * (1 - RATE * DECAY * (self.weight.dim() > 1)) - RATE * move
        self.moments = [self.rounded(0, m), self.rounded(1, v)] if self.quantized else [m, v]

    def rounded(self, which: int, x: Tensor) -> Tensor:
        """What is left of a moment once every block of every row is quantized."""
        values, found, codes = torch.tensor(self.values[which], dtype=torch.float64), [], []
        for part in x.split(self.block, -1):
            largest = part.abs().amax(-1, keepdim=True) / values.max()
            ratio = torch.where(largest > 0, part / largest, 0.0)
            code = (ratio[..., None] - values).abs().argmin(-1)
            codes.append(code)
            found.append(values[code] * largest)
        self.codes[which] = torch.cat(codes, -1)
        return torch.cat(found, -1)


def dynamic(decades: int, signed: bool) -> list[float]:
    found = []
    for decade in range(decades):
        parts = 2**decade * (1 if signed else 2)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        found += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - decades + 1)).tolist()
    return sorted([*found, *(-value for value in found), 0.0, 1.0] if signed else [*found, 10.0**-decades, 1.0])


def linear() -> list[float]:
    return [number / 16 for number in range(1, 17)]


def e4m3() -> list[float]:
    """By torch's own numbers, without NaN and the second zero."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return sorted(set(every[every.isfinite()].tolist()))


VALUES = {
    "int8": (dynamic(7, True), dynamic(7, False)),
    "int4": (dynamic(3, True), linear()),
    "fp8": (e4m3(), [value for value in e4m3() if value > 0]),
}


def run_of(*words: str, states: str = "int8", kind: str = "fp32", precision: str = "fp32") -> Run:
    rounding = f"optim.stochastic_rounding={str(kind == 'none').lower()}"
    keys = (f"optim.state_dtype={states}", f"optim.master_weights={kind}", rounding, f"plan.precision={precision}")
    return load.load(None, [*keys, f"optim.weight_decay={DECAY}", *words], ranks=1).run


def bag(run: Run, tensors: list[Tensor]) -> tuple[nn.ParameterDict, ResidentOptimizer]:
    weights = nn.ParameterDict({f"w{number}": nn.Parameter(tensor) for number, tensor in enumerate(tensors)})
    master_weights.attach([weights], run)
    return weights, ResidentOptimizer(run.optim, weights.values(), run.plan)


def grad_stats(finite: float = 1.0) -> GradStats:
    one = torch.ones((), dtype=torch.float64)
    return GradStats(loss=one, norm=one, finite=one * finite, factor=one)


def codes_of(held: Tensor, columns: int) -> Tensor:
    """One number a code, whatever the bytes are."""
    if held.shape[-1] == columns:
        return held.long()
    return torch.stack([held % 16, held // 16], -1).flatten(-2)[..., :columns].long()


@pytest.mark.parametrize("states", DTYPES)
def test_every_update_has_the_codes_of_whole_tensors(states):
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    twins = [Twin(tensor, states) for tensor in tensors]
    weights, optimizer = bag(run_of(states=states, precision="fp64"), [tensor.clone() for tensor in tensors])
    assert len(optimizer.quantized) == 6
    for _ in range(3):
        for weight, twin in zip(weights.values(), twins, strict=True):
            weight.grad = torch.randn_like(weight) * torch.rand(weight.shape[-1], dtype=torch.float64) ** 4
            twin.update(weight.grad)
        optimizer.step(RATE, grad_stats())
        for i, (weight, twin) in enumerate(zip(weights.values(), twins, strict=True)):
            torch.testing.assert_close(weight.detach(), twin.weight, rtol=1e-12, atol=1e-12)
            held = optimizer.held()[id(weight)]
            if i not in optimizer.quantized:
                assert held["first"].dtype == torch.float64
                continue
            for which, name in enumerate(("first", "second")):
                if states == "fp8":
                    numbers = torch.tensor(VALUES[states][which], dtype=torch.float64)[twin.codes[which]]
                    assert torch.equal(held[name].double(), numbers)
                else:
                    assert torch.equal(codes_of(held[name], weight.shape[-1]), twin.codes[which])


@pytest.mark.parametrize("states", DTYPES)
def test_their_bytes_are_codes_and_scales(states):
    weights, optimizer = bag(run_of(states=states), [torch.zeros(shape) for shape in SHAPES])
    for weight in weights.values():
        held, columns, rows = optimizer.held()[id(weight)], weight.shape[-1], math.prod(weight.shape[:-1])
        expected = 4 * weight.numel()
        if is_quantized(tuple(weight.shape)):
            codes = (columns + 1) // 2 if states == "int4" else columns
            expected = rows * (codes + 4 * math.ceil(columns / BLOCKS[states]))
            assert expected == FORMATS[states].state_bytes(rows, (0, columns), 4)
            assert held["first"].dtype == (torch.float8_e4m3fn if states == "fp8" else torch.uint8)
        assert sum(held[name].nbytes for name in held if name.startswith("first")) == expected


@pytest.mark.parametrize("kind", ["split", "none"])
@pytest.mark.parametrize("states", DTYPES)
def test_weights_in_bf16_have_them_too(states, kind):
    """The first moment after two updates is that of fp32 master weights: gradients decide it."""
    torch.manual_seed(0)
    tensor, ends = torch.randn(40, 300).bfloat16(), {}
    for form in ("fp32", kind):
        start = tensor.float() if form == "fp32" else tensor.clone()
        precision = "fp32" if form == "fp32" else "bf16"
        weights, optimizer = bag(run_of(states=states, kind=form, precision=precision), [start])
        random = torch.Generator().manual_seed(1)
        for _ in range(2):
            weights["w0"].grad = torch.randn(40, 300, generator=random).bfloat16().to(weights["w0"].dtype)
            optimizer.step(RATE, grad_stats())
        ends[form] = (weights["w0"].detach().float(), *optimizer.states_of(0))
    for mine, theirs in zip(ends[kind][1:], ends["fp32"][1:], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    # Rounded to bf16 once (split) or twice: a weight of 2 has steps of 2⁻⁷.
    torch.testing.assert_close(ends[kind][0], ends["fp32"][0], rtol=2.0**-6, atol=2.0**-8)


@pytest.mark.parametrize("states", DTYPES)
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_a_gradient_that_is_not_finite_changes_nothing(states, kind):
    precision = "fp32" if kind == "fp32" else "bf16"
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    run = run_of(states=states, kind=kind, precision=precision)
    weights, optimizer = bag(run, [torch.randn(50, 100).to(dtype)])
    weights["w0"].grad = torch.randn(50, 100).to(dtype)
    optimizer.step(1e-3, grad_stats())
    before = [held.clone() for held in optimizer.held()[id(weights["w0"])].values()]
    weights["w0"].grad = torch.full((50, 100), float("nan"), dtype=dtype)
    optimizer.step(1e-3, grad_stats(finite=0.0))
    after = optimizer.held()[id(weights["w0"])].values()
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("states", DTYPES)
def test_a_second_moment_far_below_its_block_does_not_blow_up(states):
    """An element whose gradient was 10⁻⁵ of its neighbours' and is then 0 moves no further than the learning rate.

    With a zero in the map its second moment would be lost, and its first divided by ε alone.
    """
    weights, optimizer = bag(run_of("optim.weight_decay=0.0", states=states), [torch.zeros(64, 256)])
    gradient = torch.ones(64, 256)
    gradient[:, 7] = 1e-5
    for number in range(4):
        weights["w0"].grad = gradient.clone()
        weights["w0"].grad[:, 7] *= number < 2
        before = weights["w0"].detach().clone()
        optimizer.step(1e-3, grad_stats())
        assert (weights["w0"].detach() - before).abs().max() <= 1.01e-3


def test_sgd_has_its_momentum_quantized_by_the_same_code():
    weights, optimizer = bag(run_of("optim.name=sgd", "optim.momentum=0.9"), [torch.randn(64, 256)])
    weights["w0"].grad = torch.randn(64, 256)
    optimizer.step(1e-3, grad_stats())
    codes, scales = optimizer.states_of(0)
    assert codes.dtype == torch.uint8
    assert list(optimizer.states()) == ["momentum", "momentum_scales"]
    # What AdamW's first moment would have: the same map.
    mine = optimizer.quantized[0]
    assert scales.shape == (64, len(mine.blocks))


def test_they_are_part_of_the_mathematics():
    assert len({digest(run_of(states=states)) for states in ("fp32", *DTYPES)}) == 4


REFUSED = (
    (("optim.name=lamb",), "is for updates by elements"),
    (("plan.optimizer_offload=host",), "leave plan.optimizer_offload out"),
    (("plan.cpu_offload=true", "plan.zero=3"), "leave plan.cpu_offload out"),
)


@pytest.mark.parametrize(("words", "text"), REFUSED)
@pytest.mark.parametrize("states", DTYPES)
def test_what_cannot_have_them_is_refused(words, text, states):
    with pytest.raises(InputError) as refused:
        run_of(*words, states=states)
    assert text in str(refused.value)


def test_no_byte_of_two_codes_is_cut():
    words = ("arch.preset=tiny", "arch.ffn=198", "plan.tp=2")
    load.load(None, [*words, "optim.state_dtype=int8"], ranks=2)
    with pytest.raises(InputError, match=r"cuts rows of arch.ffn after 99 columns; set optim.state_dtype = int8"):
        load.load(None, [*words, "optim.state_dtype=int4"], ranks=2)
    stack = ("arch.preset=tiny-moe", "arch.experts=5", "arch.hidden=66", "arch.heads=2", "arch.head_dim=32")
    stack = (*stack, "arch.kv_heads=2", "arch.expert_ffn=25", "plan.shard=2", "plan.zero=3")
    with pytest.raises(InputError, match=r"cuts rows of arch.hidden after 33 columns"):
        load.load(None, [*stack, "optim.state_dtype=int4"], ranks=2)
