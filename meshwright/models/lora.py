"""LoRA (Hu 2021), DoRA (Liu 2024): linear layers with an adapter beside their frozen weight; see `spec/tuning.py`.

So have stacks of routed experts, each expert an adapter of its own: rows sorted by expert are multiplied with all of
them by grouped matmuls, as with the stacks themselves.

A weight that is held in few bits (QLoRA, Dettmers 2023) is decoded for its matmul and freed again, in the forward and
in the backward; or, in FP8, multiplied as it is, where a plan has matmuls in FP8.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.kernels.experts import by_segment, low_rank_by_segment
from meshwright.kernels.quantized import FrozenPart, decode
from meshwright.models.dropout import Dropped, kept
from meshwright.models.init import key, signed
from meshwright.models.moe import Experts, Multiply, grouped, row_biases
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, params, stored
from meshwright.spec.quantized import ABSMAX, BLOCK, SCALES
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP, Adapter, is_adapter

QuantizedMatmul = Callable[..., Tensor]  # of an input, how a weight is held, and what stands for it
Across = Callable[[Tensor], Tensor]  # from the square norms of parts of rows to those of the rows


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is frozen, and may be held in few bits."""

    scales: nn.Parameter  # of codes, where there are any
    quantized: FrozenPart | None = None
    quantized_matmul: QuantizedMatmul | None = None  # transforms may put a function here; None: the weight is decoded

    def forward(self, input: Tensor) -> Tensor:
        y = self.product(input)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """What the layer returns, but for its bias; transforms may put another function here."""
        if self.quantized is None:
            return F.linear(x, self.weight)
        return (self.quantized_matmul or _Decoded.apply)(x, self.quantized, *self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What stands for a weight in few bits."""
        absmax = getattr(self, ABSMAX, None)
        return (self.weight, self.scales) if absmax is None else (self.weight, absmax, self.scales)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers."""
        return self.weight if self.quantized is None else decode(self.quantized, self.parts, dtype)

    def hold(self, tensors: tuple[Param, ...]) -> None:
        """Have memory for these instead of the weight."""
        bias = self._parameters.pop("bias")
        for param in tensors:
            memory = torch.empty(param.shape, dtype=torch.uint8, device=self.weight.device)
            self.register_parameter(param.name.rpartition(".")[2], nn.Parameter(memory, requires_grad=False))
        self.quantized = FrozenPart(tensors[0].held, self.in_features // BLOCK)
        self.register_parameter("bias", bias)


class _Decoded(Function):
    """A matmul with a weight that exists only while it is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: FrozenPart, *parts: Tensor) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(*parts)
        return F.linear(x, decode(how, parts, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), parts = grads, ctx.saved_tensors
        return grad @ decode(ctx.how, parts, grad.dtype, after=grad), None, *(None for _ in parts)


class LoraLinear(FrozenLinear):
    """The same with the adapter that is trained beside the weight."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    off = False  # the base alone: what it is compared with in DPO
    dropout: float = 0.0  # of what A reads, in training
    key: Tensor  # of its draws
    index: Tensor | None = None  # of the tokens that the block is at, which alone is told
    first: int = 0  # of the inputs, the first that this rank has

    def product(self, x: Tensor) -> Tensor:
        # With A, then with B: never with their product, which has the size of the weight. The small one is scaled, so
        # that a compiled block adds the large one where it is multiplied.
        return super().product(x) + F.linear(self.down(x) * (0.0 if self.off else self.scale), self.lora_b)

    @property
    def drops(self) -> bool:
        """Whether this forward drops something."""
        return self.dropout > 0 and self.index is not None and self.training

    def down(self, x: Tensor) -> Tensor:
        """The product with A of what dropout leaves."""
        if not self.drops:
            return F.linear(x, self.lora_a)
        return _DroppedDown.apply(x, self.lora_a, self.index, self.key, self.dropout, self.first)

    def begin(self, seed: int, name: str, device: torch.device) -> None:
        """Take the draws of a seed and a module's name, on a device."""
        # A tensor, so that the compiled code of one block serves all of them.
        self.key = torch.tensor(signed(key(seed, f"{name}.draws")), device=device)


class _DroppedDown(Function):
    """A matmul with what dropout leaves of its input, which the backward draws again: the input alone is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, index: Tensor, key: Tensor, p: float, first: int) -> Tensor:
        ctx.save_for_backward(x, a, index, key)
        ctx.p, ctx.first = p, first
        return F.linear(_left(x, kept(index, key, x.shape[-1], p, first), p), a)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, a, index, key) = grads, ctx.saved_tensors
        keep = kept(index, key, x.shape[-1], ctx.p, ctx.first)
        down = grad.flatten(0, -2).T @ _left(x, keep, ctx.p).flatten(0, -2)
        back = _left(grad @ a, keep, ctx.p) if ctx.needs_input_grad[0] else None
        return back, down, None, None, None, None


def _left(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, x * (1 / (1 - p)), 0)


def square_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Those of the rows of W + s · B A, never made: of W, of s · B A, and twice what the two have in common."""
    accum = torch.promote_types(weight.dtype, torch.float32)
    own = torch.linalg.vector_norm(weight, dim=-1, dtype=accum).square()
    common = ((weight @ a.mT).to(accum) * b).sum(-1)
    return own + 2 * scale * common + scale**2 * ((b.to(accum) @ (a.to(accum) @ a.to(accum).mT)) * b).sum(-1)


def alone(squares: Tensor) -> Tensor:
    """Rows are whole."""
    return squares


class DoraLinear(LoraLinear):
    """The same with a magnitude for every output, by which the adapted rows, each of norm one, are multiplied."""

    magnitude: nn.Parameter
    across: Across  # transforms may put another function here

    def product(self, x: Tensor) -> Tensor:
        if self.off:
            return super().product(x)
        with torch.no_grad():  # a constant in the gradient, as in the paper (§4.3)
            squares = square_norms(self.matrix(x.dtype), self.lora_a, self.lora_b, self.scale)
            norms = self.across(squares).sqrt()
        if not self.drops:
            y = super().product(x)
            return y * (self.magnitude / norms).to(y.dtype)
        # W x is whole, and what magnitudes change about it is of what dropout leaves: as the authors' code, and peft's.
        assert self.index is not None
        whole = FrozenLinear.product(self, x)
        part = FrozenLinear.product(self, Dropped.apply(x, self.index, self.key, self.dropout, self.first))
        y = part + F.linear(self.down(x) * self.scale, self.lora_b)
        return whole - part + y * (self.magnitude / norms).to(y.dtype)


LowRank = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # rows, A, B, and the row after each expert's last


class AdaptedExperts(Experts):
    """Experts whose stacks are frozen and may be held in few bits, with adapters beside some of them."""

    scale: float
    off = False  # as of a linear layer
    quantized: dict[str, FrozenPart]  # of the stacks that are
    low_rank: LowRank  # transforms may put another function here
    across: dict[str, Across]  # of each stack; of one whose rows are cut a transform puts another

    def product(self, stack: str, x: Tensor, ends: Tensor) -> Tensor:
        y = self._frozen(stack, x, ends)
        a, b, magnitude = (getattr(self, f"{stack}_{part}", None) for part in (DOWN, UP, MAGNITUDE))
        if a is None or b is None:
            return y
        y = y + self.low_rank(x, a, b, ends) * (0.0 if self.off else self.scale)
        if magnitude is None or self.off:
            return y
        with torch.no_grad():  # as of a linear layer
            squares = square_norms(self.matrices(stack, x.dtype), a, b, self.scale)
            norms = self.across[stack](squares).sqrt()
        if self.drops:  # rows past the last are undefined, and magnitudes would have a gradient of them
            y = torch.where(torch.arange(len(y), device=y.device)[:, None] < ends[-1], y, 0)
        return y * row_biases((magnitude / norms).to(y.dtype), ends, len(y))

    def _frozen(self, stack: str, x: Tensor, ends: Tensor) -> Tensor:
        if stack not in self.quantized:
            return super().product(stack, x, ends)
        return _DecodedStack.apply(x, self.multiply, ends, self.quantized[stack], *self.parts(stack))

    def parts(self, stack: str) -> tuple[Tensor, ...]:
        """What stands for a stack in few bits."""
        every = (getattr(self, name, None) for name in (stack, f"{stack}_{ABSMAX}", f"{stack}_{SCALES}"))
        return tuple(part for part in every if part is not None)

    def matrices(self, stack: str, dtype: torch.dtype) -> Tensor:
        """A stack as numbers."""
        if stack not in self.quantized:
            return getattr(self, stack)
        return decode(self.quantized[stack], self.parts(stack), dtype)

    def hold(self, tensors: tuple[Param, ...], adapter: Adapter) -> None:
        """Have memory for these, in this order, instead of what there is."""
        device, widths = self.up.device, {name: weight.shape[-1] for name, weight in self.named_parameters()}
        before = dict(self.named_parameters())
        self._parameters.clear()
        self.quantized = {}
        for param in tensors:
            name = param.name.rpartition(".")[2]
            dtype = torch.uint8 if param.item else torch.get_default_dtype()
            if param.item or name not in before:
                memory = torch.empty(param.shape, dtype=dtype, device=device)
                before[name] = nn.Parameter(memory, requires_grad=not param.item)
            self.register_parameter(name, before[name])
            if param.item and name in widths:
                self.quantized[name] = FrozenPart(param.held, widths[name] // BLOCK)
        self.scale, self.compute = adapter.scale, grouped
        self.multiply, self.low_rank = by_segment, low_rank_by_segment
        self.across = dict.fromkeys(("gate", "up", "down"), alone)


class _DecodedStack(Function):
    """A grouped product with matrices that exist only while they are multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Multiply, ends: Tensor, how: FrozenPart, *parts: Tensor) -> Tensor:
        ctx.multiply, ctx.how = multiply, how
        ctx.save_for_backward(ends, *parts)
        return multiply(x, decode(how, parts, x.dtype), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (ends, *parts) = grads, ctx.saved_tensors
        # As a stack that multiplies from the other side.
        dx = ctx.multiply(grad.contiguous(), decode(ctx.how, tuple(parts), grad.dtype, after=grad).mT, ends)
        return dx, None, None, None, *(None for _ in parts)


def adapt_experts(model: nn.Module, arch: Arch) -> None:
    """The same of stacks of experts."""
    by_module: dict[str, tuple[Param, ...]] = {}
    for param in stored(arch):
        if param.expert:
            module = param.name.rpartition(".")[0]
            by_module[module] = (*by_module.get(module, ()), param)
    for name, tensors in by_module.items():
        if any(param.item or is_adapter(param.name) for param in tensors):
            experts = model.get_submodule(name)
            experts.__class__ = AdaptedExperts
            assert isinstance(experts, AdaptedExperts)
            experts.hold(tensors, arch.adapter)


def adapt(model: nn.Module, arch: Arch) -> None:
    """Give the linear layers of a model the adapters that its parameter table has, and weights in few bits."""
    adapt_experts(model, arch)
    held: dict[str, tuple[Param, ...]] = {}
    for param in stored(arch):
        if param.item and not param.expert:
            layer = param.name.rpartition(".")[0]
            held[layer] = (*held.get(layer, ()), param)
    for layer, tensors in held.items():
        linear = model.get_submodule(layer)
        linear.__class__ = FrozenLinear
        assert isinstance(linear, FrozenLinear)
        linear.hold(tensors)
    for param in params(arch):
        if param.name.endswith(f".{DOWN}"):
            linear = model.get_submodule(param.name.removesuffix(f".{DOWN}"))
            linear.__class__ = DoraLinear if arch.adapter.kind == "dora" else LoraLinear
            assert isinstance(linear, LoraLinear)
            linear.lora_a = nn.Parameter(torch.empty(param.shape, device=linear.weight.device))
            linear.lora_b = nn.Parameter(
                torch.empty(linear.out_features, len(linear.lora_a), device=linear.weight.device)
            )
            linear.scale = arch.adapter.scale
            if isinstance(linear, DoraLinear):
                linear.magnitude = nn.Parameter(torch.empty(linear.out_features, device=linear.weight.device))
                linear.across = alone
            linear.dropout = arch.adapter.dropout
    if arch.adapter.dropout:
        for block in model.get_submodule("blocks").children():
            linears = [module for module in block.modules() if isinstance(module, LoraLinear)]
            block.forward = partial(_with_index, block.forward, linears)


def _with_index(forward: Callable[..., Tensor], linears: list[LoraLinear], *args: Any) -> Tensor:
    """A block whose adapters know the index of its tokens, its last argument; inside what may be recomputed."""
    for linear in linears:
        linear.index = args[-1]
    return forward(*args)


def freeze(model: nn.Module, arch: Arch, dtype: torch.dtype) -> None:
    """Take the gradient from the weights that are not trained, and hold them in the dtype that arithmetic reads."""
    for name, weight in model.named_parameters():
        if not arch.trains(name):
            weight.requires_grad_(False)
            weight.data = weight.data.to(dtype) if weight.is_floating_point() else weight.data


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights of a (part of a) model that are trained, by name."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
