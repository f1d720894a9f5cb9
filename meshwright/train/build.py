"""What a run needs in memory before its first step: model, optimizer, loader, loss scale."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint.model_folder import open_folder
from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.data.prepare import Corpus
from meshwright.models.decoder import Decoder
from meshwright.models.dropout import Dropout
from meshwright.models.init import fill
from meshwright.models.moe import MoELayer
from meshwright.optim import host_memory, master_weights
from meshwright.optim.clip import LossScale
from meshwright.optim.interface import Optimizer
from meshwright.optim.offload import OffloadedOptimizer
from meshwright.optim.outer import outer_loop
from meshwright.optim.resident import CpuOffloadOptimizer, ResidentOptimizer, materialise
from meshwright.parallel import optimizer_offload, precision
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import Mesh, local, region_of
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.params import params
from meshwright.train.noise_scale import AdaScale, NoiseMeter
from meshwright.train.saving import restore as restore
from meshwright.train.state import State


def build(run: Run, corpus: Corpus, mesh: Mesh, folder: Path | None = None) -> State:
    """The state before the first step. States that are offloaded to a disk go to the run's folder."""
    with torch.device("meta"):
        model = Decoder(run.arch).to(master_weights.weight_dtype(run.optim, run.plan))
    chunks = apply(model, run.plan, mesh, DECODER)
    make = hosted if run.plan.cpu_offload else beside
    make = partial(offloaded, folder=folder) if run.plan.optimizer_offload != "none" else make
    optimizer, scale = make(chunks, run, mesh), LossScale(run.plan, mesh.device)
    return State(
        chunks=chunks,
        optimizer=optimizer,
        loader=Loader(corpus, run, mesh.data_rank, mesh.device),
        scale=scale,
        outer=outer_loop(run, chunks, optimizer, scale, mesh),
        meter=NoiseMeter(run, chunks, mesh) if run.measures_noise else None,
        adascale=AdaScale(run) if run.optim.adascale else None,
    )


def beside(chunks: list[nn.Module], run: Run, mesh: Mesh) -> Optimizer:
    """Memory and first values for all weights, and an optimizer with its states beside them."""
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
    _begin(chunks, run, mesh)
    precision.attach(chunks, run.plan)
    names, weights = zip(*(pair for chunk in chunks for pair in chunk.named_parameters()), strict=True)
    return ResidentOptimizer(run.optim, weights, run.plan, names, mesh)


def hosted(chunks: list[nn.Module], run: Run, mesh: Mesh) -> Optimizer:
    """The same with all weights in host memory, each made on the device by itself."""
    memory = materialise(chunks, run, mesh)
    _begin(chunks, run, mesh)
    return CpuOffloadOptimizer(run, [weight for chunk in chunks for weight in chunk.parameters()], memory)


def _begin(chunks: list[nn.Module], run: Run, mesh: Mesh) -> None:
    """First values, with what rounding keeps beside them."""
    master_weights.attach(chunks, run)
    for chunk in chunks:
        initialise(chunk, run, mesh.device, master_weights.begin if run.optim.master_weights == "split" else None)


def offloaded(chunks: list[nn.Module], run: Run, mesh: Mesh, folder: Path | None) -> Optimizer:
    """The same with its states elsewhere: no more than one weight is ever wide on the device."""
    place = Path(run.plan.optimizer_offload_folder or folder or tempfile.gettempdir())
    groups = [group for chunk in chunks for group in optimizer_offload.groups(chunk, DECODER)]
    host_memory.check(run, [weight.numel() for group in groups for weight in group.weights], place)
    optimizer_offload.cast_params(chunks, run.plan)
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
    optimizer_offload.accumulate_fp32(chunks, run.plan)
    # Memory for them has made new parameters of the old.
    groups = [group for chunk in chunks for group in optimizer_offload.groups(chunk, DECODER)]
    optimizer = OffloadedOptimizer(run, groups, mesh.device, place)
    for chunk in chunks:
        initialise(chunk, run, mesh.device, optimizer.begin)
    return optimizer


def initialise(
    chunk: nn.Module, run: Run, device: torch.device, take: Callable[[nn.Parameter, Tensor], None] | None = None
) -> None:
    """Give this rank's part of every weight its first value, made on a device: from the seed, or from a folder.

    Whoever takes the values is given each weight's by itself, in full width.
    """
    folder = open_folder(run.init.folder) if run.init.folder else None
    table = {param.name: param for param in params(run.arch)}
    for name, module in chunk.named_modules():
        if isinstance(module, MoELayer):
            module.begin(run.seed, name, device)
        elif isinstance(module, Dropout):
            module.begin(run.seed, name)
    for name, weight in chunk.named_parameters():
        held, region = local(weight.detach()), region_of(weight)
        dtype = held.dtype if take is None else precision.weight_dtype(run.plan)
        in_place = take is None and held.device == device
        target = held if in_place else torch.empty_like(held, dtype=dtype, device=device)
        if folder is None:
            fill(target, table[name], run.seed, region)
        else:
            target.copy_(folder.tensor(name)[region])
        if take is not None:
            take(weight, target)
        elif not in_place:
            held.copy_(target)
