"""Linear layers whose three products run in FP8: the output, the gradient of the input and that of the weight.

Scales are found anew for every product (no history of maxima). Finding and applying them is plain arithmetic, which the
compiler fuses with what comes before; turning the codes is not, as the compiler's own kernels write columns slowly.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.kernels.choose import Pointer, constexpr, jit, tl, triton, triton_available

CODE = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers
LEAST = 1e-12  # a maximum below counts as this
MULTIPLE = 16  # of both dimensions: what FP8 products ask for
TILE = 128

Scaling = Literal["tensor", "row"]


def takes(linear: nn.Linear) -> bool:
    """Whether a layer's shape suits FP8 products."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


class Linear8(nn.Linear):
    """A linear layer in FP8 with one scale for each tensor."""

    scaling: Scaling = "tensor"

    def forward(self, input: Tensor) -> Tensor:
        """The product in FP8, the bias in the precision of the input."""
        y = _Linear8.apply(input.flatten(0, -2), self.weight, self.scaling).unflatten(0, input.shape[:-1])
        return y if self.bias is None else y + self.bias


class RowLinear8(Linear8):
    """A linear layer in FP8 with a scale for each row of what is summed: closer, and slower."""

    scaling: Scaling = "row"


def codes(x: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """A matrix as FP8 numbers and what they are multiplied with.

    Not by `quantize`, which divides where this multiplies with an inverse, and has another least maximum: of random
    matrices in bf16, 43 % of the scales and 0.05 % of the codes come out otherwise.
    """
    amax = x.abs().amax() if scaling == "tensor" else x.abs().amax(dim=1, keepdim=True)
    scale = LARGEST / amax.float().clamp(min=LEAST)
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(CODE), scale.reciprocal()


def _turned_codes(x: Tensor, scaling: Scaling, known: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The transposed matrix as FP8 numbers: of one scale, the numbers turned; else with scales of its own rows."""
    if known is not None:
        return turned(known[0]), known[1]
    return codes(x.t().contiguous(), scaling)


def _times(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a @ b.T of codes, both with the summed dimension dense."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=dtype, use_fast_accum=True)


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        x_codes, weight_codes = codes(x, scaling), codes(weight, scaling)
        kept = (*x_codes, *weight_codes) if scaling == "tensor" else (x, weight)
        ctx.save_for_backward(*kept)
        return _times(x_codes, weight_codes, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient, scaling, kept = gradients[0], ctx.scaling, ctx.saved_tensors
        of_x, of_weight = (kept[:2], kept[2:]) if scaling == "tensor" else (None, None)
        g = codes(gradient, scaling)
        to_x = _times(g, _turned_codes(kept[-1], scaling, of_weight), gradient.dtype)
        g_turned = _turned_codes(gradient, scaling, g if scaling == "tensor" else None)
        to_weight = _times(g_turned, _turned_codes(kept[0], scaling, of_x), gradient.dtype)
        return to_x, to_weight, None


@torch.library.custom_op("meshwright::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """The transpose of a matrix of FP8 numbers, dense."""
    bits = x.contiguous().view(torch.uint8)
    if not (x.is_cuda and triton_available()):
        # A clone, as the turned view of a single row is dense already.
        return bits.t().clone(memory_format=torch.contiguous_format).view(x.dtype)
    rows, columns = x.shape
    y = torch.empty(columns, rows, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    _turn[grid](bits, y, rows, columns, side=TILE, num_warps=8)
    return y.view(x.dtype)


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


@jit
def _turn(x: Pointer, y: Pointer, rows: int, columns: int, side: constexpr) -> None:
    i = tl.program_id(0) * side + tl.arange(0, side)
    j = tl.program_id(1) * side + tl.arange(0, side)
    tile = tl.load(
        x + i[:, None].to(tl.int64) * columns + j[None, :], mask=(i[:, None] < rows) & (j[None, :] < columns)
    )
    tl.store(
        y + j[:, None].to(tl.int64) * rows + i[None, :],
        tl.trans(tile),
        mask=(j[:, None] < columns) & (i[None, :] < rows),
    )
