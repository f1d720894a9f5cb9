"""Replication and sharding of weights by one path, torch's `fully_shard` over the axes (replicate, shard)."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshwright.models.moe import Experts
from meshwright.parallel import deterministic, precision
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import Blocks, ModelSpec, with_weights
from meshwright.spec.plan import Plan, runs


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Let each block all-gather its weights before use and reduce its gradients after."""
    # A lone rank's arithmetic may read the very weights that the optimizer updates, or their bf16 copy.
    by_itself = plan.bf16_params or not precision.is_low(plan)
    if plan.world == 1 and by_itself and not plan.deterministic and not plan.cpu_offload:
        return model
    reshard = plan.zero == 3 and plan.pp == 1  # weights are freed after the forward and gathered again
    # Pinned, so that a GPU can read the host's memory itself.
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    for module, grid in [*_sharers(model_spec.blocks(model), plan, mesh), (model, mesh.dense)]:
        fully_shard(
            module,
            # Without replicas one axis only, so that no all-reduce over one rank is issued.
            mesh=grid["shard"] if plan.deterministic or grid["replicate"].size() == 1 else grid["replicate", "shard"],
            mp_policy=precision.policy(plan),
            offload_policy=offload,
            reshard_after_forward=reshard and module is not model,  # what is outside the blocks is used again at once
            # The deterministic norm is folded row by row, so no row is cut.
            shard_placement_fn=None if plan.deterministic else partial(even_dim, ranks=grid["shard"].size()),
        )
    # The loss is already divided by the step's global count of tokens, so gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(list(with_weights(model_spec.blocks(model))), plan, mesh)
    return deterministic.attach(model, plan, mesh)


def _prefetch(blocks: list[nn.Module], plan: Plan, mesh: Mesh) -> None:
    """Prefetch each block's weights while the one before it computes; in the backward torch does so by itself.

    Runs of blocks that are recomputed call their blocks twice, and would prefetch twice.
    """
    if plan.shards == 1 or plan.pp > 1 or any(len(run) > 1 for run in runs(plan.recompute, len(blocks))):
        return
    sharded = [block for block in blocks if isinstance(block, FSDPModule)]
    for block, following in pairwise(sharded):
        block.set_modules_to_forward_prefetch([following])
    if mesh.device.type == "cpu":  # without streams of its own a gather runs beside others only if nobody waits for it
        for block in sharded:
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


def sum_gradients(chunk: nn.Module, plan: Plan, last: bool) -> None:
    """Set before a microbatch whether its backward is the one that communicates.

    Up to zero 1 unreduced gradients wait on each rank for the last microbatch; from zero 2 on each microbatch
    reduce-scatters its own, and only the all-reduce over replicas waits. Short of zero 3 weights stay gathered.
    """
    if not isinstance(chunk, FSDPModule):
        return
    chunk.set_reshard_after_backward(last or plan.zero == 3)
    if plan.deterministic:
        return  # every microbatch passes on its gradient, and the tree keeps it on this rank until the last
    if plan.zero >= 2:
        chunk.set_requires_all_reduce(last)
    else:
        chunk.set_requires_gradient_sync(last)


def release(chunk: nn.Module) -> None:
    """Drop gathered weights after a forward that no backward follows: what remains is what this rank holds."""
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
