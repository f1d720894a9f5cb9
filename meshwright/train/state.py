"""What changes from step to step, and which part of it a rank holds."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.optim.clip import LossScale
from meshwright.optim.interface import Optimizer
from meshwright.optim.outer import NoOuterLoop
from meshwright.parallel import precision
from meshwright.parallel.grad_reduce import Reduction
from meshwright.parallel.mesh import Mesh, whole_of
from meshwright.parallel.pipeline import placement
from meshwright.runtime.records import SaveRecord
from meshwright.spec.params import Param, buffers, stored
from meshwright.spec.plan import Plan
from meshwright.train.noise_scale import AdaScale, NoiseMeter

if TYPE_CHECKING:
    from meshwright.train.survivors import Survivors


class MovedError(Exception):
    """This rank's state is a peer's now: the step that was under way is not the next one any more."""


def to_stderr(text: str) -> None:
    """Where people are told unless somebody says better."""
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class State:
    """Everything that changes from step to step."""

    chunks: list[nn.Module]
    optimizer: Optimizer
    loader: Loader
    scale: LossScale
    outer: NoOuterLoop
    # The frozen copy of the first weights that DPO compares with, as the plan cuts it; none: the adapter is left out.
    reference: list[nn.Module] = field(default_factory=list)
    meter: NoiseMeter | None = None  # of the gradient noise scale, where it is asked for
    adascale: AdaScale | None = None
    base: str = ""  # the digest of the weights that are frozen, those of a copy too, once it is known
    reductions: list[Reduction] = field(default_factory=list)  # of gradients, where they are lossy
    step: int = 0
    stopped: bool = False  # asked to, before the last step
    saved: bool = True  # and what was done until then is on the disk
    live: "Survivors | None" = None  # the other replicas, where each can do without them
    memory: Path | None = None  # where in-memory checkpoints are, if there are any
    beside: range | None = None  # this machine's ranks, where these are in parts, one on each machine
    say: Callable[[str], None] = to_stderr  # that a save has failed
    note: Callable[[SaveRecord], None] = lambda record: None  # that one is there; rank 0


class ParamLocation(NamedTuple):
    """Where a weight is."""

    name: str
    shape: tuple[int, ...]
    rank: int  # of the pipeline
    dtype: torch.dtype | None = None  # None: that of weights that are trained


def locations(run: Run) -> list[ParamLocation]:
    """Every weight in the order of the parameter table."""
    frozen = precision.compute_dtype(run.plan)
    return [
        ParamLocation(
            param.name,
            param.shape,
            owner_of(param, run.plan),
            None if param.trained else torch.uint8 if param.item else frozen,
        )
        for param in stored(run.arch)
    ]


def weights(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every weight, and then what is learned by other rules; see `gathered`."""
    beside = [ParamLocation(param.name, param.shape, owner_of(param, run.plan)) for param in buffers(run.arch)]
    return gathered(chunks, [*locations(run), *beside], mesh, _held)


def gradients(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every gradient; see `gathered`."""
    return gathered(chunks, locations(run), mesh, gradient)


def _held(weight: Tensor) -> Tensor:
    return precision.master(weight) if precision.has_master(weight) else weight


def gradient(weight: Tensor) -> Tensor:
    """A weight's gradient; of one that took no part, zeros."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


@torch.no_grad()
def gathered(
    chunks: Sequence[nn.Module], locations: Iterable[ParamLocation], mesh: Mesh, of: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Something of every weight, in the order of the locations, on the CPU, at the first pipeline rank.

    All ranks must iterate to the end: each tensor is gathered from the ranks that share it, then handed to the first
    stage's; elsewhere nothing is yielded. Only one tensor is whole at a time.
    """
    held = {
        name: weight
        for chunk in reversed(chunks)
        for name, weight in chain(chunk.named_buffers(), chunk.named_parameters())
    }
    first = mesh.place["pp"] == 0
    every = list(chunks[0].parameters())
    like = next((weight for weight in every if weight.requires_grad), every[0])
    for each in locations:
        whole = _full(of(held[each.name])) if each.rank == mesh.place["pp"] else None
        if each.rank != 0:
            whole = _hand_over(whole, each, like, mesh)
        if first:
            assert whole is not None
            yield each.name, whole.cpu()


def owner_of(param: Param, plan: Plan) -> int:
    """The pipeline rank that has a weight; of a tied embedding the one that looks it up."""
    if plan.pp == 1 or param.name.startswith(("embed", "positions")):
        return 0
    ranks = placement(plan)
    if param.layer < 0:  # the last norm and the head
        return ranks[-1]
    end = 0
    for stage, layers in enumerate(plan.stages):
        end += layers
        if param.layer < end:
            return ranks[stage]
    raise AssertionError(f"no stage has layer {param.layer}")


def _full(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight.detach()
    return whole_of(weight.to(weight.device_mesh.device_type))  # from host memory, where weights may live


def _hand_over(whole: Tensor | None, location: ParamLocation, like: Tensor, mesh: Mesh) -> Tensor | None:
    """From the owner's stage to the first, on every line of the pipeline."""
    group = mesh.group("pp")
    if whole is not None:
        dist.send(whole.contiguous(), group=group, group_dst=0)
        return None
    if mesh.place["pp"] != 0:
        return None
    # What is learned by other rules than gradients is never in low precision.
    dtype = torch.promote_types(like.dtype, torch.float32) if location.name.endswith(".load_bias") else like.dtype
    whole = torch.empty(location.shape, dtype=location.dtype or dtype, device=mesh.device)
    dist.recv(whole, group=group, group_src=location.rank)
    return whole
