"""FP8: linear layers whose three matmuls (output, input and weight gradient) run in it, and a quantization kernel.

Scaling is dynamic: every matmul has scales of its own operands, without a history of maxima. In linear layers finding
scales is plain arithmetic, which the compiler fuses with what comes before. Numbers that the backward wants transposed
are cast by a kernel, which reads them once and writes both layouts; the compiler's own write columns slowly. A weight
is cast again in the backward instead of being saved. Of a layer that ranks share, each casts its parts by the scales
of whole tensors, of which they agree on the largest magnitudes. Where a schedule splits the backward, each half
quantizes the gradient for its own matmul, and makes that alone. A frozen weight that is held in FP8 is multiplied as it
is held (`frozen_product`). In float64 the matmuls are plain ones of the same FP8 numbers, for proofs. `quantize` is one
kernel, for saved activations: rows in E4M3.

**A backward in two halves**: the gradients of an input and of a weight as two nodes of autograd's graph.
Zero-bubble schedules go back through a stage for its input, and later for its weights (Qi et al. 2023). Autograd leaves
out the nodes that nobody asked for, but a Python function runs as a whole: one that returns both gradients would make
both in each of the two passes. Here a value has a node for each half below the one that it leaves, to which that hands
its own gradient.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.kernels.dispatch import (
    ROW_LIMIT,
    Kernels,
    Pointer,
    Values,
    as_rows,
    constexpr,
    fused,
    jit,
    power,
    refusal,
    rows_each,
    tl,
    triton,
    warps,
)
from meshwright.kernels.quantized import floats


class Half(NamedTuple):
    """What makes the gradient of one tensor from that of the value."""

    of: Tensor
    gradient: Callable[..., Tensor]  # from the value's gradient and what was saved
    saved: tuple[Tensor, ...] = ()  # activations; of weights a function may hold detached ones


def in_halves(value: Tensor, *halves: Half) -> Tensor:
    """A value that was made without a graph, with the gradients of the tensors that it is of."""
    parts = [_Half.apply(half.of, value.shape, value.dtype, half) for half in halves]
    if _begins_at_functions():
        return _Joined.apply((value,), *parts)
    for part in parts:  # zeros: a pass over the value each
        value = value + part
    return value


@cache
def _begins_at_functions() -> bool:
    """Whether a backward can begin at a Python function's node, where both halves part. Torch 2.11's cannot."""
    value = torch.zeros((), requires_grad=True)
    node: Any = _Joined.apply((value.detach(),), value).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


class _Half(torch.autograd.Function):
    """One element, seen as the whole value: its gradient is the value's."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, shape: torch.Size, dtype: torch.dtype, half: Half) -> Tensor:
        ctx.gradient = half.gradient
        ctx.save_for_backward(*half.saved)
        return of.new_zeros((), dtype=dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(gradients[0], *ctx.saved_tensors), None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: tuple[Tensor], *halves: Tensor) -> Tensor:  # in a tuple: it is no input of the graph
        ctx.halves = len(halves)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients * ctx.halves


Scaling = Literal["tensorwise", "rowwise"]
Accumulate = Literal["fast", "exact"]
GradFormat = Literal["e4m3", "e5m2"]

E4M3 = torch.float8_e4m3fn
FORMATS = {"e4m3": E4M3, "e5m2": torch.float8_e5m2}
LARGEST = 448.0  # of E4M3's finite values
LARGEST_OF = {E4M3: LARGEST, torch.float8_e5m2: 57344.0}
LEAST = 2.0**-80  # `quantize` takes an amax below for this, so that a scale and its inverse are normal floats
LEAST_LINEAR = 1e-12  # and so do linear layers
MULTIPLE = 16  # both dimensions of an FP8 matmul's operands are multiples of it
TILE = 128  # rows and columns of a tile that is transposed
CAPABILITY = (8, 9)  # of the first GPUs with conversions to FP8


