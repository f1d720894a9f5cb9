"""Layers whose backward is split make each gradient once: the input's in one pass, the weight's in the other."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

from meshwright.kernels.experts import grouped_matmul_fp8
from meshwright.kernels.fp8 import Fp8Linear


class Grouped(nn.Module):
    def __init__(self, scaling: str) -> None:
        super().__init__()
        self.stack, self.scaling, self.splits = nn.Parameter(torch.randn(2, 48, 32)), scaling, False
        self.ends = torch.tensor([16, 32], dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        return grouped_matmul_fp8(x, self.stack, self.ends, self.scaling, splits=self.splits)


def linear(scaling: str, stays: bool, grad_format: str = "e4m3") -> Fp8Linear:
    layer = Fp8Linear(32, 48, dtype=torch.float64)
    layer.scaling, layer.input_stays, layer.grad_format = scaling, stays, grad_format
    return layer


LAYERS = {
    "one scale a tensor": lambda: linear("tensorwise", False),
    "its input stays": lambda: linear("tensorwise", True, "e5m2"),
    "a scale a row": lambda: linear("rowwise", False),
    "experts": lambda: Grouped("tensorwise"),
    "experts, a scale a row": lambda: Grouped("rowwise"),
}


def of_weights(gradient, x, ends, out_shape=None) -> int:
    """An operator of our own, into which the counter does not look: every row times every column, by experts."""
    return 2 * gradient[0] * gradient[1] * x[1]


def flops(of) -> tuple[int, object]:
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.meshwright.expert_weight_gradient: of_weights}
    ) as counter:
        found = of()
    return counter.get_total_flops(), found


@pytest.mark.parametrize("name", LAYERS)
def test_each_pass_makes_its_own_matmul(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(32, 32, dtype=next(layer.parameters()).dtype, requires_grad=True)
    y = layer(x)
    sent = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, *layer.parameters()], sent)
    layer.splits = True
    forward, y = flops(lambda: layer(x) * 1)  # a stage ends in a tensor that is no view
    first, ((dx,), groups) = flops(lambda: stage_backward_input([y], [sent], [x], layer.parameters()))
    assert all(weight.grad is None for weight in layer.parameters())
    second, _ = flops(lambda: stage_backward_weight(layer.parameters(), groups))
    assert (first, second) == (forward, forward)
    for mine, theirs in zip([dx, *(weight.grad for weight in layer.parameters())], expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_layer_of_one_node_would_make_both_in_each():
    layer = LAYERS["one scale a tensor"]()
    x = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)
    forward, y = flops(lambda: layer(x) * 1)
    first, (_, groups) = flops(lambda: stage_backward_input([y], [torch.ones_like(y)], [x], layer.parameters()))
    second, _ = flops(lambda: stage_backward_weight(layer.parameters(), groups))
    assert (first, second) == (2 * forward, 2 * forward)


def test_a_whole_backward_is_the_same():
    torch.manual_seed(0)
    layer = LAYERS["one scale a tensor"]()
    x = torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    gradients = []
    for layer.splits in (False, True):
        gradients.append(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
