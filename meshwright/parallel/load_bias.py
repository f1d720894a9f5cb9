"""Auxiliary-loss-free load balancing (Wang 2024, DeepSeek-V3): a bias of each expert, moved by its load once a step.

The bias bears on which experts are chosen, and has no gradient: after each step it rises by `arch.router_load_rate` for
experts that fewer tokens asked for than the mean, and falls for the others. How many asked is counted in whole numbers
and summed over all ranks, so the same signs come out under every plan.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.moe import MoELayer
from meshwright.parallel.mesh import Mesh
from meshwright.spec.arch import Arch
from meshwright.spec.params import buffers


def update(chunks: Iterable[nn.Module], arch: Arch, mesh: Mesh, applies: Tensor) -> None:
    """Move the biases of all layers by the counts of a step; `applies` is 0 where the step is skipped, and else 1.

    One all-reduce of 8 · layers with experts · experts bytes over all ranks: those of other stages add zeros, and those
    that see the same tokens count them as often as each other.
    """
    if not arch.router_load_bias:
        return
    places = {param.name: number for number, param in enumerate(buffers(arch))}
    asked = torch.zeros(len(places), arch.experts, dtype=torch.int64, device=mesh.device)
    layers = {
        places[f"{name}.load_bias"]: module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, MoELayer)
    }
    for place, layer in layers.items():
        assert layer.asked is not None, "the architecture says so"
        asked[place] = layer.asked
        layer.asked.zero_()
    if mesh.world > 1:
        dist.all_reduce(asked)
    for place, layer in layers.items():
        layer.update_load_bias(asked[place], applies)


def held(chunk: nn.Module, arch: Arch) -> dict[str, Tensor]:
    """The learned buffers of a part of the model, by name."""
    names = {param.name for param in buffers(arch)}
    return {name: buffer for name, buffer in chunk.named_buffers() if name in names}
