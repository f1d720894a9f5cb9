"""Activations: the twin is torch's, the kernel is the twin."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import SHAPES, STRIDES, TYPES, assert_same, draw, interpreted
from kernel_pairs import ACTIVATIONS, GATES, gate_pair

from meshwright.kernels.gated import activate, gated
from meshwright.spec.problem import InputError

TORCHS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_plain_twin_is_torchs(activation):
    gate, up = draw((5, 12), torch.float64, 1), draw((5, 12), torch.float64, 2)
    expected = TORCHS[activation](gate)
    torch.testing.assert_close(activate(gate, activation), expected)
    torch.testing.assert_close(gated(gate, up, activation), expected * up)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_product_is_rounded_once(dtype):
    gate, up = draw((5, 12), dtype, 1), draw((5, 12), dtype, 2)
    assert gated(gate, up).dtype == dtype
    assert torch.equal(gated(gate, up), (F.silu(gate.float()) * up.float()).to(dtype))


def test_nothing_is_activated_too():
    x = torch.empty(0, 8, requires_grad=True)
    gated(x, x).sum().backward()
    assert x.grad is not None


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] < 10])
@pytest.mark.parametrize("kind", GATES)
def test_the_kernel_is_its_twin(kind, shape, dtype):
    for activation in ACTIVATIONS:
        assert_same(*gate_pair(kind, activation, shape, dtype, "dense"))


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(GATES),
    st.sampled_from(ACTIVATIONS),
    st.tuples(st.integers(1, 5), st.integers(1, 3000)),
    st.sampled_from(TYPES),
    st.sampled_from(STRIDES),
)
def test_any_shape_and_strides_will_do(kind, activation, shape, dtype, strides):
    assert_same(*gate_pair(kind, activation, shape, dtype, strides))


@interpreted
def test_two_tensors_that_differ_are_refused_to_the_kernel():
    gate, up = torch.randn(2, 8), torch.randn(2, 8).bfloat16()
    with pytest.raises(InputError, match="differ in type"):
        gated(gate, up, kernels="fused")
    assert gated(gate, up, kernels="auto").dtype == torch.bfloat16
