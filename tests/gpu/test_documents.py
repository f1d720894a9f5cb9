"""Attention within documents on a GPU: right against fp64, however blocks are run, and without a dense mask."""

import pytest
import torch
from torch import Tensor
from trials import losses_of, made, make_run

from meshwright.kernels.attention import build_mask, document_attention
from meshwright.models.layers import causal_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _kernels_of_this_test_alone():
    """Torch makes a kernel for each of eight shapes in a process and then refuses: a run has two or three."""
    torch._dynamo.reset()


def cut(samples: int, length: int, mean: int) -> Tensor:
    return (torch.rand(samples, length, device="cuda") < 1 / mean).cumsum(dim=1)


def draw(samples: int, heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(samples, each, length, head_dim) for each in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(
    ("shape", "mean"),
    [((2, 8, 2, 1024, 64), 100), ((1, 4, 4, 777, 128), 300), ((3, 6, 3, 130, 32), 20), ((1, 2, 1, 2048, 64), 9999)],
)
def test_it_is_the_dense_masks_in_fp64(shape, mean, dtype, tolerance):
    torch.manual_seed(1)
    tensors, documents = draw(*shape, dtype), cut(shape[0], shape[3], mean)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    found, wanted = document_attention(*tensors, build_mask(documents)), causal_attention(*wide, documents)
    weights = torch.randn_like(found)
    pairs = zip(
        (found, *torch.autograd.grad(found, tensors, weights)),
        (wanted, *torch.autograd.grad(wanted, wide, weights.double())),
        strict=True,
    )
    assert all((one.double() - other).norm() / other.norm() < tolerance for one, other in pairs)


def test_its_memory_grows_with_the_length_and_not_its_square():
    torch.manual_seed(1)
    length = 32768  # a mask of it would take 1 GiB
    tensors, documents = draw(1, 2, 1, length, 64, torch.bfloat16), cut(1, length, 4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    document_attention(*tensors, build_mask(documents)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_the_plain_twins(folder, recompute, compiled):
    words = (
        "arch.heads=4",
        "arch.kv_heads=2",
        "sequence=256",
        "steps=8",
        "data.mask_documents=true",
        "optim.lr=1e-3",
    )
    device = torch.device("cuda", 0)
    plain, mine = (
        losses_of(*made(make_run(folder, *words, "plan.precision=bf16", *more), folder, device))
        for more in (
            ("plan.kernels=plain",),
            ("plan.kernels=fused", f"plan.compile={str(compiled).lower()}", f"plan.recompute={recompute}"),
        )
    )
    assert mine == pytest.approx(plain, abs=0.02)  # bf16 rounds a loss of 6 to 0.02
