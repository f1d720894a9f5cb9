"""Stand-ins for what a tensor without values cannot do: routing by the router's choice, votes of other ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.moe import Experts, Mixture, RunExperts
from meshwright.parallel import attention, expert
from meshwright.parallel.attention import HALF, Block, Forward, Gradients
from meshwright.parallel.expert import Journey, sorted_by_expert


@contextmanager
def standing_in(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, routers share their rows out evenly, and norms and a ring's attention are fused, as on a GPU."""
    mixtures = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Mixture)]
    with ExitStack() as stack:
        for mixture in mixtures:
            run = partial(_run_evenly, mixture.run, mixture.arch.experts)
            stack.enter_context(patch.object(mixture, "run", run))
        stack.enter_context(patch.object(expert, "announced", _announced_evenly))
        stack.enter_context(patch.object(attention, "_kernel", partial(_kernel, attention._kernel)))
        stack.enter_context(patch.object(F, "rms_norm", _rms_norm))
        # parallel/recompute.py compares addresses, which are all the same here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class Voting(TorchDispatchMode):
    """Before its first step torch's pipeline asks whether every stage's input is described: they are, and 1 says so."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


def even(rows: int, parts: int) -> list[int]:
    """Rows shared out, the first parts having one more where they do not divide."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _run_evenly(run: RunExperts, total: int, experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """The same experts, each with its even part of the rows instead of what the router chose."""
    return run(experts, x, _real(even(len(x), total)))


def _announced_evenly(counts: Tensor, group: dist.ProcessGroup) -> Journey:
    """What `announced` says when every rank sends what this one sends."""
    ranks = group.size()
    mine = counts.tolist()
    each = len(mine) // ranks  # experts of a rank
    leaving = torch.empty(ranks, each, dtype=torch.int64)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    sent = [sum(mine[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    held = mine[dist.get_rank(group) * each :][:each]  # from every rank as many as from this one
    received = [sum(held)] * ranks
    by_expert = sorted_by_expert(coming, sum(received))
    counted = _real([ranks * rows for rows in held])
    return Journey(sent=sent, received=received, counts=counted, by_expert=by_expert, by_rank=by_expert.argsort())


def _real(numbers: list[int]) -> Tensor:
    """A tensor that has values even here."""
    with unset_fake_temporarily():
        return torch.tensor(numbers, dtype=torch.int64)


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(x, list(normalized_shape), weight, eps)


class _FusedNorm(Function):
    """Root-mean-square norm by the operators that a GPU has as kernels; on a CPU torch computes them piecemeal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor, eps: float | None) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        to_x, to_weight = torch.ops.aten._fused_rms_norm_backward(grads[0], x, ctx.shape, scale, weight, [True, True])
        return to_x, None, to_weight, None


def _kernel(otherwise: Callable[[Block], tuple[Forward, Gradients]], block: Block) -> tuple[Forward, Gradients]:
    """What flash kernels make of a block, where a GPU has them: results and no scores."""
    if block.q.dtype not in HALF or block.same is not None or block.q.shape[3] % 8:
        return otherwise(block)
    return _attend, _gradients


def _attend(block: Block) -> tuple[Tensor, Tensor]:
    return torch.empty_like(block.q), block.q.new_empty(block.q.shape[:3], dtype=torch.float32)


def _gradients(block: Block, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(block.q), torch.empty_like(block.k), torch.empty_like(block.v)
