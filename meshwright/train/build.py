"""What a run needs in memory before its first step: model, optimizer, loader, loss scale."""

import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from meshwright.checkpoint.model_folder import ModelFolder, open_folder
from meshwright.config.run import Dpo, Run
from meshwright.data.loader import Loader
from meshwright.data.prepare import Corpus
from meshwright.kernels.quantized import FrozenPart, decode, encode
from meshwright.models import lora
from meshwright.models.decoder import Decoder
from meshwright.models.dropout import Dropout
from meshwright.models.init import fill, initial, row_norms
from meshwright.models.moe import MoELayer
from meshwright.optim import host_memory, master_weights, offload
from meshwright.optim.clip import LossScale
from meshwright.optim.interface import Optimizer
from meshwright.optim.offload import OffloadedOptimizer
from meshwright.optim.onebit import CompressingReplicas
from meshwright.optim.outer import NoOuterLoop, outer_loop
from meshwright.optim.parameter_server import AsynchronousReplicas, ServedOptimizer
from meshwright.optim.resident import CpuOffloadOptimizer, ResidentOptimizer, materialise
from meshwright.parallel import grad_reduce, precision
from meshwright.parallel.apply import Transform, apply
from meshwright.parallel.expert import learned_buffers
from meshwright.parallel.mesh import Mesh, local, region_of
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.params import Param, buffers, params, stored, stored_name
from meshwright.spec.quantized import ABSMAX, BLOCK, CODES, SCALES, parts
from meshwright.spec.tuning import MAGNITUDE, is_adapter
from meshwright.train.noise_scale import AdaScale, NoiseMeter
from meshwright.train.saving import restore as restore
from meshwright.train.state import State


def build(run: Run, corpus: Corpus, mesh: Mesh, folder: Path | None = None, in_fp8: Transform | None = None) -> State:
    """The state before the first step. States that are offloaded to a disk go to the run's folder."""
    chunks = _chunks(run, mesh, in_fp8)
    make = cpu_offloaded if run.plan.cpu_offload else served if run.plan.is_served else beside
    make = partial(offloaded, folder=folder) if run.plan.optimizer_offload != "none" else make
    optimizer, scale = make(chunks, run, mesh), LossScale(run.plan, mesh.device)
    return State(
        chunks=chunks,
        optimizer=optimizer,
        loader=Loader(corpus, run, mesh.data_rank, mesh.device),
        scale=scale,
        outer=_outer(run, chunks, optimizer, scale, mesh),
        reference=reference(run, mesh) if run.arch.copies_reference else [],
        meter=NoiseMeter(run, chunks, mesh) if run.measures_noise else None,
        adascale=AdaScale(run) if run.optim.adascale else None,
        reductions=grad_reduce.begun(chunks, run, mesh),
    )


def _chunks(run: Run, mesh: Mesh, in_fp8: Transform | None = None) -> list[nn.Module]:
    """The model as the plan cuts it, without memory."""
    with torch.device("meta"):
        model = Decoder(run.arch).to(master_weights.weight_dtype(run.optim, run.plan))
    model.length = run.sequence
    lora.freeze(model, run.arch, precision.compute_dtype(run.plan))
    return apply(model, run.plan, mesh, DECODER, in_fp8)


def reference(run: Run, mesh: Mesh) -> list[nn.Module]:
    """A second model with the first values of all weights, which nobody trains: no gradients, and no states.

    It is cut as the plan cuts frozen weights, and in the precision that arithmetic reads. It never goes back, so there
    is nothing to recompute or to offload.
    """
    plain = replace(run.plan, recompute="none", activation_quant="none", activation_offload=False)
    still = replace(
        run, objective="sft", dpo=Dpo(), optim=replace(run.optim, freeze=("*",)), plan=plain, arch=run.arch.reference
    )
    chunks = _chunks(still, mesh)
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.eval()
        initialise(chunk, still, mesh.device)
    return chunks


def _outer(run: Run, chunks: list[nn.Module], optimizer: Optimizer, scale: LossScale, mesh: Mesh) -> NoOuterLoop:
    """What replicas do with gradients that no backward has summed; without such, nothing."""
    if run.compresses:
        return CompressingReplicas(run, chunks, optimizer, mesh)
    if isinstance(optimizer, ServedOptimizer):
        return AsynchronousReplicas(run, optimizer)
    return outer_loop(run, chunks, optimizer, scale, mesh)


def served(chunks: list[nn.Module], run: Run, mesh: Mesh) -> Optimizer:
    """Weights on the device, and a parameter server on the hosts with their master copies and states."""
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
    _begin(chunks, run, mesh)
    return ServedOptimizer(run, [pair for chunk in chunks for pair in chunk.named_parameters()], mesh)


def beside(chunks: list[nn.Module], run: Run, mesh: Mesh) -> Optimizer:
    """Memory and first values for all weights, and an optimizer with its states beside them."""
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
    _begin(chunks, run, mesh)
    precision.attach(chunks, run.plan)
    names, weights = zip(*(pair for chunk in chunks for pair in lora.trained(chunk)), strict=True)
    return ResidentOptimizer(run.optim, weights, run.plan, names, mesh)


