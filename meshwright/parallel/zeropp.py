"""ZeRO++ (Wang et al. 2023): weights all-gathered in blocks of eight bits (qwZ), and shared again inside a node (hpZ).

qwZ: a rank's shard travels as codes (int8, or fp8) and scales, its own part included, so that all ranks compute with
the same weights, rounded; the optimizer's are exact. hpZ: after the forward a block's weights are not given up to all
shards but to the `secondary_shard` neighbours of each rank, from which the backward gathers them: exact, over the links
inside a node, for a second copy of the weights on each group of neighbours. qgZ is parallel/grad_reduce.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from meshwright.kernels.blockwise import BlockCodes
from meshwright.parallel.fsdp import param_groups
from meshwright.parallel.mesh import Mesh, all_gather, join
from meshwright.spec.communication import block_of
from meshwright.spec.plan import Plan


def wrap(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Let a sharded model gather its weights as the plan says."""
    secondary = None
    if plan.secondary_shard > 1:
        secondary = HSDPMeshInfo(mesh.secondary(plan.secondary_shard), shard_mesh_dim=1, replicate_mesh_dim=0)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            if plan.gather != "default" and group.mesh_info.shard_mesh_size > 1:
                module.set_custom_all_gather(QuantizedGather(plan, group))
            if secondary is not None and module is not model:  # what is outside the blocks is used again at once
                _reshard_to(secondary, group)
    return model


def _reshard_to(secondary: HSDPMeshInfo, group: Any) -> None:
    """What `fully_shard` does with a number for reshard_after_forward, which makes process groups for every block."""
    group.post_forward_mesh_info = secondary
    for weight in group.fsdp_params:
        weight.post_forward_mesh_info = secondary
        weight._init_sharded_post_forward_param_metadata(torch.empty(weight._orig_size, device="meta"))


class QuantizedGather(AllGather):
    """The all-gather of one FSDP group."""

    def __init__(self, plan: Plan, group: Any) -> None:
        sizes = [weight.padded_sharded_param_size.numel() for weight in group.fsdp_params]
        self.codes = BlockCodes(plan.gather, sizes, [block_of(tuple(w.sharded_param.shape)) for w in group.fsdp_params])
        self.shards = group.mesh_info.shard_mesh_size

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of the gathered weights."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather codes, and make weights of them; what was rounded before, among neighbours, goes as it is."""
        if group.size() < self.shards:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        received = join(self.codes.encode(input_tensor[None]), 0, group)
        output_tensor.view(group.size(), -1).copy_(self.codes.decode(received, output_tensor.dtype))
        return None
