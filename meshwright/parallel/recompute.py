"""Activation checkpointing (recomputation): the backward recomputes blocks, so that the forward need not save them.

A block by itself is recomputed inside its own call: its weights are all-gathered around that, once in the forward and
once in the backward. Blocks of a longer run are called together when the last of them is called; the others return
their input.
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

from meshwright.models.decoder import AheadBlock
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import ModelSpec, note, present_blocks
from meshwright.spec.plan import Plan, by_operation, runs
from meshwright.spec.problem import InputError, mistake

Forward = Callable[..., Any]

# What `selective` saves, by the packet of operators: matmuls, attention, and collectives that return their result.
# Collectives that write into a buffer they are given return nothing that could be saved, and are issued again.
# So is attention within documents where blocks are not compiled: torch does not see into what it has compiled apart.
SAVED = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.linear,
    torch.ops.aten._scaled_mm,
    torch.ops.aten._grouped_mm,
    torch.ops.aten._scaled_grouped_mm,
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


def keep_costly(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Recomputation by operation: the backward recomputes all of a block but its costly operations."""
    if by_operation(plan.recompute):
        blocks = present_blocks(model, model_spec)
        for run in runs(plan.recompute, len(blocks)):
            block = blocks[run.start]
            block.forward = partial(_checkpointed, block.forward, {"context_fn": _contexts})
            note(block, "recomputed but for matmuls, attention and collectives")
    return model


def keep_inputs(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Recomputation by blocks: the backward recomputes the plan's runs of them from their inputs."""
    if by_operation(plan.recompute):
        return model
    blocks = present_blocks(model, model_spec)
    for run in runs(plan.recompute, len(blocks), bool(blocks) and isinstance(blocks[-1], AheadBlock)):
        for number in run:
            note(blocks[number], "recomputed" if len(run) == 1 else f"recomputed in a run of {len(run)}")
        if len(run) == 1:
            block = blocks[run.start]
            block.forward = partial(_checkpointed, block.forward, {})
        else:
            _together(model, [blocks[number] for number in run])
    return model


def _checkpointed(forward: Forward, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Where the forward runs, and where it is recomputed."""
    first, recomputed = create_selective_checkpoint_contexts(_policy)
    assert isinstance(recomputed, _CachedTorchDispatchMode)
    return first, Recomputed(_policy, recomputed.storage, allow_cache_entry_mutation=False)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(operator: Any) -> bool:
    return getattr(operator, "overloadpacket", operator) in SAVED  # operators of a higher order are of no packet


class Recomputed(_CachedTorchDispatchMode):
    """Returns saved results, and does not check the other operators.

    Torch wants to see the very same ones again. Experts that gather weights of their own do so in the forward, and
    need not, or in another way, in the backward.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_saved(func):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class RecomputedRun:
    """A run of blocks that are computed, and recomputed, as one: by the call of the last."""

    def __init__(self, calls: Sequence[Forward]) -> None:
        self.calls = calls  # of the blocks, with the hooks of other transforms
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # each block's arguments but its hidden states
        self.hidden: tuple[Any, ...] = ()

    def called(self, number: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Block `number` of the run is called by the model."""
        # Whether two tensors are one that nobody has written to, though a hook may have wrapped it.
        identity = (x.data_ptr(), tuple(x.shape), x._version)
        if number == 0:
            self.given, self.hidden = [], identity
        elif identity != self.hidden or len(self.given) != number:
            raise _between()
        self.given.append((args, kwargs))
        if number < len(self.calls) - 1:
            return x
        given, self.given = self.given, []
        return checkpoint(self._chain, x, given, use_reentrant=False)

    def ended(self, *call: Any) -> None:
        """The model's forward is over: a run whose last block was not called has not been computed."""
        if self.given:
            raise _between()

    def _chain(self, x: Any, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        for call, (args, kwargs) in zip(self.calls, given, strict=True):
            x = call(x, *args, **kwargs)
        return x


def _between() -> InputError:
    return mistake(
        "plan.recompute recomputes several blocks together, and this model leaves one of them out or does something "
        "between its blocks",
        "use plan.recompute = full, which takes each block by itself",
        "plan.recompute",
    )


def _together(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let a run intercept the calls of its blocks."""
    run = RecomputedRun([partial(type(block).__call__, block) for block in blocks])
    model.register_forward_hook(run.ended)
    for number, block in enumerate(blocks):
        # Hooks of other transforms are part of a call, and must run when the block does. Only a class can say what a
        # call is; one serves all blocks of a kind, as the compiler takes another class for another block.
        block.__class__ = _intercepted(type(block))
        block.call_in_run = partial(run.called, number)  # pyright: ignore


@cache
def _intercepted(kind: type[nn.Module]) -> type[nn.Module]:
    """The kind of block whose calls go to its run instead."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_in_run(*args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
