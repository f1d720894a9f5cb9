"""AdamW in one pass over weights in bf16: the plain twin's numbers, low bits and draws."""

import pytest
import torch
from kernel_cases import DEVICE, interpreted
from torch import Tensor, nn

from meshwright.config import load
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer, rule_of

SHAPES = ((40, 16), (7, 9), (33,), (3000,))


def moved(kind: str, states: str, way: str, finite: tuple[float, ...]) -> list[Tensor]:
    """Weights, moments and what is kept beside them after some updates."""
    run = load.load(
        None,
        [
            "plan.precision=bf16",
            f"optim.master_weights={kind}",
            f"optim.state_dtype={states}",
            f"optim.stochastic_rounding={str(kind == 'none').lower()}",
            "optim.weight_decay=0.1",
        ],
        ranks=1,
    ).run
    random = torch.Generator().manual_seed(3)
    weights = nn.ParameterDict(
        {f"w{i}": nn.Parameter(torch.randn(shape, generator=random).bfloat16()) for i, shape in enumerate(SHAPES)}
    ).to(DEVICE)
    master_weights.attach([weights], run)
    optimizer = ResidentOptimizer(run.optim, weights.values(), run.plan)
    rule = rule_of(run.optim)
    update = master_weights.rounded(optimizer, rule) if way == "plain" else rule.one_pass(optimizer)
    assert update is not None
    optimizer.updates["adamw"] = update
    for moving in finite:
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=random).bfloat16().to(DEVICE)
        factor, one = (torch.tensor(number, dtype=torch.float64, device=DEVICE) for number in (0.5, 1.0))
        optimizer.step(1e-2, GradStats(loss=one, norm=one, finite=one * moving, factor=factor))
    return [part for held in optimizer.held().values() for part in (_wide(held), held["first"], held["second"])]


def _wide(held: dict[str, Tensor]) -> Tensor:
    """The number that a weight and its low bits are together."""
    return master_weights.join(held["weight"], held["low"].view(torch.int16)) if "low" in held else held["weight"]


@interpreted
@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["none", "split"])
def test_the_kernel_moves_as_the_twin(kind, states):
    fused, plain = (moved(kind, states, way, (1.0, 0.0, 1.0)) for way in ("fused", "plain"))
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.dtype == torch.bfloat16:  # the same draws: a number on the border of two may fall the other way
            assert (mine == theirs).float().mean() > 0.995
        elif states == "bf16":  # where a state fell the other way, its weight follows
            assert torch.isclose(mine, theirs, rtol=2.0**-20, atol=1e-9).float().mean() > 0.99
        else:  # two updates of a few operations, each rounded to 24 bits
            torch.testing.assert_close(mine, theirs, rtol=2.0**-20, atol=1e-9)
