"""Faults put in on purpose, to see that they are survived. Nothing here is reached unless a rehearsal asks for it.

A fault is `kind:rank:step:phase`; what is left out is the last rank, the third step and the forward. In the place of
the phase, `cut` has a number and `matmul` the share of matmuls that are spoiled.
"""

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.copies import Copies
from meshwright.checkpoint.storage import Disk
from meshwright.config.run import Run
from meshwright.parallel.mesh import Mesh, local
from meshwright.train import matmul_check
from meshwright.train.matmul_check import Matmuls, Product
from meshwright.train.state import State

FOREVER = 1e6  # seconds
DEFAULT = {"data": "data", "matmul": "1"}  # what stands in the place of the phase, if it is not the forward
Act = Callable[[], object]


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to which rank, and when."""

    kind: str
    rank: int
    step: int  # counts from 1
    phase: str = "forward"


def parse(words: str, run: Run) -> Injection:
    """`kind:rank:step:phase`."""
    kind, rank, step, phase, *_ = [*words.split(":"), "", "", ""]
    if kind not in KINDS:
        raise ValueError(f"{kind} is no fault that can be injected; there are {', '.join(KINDS)}")
    phase = phase or DEFAULT.get(kind, "forward")
    return Injection(kind=kind, rank=int(rank or run.plan.world - 1), step=int(step or 3), phase=phase)


def inject(words: str, run: Run, state: State, mesh: Mesh) -> None:
    """Arrange for the faults that are asked for, with commas between them, if this is the rank."""
    for injection in (parse(each, run) for each in words.split(",") if each):
        if injection.rank != mesh.rank:
            continue
        KINDS[injection.kind](injection, run, state, mesh)


def when(injection: Injection, state: State, act: Act) -> None:
    """Act once, in the phase and step of the injection."""
    once = _once(injection, state, act)
    match injection.phase:
        case "start":
            act()
        case "data":
            _before(state.loader, "take", once)
        case "forward":
            state.chunks[0].register_forward_pre_hook(lambda module, _: once() if module.training else None)
        case "eval":
            state.chunks[0].register_forward_pre_hook(lambda module, _: None if module.training else once())
        case "backward":
            state.chunks[0].register_forward_hook(lambda module, _, output: _on_gradient(output, once))
        case "optimizer":
            _before(state.optimizer, "step", once)
        case "collective" if state.live is not None:
            _before(state.live, "_exchange", once)
        case "collective":
            _before(dist, "all_reduce", once)
        case "save":
            _before(Copies, "take", once)  # inside the save, where a watcher looks for it
        case other:
            raise ValueError(f"no fault can be injected in {other}")


def _once(injection: Injection, state: State, act: Act) -> Act:
    done = threading.Event()

    def once() -> None:
        if state.step + 1 >= injection.step and not done.is_set() and _can_be_missed(state):
            done.set()
            act()

    return once


def _can_be_missed(state: State) -> bool:
    """Whether a fault leaves somebody to go on: of several faults, one waits until who was lost before is back."""
    return state.live is None or len(state.live.generation.members) > state.live.run.plan.replicate // 2


def _before(owner: Any, name: str, act: Act) -> None:
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, both)


def _on_gradient(output: Any, act: Act) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if first.requires_grad:
        first.register_hook(lambda gradient: act())


def _does(act: Callable[[State, Mesh], object]) -> Callable[[Injection, Run, State, Mesh], None]:
    return lambda injection, run, state, mesh: when(injection, state, lambda: act(state, mesh))


def _signal(number: signal.Signals) -> Callable[[Injection, Run, State, Mesh], None]:
    return _does(lambda state, mesh: os.kill(os.getpid(), number))


def _sleep(seconds: float) -> Callable[[Injection, Run, State, Mesh], None]:
    return _does(lambda state, mesh: time.sleep(seconds))


def _fail(error: Exception) -> Callable[[Injection, Run, State, Mesh], None]:
    def act(state: State, mesh: Mesh) -> None:
        raise error

    return _does(act)


def _hold_lock(state: State, mesh: Mesh) -> None:
    """Sleep in native code without letting go of Python's lock."""
    library = ctypes.PyDLL(None)
    while True:
        library.usleep(3_000_000_000)


def _block_worker(state: State, mesh: Mesh) -> None:
    """The loader's thread waits for what never comes; what it had read ahead is used up first."""
    state.loader.reader.submit(threading.Event().wait)
    state.loader.ahead.clear()


def _cut(injection: Injection, run: Run, state: State, mesh: Mesh) -> None:
    """Killed before the n-th thing that this rank's saves do to the disk; n stands in the place of the phase."""
    left = [int(injection.phase)]

    def act() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("make_folder", "write", "write_parts", "write_block", "rename", "sync_folder", "remove"):
        _before(Disk, name, act)


