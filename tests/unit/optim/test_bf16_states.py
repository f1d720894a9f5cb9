"""Optimizer states in bf16 beside bf16 weights: right on average, where rounding to the nearest stalls."""

from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.config.run import Run, digest
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.spec.problem import InputError

STEPS, RATE = 200, 1e-3
ARCH = msgspec.structs.replace(
    preset("tiny"), vocab=256, layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=64, context=64
)
SGD = ("optim.name=sgd", "optim.momentum=0.9")


def run_of(*words: str, kind: str = "split", states: str = "bf16") -> Run:
    rounding = f"optim.stochastic_rounding={str(kind == 'none').lower()}"
    common = ("plan.precision=bf16", f"optim.master_weights={kind}", rounding, f"optim.state_dtype={states}")
    return load.load(None, [*common, "optim.weight_decay=0.1", *words], ranks=1).run


def bag(run: Run, tensors: list[Tensor]) -> tuple[nn.ParameterDict, ResidentOptimizer]:
    weights = nn.ParameterDict({f"w{number}": nn.Parameter(tensor) for number, tensor in enumerate(tensors)})
    master_weights.attach([weights], run)
    return weights, ResidentOptimizer(run.optim, weights.values(), run.plan)


def grad_stats(finite: float = 1.0) -> GradStats:
    one = torch.ones((), dtype=torch.float64)
    return GradStats(loss=one, norm=one, finite=one * finite, factor=one)


@pytest.mark.parametrize("words", [(), SGD])
@pytest.mark.parametrize("kind", ["none", "split"])
def test_every_state_is_bf16_and_begins_at_zero(kind, words):
    weights, optimizer = bag(run_of(*words, kind=kind), [torch.randn(8, 8).bfloat16()])
    held = optimizer.held()[id(weights["w0"])]
    assert {held[name].dtype for name in optimizer.states()} == {torch.bfloat16}
    assert not any(held[name].any() for name in optimizer.states())
    assert ("low" in held) is (kind == "split")


def test_a_mean_square_does_not_stall_at_a_long_memory():
    """Steps of a thousandth are below half the last bit, 2⁻⁹: to the nearest, none would ever be taken."""
    run = run_of("optim.beta2=0.999", "optim.lr=0.0", "optim.weight_decay=0.0")
    weights, optimizer = bag(run, [torch.zeros(64, 64).bfloat16()])
    _, second = optimizer.states_of(0)
    second.fill_(1.0)
    exact, nearest = 1.0, torch.ones((), dtype=torch.bfloat16)
    for _ in range(400):  # a gradient of half the size: the mean square falls from 1 to 0.75
        weights["w0"].grad = torch.full((64, 64), 0.5).bfloat16()
        optimizer.step(0.0, grad_stats())
        exact = exact * 0.999 + 0.25 * 0.001
        nearest = (nearest.float() * 0.999 + 0.25 * 0.001).bfloat16()
    assert nearest.item() == 1.0
    found = second.float()
    # A draw a step between neighbours 2⁻⁸ apart, of steps 7.5e-4: √(400 · 7.5e-4 · 2⁻⁸) = 0.034 of scatter an element.
    assert found.std().item() < 0.05
    assert found.mean().item() == pytest.approx(exact, abs=4 * 0.05 / 64)


def test_states_and_weights_follow_those_in_fp32():
    torch.manual_seed(0)
    start, ends = torch.randn(48, 40).bfloat16(), {}
    for states in ("fp32", "bf16"):
        random = torch.Generator().manual_seed(1)
        weights, optimizer = bag(run_of(states=states), [start.clone()])
        for _ in range(60):
            weights["w0"].grad = (torch.randn(48, 40, generator=random) + 0.3).bfloat16()
            optimizer.step(1e-3, grad_stats())
        low = optimizer.held()[id(weights["w0"])]["low"].view(torch.int16)
        ends[states] = [master_weights.join(weights["w0"].detach(), low), *optimizer.states_of(0)]
    travel = ends["fp32"][0] - start.float()
    assert ((ends["bf16"][0] - ends["fp32"][0]).norm() / travel.norm()).item() < 0.02
    for mine, exact in zip(ends["bf16"][1:], ends["fp32"][1:], strict=True):
        # A state forgets within 1 ÷ (1 − β₂) = 20 steps: √20 roundings of 2⁻⁸ ÷ √6 are left, 0.7 %.
        assert ((mine.float() - exact).norm() / exact.norm()).item() < 0.01


