"""The processes of a job, from before the first collective to after the last."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.parallel import mesh
from meshwright.parallel.mesh import Mesh
from meshwright.spec.check import InputError, Problem
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.train.agree import agree

MEETING = timedelta(minutes=5)  # ranks import torch at different speeds on a crowded machine


def device_of(place: Place) -> torch.device:
    """The accelerator of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def backend_of(place: Place, device: torch.device, store: dist.Store) -> str:
    """NCCL where each rank has a GPU of its own; it refuses to share one, so ranks that do speak Gloo."""
    if device.type != "cuda":
        return "gloo"
    if place.local_world <= torch.cuda.device_count():
        return "nccl"
    # A scheduler may show every rank one GPU, the same or each another: they tell each other which.
    mine = str(torch.cuda.get_device_properties(device).uuid)
    return "nccl" if apart(mine, place, store) else "gloo"


def apart(gpu: str, place: Place, store: dist.Store) -> bool:
    """Whether no two ranks of this machine have the same GPU."""
    store.set(f"gpu{place.rank}", gpu)
    first = place.rank - place.local_rank
    return len({store.get(f"gpu{rank}") for rank in range(first, first + place.local_world)}) == place.local_world


@contextmanager
def world(run: Run, place: Place, attempt: int = 1) -> Iterator[Mesh]:
    """Meet the other ranks, and part from them however the work ends.

    A store may outlive an attempt, torchrun's does: the words of one that failed must not be taken for this one's.
    """
    device = device_of(place)
    store = dist.PrefixStore(f"attempt{attempt}", _store(place))
    backend = backend_of(place, device, store)
    _check_device(run, device, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu" or run.plan.offload_weights:  # the host computes: a step, or its update
        torch.set_num_threads(place.threads)
    # Torch advises, on every rank and for every shape, on gathering weights of two axes. We do it once, at the end.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    agree(run, store, place.rank, place.world)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=MEETING,
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield mesh.make(run.plan, device)
    finally:
        dist.destroy_process_group()


def world_group() -> dist.ProcessGroup:
    """All ranks of the job."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have met"
    return group


def _store(place: Place) -> dist.Store:
    if place.store:  # ranks of one machine meet in a file: nothing listens
        return dist.FileStore(place.store, place.world)
    return dist.TCPStore(place.address, place.port, place.world, is_master=place.rank == 0, timeout=MEETING)


def _check_device(run: Run, device: torch.device, backend: str) -> None:
    """What this device, or ranks that share it, cannot do."""
    if device.type != "cuda":
        return
    plan, name = run.plan, torch.cuda.get_device_name(device)
    if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError([Problem(f"{name} has no bf16 arithmetic", "set plan.precision=fp16", "plan.precision")])
    if backend == "gloo" and (plan.shards > 1 or plan.tp > 1 or plan.pp > 1):
        what = "ranks that share a GPU speak Gloo, which there can add up and exchange but not gather, scatter or send"
        remedy = "start one rank for each GPU, use replicate or cp, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        raise InputError([Problem(what, remedy, "plan")])
