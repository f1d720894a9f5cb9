"""Softmax: the twin is softmax, the kernel is the twin, and the bytes that each moves are counted, not claimed."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import SHAPES, STRIDES, TYPES, assert_same, draw, interpreted
from kernel_pairs import softmax_pair
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.kernels import dispatch
from meshwright.kernels.softmax import bytes_moved, reference, softmax


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_plain_twin_is_torchs(dtype):
    x = draw((4, 33), dtype, 1)
    torch.testing.assert_close(reference(x), torch.softmax(x, -1))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_has_a_softmax_too(shape):
    x = torch.empty(shape, requires_grad=True)
    y = softmax(x)
    y.sum().backward()
    assert y.shape == x.shape


class Counter(TorchDispatchMode):
    """Elements that operations read and write; views move nothing."""

    def __init__(self):
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.data_ptr() not in [x.data_ptr() for x in tensors]:
            self.read += sum(x.numel() for x in tensors)
            self.written += result.numel()
        return result


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 5), (64, 100)])
def test_the_plain_operations_read_5mn_2m_and_write_3mn_2m(rows, cols):
    x = torch.randn(rows, cols)
    with Counter() as moved:
        reference(x)
    assert moved.read == 5 * rows * cols + 2 * rows
    assert moved.written == 3 * rows * cols + 2 * rows
    assert bytes_moved("plain", rows, cols, 4) == 4 * (moved.read + moved.written)


@interpreted
@pytest.mark.parametrize(("rows", "cols"), [(7, 5), (3, 1000), (1, dispatch.ROW_LIMIT + 5)])
def test_the_kernel_loads_and_stores_what_is_claimed(rows, cols, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    elements = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_load",
        lambda self, where, mask, *rest: elements.append(mask.data.sum()) or load(self, where, mask, *rest),
    )
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, where, new, mask, *rest: elements.append(mask.data.sum()) or store(self, where, new, mask, *rest),
    )
    softmax(torch.randn(rows, cols), "fused")
    assert 4 * sum(elements) == bytes_moved("fused", rows, cols, 4)


def test_a_fused_softmax_moves_a_quarter():
    assert bytes_moved("fused", 4096, 4096, 2) / bytes_moved("plain", 4096, 4096, 2) == pytest.approx(0.25, rel=1e-3)


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, dispatch.ROW_LIMIT + 5)])
def test_the_kernel_is_its_twin(shape, dtype):
    assert_same(*softmax_pair(shape, dtype, "dense"))


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(st.tuples(st.integers(1, 9), st.integers(1, 300)), st.sampled_from(TYPES), st.sampled_from(STRIDES))
def test_any_shape_and_strides_will_do(shape, dtype, strides):
    assert_same(*softmax_pair(shape, dtype, strides))


@interpreted
@pytest.mark.parametrize("cols", [5, dispatch.ROW_LIMIT + 5])
def test_masked_and_huge_elements_are_as_in_the_twin(cols):
    x = torch.randn(3, cols)
    x[0, 1:] = float("-inf")
    x[1] *= 1e30
    x[2, -1] = float("nan")
    torch.testing.assert_close(softmax(x, "fused"), reference(x), equal_nan=True)