def takes(linear: nn.Linear) -> bool:
    """Whether a layer's shape suits FP8 matmuls."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


class Sharing(NamedTuple):
    """How the ranks of tensor parallelism share a linear layer."""

    # What each rank has a part of: output features (column-parallel), input features (row-parallel), or tokens.
    cut: Literal["out", "in", "tokens"]
    max: Callable[[Tensor], Tensor]  # the largest over all of them, element by element


class Fp8Linear(nn.Linear):
    """A linear layer in FP8, with one scale for each tensor unless it is set otherwise."""

    scaling: Scaling = "tensorwise"  # rowwise: a scale for each row of both operands, more accurate, and slower
    accumulate: Accumulate = "fast"  # exact: sums of both gradients in fp32, as torchao's; the output's stay fast
    grad_format: GradFormat = "e4m3"  # of gradients; e5m2 has more range and one bit less
    input_stays = False  # its input is saved by others anyway, so the backward can cast that
    sharing: Sharing | None = None  # None: this rank has the whole layer
    splits = False  # its backward runs for the input, and later for the weight

    def forward(self, input: Tensor) -> Tensor:
        """The matmul in FP8, the bias in the precision of the input."""
        y = self.product(input, self.weight)
        return y if self.bias is None else y + self.bias

    def product(self, input: Tensor, weight: Tensor) -> Tensor:
        """The matmul in FP8 of what this rank has of the input and the weight."""
        how = self.scaling, self.accumulate, self.grad_format, self.input_stays, self.sharing
        rows = input.flatten(0, -2)
        y = _by_halves(rows, weight, *how) if self.splits else _Fp8Linear.apply(rows, weight, *how)
        return y.unflatten(0, input.shape[:-1])


def amax_of(x: Tensor, scaling: Scaling) -> Tensor:
    """The largest magnitude of a matrix, or of each of its rows."""
    return (x.abs().amax() if scaling == "tensorwise" else x.abs().amax(dim=1, keepdim=True)).float()


def scale_of(x: Tensor, scaling: Scaling, dtype: torch.dtype = E4M3) -> Tensor:
    """The factor by which the largest magnitude of a matrix, or of each of its rows, is the largest of a format."""
    return _scale(amax_of(x, scaling), dtype)


def _scale(amax: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return LARGEST_OF[dtype] / amax.clamp(min=LEAST_LINEAR)


def _agreed(sharing: Sharing, *amaxes: Tensor) -> tuple[Tensor, ...]:
    """Largest magnitudes over the parts of all ranks, in one call."""
    together = sharing.max(torch.cat([amax.flatten() for amax in amaxes]))
    parts = together.split([amax.numel() for amax in amaxes])
    return tuple(part.view(amax.shape) for part, amax in zip(parts, amaxes, strict=True))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """A matrix times its scales in FP8."""
    return (x.float() * scale).clamp(-LARGEST_OF[dtype], LARGEST_OF[dtype]).to(dtype)


def quantize_linear(x: Tensor, scaling: Scaling, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 and its inverse scales, as an FP8 matmul takes them.

    Not by `quantize`, which divides where this multiplies by an inverse, and has another least amax: of random
    matrices in bf16, 43 % of the scales and 0.05 % of the values come out otherwise.
    """
    return _scaled(x, scale_of(x, scaling, dtype), dtype)


def _has_rows_on_cpus() -> bool:
    """Whether torch multiplies FP8 matrices with a scale for each row on a CPU. 2.11 does not."""
    a, scale = torch.zeros(16, 16, dtype=E4M3), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


ROWS_ON_CPUS = _has_rows_on_cpus()


