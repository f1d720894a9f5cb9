"""What the descriptions of optimizers of whole tensors say of their rules, their states and their refusals."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.config import load
from meshwright.config.run import digest, mathematics
from meshwright.cost.layout import layout_of
from meshwright.cost.resident import unfused_bytes
from meshwright.optim import master_weights
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import MATRIX_UPDATES, WHOLE_RULES, ResidentOptimizer
from meshwright.spec.optimizers import DESCRIPTIONS, LAMB, OPTIMIZERS, Statistic, description_of, saved_by
from meshwright.spec.params import params
from meshwright.spec.problem import InputError
from meshwright.verify.trace import following

OPTIONS = {
    "adafactor": (),
    "adafactor+first": ("optim.beta1=0.9",),
    "adafactor+relative": ("optim.relative_step=true",),
    "adafactor+first+relative": ("optim.beta1=0.9", "optim.relative_step=true"),
    "sm3": (),
    "lamb": (),
}
SIZE = 64  # rows and columns of a matrix
FORMS = {
    "fp32": ("plan.precision=fp32",),
    "split": ("plan.precision=bf16", "optim.master_weights=split"),
    "none": ("plan.precision=bf16", "optim.master_weights=none", "optim.stochastic_rounding=true"),
}
VIEWS = {"view", "unsqueeze", "expand", "reshape", "detach", "slice", "alias", "select"}


def run_of(*words):
    return load.load(None, ["arch.preset=tiny", *words], ranks=1).run


def grad_stats():
    one = torch.ones((), dtype=torch.float64)
    return GradStats(loss=one, norm=one, finite=one, factor=one * 0.5)


class Passes(TorchDispatchMode):
    """Counts operators that read or write a whole matrix, and their bytes."""

    def __init__(self):
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        whole = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        whole = [each for each in whole if each.numel() == SIZE * SIZE]
        if whole and func._schema.name.partition("::")[2] not in VIEWS:
            self.count += 1
            self.bytes += sum(each.nbytes for each in whole)
        return result


@pytest.mark.parametrize("form", ["fp32", "split"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_description_counts_what_an_update_moves(name, form):
    run = run_of(f"optim.name={name.partition('+')[0]}", *OPTIONS[name], *FORMS[form])
    assert description_of(run.optim) == name
    spec = DESCRIPTIONS[name]
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    weights = nn.ParameterDict({"w": nn.Parameter(torch.randn(SIZE, SIZE, dtype=dtype))})
    master_weights.attach([weights], run)
    optimizer = ResidentOptimizer(run.optim, weights.values(), run.plan)
    weights["w"].grad = torch.randn_like(weights["w"])
    with Passes() as seen:
        optimizer.step(1e-2, grad_stats())
    assert seen.bytes / SIZE**2 == (spec.update_bytes if form == "fp32" else spec.rounded_bytes)
    if form == "fp32":
        assert seen.count == spec.flops


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*OPTIONS, "lion"])
def test_a_description_counts_what_is_alive_at_a_time(name, form):
    run = run_of(f"optim.name={name.partition('+')[0]}", *OPTIONS.get(name, ()), *FORMS[form])
    layout = layout_of(run.plan, run.optim.master_weights, optimizer=name)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True), following() as live:
        weights = nn.ParameterDict({"w": nn.Parameter(torch.zeros(SIZE, SIZE, dtype=dtype))})
        master_weights.attach([weights], run)
        optimizer = ResidentOptimizer(run.optim, weights.values(), run.plan)
        weights["w"].grad = torch.zeros_like(weights["w"])
        live.peak = before = live.bytes
        optimizer.step(1e-2, grad_stats())
        copies = (live.peak - before) / 4 / SIZE**2
    said = unfused_bytes(layout, SIZE**2) / 4 / SIZE**2
    if not DESCRIPTIONS[name].whole and form != "fp32":
        assert said == 0  # by blocks, as of every update by elements
    elif form == "fp32":
        assert int(copies) == said  # rows and columns, and scalars, are less than a copy
    else:
        assert copies - 0.2 <= said <= copies + 2  # as much as the most that any of them needs to join and round


@pytest.mark.parametrize("name", OPTIONS)
def test_states_are_those_of_the_description(name):
    run = run_of(f"optim.name={name.partition('+')[0]}", *OPTIONS[name])
    spec, table = DESCRIPTIONS[name], params(run.arch)
    weights = [nn.Parameter(torch.zeros(param.shape)) for param in table]
    optimizer = ResidentOptimizer(run.optim, weights, run.plan, [param.name for param in table])
    assert tuple(optimizer.states()) == spec.state_names
    live = sum(tensor.nbytes for tensors in optimizer.states().values() for tensor in tensors)
    assert live == spec.total_bytes(table, 4)
    for weight, param in zip(weights, table, strict=True):
        held = optimizer.held()[id(weight)]
        assert sum(held[kind].nbytes for kind in held if kind != "weight") == spec.bytes_of(param.name, param.shape, 4)
    assert all(spec.state_bytes(4) * weight.numel() <= spec.bytes_of("", tuple(weight.shape), 4) for weight in weights)
    saver = saved_by(("weight", "low", *spec.state_names))
    assert saver is not None
    assert saver.state_names == spec.state_names
    assert saver.name == ("adamw" if spec is LAMB else spec.name)


def test_every_optimizer_has_a_rule_and_every_reduction_its_parameters():
    assert {name for name, spec in OPTIMIZERS.items() if spec.whole} == {*WHOLE_RULES, *MATRIX_UPDATES}
    assert {name for name, spec in OPTIMIZERS.items() if spec.orthogonalizes} == set(MATRIX_UPDATES)
    by_element = {name for name, spec in OPTIMIZERS.items() if spec.compresses} - {"onebit_lamb"}  # but for their signs
    for spec in DESCRIPTIONS.values():
        whole = spec.whole and not spec.orthogonalizes and spec.name not in by_element
        assert [bool(spec.reduced(warm_up)) for warm_up in (True, False)] == [whole, whole], spec.name
    rows, columns, matrix, tensor = (Statistic(shape=shape) for shape in ("rows", "columns", "matrix", "tensor"))
    assert [each.over(3) for each in (rows, columns, matrix, tensor)] == [(2,), (1,), (1,), (0, 1, 2)]
    assert [each.elements((2, 3, 5)) for each in (rows, columns, matrix, tensor)] == [6, 10, 2, 1]


@pytest.mark.parametrize("form", ["split", "none"])
@pytest.mark.parametrize("name", ["adafactor", "sm3", "lamb"])
def test_bf16_weights_follow_fp32_ones(name, form):
    run = run_of(f"optim.name={name}", *FORMS[form])
    torch.manual_seed(0)
    start = [torch.randn(70, 100).bfloat16(), torch.randn(37).bfloat16()]
    ours = nn.ParameterDict({f"w{number}": nn.Parameter(tensor.clone()) for number, tensor in enumerate(start)})
    master_weights.attach([ours], run)
    wide = [nn.Parameter(tensor.float()) for tensor in start]
    mine = ResidentOptimizer(run.optim, ours.values(), run.plan)
    reference = ResidentOptimizer(run_of(f"optim.name={name}").optim, wide, run.plan)
    for _ in range(4):
        for one, other in zip(ours.values(), wide, strict=True):
            gradient = torch.randn(one.shape).bfloat16()
            one.grad, other.grad = gradient, gradient.float()
        mine.step(1e-3, grad_stats())
        reference.step(1e-3, grad_stats())
    for one, other in zip(ours.values(), wide, strict=True):
        if form == "split":
            low = mine.held()[id(one)]["low"].view(torch.int16)
            assert torch.equal(master_weights.join(one.detach(), low), other.detach())
        else:  # stochastic rounding goes to one of two neighbours in each of four updates: 4 units of bf16's eight bits
            torch.testing.assert_close(one.detach().float(), other.detach(), rtol=4 * 2**-7, atol=4e-3)


WHOLE = [name for name, spec in OPTIMIZERS.items() if spec.whole and not spec.compresses]  # under any plan


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("plan.optimizer_offload=host", "plan.precision=bf16"),
            "plan.optimizer_offload moves pieces of states, and optim.name = {} updates whole tensors",
        ),
        (
            ("plan.cpu_offload=true", "plan.zero=3"),
            "plan.cpu_offload moves pieces of states, and optim.name = {} updates whole tensors",
        ),
        (
            ("plan.precision=bf16", "optim.master_weights=split", "optim.state_dtype=bf16"),
            "optim.state_dtype = bf16 is for updates by elements, and optim.name = {} updates whole tensors",
        ),
    ],
)
def test_forms_that_move_elements_are_refused(name, words, said):
    with pytest.raises(InputError) as error:
        run_of(f"optim.name={name}", *words)
    assert [problem.text for problem in error.value.problems] == [said.format(name)]
    assert "use an optimizer that updates elements (adamw, sgd, lion)" in error.value.problems[0].remedy


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if not spec.compresses])  # on one rank
def test_deterministic_mode_takes_what_does_not_round_in_reductions(name):
    words = (f"optim.name={name}", "plan.deterministic=true")
    if OPTIMIZERS[name].is_exact:
        assert run_of(*words).optim.name == name
        return
    with pytest.raises(InputError) as error:
        run_of(*words)
    (problem,) = error.value.problems
    assert problem.text.startswith("plan.deterministic has one order of sums whatever the shards")
    assert problem.remedy.startswith("leave plan.deterministic out, or use")


def test_defaults_that_an_optimizer_has_of_its_own():
    loaded = load.load(None, ["arch.preset=tiny", "optim.name=lamb"], ranks=1)
    assert (loaded.run.optim.beta2, loaded.run.optim.eps) == (0.999, 1e-6)
    assert loaded.origins["optim.beta2"] == "usual for LAMB"
    assert run_of("optim.name=lion").optim.beta2 == 0.99
    assert run_of("optim.name=lion", "optim.beta2=0.95").optim.beta2 == 0.95
    assert run_of("optim.name=adafactor").optim.beta1 == 0.0
    assert run_of().optim.beta2 == 0.95
    again = load.load(None, ["arch.preset=tiny", "optim.name=adafactor", "optim.beta1=0.0"], ranks=1).run
    assert digest(again) == digest(run_of("optim.name=adafactor"))
    assert {"eps1", "eps2", "relative_step"}.isdisjoint(mathematics(again)["optim"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optim.eps1=1e-20",), "optim.eps1 is for Adafactor, and optim.name = adamw"),
        (("optim.relative_step=true",), "optim.relative_step is for Adafactor, and optim.name = adamw"),
        (("optim.name=sm3", "optim.beta2=0.9"), "optim.beta2 is for AdamW, and optim.name = sm3"),
        (("optim.name=lion", "optim.eps=1e-6"), "optim.eps is for AdamW, and optim.name = lion"),
        (("optim.name=lamb", "optim.momentum=0.5"), "optim.momentum is for SGD with momentum, and optim.name = lamb"),
        (("optim.name=adafactor", "optim.eps1=0.0"), "optim.eps1 = 0.0 is out of range"),
    ],
)
def test_keys_of_another_optimizer_are_refused(words, said):
    with pytest.raises(InputError) as error:
        run_of(*words)
    assert [problem.text for problem in error.value.problems] == [said]