@pytest.mark.parametrize("words", [(), SGD])
def test_a_gradient_that_is_not_finite_changes_nothing(words):
    weights, optimizer = bag(run_of(*words), [torch.randn(50, 7).bfloat16()])
    weights["w0"].grad = torch.randn(50, 7).bfloat16()
    optimizer.step(1e-3, grad_stats())
    before = [held.clone() for held in optimizer.held()[id(weights["w0"])].values()]
    weights["w0"].grad = torch.full((50, 7), float("nan"), dtype=torch.bfloat16)
    optimizer.step(1e-3, grad_stats(finite=0.0))
    after = optimizer.held()[id(weights["w0"])].values()
    assert all(
        torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(before, after, strict=True)
    )


def test_both_states_and_every_step_have_draws_of_their_own():
    weights, optimizer = bag(run_of(), [torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16()])
    seen = []
    for _ in range(2):
        for number, weight in enumerate(weights.values()):
            for state in optimizer.states_of(number):
                state.fill_(1.0)
            weight.grad = torch.full((64, 64), 1.03).bfloat16()  # both means move by less than their last bit
        optimizer.step(1e-4, grad_stats())
        seen += [state.ne(1.0) for number in range(2) for state in optimizer.states_of(number)]
    assert all(0.1 < each.float().mean().item() < 0.95 for each in seen), "some are rounded down, some up"
    assert all(not torch.equal(one, other) for number, one in enumerate(seen) for other in seen[:number])


def test_they_are_part_of_the_mathematics():
    assert (
        len({digest(run_of(kind=kind, states=states)) for kind in ("none", "split") for states in ("fp32", "bf16")})
        == 4
    )


def test_they_need_bf16_weights():
    with pytest.raises(InputError) as refused:
        run_of(kind="fp32")
    assert "set optim.master_weights = split" in str(refused.value)
    offloaded = run_of("plan.optimizer_offload=host", kind="fp32")
    assert msgspec.structs.asdict(offloaded.optim)["state_dtype"] == "bf16"


def trained(states: str, beta2: float) -> tuple[list[float], Tensor]:
    """Losses over a short real run, and how far each weight has gone."""
    torch.manual_seed(0)
    run = run_of(f"optim.beta2={beta2}", "optim.weight_decay=0.0", states=states)
    model = Decoder(ARCH)
    fill_model(model, ARCH, 1)
    model = model.bfloat16()
    start = torch.cat([weight.detach().float().flatten() for weight in model.parameters()])
    master_weights.attach([model], run)
    optimizer = ResidentOptimizer(run.optim, model.parameters(), run.plan)
    text, losses, positions = torch.tensor(list(Path(__file__).read_bytes())), [], torch.arange(32).expand(4, 32)
    for step in range(STEPS):
        starts = [(97 * step + 31 * row) % (len(text) - 33) for row in range(4)]
        tokens = torch.stack([text[start : start + 33] for start in starts]).long()
        logits = model(tokens[:, :-1], positions, index=tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        optimizer.step(RATE, grad_stats())
        losses.append(loss.item())
    held = [optimizer.held()[id(weight)] for weight in model.parameters()]
    ends = [master_weights.join(each["weight"], each["low"].view(torch.int16)) for each in held]
    return losses, torch.cat([end.flatten() for end in ends]) - start


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_over_a_real_run_they_learn_as_fp32_states_do(beta2):
    torch.set_num_threads(1)
    (losses, travel), (mine, moved) = (trained(states, beta2) for states in ("fp32", "bf16"))
    gained, likewise = (found[0] - sum(found[-20:]) / 20 for found in (losses, mine))
    assert likewise == pytest.approx(gained, rel=0.01)
    assert (torch.dot(moved, travel) / travel.square().sum()).item() == pytest.approx(1, abs=0.02)