def _matmul(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = True) -> Tensor:
    """a @ b.T of quantized matrices, both with the summed dimension contiguous."""
    if dtype == torch.float64:
        return (a[0].double() * a[1]) @ (b[0].double() * b[1]).t()
    if not (a[0].is_cuda or a[1].numel() == 1 or ROWS_ON_CPUS):
        return ((a[0].float() * a[1]) @ (b[0].float() * b[1]).t()).to(dtype)
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=dtype, use_fast_accum=fast)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scaling: Scaling,
        accumulate: Accumulate,
        grad_format: GradFormat,
        input_stays: bool,
        sharing: Sharing | None,
    ) -> Tensor:
        ctx.how = scaling, accumulate, grad_format, input_stays, sharing
        x_scale, weight_scale = _forward_scales(x, weight, scaling, sharing)
        if scaling == "rowwise":
            ctx.save_for_backward(x, weight)
            return _matmul(_scaled(x, x_scale), _scaled(weight, weight_scale), x.dtype)
        if input_stays:
            x_fp8, saved = cast(x, x_scale), x
        else:
            x_fp8, saved = cast_both(x, x_scale, E4M3)
        ctx.save_for_backward(saved, x_scale, weight, weight_scale)
        return _matmul((x_fp8, x_scale.reciprocal()), _scaled(weight, weight_scale), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaling, accumulate, grad_format, input_stays, sharing = ctx.how
        gradient, fast, dtype = gradients[0], accumulate == "fast", FORMATS[grad_format]
        if scaling == "rowwise":
            x, weight = ctx.saved_tensors
            amax, weight_amax = _backward_amaxes(gradient, weight, sharing)
            g, weight_transposed = (
                _scaled(gradient, _scale(amax, dtype), dtype),
                _scaled(weight.t().contiguous(), _scale(weight_amax)),
            )
            transposed, x_transposed = _transposed_by_row(gradient, x, dtype, sharing)
        else:
            saved, x_scale, weight, weight_scale = ctx.saved_tensors
            scale = _gradient_scale(gradient, dtype, sharing)
            inverse = scale.reciprocal()
            g, transposed = ((each, inverse) for each in cast_both(gradient, scale, dtype))
            weight_transposed = cast_transposed(weight, weight_scale, scale), weight_scale.reciprocal()
            x_transposed = cast_transposed(saved, x_scale, scale) if input_stays else saved, x_scale.reciprocal()
        dx = _matmul(g, weight_transposed, gradient.dtype, fast)
        dweight = _matmul(transposed, x_transposed, gradient.dtype, fast)
        return dx, dweight, None, None, None, None, None


def _by_halves(
    x: Tensor, weight: Tensor, scaling: Scaling, accumulate: Accumulate, grad_format: GradFormat, stays: bool,
    sharing: Sharing | None,
) -> Tensor:  # fmt: skip
    """As `_Fp8Linear`, with a node of the graph for each gradient."""
    fast, dtype = accumulate == "fast", FORMATS[grad_format]
    grad_scale = _SharedScale(dtype, sharing)
    with torch.no_grad():
        x_scale, weight_scale = _forward_scales(x, weight, scaling, sharing)
        if scaling == "rowwise" or stays:
            x_fp8, saved = cast(x, x_scale), x.detach()
        else:
            x_fp8, saved = cast_both(x, x_scale, E4M3)
        y = _matmul((x_fp8, x_scale.reciprocal()), _scaled(weight, weight_scale), x.dtype)

    def for_input(held: Tensor, gradient: Tensor) -> Tensor:
        if scaling == "rowwise":
            amax, weight_amax = _backward_amaxes(gradient, held, sharing)
            g, weight_transposed = _scaled(gradient, _scale(amax, dtype), dtype), held.t().contiguous()
            return _matmul(g, _scaled(weight_transposed, _scale(weight_amax)), gradient.dtype, fast)
        scale = grad_scale.of(gradient)
        transposed = cast_transposed(held, weight_scale, scale)
        return _matmul(_scaled(gradient, scale, dtype), (transposed, weight_scale.reciprocal()), gradient.dtype, fast)

    def for_weight(gradient: Tensor, saved: Tensor, x_scale: Tensor) -> Tensor:
        if scaling == "rowwise":
            return _matmul(*_transposed_by_row(gradient, saved, dtype, sharing), gradient.dtype, fast)
        scale = grad_scale.of(gradient)
        x_transposed = cast_transposed(saved, x_scale, scale) if stays else saved
        transposed = cast_both(gradient, scale, dtype)[1]
        return _matmul((transposed, scale.reciprocal()), (x_transposed, x_scale.reciprocal()), gradient.dtype, fast)

    return in_halves(y, Half(x, partial(for_input, weight.detach())), Half(weight, for_weight, (saved, x_scale)))


class _SharedScale:
    """The scale of a gradient, tensorwise, in both halves of its backward: ranks that have parts agree in the first."""

    def __init__(self, dtype: torch.dtype, sharing: Sharing | None) -> None:
        self.dtype, self.sharing = dtype, sharing
        self.agreed: Tensor | None = None  # by the first half, for the second

    def of(self, gradient: Tensor) -> Tensor:
        if self.sharing is None or self.sharing.cut == "in":
            return _gradient_scale(gradient, self.dtype, None)
        if self.agreed is None:
            self.agreed = _gradient_scale(gradient, self.dtype, self.sharing)
            return self.agreed
        scale, self.agreed = self.agreed, None
        return scale


def _gradient_scale(gradient: Tensor, dtype: torch.dtype, sharing: Sharing | None) -> Tensor:
    """The scale of a whole gradient, of which all but row-parallel ranks have parts."""
    amax = amax_of(gradient, "tensorwise")
    if sharing is not None and sharing.cut != "in":
        (amax,) = _agreed(sharing, amax)
    return _scale(amax, dtype)


def _backward_amaxes(gradient: Tensor, weight: Tensor, sharing: Sharing | None) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows of a gradient and of the transposed weight, which column-parallel ranks share."""
    amaxes = amax_of(gradient, "rowwise"), amax_of(weight.t(), "rowwise")
    if sharing is None or sharing.cut != "out":
        return amaxes
    amax, weight_amax = _agreed(sharing, *amaxes)
    return amax, weight_amax


def _transposed_by_row(
    gradient: Tensor, x: Tensor, dtype: torch.dtype, sharing: Sharing | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The factors of a weight's gradient, rowwise: of each feature the numbers of all tokens have one scale."""
    transposed, x_transposed = gradient.t().contiguous(), x.t().contiguous()
    amaxes = amax_of(transposed, "rowwise"), amax_of(x_transposed, "rowwise")
    if sharing is not None and sharing.cut == "tokens":
        amax, x_amax = _agreed(sharing, *amaxes)
    else:
        amax, x_amax = amaxes
    return _scaled(transposed, _scale(amax, dtype), dtype), _scaled(x_transposed, _scale(x_amax))


def _forward_scales(x: Tensor, weight: Tensor, scaling: Scaling, sharing: Sharing | None) -> tuple[Tensor, Tensor]:
    """The scales of the output's operands: of whole tensors, or of whole rows, where ranks have parts of these."""
    amax, weight_amax = amax_of(x, scaling), amax_of(weight, scaling)
    if sharing is not None and sharing.cut == "in":
        amax, weight_amax = _agreed(sharing, amax, weight_amax)
    elif sharing is not None and scaling == "tensorwise":  # else each rank has whole rows
        if sharing.cut == "tokens":
            (amax,) = _agreed(sharing, amax)
        else:
            (weight_amax,) = _agreed(sharing, weight_amax)
    return _scale(amax), _scale(weight_amax)


def frozen_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    scaling: Scaling,
    accumulate: Accumulate,
    grad_format: GradFormat,
    sharing: Sharing | None,
) -> Tensor:
    """The matmul in FP8 with a frozen weight of `kernels/quantized.py`: E4M3 numbers, and a scale for each row.

    Two matmuls, as the weight has no gradient. A row's scale multiplies what the output has of it, and going back the
    gradient, before that is quantized: the numbers are never decoded. Nothing of the input is saved.
    """
    how = scaling, accumulate, grad_format, sharing
    return _FrozenProduct.apply(x.flatten(0, -2), codes, scales, *how).unflatten(0, x.shape[:-1])


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        scaling: Scaling,
        accumulate: Accumulate,
        grad_format: GradFormat,
        sharing: Sharing | None,
    ) -> Tensor:
        ctx.how = scaling, accumulate, grad_format, sharing
        ctx.save_for_backward(codes, scales)
        amax = amax_of(x, scaling)
        if sharing is not None and sharing.cut == "in":
            (amax,) = _agreed(sharing, amax)
        quantized, held, each = _scaled(x, _scale(amax)), codes.view(E4M3), floats(scales)
        if scaling == "rowwise":
            return _matmul(quantized, (held, each[:, None]), x.dtype)
        return (_matmul(quantized, (held, torch.ones_like(amax)), x.dtype) * each).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaling, accumulate, grad_format, sharing = ctx.how
        (gradient,), (codes, scales) = gradients, ctx.saved_tensors
        dtype, scaled = FORMATS[grad_format], gradient * floats(scales)
        amax = amax_of(scaled, scaling)
        if sharing is not None and sharing.cut == "out":
            (amax,) = _agreed(sharing, amax)
        one = amax.new_ones(())
        transposed = cast_transposed(codes.view(E4M3), one, amax)  # by one: as they are
        ones = one if scaling == "tensorwise" else amax.new_ones(len(transposed), 1)
        quantized = _scaled(scaled, _scale(amax, dtype), dtype)
        dx = _matmul(quantized, (transposed, ones), gradient.dtype, accumulate == "fast")
        return dx, None, None, None, None, None, None


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    return cast(x, scale, dtype), scale.reciprocal()


