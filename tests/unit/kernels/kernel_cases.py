"""Random tensors of many shapes and strides, and how far a kernel may be from float64 arithmetic on them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from meshwright.kernels import dispatch

DEVICE = "cpu"  # the tests of a GPU put another here
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Up to three roundings follow each other: of a sum, of a value kept for the backward, of the result. Triton's
# interpreter cuts off instead of rounding, a whole step each time. Float32 adds the rounding of a few hundred sums.
STEP = {torch.float32: 2.0**-18, torch.bfloat16: 3 * 2.0**-7, torch.float16: 3 * 2.0**-10}
SHAPES = ((1, 1), (3, 8), (5, 37), (2, 3, 96), (70, 130), (2, 1025))

interpreted = pytest.mark.skipif(
    not dispatch.INTERPRETED, reason="kernels run on the CPU in Triton's interpreter alone (TRITON_INTERPRET=1)"
)


def draw(shape: Sequence[int], dtype: torch.dtype, seed: int, strides: str = "dense") -> Tensor:
    """Normal numbers in a tensor that is dense, a slice of a wider one, turned, or every second element."""
    random = torch.Generator().manual_seed(seed)
    if strides == "slice":
        x = torch.randn((*shape[:-1], shape[-1] + 3), generator=random)[..., 1:-2]
    elif strides == "turned":
        x = torch.randn(tuple(reversed(shape)), generator=random).permute(*reversed(range(len(shape))))
    elif strides == "second":
        x = torch.randn((*shape[:-1], shape[-1] * 2), generator=random)[..., ::2]
    else:
        x = torch.randn(tuple(shape), generator=random)
    place = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=DEVICE)
    return place.copy_(x)


STRIDES = ("dense", "slice", "turned", "second")


def assert_same(
    fused: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
) -> None:
    """Values and gradients of the kernel are those of the plain twin in float64, to the rounding of the type."""
    near = [x.detach().requires_grad_() for x in tensors]
    far = [x.detach().double().requires_grad_() for x in tensors]
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (fused(*near), plain(*far)))
    slopes = [draw(y.shape, y.dtype, seed, strides="turned") for seed, y in enumerate(ours)]
    torch.autograd.backward(ours, slopes)
    torch.autograd.backward(theirs, [slope.double() for slope in slopes])
    step = max(STEP[x.dtype] for x in tensors)
    for mine, exact in (*zip(ours, theirs, strict=True), *((a.grad, b.grad) for a, b in zip(near, far, strict=True))):
        assert mine is not None
        assert exact is not None
        assert mine.shape == exact.shape
        assert_near(mine, exact, step)


def assert_near(mine: Tensor, exact: Tensor, step: float) -> None:
    """Each element within a step of itself or, where numbers of that size cancel, of the typical element."""
    # Below normal numbers a step no longer shrinks; a kept value that is one off is multiplied by slopes of up to five.
    tiny = 8 * torch.finfo(mine.dtype).smallest_normal * torch.finfo(mine.dtype).eps
    if mine.numel() == 0:
        return
    typical = exact.square().mean().sqrt()
    excess = (mine.double() - exact).abs() - step * (exact.abs() + typical) - tiny
    assert not excess.isnan().any()
    assert excess.max() <= 0, f"off by {excess.max().item():.3g} more than allowed"
