"""SGD with momentum: torch's own update by update, in every form, and what its description says of it."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config import load
from meshwright.config.run import Optim, digest, mathematics
from meshwright.optim import master_weights, offload
from meshwright.optim.clip import GradStats
from meshwright.optim.interface import UpdateTerms
from meshwright.optim.master_weights import join, split
from meshwright.optim.offload import StatePiece
from meshwright.optim.resident import MATRIX_UPDATES, RULES, WHOLE_RULES, ResidentOptimizer, rule_of
from meshwright.spec.optimizers import OPTIMIZERS, saved_by
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

PIECE = StatePiece(group=0, weight=0, begin=0, end=0, last=True)
PLANS = [Plan(microbatch=1, deterministic=deterministic) for deterministic in (False, True)]
# The same formula in another order of operations: a few units in the last place of numbers around one.
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-14}


def grad_stats(factor=1.0, finite=1.0):
    numbers = {"loss": 0.0, "norm": 1.0, "finite": finite, "factor": factor}
    return GradStats(**{name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})


def weights(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, dtype=dtype)), nn.Parameter(torch.randn(7, dtype=dtype))]


def torchs(params, nesterov):
    groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:], "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.8, nesterov=nesterov)


@pytest.mark.parametrize("plan", PLANS, ids=["fused", "plain"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_torchs_sgd_with_decay_on_matrices_only(dtype, nesterov, plan):
    ours, theirs = weights(dtype), weights(dtype)
    optim = Optim(name="sgd", momentum=0.8, nesterov=nesterov, weight_decay=0.3)
    mine, reference = ResidentOptimizer(optim, ours, plan), torchs(theirs, nesterov)
    for step in range(5):
        rate, factor = 0.1 / (step + 1), 0.5
        for one, other in zip(ours, theirs, strict=True):
            gradient = torch.randn_like(one)
            one.grad, other.grad = gradient.clone(), gradient * factor
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        mine.step(rate, grad_stats(factor))
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            (momentum,) = mine.states_of(index)
            torch.testing.assert_close(one, other, rtol=CLOSE[dtype], atol=CLOSE[dtype])
            buffer = reference.state[other]["momentum_buffer"]
            torch.testing.assert_close(momentum, buffer, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("plan", PLANS, ids=["fused", "plain"])
def test_without_momentum_it_is_plain_sgd(plan):
    ours, theirs = weights(torch.float64), weights(torch.float64)
    mine = ResidentOptimizer(load.load(None, ["optim.name=sgd", "optim.momentum=0"]).run.optim, ours, plan)
    groups = [{"params": theirs[:1], "weight_decay": mine.optim.weight_decay}, {"params": theirs[1:]}]
    reference = torch.optim.SGD(groups, lr=0.1)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad, other.grad = (gradient := torch.randn_like(one)), gradient.clone()
        reference.step()
        mine.step(0.1, grad_stats())
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("plan", PLANS, ids=["fused", "plain"])
def test_a_weight_without_a_gradient_rests_as_torchs_does(plan):
    ours, theirs = weights(torch.float64), weights(torch.float64)
    mine = ResidentOptimizer(Optim(name="sgd", momentum=0.8, weight_decay=0.3), ours, plan)
    reference = torchs(theirs, False)
    for used, finite in [((0, 1), True), ((1,), True), ((1,), False), ((), True), ((0, 1), True), ((0,), True)]:
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = torch.randn_like(one) if index in used else None
            other.grad = None if one.grad is None else one.grad.clone()
        mine.step(1.0, grad_stats(finite=float(finite)))
        if finite:
            reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("plan", PLANS, ids=["fused", "plain"])
def test_a_gradient_that_is_not_finite_changes_nothing(plan):
    ours = weights(torch.float32)
    optimizer = ResidentOptimizer(Optim(name="sgd"), ours, plan)
    before = [weight.detach().clone() for weight in ours]
    for weight in ours:
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step(0.1, grad_stats(factor=0.0, finite=0.0))
    assert all(torch.equal(weight, old) for weight, old in zip(ours, before, strict=True))
    assert all(momentum.eq(0).all() for momentum in optimizer.states()["momentum"])
    assert optimizer.count == 0


def test_split_master_weights_are_fp32_ones_in_two_parts():
    words = ["arch.preset=tiny", "plan.precision=bf16", "optim.name=sgd", "optim.master_weights=split"]
    run = load.load(None, words, ranks=1).run
    torch.manual_seed(0)
    start = [torch.randn(70, 1000).bfloat16(), torch.randn(37).bfloat16()]  # more than one block, and a vector
    ours = nn.ParameterDict({f"w{number}": nn.Parameter(tensor.clone()) for number, tensor in enumerate(start)})
    master_weights.attach([ours], run)
    mine = ResidentOptimizer(run.optim, ours.values(), run.plan)
    wide = [nn.Parameter(tensor.float()) for tensor in start]
    theirs = ResidentOptimizer(Optim(name="sgd"), wide, PLANS[1])  # the same operations, one by one
    for _ in range(4):
        for one, other in zip(ours.values(), wide, strict=True):
            gradient = torch.randn(one.shape).bfloat16()
            one.grad, other.grad = gradient, gradient.float()
        mine.step(1e-3, grad_stats(0.5))
        theirs.step(1e-3, grad_stats(0.5))
    for one, other in zip(ours.values(), wide, strict=True):
        low = mine.held()[id(one)]["low"].view(torch.int16)
        assert torch.equal(join(one.detach(), low), other.detach())


def test_a_piece_with_a_bf16_state_moves_as_one_with_an_fp32_state_does():
    torch.manual_seed(1)
    rule = rule_of(Optim(name="sgd"))
    scalars = UpdateTerms(1e-2, 0.1, torch.tensor(1.0), *(torch.tensor(1.0, dtype=torch.float64) for _ in range(2)))
    master, gradient = torch.randn(5000), torch.randn(5000).bfloat16()
    wide, narrow = [master.clone(), torch.zeros(5000)], torch.empty(5000).bfloat16()
    weight, low = split(master)
    halves = [low, torch.zeros(5000).bfloat16()]
    offload.update_fp32(rule, wide, narrow, gradient, scalars, PIECE)
    offload.update_bf16(rule, halves, weight, gradient, scalars, PIECE)
    assert torch.equal(join(weight, halves[0]), wide[0])  # the first update starts from a state of zero, which is exact
    # Stochastic rounding goes to one of two neighbours: off by less than one unit of bf16's eight bits.
    torch.testing.assert_close(halves[1].float(), wide[1], rtol=2**-7, atol=0)


class Elementwise(TorchDispatchMode):
    """Counts operations on whole tensors."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += result.ndim > 0
        return result


