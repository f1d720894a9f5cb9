"""Weights in bf16 alone: what rounding to the nearest loses, chance and low bits keep."""

from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.config.run import Optim, Run, digest
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model, key, uniform
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.plan import Plan

BF16 = Plan(microbatch=1, precision="bf16")
ROUNDED = ("none", "split")


def grad_stats(factor: float = 1.0, finite: float = 1.0) -> GradStats:
    zero, one, many = (torch.tensor(value, dtype=torch.float64) for value in (finite, factor, 1.0))
    return GradStats(loss=many, norm=many, finite=zero, factor=one)


def sixteen_bits(draws: Tensor) -> Tensor:
    return (draws * master_weights.SIXTEEN_BITS).to(torch.int32)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32)


LARGE = 2.0**126  # far above any weight; the very largest fp32 numbers have no bf16 above them


@given(st.lists(st.floats(-LARGE, LARGE, width=32), min_size=1))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_was_split_is_joined_bit_by_bit(values):
    wide = torch.tensor(values, dtype=torch.float32)
    narrow, low = master_weights.split(wide)
    assert torch.equal(bits(master_weights.join(narrow, low)), bits(wide))
    # The nearest: torch's own rounding differs at ties alone, which are as far from both.
    assert torch.equal((narrow.double() - wide.double()).abs(), (wide.bfloat16().double() - wide.double()).abs())


def test_chance_rounds_to_a_neighbour_and_is_right_on_average():
    wide = torch.tensor([1.0 + 2**-9, -1.0 - 2**-9, 3.14159, -0.01234, 1e-20]).repeat_interleave(20_000)
    draws = uniform(key(1, "draws"), torch.arange(len(wide)))
    narrow = master_weights.round_stochastic(wide, sixteen_bits(draws)).float()
    down = (bits(wide) & -65536).view(torch.float32)
    up = ((bits(wide) & -65536) + 65536).view(torch.float32)
    assert ((narrow == down) | (narrow == up)).all()
    mean = narrow.double().view(5, -1).mean(1)
    wanted, unit = wide.double().view(5, -1)[:, 0], (up - down).abs().double().view(5, -1)[:, 0]
    # The mean of 20,000 draws between two neighbours has a standard deviation of at most unit ÷ 2√20000 = unit ÷ 283.
    assert ((mean - wanted).abs() < unit / 283 * 4).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 2.0**-130])
def test_what_bf16_holds_is_not_moved_by_chance(value):
    wide = torch.full((1000,), value)
    assert torch.equal(
        master_weights.round_stochastic(wide, sixteen_bits(torch.linspace(0, 1 - 2**-24, 1000))).float(), wide
    )


def run_of(kind: str) -> Run:
    words = [
        "arch.preset=tiny",
        "plan.precision=bf16",
        f"optim.master_weights={kind}",
        f"optim.stochastic_rounding={str(kind == 'none').lower()}",
        "optim.weight_decay=0.1",
    ]
    return load.load(None, words, ranks=1).run


def bag(kind: str, tensors: list[Tensor]) -> tuple[nn.ParameterDict, ResidentOptimizer]:
    run = run_of(kind)
    weights = nn.ParameterDict({f"w{number}": nn.Parameter(tensor) for number, tensor in enumerate(tensors)})
    master_weights.attach([weights], run)
    return weights, ResidentOptimizer(run.optim, weights.values(), BF16)


