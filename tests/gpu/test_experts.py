"""Grouped matmuls of experts on a GPU: the loop over experts within rounding, whatever the load, and no waiting."""

import pytest
import torch
from torch import Tensor

from meshwright.kernels.experts import combine_rows, dispatch_rows, takes_grouped
from meshwright.models.moe import MoELayer, grouped, one_by_one
from meshwright.spec.arch import Arch

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


def layer_of(router: str = "topk", capacity: float = 0.0, mlp: str = "swiglu") -> MoELayer:
    arch = Arch(
        vocab=8, layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, ffn=8, context=128, mlp=mlp, experts=4,
        expert_ffn=96, top_k=2, router=router, capacity=capacity,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = MoELayer(arch, 0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
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


@pytest.mark.parametrize(
    ("router", "capacity"), [("topk", 0.0), ("topk", 0.5), ("gshard", 0.0), ("gshard", 0.5), ("expert_choice", 1.0)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_is_the_same_by_grouped_matmuls(router, capacity, compiled):
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    index = torch.arange(256, device="cuda").view(2, 128)
    plain, layer = layer_of(router, capacity), layer_of(router, capacity)
    layer.experts.compute = grouped
    if not compiled:
        layer.dispatch, layer.combine = dispatch_rows, combine_rows
    run = torch.compile(layer) if compiled else layer
    torch.cuda.empty_cache()
    torch.full((1 << 24,), float("nan"), device="cuda")  # what undefined rows may find in memory
    assert_near(results(layer, run, x, index), results(plain, plain, x, index))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_never_waits_and_no_load_compiles_again(compiled):
    layer = layer_of()
    layer.experts.compute = grouped
    layer.dispatch, layer.combine = (layer.dispatch, layer.combine) if compiled else (dispatch_rows, combine_rows)
    run = torch.compile(layer) if compiled else layer
    xs = [torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16) + shift for shift in (0, 1, -3)]
    xs = [x.requires_grad_() for x in xs]
    slope = torch.ones_like(xs[0])
    run(xs[0]).backward(slope)
    torch.cuda.synchronize()
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x in xs:
                run(x).backward(slope)
        finally:
            torch.cuda.set_sync_debug_mode("default")
