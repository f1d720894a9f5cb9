"""Grouped matmuls of experts on a GPU: the loop over experts within rounding, whatever the load, and no waiting."""

import pytest
import torch
from torch import Tensor
from trials import make_corpus, make_run

from meshwright.kernels.experts import combine_rows, dispatch_rows, grouped_matmul_fp8, takes_grouped
from meshwright.models.moe import Experts, MoELayer, grouped, mix, mix_grouped, one_by_one
from meshwright.parallel import mesh as meshes
from meshwright.spec.arch import Arch
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not takes_grouped(torch.device("cuda"), torch.bfloat16),
    reason="needs a GPU with grouped matmuls",
)
# One more rounding of bf16 (2⁻⁹ at most, about half on average) in each of three matmuls and the sum.
ROUNDING = 0.01
LOADS = {"fair": None, "skewed": [300, 3, 0, 209], "one expert": [0, 512, 0, 0], "a few": [1, 2, 0, 1]}


@pytest.fixture(autouse=True)
def _no_graphs_of_before():
    torch._dynamo.reset()  # a second architecture in one process would make its capacity a symbol


def layer_of(router: str = "topk", capacity: float = 0.0, mlp: str = "swiglu", loss: float = 0.0) -> MoELayer:
    arch = Arch(
        vocab=8, layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, ffn=8, context=128, mlp=mlp, experts=4,
        expert_ffn=96, top_k=1 if router == "switch" else 2, router=router, capacity=capacity, balance_loss=loss,
        z_loss=loss,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = MoELayer(arch, 0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    layer.begin(0, "a layer", torch.device("cuda"))
    return layer.cuda().bfloat16()


def results(layer: MoELayer, run, *inputs: Tensor) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    x = inputs[0].detach().requires_grad_()
    y = run(x, *inputs[1:])
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters() if weight.grad is not None)]


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - other.double()).norm() <= ROUNDING * other.double().norm()


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("load", LOADS)
def test_grouped_is_the_loop_over_experts(load, mlp):
    layer = layer_of(mlp=mlp)
    counts = torch.tensor(LOADS[load] or [128] * 4, device="cuda")
    x = torch.randn(int(counts.sum()), 64, device="cuda", dtype=torch.bfloat16)
    ours, theirs = (
        results(layer, lambda x, how=how: how(layer.experts, x, counts), x) for how in (grouped, one_by_one)
    )
    assert_near(ours, theirs)


ROUTERS = [
    ("topk", 0.0),
    ("topk", 0.5),
    ("noisy_topk", 0.0),
    ("switch", 1.0),
    ("gshard", 0.0),
    ("gshard", 0.5),
    ("expert_choice", 1.0),
]
# Not compiled, with our kernels; compiled with gates after the experts; compiled with gates inside.
WAYS = ["kernels", "after", "inside"]


def put(layer: MoELayer, way: str):
    """A layer's grouped matmuls, and how it is called."""
    layer.experts.compute = grouped
    layer.mix = mix_grouped if way == "inside" else mix
    if way == "kernels":
        layer.dispatch, layer.combine = dispatch_rows, combine_rows
    return layer if way == "kernels" else torch.compile(layer)


@pytest.mark.parametrize(("router", "capacity"), ROUTERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_the_same_by_grouped_matmuls(router, capacity, way):
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(256, device="cuda").view(2, 128)
    plain, layer = layer_of(router, capacity), layer_of(router, capacity)
    run = put(layer, way)
    torch.cuda.empty_cache()
    torch.full((1 << 24,), float("nan"), device="cuda")  # what undefined rows may find in memory
    assert_near(results(layer, run, x, index), results(plain, plain, x, index))


@pytest.mark.parametrize("way", WAYS)
def test_sums_have_one_order(way):
    layer = layer_of()
    run = put(layer, way)
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    first, again = results(layer, run, x), results(layer, run, x)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("load", LOADS)
def test_grouped_fp8_is_its_plain_twin(load, scaling):
    counts = torch.tensor(LOADS[load] or [128] * 4)
    ends, rows = counts.cumsum(0, dtype=torch.int32), int(counts.sum())
    x, slope = torch.randn(2, rows, 64).bfloat16()
    stack = torch.randn(4, 64, 64).bfloat16()
    found = []
    for device in ("cuda", "cpu"):
        given = [x.to(device).requires_grad_(), stack.to(device).requires_grad_()]
        y = grouped_matmul_fp8(*given, ends.to(device), scaling)
        y.backward(slope.to(device))
        found.append([each.detach().cpu() for each in (y, given[0].grad, given[1].grad)])
    assert_near(*found)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_compiled_fp8_layer_is_near_the_plain_one(scaling):
    layer, plain = layer_of(), layer_of()
    run = put(layer, "inside")
    layer.experts.multiply = lambda *given: grouped_matmul_fp8(*given, scaling)
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    for mine, other in zip(results(layer, run, x), results(plain, plain, x), strict=True):
        # E4M3 is off by 2⁻⁴ at most, about a third of that on average, in both operands of three products in a row.
        assert (mine.double() - other.double()).norm() <= 0.12 * other.double().norm()


@pytest.mark.parametrize(("router", "capacity"), ROUTERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_host_never_waits_and_no_load_compiles_again(router, capacity, way):
    layer = layer_of(router, capacity, loss=0.01)
    run = put(layer, way)
    layer.loss_weight = torch.ones((), dtype=torch.float64, device="cuda")
    index = torch.arange(256, device="cuda").view(2, 128)
    xs = [torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16) + shift for shift in (0, 1, -3)]
    xs = [x.requires_grad_() for x in xs]
    slope = torch.ones_like(xs[0])
    run(xs[0], index).backward(slope)
    torch.cuda.synchronize()
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x in xs:
                run(x, index).backward(slope)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compile", ["true", "false"])
@pytest.mark.parametrize(("router", "capacity"), [("topk", 0.0), ("topk", 1.0), ("gshard", 1.0)])
def test_a_training_step_waits_for_nothing(folder, router, capacity, compile):
    words = (f"arch.router={router}", f"arch.capacity={capacity}", "plan.precision=bf16", f"plan.compile={compile}")
    run = make_run(folder, *words, "steps=8", "data.eval_fraction=0.0", arch="tiny-moe")
    mesh = meshes.make(run.plan, torch.device("cuda", 0))
    state = build(run, make_corpus(run, folder), mesh)
    modules = [module for chunk in state.chunks for module in chunk.modules()]
    assert all(module.compute is grouped for module in modules if isinstance(module, Experts))
    try:
        for result in train(run, state, mesh):
            if isinstance(result, StepResult) and result.step == 4:
                torch.cuda.set_sync_debug_mode("error")  # from here on any hidden synchronisation raises
    finally:
        torch.cuda.set_sync_debug_mode("default")
        state.loader.close()