@torch.library.custom_op("meshwright::cast_fp8_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix times its scale in FP8, and the transpose of that."""
    if triton is None or not x.is_cuda:
        values = cast(x, scale, dtype).contiguous()
        return values, _transposed(values)
    rows, columns = x.shape
    shapes = (rows, columns), (columns, rows)
    values, transposed = (torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes)
    _launch(x, scale, values, transposed)
    return values, transposed


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty((columns, rows), dtype=dtype)


@torch.library.custom_op("meshwright::cast_fp8_transposed", mutates_args=())
def cast_transposed(x: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    """The transpose of a matrix times its scale in E4M3.

    `after` is not read. It is of the backward, so the compiler, which would save what a kernel returns from its inputs
    alone rather than call it again, leaves the call there: a byte of every weight is not held from the forward on.
    """
    if triton is None or not x.is_cuda:
        return _transposed(cast(x, scale))
    transposed = torch.empty((x.shape[1], x.shape[0]), dtype=E4M3, device=x.device)
    _launch(x, scale, None, transposed)
    return transposed


@cast_transposed.register_fake
def _(x: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3)


def _transposed(values: Tensor) -> Tensor:
    """A contiguous copy, as the transposed view of a single row is contiguous already; FP8 is copied as bytes."""
    return values.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(values.dtype)


def _launch(x: Tensor, scale: Tensor, values: Tensor | None, transposed: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    _cast_tiles[(-(-rows // TILE), -(-columns // TILE))](
        x, scale, transposed if values is None else values, transposed, rows, columns, x.stride(0),
        both=values is not None, side=TILE, num_warps=8,
    )  # fmt: skip


@jit
def _cast_tiles(
    x: Pointer, scale: Pointer, values: Pointer, transposed: Pointer,
    rows: int, columns: int, x_row: int, both: constexpr, side: constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * side + tl.arange(0, side)
    j = tl.program_id(1).to(tl.int64) * side + tl.arange(0, side)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    tile = tl.load(x + i[:, None] * x_row + j[None, :], mask=inside, other=0.0).to(tl.float32)
    # Within the format's range but for its last bit, as the scale is of the largest magnitude: no clamp is needed.
    quantized = (tile * tl.load(scale)).to(transposed.dtype.element_ty)
    if both:
        tl.store(values + i[:, None] * columns + j[None, :], quantized, mask=inside)
    beside = (j[:, None] < columns) & (i[None, :] < rows)
    tl.store(transposed + j[:, None] * rows + i[None, :], tl.trans(quantized), mask=beside)


def quantize(x: Tensor, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """A matrix in E4M3 and the scale of each row, (rows, 1), by which its largest magnitude is the largest value.

    A NaN or an infinity spoils its row.
    """
    if not _fits(x, kernels):
        return reference(x)
    x = as_rows(x)
    rows, cols = x.shape
    values = torch.empty((rows, cols), dtype=E4M3, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = power(cols)
    each = rows_each(block, rows)
    _cast_rows[(-(-rows // each),)](
        x, values, scale, rows, cols, x.stride(0),
        largest=LARGEST, least=LEAST, each=each, block=block, num_warps=warps(each * block),
    )  # fmt: skip
    return values, scale


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantization by plain arithmetic: a pass for the maxima and one for the cast."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    amax = x.abs().amax(1, keepdim=True) if x.numel() else x.new_zeros((x.shape[0], 1))
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    largest = torch.full_like(amax, LARGEST)  # a tensor: by a scalar a GPU divides as if by its inverse
    return (x * (largest / amax)).to(E4M3).contiguous(), (amax / largest).to(torch.float32)


def _fits(x: Tensor, kernels: Kernels) -> bool:
    if not fused(x, kernels):
        return False
    able = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= CAPABILITY
    if not able and kernels == "fused":
        raise refusal("this GPU has no FP8")
    return able and x.shape[1] <= ROW_LIMIT


@jit
def _bits(x: Values) -> Values:
    """Magnitudes as integers: they sort like the floats, and a NaN is above them all instead of being passed over."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@jit
def _amax(bits: Values, least: constexpr) -> Values:
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < least, least, amax)


@jit
def _inverse(amax: Values, largest: constexpr) -> Values:
    return tl.div_rn(amax * 0.0 + largest, amax)  # rounded as the reference rounds it; a NaN stays


@jit
def _cast_rows(
    x: Pointer, values: Pointer, scale: Pointer,
    rows: int, cols: int, x_row: int, largest: constexpr, least: constexpr, each: constexpr, block: constexpr,
) -> None:  # fmt: skip
    rows_here = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)
    row = rows_here[:, None]
    col = tl.arange(0, block)[None, :]
    inside = (row < rows) & (col < cols)
    loaded = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    amax = _amax(tl.max(_bits(loaded), axis=1), least)
    tl.store(scale + rows_here, tl.div_rn(amax, largest), mask=rows_here < rows)
    quantized = loaded * _inverse(amax, largest)[:, None]
    tl.store(values + row * cols + col, quantized.to(values.dtype.element_ty), mask=inside)
