"""CPU offload: weights, gradients and optimizer states in host memory, the device holds only what is in use.

FSDP copies a block's weights to the device before use and its reduced gradient back; see `parallel/fsdp.py`. Here are
their memory and the update, which runs on the host.
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
from meshwright.models.layers import accum_dtype
from meshwright.optim import host_memory
from meshwright.optim.clip import GradStats
from meshwright.optim.host_memory import PinnedMemory
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import note
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.problem import InputError, Problem

REMEDY = "use more ranks, whose hosts share the weights out by plan.shard, or leave plan.cpu_offload out"


class CpuOffloadOptimizer(ResidentOptimizer):
    """The update by torch's CPU kernel, with all of this rank's threads."""

    def __init__(self, run: Run, weights: Iterable[nn.Parameter], memory: PinnedMemory) -> None:
        super().__init__(run.optim, weights, msgspec.structs.replace(run.plan, kernels="plain"))
        self.memory = memory  # pinned for as long as this lives

    def step(self, rate: float, verdict: GradStats) -> None:
        """Update every weight, or none when the gradient is not finite.

        The host waits once a step: no weight is updated before the norm over all ranks' gradients is known.
        """
        factor, finite = torch.stack([verdict.factor, verdict.finite]).cpu().unbind()
        super().step(rate, replace(verdict, factor=factor, finite=finite))


def materialise(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> PinnedMemory:
    """Give every weight of a rank memory on its host, and every buffer memory on its device."""
    check(bytes_needed(chunks, run))
    memory = PinnedMemory(mesh.device.type == "cuda", remedy=REMEDY, key="plan.cpu_offload")
    for chunk in chunks:
        chunk._apply(partial(_allocated, memory, mesh.device))
        chunk.train()
        note(chunk, "weights, gradients and optimizer states offloaded to host")
    return memory


def _allocated(memory: PinnedMemory, device: torch.device, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device)
    empty = torch.empty_like(tensor, device="cpu")
    if memory.pinned and isinstance(empty, DTensor) and _is_even(empty):
        # Torch would pin a copy, in powers of two; memory that is pinned already it takes as it is.
        part = empty.to_local()
        empty._local_tensor = memory.take([part.numel()], [part.dtype])[0].view(part.shape)
    return empty


def _is_even(weight: DTensor) -> bool:
    """Whether all ranks have equal parts of a weight; torch pads others, and copies them for that."""
    axes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    sharers = math.prod(size for size, placement in axes if not isinstance(placement, Replicate))
    return weight.to_local().numel() * sharers == weight.numel()


def bytes_needed(chunks: Iterable[nn.Module], run: Run) -> int:
    """Host memory of a rank's weights, their gradients, optimizer states, and the low bits of split masters."""
    weights = [local(weight.detach()) for chunk in chunks for weight in chunk.parameters()]
    low, spec = 2 if run.optim.master_weights == "split" else 0, OPTIMIZERS[run.optim.name]
    return sum(
        weight.numel() * (2 * weight.itemsize + spec.state_bytes(accum_dtype(weight).itemsize) + low)
        for weight in weights
    )


def check(need: int) -> None:
    """Refuse what does not fit into this rank's host memory."""
    have = host_memory.free_host_bytes()
    if have is not None and need > have:
        what = f"plan.cpu_offload needs {need:,} bytes of host memory for this rank, and {have:,} are free"
        raise InputError([Problem(what, REMEDY, "plan.cpu_offload")])
