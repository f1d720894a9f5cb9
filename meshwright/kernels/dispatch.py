"""Whether a fused Triton kernel runs or its plain PyTorch reference, and how it is launched.

Triton is imported here and nowhere else. Where it is missing, kernels stay ordinary functions that nobody calls.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from meshwright.spec.problem import InputError, mistake

Kernels = Literal["auto", "plain", "fused"]

try:  # by name, so that reading this file without Triton is no error either
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:  # no wheel for this machine
    triton = tl = None

# Types in a kernel's signature: a tensor's address (or None), a block of elements, a compile-time constant.
if TYPE_CHECKING:
    Pointer = Any
    Values = Any
    constexpr = Any
else:
    Pointer = Values = Any if triton is None else tl.tensor
    constexpr = Any if triton is None else tl.constexpr

INTERPRETED = bool(triton is not None and triton.knobs.runtime.interpret)  # kernels run in Python, on CPU tensors
FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = 'set plan.kernels to "plain" or "auto"'
ROW_LIMIT = 32768  # elements of a row that one program holds in registers: 32 for each of 1024 threads
TILE = 4096  # elements of a program that has several short rows, or a part of a long one
EACH_THREAD = 16  # elements: two 128-bit loads of a 16-bit type, enough in flight to cover the memory's latency


def jit(kernel: Callable[..., None]) -> Any:
    """A Triton kernel where there is Triton, else the function as it is."""
    return kernel if triton is None else triton.jit(kernel)


def fused(x: Tensor, kernels: Kernels, beside: Tensor | None = None) -> bool:
    """Whether to run the fused kernel on `x` and a second tensor like it; refuses "fused" where it cannot be."""
    if kernels == "plain":
        return False
    reason = unsupported(x)
    if beside is not None and (x.dtype, x.shape, x.device) != (beside.dtype, beside.shape, beside.device):
        reason = reason or "the two tensors differ in type, shape or device"
    if kernels == "fused" and reason:
        raise refusal(reason)
    # The interpreter is for tests that ask for it: it is far slower than plain arithmetic.
    return not reason and x.numel() > 0 and (x.is_cuda or kernels == "fused")


def unsupported(x: Tensor) -> str:
    """Why no fused kernel can run on `x`; empty when one can."""
    if not x.is_cuda and not INTERPRETED:
        return "fused kernels need a GPU"
    if triton is None:
        return "Triton is not installed"
    if x.dtype not in FUSED_TYPES:
        return f"there are no fused kernels for {str(x.dtype).removeprefix('torch.')}"
    return ""


def refusal(reason: str) -> InputError:
    """The sentence for a user who asked for fused kernels and cannot have them."""
    return mistake(f'kernels = "fused" cannot run here: {reason}', REMEDY, "kernels")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels of a whole run, and the reason where they are the plain ones."""

    kind: Literal["plain", "fused"]
    reason: str = ""


def settle(kernels: Kernels, device: torch.device, dtype: torch.dtype = torch.float32) -> KernelChoice:
    """Decide for a whole run, after a trial launch: a Triton that cannot compile is found before the first step."""
    if kernels == "plain":
        return KernelChoice("plain", 'plan.kernels is "plain"')
    reason = trial(device, dtype)
    if kernels == "fused" and reason:
        raise refusal(reason)
    return KernelChoice("plain", reason) if reason else KernelChoice("fused")


@cache
def trial(device: torch.device, dtype: torch.dtype) -> str:
    """Launch the smallest kernel, once in a process for each device and type; the reason if that fails, else empty."""
    x = torch.zeros(16, device=device, dtype=dtype)
    if reason := unsupported(x):
        return reason
    try:
        _mark[(1,)](x, 16)
        return "" if bool((x == 1).all()) else "a trial kernel computed something else"
    except Exception as error:  # compilers, drivers and linkers each raise their own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"a trial kernel failed ({lines[0]})"


@jit
def _mark(x: Pointer, size: constexpr) -> None:
    tl.store(x + tl.arange(0, size), 1.0)


def as_rows(x: Tensor) -> Tensor:
    """A matrix of contiguous rows along the last dimension: a view where strides allow, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def power(count: int) -> int:
    """The least power of two that is not below `count`: the size of a Triton block."""
    return 1 << max(count - 1, 0).bit_length()


def rows_each(block: int, rows: int, tile: int = TILE) -> int:
    """How many rows of `block` elements one program takes, so that short rows fill it too."""
    return max(1, min(tile // block, power(rows)))


def stride_step(*sizes: int) -> int:
    """A power of two, 8 at most, that divides all sizes, so that a kernel may load as many elements at once."""
    return math.gcd(8, *sizes)


def warps(elements: int, each_thread: int = EACH_THREAD) -> int:
    """The warps of a program over so many elements."""
    return max(1, min(32, power(elements) // (32 * each_thread)))


def processors(x: Tensor) -> int:
    """Multiprocessors of the GPU that holds `x`; two in the interpreter, so that loops over programs are walked."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