def cpu_offloaded(chunks: list[nn.Module], run: Run, mesh: Mesh) -> Optimizer:
    """The same with all weights in host memory, each made on the device by itself."""
    memory = materialise(chunks, run, mesh)
    _begin(chunks, run, mesh)
    return CpuOffloadOptimizer(run, [weight for chunk in chunks for _, weight in lora.trained(chunk)], memory)


def _begin(chunks: list[nn.Module], run: Run, mesh: Mesh) -> None:
    """First values, with what rounding keeps beside them."""
    master_weights.attach(chunks, run)
    for chunk in chunks:
        initialise(chunk, run, mesh.device, master_weights.begin if run.optim.master_weights == "split" else None)


def offloaded(chunks: list[nn.Module], run: Run, mesh: Mesh, folder: Path | None) -> Optimizer:
    """The same with its states offloaded: no more than one weight is ever in fp32 on the device."""
    place = Path(run.plan.optimizer_offload_folder or folder or tempfile.gettempdir())
    groups = [group for chunk in chunks for group in offload.groups(chunk, DECODER)]
    host_memory.check(run, [weight.numel() for group in groups for weight in group.weights], place)
    offload.cast_params(chunks, run.plan)
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
    offload.accumulate_fp32(chunks, run.plan)
    # Memory for them has made new parameters of the old.
    groups = [group for chunk in chunks for group in offload.groups(chunk, DECODER)]
    optimizer = OffloadedOptimizer(run, groups, mesh.device, place)
    for chunk in chunks:
        initialise(chunk, run, mesh.device, optimizer.begin)
    return optimizer


class FirstValues:
    """The first values of weights: from the seed, or from a folder; codes, and norms of rows, are of whole matrices."""

    def __init__(self, run: Run, folder: ModelFolder | None, device: torch.device) -> None:
        self.run, self.folder, self.device = run, folder, device
        self.table = {param.name: param for param in params(run.arch)}
        self.stored = {param.name: param for param in stored(run.arch)}
        # What each tensor that is beside a weight, or stands for it, is made of.
        weights, beside = (p for p in params(run.arch) if not is_adapter(p.name)), (CODES, ABSMAX, SCALES, MAGNITUDE)
        self.source = {stored_name(weight.name, part): weight for weight in weights for part in beside}
        self.encoded = lru_cache(maxsize=1)(self._encoded)  # several tensors are made of one

    def write(self, target: Tensor, name: str, region: tuple[slice, ...]) -> None:
        """Give a rank's part of a weight its values."""
        param = self.stored[name]
        if param.init == "norms":
            target.copy_(row_norms(self.matrix(name)[region]))
        elif param.item:
            target.copy_(self.part(name)[region])
        elif self.folder is None or is_adapter(name):
            fill(target, param, self.run.seed, region)
        else:
            target.copy_(self.folder.tensor(name)[region])

    def part(self, name: str) -> Tensor:
        """One of the tensors that stand for a matrix in few bits, or a stack of them."""
        weight = self.source[name]
        names = [stored_name(weight.name, part) for part, _, _ in parts(weight.held, weight.shape, False)]
        return self.encoded(weight)[names.index(name)]

    def matrix(self, name: str) -> Tensor:
        """The matrix beside a weight, as it is held."""
        weight, dtype = self.source[name], precision.compute_dtype(self.run.plan)
        if weight.held == "bf16":
            return self._whole(weight).to(dtype)
        return decode(FrozenPart(weight.held, weight.shape[-1] // BLOCK), self.encoded(weight), dtype)

    def _encoded(self, weight: Param) -> tuple[Tensor, ...]:
        return encode(weight.held, self._whole(weight))

    def _whole(self, weight: Param) -> Tensor:
        if self.folder is None:
            return initial(weight, self.run.seed, device=self.device)
        return self.folder.tensor(weight.name).to(self.device)


def begin_draws(chunk: nn.Module, run: Run, device: torch.device) -> None:
    """Let modules that draw in training, dropout and routers, draw by the seed and their names."""
    for name, module in chunk.named_modules():
        if isinstance(module, (MoELayer, lora.LoraLinear)):
            module.begin(run.seed, name, device)
        elif isinstance(module, Dropout):
            module.begin(run.seed, name)


def initialise(
    chunk: nn.Module, run: Run, device: torch.device, take: Callable[[nn.Parameter, Tensor], None] | None = None
) -> None:
    """Give this rank's part of every weight its first value, made on a device: from the seed, or from a folder.

    Whoever takes the values is given each weight's by itself, in full width.
    """
    folder = open_folder(run.init.folder, run.arch.mtp_layers) if run.init.folder else None
    values = FirstValues(run, folder, device)
    begin_draws(chunk, run, device)
    for param in buffers(run.arch):
        if (buffer := learned_buffers(chunk, run.arch).get(param.name)) is not None:
            buffer.zero_() if folder is None else buffer.copy_(folder.tensor(param.name))
    for name, weight in chunk.named_parameters():
        held, region = local(weight.detach()), region_of(weight)
        taken = take is not None and weight.requires_grad
        dtype = precision.weight_dtype(run.plan) if taken else held.dtype
        in_place = not taken and held.device == device
        target = held if in_place else torch.empty_like(held, dtype=dtype, device=device)
        values.write(target, name, region)
        if take is not None and taken:
            take(weight, target)
        elif not in_place:
            held.copy_(target)
