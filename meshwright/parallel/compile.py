"""torch.compile per block, at its first forward."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from meshwright.config.check import missing
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import DECODER, ModelSpec, note, present_blocks
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

AS_WRITTEN = ContextVar("AS_WRITTEN", default=False)  # whether compiled blocks are suspended here


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Compile every block separately: blocks are alike, so the first one's kernels serve them all."""
    if not plan.compile:
        return model
    if problems := list(missing(plan)):
        raise InputError(problems)
    _configure(mesh.device)
    _listen()
    # What a block saves is offloaded or quantized by hooks that expect a backward: there validation has its own graphs.
    alike = model_spec is DECODER and plan.activation_quant == "none" and not plan.activation_offload
    run = _in_training_graph if alike else _forward
    for block in present_blocks(model, model_spec):
        # The forward, not the call: hooks of other transforms (gathering weights) stay outside.
        block.forward = partial(run, torch.compile(block.forward))
        note(block, "compiled")
    return model


def _configure(device: torch.device) -> None:
    """Keep torch's compiler from starting processes, warnings and progress bars of its own."""
    if device.type == "cpu":
        from torch._inductor import config as inductor

        # Each rank would have a pool of compilers, on cores that the ranks themselves fill.
        inductor.compile_threads = 1
    # Torch warns that compiled selective recomputation mishandles operations in place. Blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
    )
    with suppress(ImportError):
        from tqdm import tqdm

        # Tracing makes a progress bar that it never shows, with a system semaphore for a lock: a rank that is killed
        # would leak it, and Python warns of that on the user's screen.
        tqdm.set_lock(threading.RLock())


class CompileClock:
    """How long torch's compiler has worked in this process; inner calls of it are within an outer one."""

    def __init__(self) -> None:
        self.total = 0.0
        self.since: float | None = None

    def start(self, _: Any) -> None:
        self.since = time.monotonic()

    def end(self, _: Any) -> None:
        if self.since is not None:
            self.total, self.since = self.total + time.monotonic() - self.since, None


CLOCK = CompileClock()


def seconds() -> float:
    """What compilation has taken in this process so far."""
    return CLOCK.total


def _listen() -> None:
    from torch._dynamo.callback import callback_handler

    if CLOCK.start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(CLOCK.start)
        callback_handler.register_end_callback(CLOCK.end)


@contextmanager
def suspended(plan: Plan) -> Iterator[None]:
    """A context where compiled blocks run as they are written: for a few forwards of other shapes."""
    if not plan.compile:
        yield
        return
    before = AS_WRITTEN.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        AS_WRITTEN.reset(before)


def described() -> list[str]:
    """The graphs, recompiles and graph breaks of this process so far; called when shapes no longer change."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    recompiles = sum(FRAME_COMPILE_COUNTER.values()) - len(FRAME_COMPILE_COUNTER)
    counts = ((graphs, "graph"), (recompiles, "recompile"), (sum(breaks.values()), "graph break"))
    total = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    return [
        f"torch.compile: {total}",
        *(f"graph break, {count} times: {reason.splitlines()[0]}" for reason, count in breaks.most_common()),
    ]


def _forward(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return compiled(*map(_arrived, args), **{name: _arrived(value) for name, value in kwargs.items()})


def _in_training_graph(compiled: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Without gradients too, as they are computed with them: the compiler would make a second graph of every block.

    What the graph saves for a backward goes with the block's output, which is cut off from it here.
    """
    if torch.is_grad_enabled() or AS_WRITTEN.get():
        return _forward(compiled, x, *args, **kwargs)
    with torch.enable_grad():
        return _forward(compiled, _arrived(x).detach().requires_grad_(), *args, **kwargs).detach()


def _arrived(value: Any) -> Any:
    """Wait for a tensor still in flight from other ranks: torch's compiler would silently drop its gradient."""
    return _Arrived.apply(value) if isinstance(value, AsyncCollectiveTensor) else value


class _Arrived(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert isinstance(x, AsyncCollectiveTensor)
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
