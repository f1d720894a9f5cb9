"""Compilation: each block's forward turned into fused kernels by torch, the first time it runs."""

import logging
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from meshwright.config.check import missing
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import Absent, ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Compile every block by itself: blocks are alike, so the first one's kernels serve them all."""
    if not plan.compile:
        return model
    if problems := list(missing(plan)):
        raise InputError(problems)
    _settle(mesh.device)
    for block in anatomy.blocks(model).values():
        if not isinstance(block, Absent):
            # Not the call but the forward: what other transforms hang on a call (gathering weights) stays outside.
            block.forward = partial(_forward, torch.compile(block.forward))
    return model


def _settle(device: torch.device) -> None:
    """What torch's compiler starts beside itself, left out."""
    if device.type == "cpu":
        from torch._inductor import config as inductor

        # Each rank would have a pool of compilers, on cores that the ranks themselves fill.
        inductor.compile_threads = 1
    # Selective recomputation is compiled, and torch warns whoever does that of operations in place. Blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    with suppress(ImportError):
        from tqdm import tqdm

        # Tracing opens a bar that it never shows, with a semaphore of the system for a lock: a rank that is ended at
        # once would leave it behind, and Python complains of that on the user's screen.
        tqdm.set_lock(threading.RLock())


def _is_news(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


def described() -> list[str]:
    """What was compiled so far in this process, and where the compiler gave up; called when shapes have settled."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    again = sum(FRAME_COMPILE_COUNTER.values()) - len(FRAME_COMPILE_COUNTER)
    stopped = sum(breaks.values())
    counts = [_counted(graphs, "graph"), _counted(again, "recompile"), _counted(stopped, "graph break")]
    told = f"torch.compile: {', '.join(counts)}"
    return [told, *(f"graph break, {count} times: {reason.splitlines()[0]}" for reason, count in breaks.most_common())]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _forward(compiled: Any, *arguments: Any, **words: Any) -> Any:
    return compiled(*map(_arrived, arguments), **{name: _arrived(value) for name, value in words.items()})


def _arrived(value: Any) -> Any:
    """A tensor still on its way from other ranks is waited for: torch's compiler would lose its gradient in silence."""
    return _Arrived.apply(value) if isinstance(value, AsyncCollectiveTensor) else value


class _Arrived(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert isinstance(x, AsyncCollectiveTensor)
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
