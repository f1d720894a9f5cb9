"""AdamW whose weights live in host memory, with their gradients and moments: the device has only what is in use.

Torch brings a block's weights before they are used and takes its gradient away when it is summed; see
`parallel/fsdp.py`. What is left for here is their memory, and the update, which is the host's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.config.run import Run
from meshwright.optim import host_memory
from meshwright.optim.adamw import AdamW
from meshwright.optim.clip import GradStats
from meshwright.optim.host_memory import PinnedMemory
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.problem import InputError, Problem

REMEDY = "use more ranks, whose hosts share the weights out by plan.shard, or leave plan.cpu_offload out"


class CpuOffloadAdamW(AdamW):
    """The same update by the host's own kernel, with all of this rank's threads."""

    def __init__(self, run: Run, weights: Iterable[nn.Parameter], memory: PinnedMemory) -> None:
        super().__init__(run.optim, weights, msgspec.structs.replace(run.plan, kernels="plain"))
        self.memory = memory  # pinned for as long as this lives

    def step(self, rate: float, verdict: GradStats) -> None:
        """Update every weight, or none when the verdict says the gradient is not finite.

        The host waits for the verdict, once a step: the norm is of all ranks' gradients, and no weight moves before it.
        """
        factor, finite = torch.stack([verdict.factor, verdict.finite]).cpu().unbind()
        super().step(rate, replace(verdict, factor=factor, finite=finite))


def materialise(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> PinnedMemory:
    """Give every weight of a rank memory on its host, and every buffer memory on its device."""
    check(bytes_needed(chunks, run))
    memory = PinnedMemory(mesh.device.type == "cuda", remedy=REMEDY, key="plan.cpu_offload")
    for chunk in chunks:
        chunk._apply(partial(_with_memory, memory, mesh.device))
        chunk.train()
    return memory


def _with_memory(memory: PinnedMemory, device: torch.device, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device)
    empty = torch.empty_like(tensor, device="cpu")
    if memory.pinned and isinstance(empty, DTensor) and _is_even(empty):
        # Torch would pin a copy, in powers of two; memory that is pinned already it takes as it is.
        part = empty.to_local()
        empty._local_tensor = memory.take([part.numel()], [part.dtype])[0].view(part.shape)
    return empty


def _is_even(weight: DTensor) -> bool:
    """Whether all ranks have equally much of a weight; torch fills up what is not, and moves it for that."""
    axes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    sharers = math.prod(size for size, placement in axes if not isinstance(placement, Replicate))
    return weight.to_local().numel() * sharers == weight.numel()


def bytes_needed(chunks: Iterable[nn.Module], run: Run) -> int:
    """What a rank's weights take of host memory: each with its gradient and two moments, and the bits beside it."""
    weights = [local(weight.detach()) for chunk in chunks for weight in chunk.parameters()]
    low = 2 if run.optim.master_weights == "split" else 0
    return sum(
        weight.numel() * (2 * weight.itemsize + 2 * torch.promote_types(weight.dtype, torch.float32).itemsize + low)
        for weight in weights
    )


def check(need: int) -> None:
    """Refuse what this rank's host has no room for."""
    have = host_memory.free_host_bytes()
    if have is not None and need > have:
        what = f"plan.cpu_offload needs {need:,} bytes of host memory for this rank, and {have:,} are free"
        raise InputError([Problem(what, REMEDY, "plan.cpu_offload")])
