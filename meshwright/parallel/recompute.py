"""Recomputation: blocks whose inner results the backward computes anew, so that the forward need not keep them.

A block by itself is computed anew inside its own call: its weights are gathered around that, once going forward and
once going back. Blocks of a longer run are called together when the last of them is called; the others hand on what
they were given.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import Absent, ModelSpec
from meshwright.parallel.transforms import note
from meshwright.spec.plan import Plan, by_operation, runs
from meshwright.spec.problem import InputError, Problem

Forward = Callable[..., Any]

# What `selective` keeps, by the packet of operators: matrix products, attention, and collectives that return their
# result. Collectives that write into a buffer they are given return nothing that could be kept, and are issued again.
# So is attention within documents where blocks are not compiled: torch does not see into what it has compiled apart.
KEPT = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.linear,
    torch.ops.aten._scaled_mm,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_attention_math,
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.all_gather_into_tensor,
    torch.ops._c10d_functional.reduce_scatter_tensor,
    torch.ops._c10d_functional.all_reduce,
    torch.ops._c10d_functional.all_to_all_single,
}


def keep_costly(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Recomputation by operation: of the plan's blocks, let the backward compute anew all but the costly operations."""
    if by_operation(plan.recompute):
        blocks = _blocks(model, anatomy)
        for run in runs(plan.recompute, len(blocks)):
            block = blocks[run.start]
            block.forward = partial(_anew, block.forward, {"context_fn": _contexts})
            note(block, "recomputed but for matmuls, attention and collectives")
    return model


def keep_inputs(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Recomputation by blocks: of the plan's runs of them, let the backward compute everything anew."""
    if by_operation(plan.recompute):
        return model
    blocks = _blocks(model, anatomy)
    for run in runs(plan.recompute, len(blocks)):
        for number in run:
            note(blocks[number], "recomputed" if len(run) == 1 else f"recomputed in a run of {len(run)}")
        if len(run) == 1:
            block = blocks[run.start]
            block.forward = partial(_anew, block.forward, {})
        else:
            _together(model, [blocks[number] for number in run])
    return model


def _blocks(model: nn.Module, anatomy: ModelSpec) -> list[nn.Module]:
    """Those that this (part of a) model has."""
    return [block for block in anatomy.blocks(model).values() if not isinstance(block, Absent)]


def _anew(forward: Forward, options: dict[str, Any], *arguments: Any, **words: Any) -> Any:
    return checkpoint(forward, *arguments, use_reentrant=False, **options, **words)


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Where the forward runs, and where it runs again."""
    first, again = create_selective_checkpoint_contexts(_policy)
    assert isinstance(again, _CachedTorchDispatchMode)
    return first, Recomputed(_policy, again.storage, allow_cache_entry_mutation=False)


def _policy(context: Any, operator: Any, *arguments: Any, **words: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any) -> bool:
    return getattr(operator, "overloadpacket", operator) in KEPT  # operators of a higher order are of no packet


class Recomputed(_CachedTorchDispatchMode):
    """Gives back what was kept, and asks nothing of the other operators.

    Torch wants to see the very same ones again. Experts that gather weights of their own do so in the forward, and
    need not, or in another way, in the backward.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class RecomputedRun:
    """A run of blocks that are computed, and computed anew, as one: by the call of the last."""

    def __init__(self, calls: Sequence[Forward]) -> None:
        self.calls = calls  # of the blocks, with whatever other transforms hang on them
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # the arguments of each but the first
        self.stream: tuple[Any, ...] = ()

    def called(self, number: int, x: Tensor, *others: Any, **words: Any) -> Any:
        """Block `number` of the run is called by the model."""
        if number == 0:
            self.given, self.stream = [], _mark(x)
        elif _mark(x) != self.stream or len(self.given) != number:
            raise InputError([_between()])
        self.given.append((others, words))
        if number < len(self.calls) - 1:
            return x
        given, self.given = self.given, []
        return checkpoint(self._chain, x, given, use_reentrant=False)

    def ended(self, *call: Any) -> None:
        """The model's forward is over: a run whose last block was not called has not been computed."""
        if self.given:
            raise InputError([_between()])

    def _chain(self, x: Any, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        for call, (others, words) in zip(self.calls, given, strict=True):
            x = call(x, *others, **words)
        return x


def _mark(x: Tensor) -> tuple[Any, ...]:
    """Tells whether two tensors are one that nobody has written to, though a hook may have wrapped it."""
    return x.data_ptr(), tuple(x.shape), x._version


def _between() -> Problem:
    return Problem(
        "plan.recompute recomputes several blocks together, and this model leaves one of them out or does something "
        "between its blocks",
        "use plan.recompute = full, which takes each block by itself",
        "plan.recompute",
    )


def _together(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let a run know of the calls of its blocks."""
    run = RecomputedRun([partial(type(block).__call__, block) for block in blocks])
    model.register_forward_hook(run.ended)
    for number, block in enumerate(blocks):
        # Hooks of other transforms are part of a call, and must run when the block does. Only a class can say what a
        # call is; one serves all blocks of a kind, as the compiler takes another class for another block.
        block.__class__ = _told(type(block))
        block.told = partial(run.called, number)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


@cache
def _told(kind: type[nn.Module]) -> type[nn.Module]:
    """The kind of block whose calls are told to its run instead."""

    def call(self: Any, *arguments: Any, **words: Any) -> Any:
        return self.told(*arguments, **words)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