@pytest.mark.parametrize("name", RULES)
def test_a_description_counts_the_operations_of_its_rule_and_names_its_states(name):
    spec, ours = OPTIMIZERS[name], weights(torch.float32)
    terms = UpdateTerms(1e-2, 0.1, torch.tensor(1.0), *(torch.tensor(1.0, dtype=torch.float64) for _ in range(2)))
    arithmetic = rule_of(Optim(name=name)).arithmetic(terms, torch.float32)
    states = [torch.zeros_like(ours[0]) for _ in spec.states]
    with torch.no_grad(), Elementwise() as seen:
        _, updated = arithmetic(ours[0], torch.randn_like(ours[0]), states)
    assert seen.calls - 1 == spec.flops  # the gradient's draw apart
    assert len(updated) == len(spec.states)
    optimizer = ResidentOptimizer(Optim(name=name), ours, PLANS[0])
    assert tuple(optimizer.states()) == spec.state_names
    for weight, held in zip(ours, optimizer.held().values(), strict=True):
        assert [held[state.name].numel() for state in spec.states] == [
            math.prod(state.shape_beside(tuple(weight.shape))) for state in spec.states
        ]
    assert saved_by(("weight", *spec.state_names)) is spec
    assert set(OPTIMIZERS) == {*RULES, *WHOLE_RULES, *MATRIX_UPDATES}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.momentum=0.5"], "optim.momentum is for SGD with momentum, and optim.name = adamw"),
        (["optim.nesterov=true"], "optim.nesterov is for SGD with momentum, and optim.name = adamw"),
        (["optim.name=sgd", "optim.beta1=0.5"], "optim.beta1 is for AdamW, and optim.name = sgd"),
        (["optim.name=sgd", "optim.momentum=1.0"], "optim.momentum = 1.0 is out of range"),
    ],
)
def test_keys_of_another_optimizer_are_refused(words, said):
    with pytest.raises(InputError) as error:
        load.load(None, ["arch.preset=tiny", *words], ranks=1)
    assert [problem.text for problem in error.value.problems] == [said]
    assert all(problem.remedy for problem in error.value.problems)


def test_momentum_is_mathematics_and_unsaid_where_it_is_usual():
    sgd = "optim.name=sgd"
    words = [(), (sgd,), (sgd, "optim.nesterov=true"), (sgd, "optim.momentum=0.8")]
    runs = [load.load(None, ["arch.preset=tiny", *each], ranks=1).run for each in words]
    assert len({digest(run) for run in runs}) == len(runs)
    said = [{"momentum", "nesterov"} & set(mathematics(run)["optim"]) for run in runs]
    assert said == [set(), set(), {"nesterov"}, {"momentum"}]
