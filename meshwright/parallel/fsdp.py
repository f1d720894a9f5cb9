"""Replication and sharding of weights by one path, torch's `fully_shard` over the axes (replicate, shard)."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.models.moe import Experts
from meshwright.parallel import deterministic, precision
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import Blocks, ModelSpec, with_weights
from meshwright.spec.plan import Plan, runs


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Each block gathers its weights before use and sums its gradients after.

    A lone rank whose weights already have the precision of the arithmetic does neither.
    """
    if _stays_whole(plan):
        return model
    again = plan.zero == 3 and plan.pp == 1  # gathered weights are dropped after the forward and gathered again
    for module, grid in [*_sharers(anatomy.blocks(model), plan, mesh), (model, mesh.dense)]:
        fully_shard(
            module,
            mesh=grid["shard"] if plan.deterministic else weight_axes(grid),
            mp_policy=precision.policy(plan),
            offload_policy=_home(plan, mesh),
            reshard_after_forward=again and module is not model,  # what is outside the blocks is used again at once
            # The deterministic norm is folded row by row, so no row is cut.
            shard_placement_fn=None if plan.deterministic else partial(even_dim, ranks=grid["shard"].size()),
        )
    # The loss is already divided by the step's global count of tokens, so gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _look_ahead(list(with_weights(anatomy.blocks(model))), plan, mesh)
    return deterministic.attach(model, plan, mesh)


def _stays_whole(plan: Plan) -> bool:
    """Whether the arithmetic reads the very weights that the optimizer moves, or their shadow."""
    by_itself = plan.bf16_params or not precision.is_low(plan)
    return plan.world == 1 and by_itself and not plan.deterministic and not plan.cpu_offload


def _home(plan: Plan, mesh: Mesh) -> OffloadPolicy:
    """Where weights and their gradients live: beside the arithmetic, or in host memory that a GPU can read itself."""
    return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if plan.cpu_offload else OffloadPolicy()


def _look_ahead(blocks: list[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Gather each block's weights while the one before it computes; going back torch does so by itself.

    Runs of blocks that are computed anew call their blocks twice, and would gather ahead twice.
    """
    if plan.shards == 1 or plan.pp > 1 or any(len(run) > 1 for run in runs(plan.recompute, len(blocks))):
        return
    for block, following in pairwise(blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])
    if mesh.device.type == "cpu":  # without streams of its own a gather runs beside others only if nobody waits for it
        for block in blocks:
            assert isinstance(block, FSDPModule)
            block._set_unshard_async_op(True)


def _sharers(blocks: Blocks, plan: Plan, mesh: Mesh) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """The modules that gather their weights by themselves, inner ones first, and the grid over which they do.

    Experts that ranks share among them are held alike by fewer ranks than the rest of their block.
    """
    for block in with_weights(blocks):
        if plan.ep > 1:
            yield from ((module, mesh.expert) for module in block.modules() if isinstance(module, Experts))
        yield block, mesh.dense


def even_dim(weight: nn.Parameter, ranks: int) -> Shard | None:
    """Along which dim a stack of experts is sharded: the first that comes out even. Everything else: the first.

    Stacks hold few experts, often fewer than there are ranks: cut between experts, most ranks would hold nothing.
    """
    if weight.dim() != 3:
        return None
    return next((Shard(dim) for dim, size in enumerate(local(weight).shape) if size % ranks == 0), None)


def weight_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that share or copy weights; without copies only the first, so that no sum over one rank is issued."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]


def sum_gradients(chunk: nn.Module, plan: Plan, last: bool) -> None:
    """Say before a microbatch whether its backward is the one that communicates.

    Up to zero 1 gradients wait whole on each rank for the last microbatch; from zero 2 on each microbatch scatters
    its own, and only the sum over replicas waits. Short of zero 3, weights stay gathered until then.
    """
    if not isinstance(chunk, FSDPModule):
        return
    chunk.set_reshard_after_backward(last or plan.zero == 3)
    if plan.deterministic:
        return  # every microbatch hands over its gradient, and the tree keeps it on this rank until the last
    if plan.zero >= 2:
        chunk.set_requires_all_reduce(last)
    else:
        chunk.set_requires_gradient_sync(last)


def param_groups(module: nn.Module) -> list[Any]:
    """The parameters that a sharded module gathers and reduces by itself: a list only in later versions of torch."""
    state = fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_state(module: nn.Module) -> Any:
    """What `fully_shard` keeps of a module."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def release(chunk: nn.Module) -> None:
    """Drop gathered weights after a forward that no backward follows: what remains is what this rank holds."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