def _skip(injection: Injection, run: Run, state: State, mesh: Mesh) -> None:
    """Leave out one collective that the others take part in."""
    original, done = dist.all_reduce, threading.Event()

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if state.step + 1 >= injection.step and not done.is_set():
            done.set()
            return None
        return original(*args, **kwargs)

    dist.all_reduce = all_reduce


def _cross(state: State, mesh: Mesh) -> None:
    """Be in a collective that nobody else is in."""
    dist.broadcast(torch.zeros(8, device=mesh.device), src=0)


def _poison(factor: float) -> Callable[[Injection, Run, State, Mesh], None]:
    """One sample whose loss is multiplied, whenever it is computed."""

    def arrange(injection: Injection, run: Run, state: State, mesh: Mesh) -> None:
        sample = (injection.step - 1) * run.batch + state.loader.mine.start
        hot = threading.Event()

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            index = kwargs.get("index") if module.training else None  # text that is generated has none
            there = index is not None and (index[:, 0] // run.sequence == sample).any().item()
            hot.set() if there else hot.clear()

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not hot.is_set():
                return output
            return tuple(one * factor for one in output) if isinstance(output, tuple) else output * factor

        state.chunks[0].register_forward_pre_hook(before, with_kwargs=True)
        state.chunks[0].register_forward_hook(after)

    return arrange


def _flip(state: State, mesh: Mesh) -> None:
    """One bit of one weight of this rank."""
    weight = local(state.optimizer.weights[0].detach()).flatten()
    bits = weight[:1].view(torch.uint8)
    bits[2] ^= 0x40


class FaultyMatmuls:
    """A device that flips one bit in the output of a share of its matmuls, also of those that a check repeats."""

    def __init__(self, share: float, chance: random.Random, bit: int | None = None) -> None:
        self.share = share
        self.chance = chance
        self.bit = bit  # counted from the highest, which is the sign; None: any
        self.flips = 0

    def take(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], c: Tensor) -> None:
        if self.chance.random() < self.share:
            self.flip(c)

    def flip(self, c: Tensor) -> None:
        """In place, an element by chance."""
        place = tuple(self.chance.randrange(size) for size in c.shape)
        bits = 8 * c.element_size()
        bit = bits - 1 - (self.chance.randrange(bits) if self.bit is None else self.bit)
        one = c[place].reshape(1).clone()
        one.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        c[place] = one[0]
        self.flips += 1

    def multiply(self, original: Callable[[Product, Tensor], Tensor], product: Product, a: Tensor) -> Tensor:
        c = original(product, a)
        self.take(product.multiply, (), {}, c)
        return c


def _flip_matmuls(injection: Injection, run: Run, state: State, mesh: Mesh) -> None:
    """From that step on; the highest bit of the exponent, so that none is too small to be found."""
    faulty = FaultyMatmuls(float(injection.phase), random.Random(f"{run.seed} {mesh.rank}"), bit=1)

    def take(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], c: Tensor) -> None:
        if state.step + 1 >= injection.step:
            faulty.take(operator, args, kwargs, c)

    Matmuls(take).__enter__()  # for the rest of the process
    matmul_check.multiply = partial(faulty.multiply, matmul_check.multiply)


def _slow(injection: Injection, run: Run, state: State, mesh: Mesh) -> None:
    """Several times as slow from that step on: each forward is followed by as long a sleep."""
    began = [0.0]

    def before(module: nn.Module, args: Any) -> None:
        began[0] = time.perf_counter()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if state.step + 1 >= injection.step:
            time.sleep(max(3 * (time.perf_counter() - began[0]), 0.1))

    state.chunks[0].register_forward_pre_hook(before)
    state.chunks[0].register_forward_hook(after)


KINDS: dict[str, Callable[[Injection, Run, State, Mesh], None]] = {
    "kill": _signal(signal.SIGKILL),
    "cut": _cut,
    "term": _signal(signal.SIGTERM),
    "hang": _signal(signal.SIGSTOP),
    "sleep": _sleep(FOREVER),
    "lock": _does(_hold_lock),
    "data": _does(_block_worker),
    "skip": _skip,
    "cross": _does(_cross),
    "nan": _poison(float("nan")),
    "inf": _poison(float("inf")),
    "spike": _poison(1000.0),
    "flip": _does(_flip),
    "matmul": _flip_matmuls,
    "slow": _slow,
    "pause": _sleep(20.0),  # slow, not hung: a save, or a first step
    "error": _fail(RuntimeError("injected")),
    "memory": _fail(torch.OutOfMemoryError("injected: tried to allocate 1 TiB")),
}
