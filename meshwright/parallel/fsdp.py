"""Replication and sharding of weights by one path, torch's `fully_shard` over the axes (replicate, shard).

Ranks whose data takes different branches of a model leave parameters unused, as under DDP's `find_unused_parameters`.
Collectives need every rank, and in one order. A rank that leaves a block out all-gathers its weights and reduces its
gradient nevertheless, at the block's turn; a parameter without a gradient is reduced as zeros. Which parameters a rank
used travels with the gradient's norm, one number each: what no rank used in a step has no gradient and is not updated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Shard

from meshwright.models.decoder import AheadBlock
from meshwright.models.moe import Experts
from meshwright.parallel import deterministic, precision
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import Blocks, ModelSpec, with_weights
from meshwright.spec.plan import Plan, runs
from meshwright.spec.problem import mistake


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Let each block all-gather its weights before use and reduce its gradients after."""
    # A lone rank's arithmetic may read the very weights that the optimizer updates, or their bf16 copy.
    by_itself = plan.bf16_params or not precision.is_low(plan)
    if plan.world == 1 and by_itself and not plan.deterministic and not plan.cpu_offload:
        return model
    reshard = plan.zero == 3 and plan.pp == 1  # weights are freed after the forward and gathered again
    # Pinned, so that a GPU can read the host's memory itself.
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if plan.cpu_offload else OffloadPolicy()
    # Without replicas one axis only, so that no all-reduce over one rank is issued; or a hook sums over them.
    grids, hooked = [mesh.dense, mesh.expert], plan.deterministic or plan.reduces_lossily
    dense, expert = (
        grid["shard"] if hooked or grid["replicate"].size() == 1 else grid["replicate", "shard"] for grid in grids
    )
    if not all(weight.is_floating_point() for weight in model.parameters()):
        _shard_integers()
    for module, grid in [*_sharers(model_spec.blocks(model), plan, dense, expert), (model, dense)]:
        fully_shard(
            module,
            mesh=grid,
            mp_policy=precision.policy(plan),
            offload_policy=offload,
            reshard_after_forward=reshard and module is not model,  # what is outside the blocks is used again at once
            # The deterministic norm is folded row by row, so no row is cut.
            shard_placement_fn=None if plan.deterministic else partial(even_dim, ranks=grid.shape[-1]),
        )
    # The loss is already divided by the step's global count of tokens, so gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Validation does without multi-token prediction, and nothing may be gathered that is not used.
    every = [block for block in with_weights(model_spec.blocks(model)) if not isinstance(block, AheadBlock)]
    _prefetch(every, plan, mesh)
    return deterministic.attach(model, plan, mesh)


@cache
def _shard_integers() -> None:
    """Have torch before 2.13 shard frozen codes as later ones do: it wants their gradients, and gathers as floats."""
    if torch.__version__ >= "2.13":
        return
    attributes = FSDPParam.init_dtype_attrs

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    def init_dtype_attrs(self: FSDPParam, mp_policy: MixedPrecisionPolicy) -> None:
        attributes(self, mp_policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    FSDPParam.init_dtype_attrs = init_dtype_attrs
    _fsdp_param.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)  # pyright: ignore[reportAttributeAccessIssue]


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


def _sharers(
    blocks: Blocks, plan: Plan, dense: DeviceMesh, expert: DeviceMesh
) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """The modules that gather their weights by themselves, inner ones first, and the grid over which they do.

    Experts that ranks share among them are held alike by fewer ranks than the rest of their block.
    """
    for block in with_weights(blocks):
        if plan.ep > 1:
            yield from ((module, expert) for module in block.modules() if isinstance(module, Experts))
        yield block, dense


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


def find_unused(
    chunks: list[nn.Module], names: Sequence[str], plan: Plan, mesh: Mesh, model_spec: ModelSpec
) -> list[nn.Module]:
    """Let the sharded chunks of a model, whose parameters have these names, find those that ranks do not use."""
    if not model_spec.find_unused_parameters or plan.copies * plan.shards == 1:
        return chunks
    for chunk in chunks:
        chunk.parameter_usage = Usage(chunk, names, mesh.device)  # pyright: ignore[reportArgumentType]
        if plan.pp == 1:  # a pipeline's runtime gathers and reduces whole stages, whatever is called in them
            BlockOrder(chunk, plan, model_spec)
    return chunks


@dataclass(frozen=True, slots=True)
class UsedParameters:
    """What this rank used in a step."""

    flags: Tensor  # 1 for every parameter that got a gradient here, in the order of the whole model; else 0
    left_out: list[tuple[int, nn.Parameter]]  # those that got none, by their place in it

    def drop_unused(self, counts: Tensor) -> None:
        """Take away the zeros that stand for the gradient of what no rank used, by the sum of all ranks' flags.

        The host waits for the sum only where this rank left something out: what it used, somebody used.
        """
        if self.left_out:
            ranks = counts.tolist()
            for place, weight in self.left_out:
                if ranks[place] == 0:
                    weight.grad = None


def used_parameters(chunks: Sequence[nn.Module]) -> UsedParameters | None:
    """What a rank's chunks used since this was last asked; None if the model is known to use everything."""
    usages = [getattr(chunk, "parameter_usage", None) for chunk in chunks]
    steps = [usage.take() for usage in usages if isinstance(usage, Usage)]
    if not steps:
        return None
    flags = torch.stack([step.flags for step in steps]).sum(0) if len(steps) > 1 else steps[0].flags
    return UsedParameters(flags, [each for step in steps for each in step.left_out])