def test_compensated_weights_are_a_master_in_two_parts():
    torch.manual_seed(0)
    start = [torch.randn(70, 1000).bfloat16(), torch.randn(37).bfloat16()]  # more than one block, and a vector
    ours, mine = bag("split", [tensor.clone() for tensor in start])
    wide = [nn.Parameter(tensor.float()) for tensor in start]
    # The deterministic update takes the same operations one by one.
    theirs = ResidentOptimizer(Optim(weight_decay=0.1), wide, Plan(microbatch=1, deterministic=True))
    for step in range(5):
        for one, other in zip(ours.values(), wide, strict=True):
            gradient = torch.randn(one.shape).bfloat16()
            one.grad, other.grad = gradient, gradient.float()
        mine.step(1e-4 / (step + 1), grad_stats(0.5))
        theirs.step(1e-4 / (step + 1), grad_stats(0.5))
    for one, other in zip(ours.values(), wide, strict=True):
        low = mine.held()[id(one)]["low"].view(torch.int16)
        assert torch.equal(master_weights.join(one.detach(), low), other.detach())


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_gradient_that_is_not_finite_changes_nothing(kind):
    weights, optimizer = bag(kind, [torch.randn(50, 7).bfloat16()])
    weights["w0"].grad = torch.randn(50, 7).bfloat16()
    optimizer.step(1e-3, grad_stats())
    before = [held.clone() for held in (weights["w0"].detach(), *optimizer.states_of(0))]
    weights["w0"].grad = torch.full((50, 7), float("nan"), dtype=torch.bfloat16)
    optimizer.step(1e-3, grad_stats(factor=0.0, finite=0.0))
    after = [weights["w0"].detach(), *optimizer.states_of(0)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert optimizer.count == 1


def test_draws_differ_from_step_to_step_and_from_weight_to_weight():
    weights, optimizer = bag("none", [torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16()])
    seen = []
    for _ in range(3):
        for weight in weights.values():
            weight.data.fill_(1.0)
            weight.grad = torch.ones_like(weight)
        optimizer.step(2**-9, grad_stats())
        seen += [weight.detach().ne(1.0) for weight in weights.values()]
    shares = [each.float().mean().item() for each in seen]
    assert all(0.1 < share < 0.9 for share in shares), "some are rounded down, some up"
    assert all(not torch.equal(one, other) for number, one in enumerate(seen) for other in seen[:number])


def test_weights_in_bf16_have_moments_in_fp32_and_no_master():
    for kind in ROUNDED:
        weights, optimizer = bag(kind, [torch.randn(8, 8).bfloat16()])
        assert optimizer.masters[0].data_ptr() == weights["w0"].data_ptr()
        assert {state.dtype for state in optimizer.states_of(0)} == {torch.float32}
    assert master_weights.weight_dtype(Optim(), BF16) == torch.float32
    assert master_weights.weight_dtype(Optim(master_weights="none"), BF16) == torch.bfloat16


def test_rounding_is_part_of_the_mathematics():
    names = {digest(run_of(kind)) for kind in ("fp32", *ROUNDED)}
    assert len(names) == 3


# A short real run. The rate is as low as at the end of a schedule: a step of 3e-5 is less than half the last bit of
# every weight above 0.008, and most are.
STEPS, RATE = 200, 3e-5
ARCH = msgspec.structs.replace(
    preset("tiny"), vocab=256, layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, context=64
)


def batches() -> list[Tensor]:
    """Bytes of this file, in windows."""
    text = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.long)
    return [text[(97 * step + 31 * row) % (len(text) - 33) :][:33] for step in range(STEPS) for row in range(4)]


def trained(kind: str) -> tuple[list[float], Tensor]:
    """Losses, and where the weights have gone: `nearest` rounds as bf16 does, `master` has fp32 weights."""
    torch.manual_seed(0)
    model = Decoder(ARCH)
    fill_model(model, ARCH, 1)
    model = model.bfloat16() if kind != "fp32" else model.bfloat16().float()  # all begin alike
    wide = [weight.detach().float().clone() for weight in model.parameters()]
    run = run_of(kind if kind in ROUNDED else "fp32")
    master_weights.attach([model], run)
    held = list(model.parameters()) if kind in ROUNDED else [nn.Parameter(weight.clone()) for weight in wide]
    optimizer = ResidentOptimizer(msgspec.structs.replace(run.optim, weight_decay=0.0), held, BF16)
    windows, losses = batches(), []
    positions = torch.arange(32).expand(4, 32)
    for step in range(STEPS):
        tokens = torch.stack(windows[4 * step : 4 * step + 4])
        logits = model(tokens[:, :-1], positions, index=tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for weight, mine in zip(held, model.parameters(), strict=True):
            weight.grad = mine.grad if mine.grad is None else mine.grad.to(weight.dtype)
        optimizer.step(RATE, grad_stats())
        if kind not in ROUNDED:
            with torch.no_grad():
                for weight, mine in zip(held, model.parameters(), strict=True):
                    mine.copy_(weight)
                    if kind == "nearest":
                        weight.copy_(mine.float())  # the master is forgotten
        losses.append(loss.item())
    moved = [weight.detach().float() - start for weight, start in zip(model.parameters(), wide, strict=True)]
    return losses, torch.cat([each.flatten() for each in moved])


def test_over_a_real_run_nearest_stalls_and_both_others_follow_fp32():
    torch.set_num_threads(1)
    ends = {kind: trained(kind) for kind in ("fp32", "nearest", *ROUNDED)}
    start = ends["fp32"][0][0]
    gained = {kind: start - sum(losses[-20:]) / 20 for kind, (losses, _) in ends.items()}
    travel = ends["fp32"][1]
    along = {kind: (torch.dot(moved, travel) / travel.square().sum()).item() for kind, (_, moved) in ends.items()}
    assert along["nearest"] < 0.5
    assert along["none"] == pytest.approx(1, abs=0.05)
    assert along["split"] == pytest.approx(1, abs=0.02)
    assert gained["nearest"] < 0.5 * gained["fp32"]
    for kind in ROUNDED:
        assert gained[kind] == pytest.approx(gained["fp32"], rel=0.02)