class Usage:
    """Which parameters of a chunk got a gradient on this rank in a step; the others are reduced as zeros."""

    def __init__(self, chunk: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.chunk = chunk
        self.places = {name: place for place, name in enumerate(names)}
        held = {name for name, _ in chunk.named_parameters()}
        self.held = torch.tensor([float(name in held) for name in names], dtype=torch.float64, device=device)
        self.used: set[int] = set()
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                for group in param_groups(module):
                    group.post_backward = partial(self._post_backward, group, group.post_backward)

    def _post_backward(self, group: Any, post_backward: Callable[[], None], *unused: Any) -> None:
        """Give every weight of a group a gradient, all of one type, before they are reduced."""
        weights = group.fsdp_params if group.reduce_grads else []
        for weight in weights:
            weight.accumulate_unsharded_grad_if_needed()
        accumulated = any(weight.unsharded_accumulated_grad is not None for weight in weights)
        for weight in weights:
            if accumulated:  # in the type of the reduction, unlike what has its first gradient only now
                weight.to_accumulated_grad_if_needed()
            if weight.unsharded_accumulated_grad is not None or weight.unsharded_param.grad is not None:
                self.used.add(id(weight.sharded_param))
            elif weight.unsharded_param.requires_grad:
                weight.unsharded_param.grad = torch.zeros_like(weight.unsharded_param)
                if accumulated:
                    weight.to_accumulated_grad_if_needed()
        post_backward()

    def take(self) -> UsedParameters:
        """What was used since this was last called."""
        trained = [(name, weight) for name, weight in self.chunk.named_parameters() if weight.requires_grad]
        left_out = [(self.places[name], weight) for name, weight in trained if id(weight) not in self.used]
        self.used.clear()
        flags = self.held.clone()
        if left_out:
            flags[[place for place, _ in left_out]] = 0.0
        return UsedParameters(flags, left_out)


class BlockOrder:
    """One order for all ranks in which blocks are gathered and reduced: as listed, and going back the reverse.

    A rank calls those blocks that it needs, each at most once a forward. Before a later one is called, those between
    are called on nothing.
    """

    def __init__(self, model: nn.Module, plan: Plan, model_spec: ModelSpec) -> None:
        named = model_spec.blocks(model)
        self.blocks = list(with_weights(named))
        self.names = {id(block): name for name, block in named.items()}
        self.several = any(len(run) > 1 for run in runs(plan.recompute, len(self.blocks)))
        self.turn = -1  # the block whose turn it is; before the first, -1 going forward and their number going back
        self.backward = False
        model.register_forward_pre_hook(self._begin, prepend=True)  # ahead of torch's own hooks
        model.register_forward_hook(self._end, prepend=True)
        self.states = [fsdp_state(block) for block in self.blocks]
        self.pre_backward = [state._pre_backward for state in self.states]
        for number, (block, state) in enumerate(zip(self.blocks, self.states, strict=True)):
            block.register_forward_pre_hook(partial(self._called, number), prepend=True)
            state._pre_backward = partial(self._pre_backward, number)
        root = fsdp_state(model)
        root._pre_backward = partial(self._root_pre_backward, root._pre_backward)

    def _begin(self, model: nn.Module, arguments: Any) -> None:
        self.turn, self.backward = -1, False

    def _called(self, number: int, block: nn.Module, arguments: Any) -> None:
        if self.backward:  # recomputed
            return
        if number <= self.turn:
            raise mistake(
                f"{self.names[id(block)]} is called twice in a forward, or after a later block: ranks that leave it "
                "out could not tell when",
                "if all ranks call the same blocks and use all parameters, say so by "
                "ModelSpec(find_unused_parameters=False); else make the model one unit by ModelSpec(blocks=one_unit)",
                "plan.shard",
            )
        self._leave_out(number)
        self.turn = number

    def _end(self, model: nn.Module, arguments: Any, output: Any) -> None:
        self._leave_out(len(self.blocks))

    def _leave_out(self, until: int) -> None:
        """Gather and drop the weights of blocks that are not called."""
        for number in range(self.turn + 1, until):
            block, state = self.blocks[number], self.states[number]
            if self.several:
                name = self.names[id(block)]
                what = f"plan.recompute recomputes several blocks together, and a rank's data leaves {name} out"
                raise mistake(what, "use plan.recompute = full, which takes each block by itself", "plan.recompute")
            state._pre_forward(block, (), {})
            state._post_forward(block, (), None)

    def _root_pre_backward(self, pre_backward: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        self._go_back()
        return pre_backward(gradient)

    def _pre_backward(self, number: int, gradient: Tensor) -> Tensor:
        self._go_back()
        self._pass_turn(number)
        return self.pre_backward[number](gradient)

    def _go_back(self) -> None:
        """Begin a backward, if none has begun. What is outside of blocks is reduced after them, by torch's callback."""
        if not self.backward:
            self.turn, self.backward = len(self.blocks), True
            Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._pass_turn(-1)
        self.backward = False

    def _pass_turn(self, to: int) -> None:
        """Reduce the gradients of all blocks after one.

        Their backward is over: of the operations that it could take next, autograd takes the one that was done last.
        """
        assert to <= self.turn, "blocks go back in the reverse of their order"
        while self.turn > to:
            if self.turn < len(self.blocks):
                for group in param_groups(self.blocks[self.turn]):
                    # Left out, or none of its inputs has a gradient.
                    if group._training_state != TrainingState.POST_BACKWARD:
                        group.post_backward()
            self.turn -= 1
            if self.turn > to:
                self.pre_backward[self.turn](None)


def param_groups(module: nn.Module) -> list[Any]:
    """The parameters that a sharded module gathers and reduces by itself: a list only in later versions of torch."""
    state = fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_state(module: nn.Module) -> Any:
    """What `fully_shard` keeps of a module."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()
