"""Tensor and sequence parallelism: matrices sharded by the model's table, the loss over vocabulary-parallel logits.

Between matrices a rank of our decoder holds its part of the sequence, (b, s ÷ tp, hidden): all-gathered before a
column-parallel matmul, reduce-scattered after the row-parallel one. Per layer that is two of each in the forward, and
their mirror images in the backward. Logits stay sharded by vocabulary; the loss needs only their maxima and sums, and
its chunked form never has all of them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from meshwright.kernels import cross_entropy
from meshwright.kernels.cross_entropy import VocabShard
from meshwright.kernels.dispatch import Kernels
from meshwright.models.layers import Attention
from meshwright.models.lora import AdaptedExperts, FrozenLinear
from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.local_parts import hold, hold_sinks, placed, read_partial, reading_locally
from meshwright.parallel.mesh import Mesh, gather, local, scatter, sum_over
from meshwright.parallel.model_spec import ModelSpec, hold_adapted, note, resolved, shared_heads
from meshwright.spec.plan import Plan
from meshwright.spec.quantized import ABSMAX, SCALES
from meshwright.spec.tuning import DOWN


def split(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Shard every matrix as the model's table says."""
    if plan.tp == 1:
        return model
    assert model_spec.tp_plan is not None, "refused before ranks start"
    table = shared_heads(resolved(model_spec.tp_plan(model), model), model, plan.tp)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    parallelize_module(model, mesh.dense["tp"], table)
    for name, style in table.items():
        note(model.get_submodule(name), f"{type(style).__name__} over tp={plan.tp}")
    for module in model.modules():
        if isinstance(module, MoELayer):
            split_moe(module, plan, mesh)
            note(module, f"tensor parallel over tp={plan.tp}")
        elif isinstance(module, Attention):
            hold_sinks(module, mesh.dense["tp"])
    for name, weight in model.named_parameters():  # torch's styles make new parameters, some of which would be trained
        weight.requires_grad_(name not in frozen)
    return model


def split_moe(layer: MoELayer, plan: Plan, mesh: Mesh) -> None:
    """Shard one MoE layer over tp, in place."""
    for module in layer.modules():
        if isinstance(module, FrozenLinear):
            hold_adapted(module, mesh.dense["tp"], rows_cut=layer.shared is not None and module is layer.shared.down)
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            if not isinstance(module, Experts):
                hold(module, name, weight, mesh.dense["tp"], [_placement(name, module, layer)])
    hold_experts(layer.experts, mesh)
    layer.share /= plan.tp
    group = mesh.group("tp")
    compute = layer.forward

    def forward(x: Tensor, index: Tensor | None = None) -> Tensor:
        whole = gather(local(x), 1, group).contiguous()  # or each matmul of shared experts saves a copy of its own
        with reading_locally(layer, read_partial, skip=layer.experts):
            y = compute(whole, index)
        return scatter(y, 1, group)

    layer.forward = forward


def hold_experts(experts: Experts, mesh: Mesh) -> None:
    """Give each rank its experts (ep) and its part inside each (tp); done once, by whichever axis comes first."""
    if isinstance(experts.up, DTensor):
        return
    axes = mesh.expert["ep", "tp"]
    for name, weight in list(experts.named_parameters(recurse=False)):
        hold(experts, name, weight, axes, [Shard(0), _inside(name, experts)])
    if isinstance(experts, AdaptedExperts):
        _place_adapted(experts, mesh)
    experts.place = placed(mesh.place["tp"], mesh.fine["tp"].size())
    compute = experts.forward

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        with reading_locally(experts, _read_expert):
            return compute(x, counts)

    experts.forward = forward


def _read_expert(weight: DTensor) -> Tensor:
    """A stack of which no other rank has a part that this one has: its gradient is complete.

    Of an adapter the matrix that tp leaves whole has a part of it on each rank.
    """
    pairs = zip(weight.placements, weight.device_mesh.shape, strict=True)
    partial_of = [Partial() if isinstance(each, Replicate) and ranks > 1 else each for each, ranks in pairs]
    return weight.to_local(grad_placements=partial_of)


def _inside(name: str, experts: Experts) -> Placement:
    """How tp cuts the matrices of a stack, their biases, adapters and what stands for them."""
    stack, _, part = name.partition("_")
    rows_cut = stack == "down"
    if part in ("", ABSMAX):
        return Shard(2) if rows_cut else Shard(1)
    if part == "bias":
        return Shard(1)
    if part == SCALES:
        quantized = experts.quantized[stack] if isinstance(experts, AdaptedExperts) else None
        return Replicate() if rows_cut or quantized is None or quantized.held == "nf4" else Shard(1)
    if part == DOWN:
        return Shard(2) if rows_cut else Replicate()
    return Replicate() if rows_cut else Shard(1)  # B, and magnitudes


def _place_adapted(experts: AdaptedExperts, mesh: Mesh) -> None:
    """Tell stacks in few bits where a rank's part of each matrix begins, and sum square norms of rows that are cut."""
    rank, ranks = mesh.place["tp"], mesh.fine["tp"].size()
    for stack, how in experts.quantized.items():
        rows = getattr(experts, stack).shape[1] // ranks
        experts.quantized[stack] = (
            replace(how, block=rank * how.row_blocks // ranks) if stack == "down" else replace(how, row=rank * rows)
        )
    if ranks > 1:
        experts.across["down"] = partial(sum_over, group=mesh.group("tp"))


def _placement(name: str, module: nn.Module, layer: MoELayer) -> Placement:
    shared = layer.shared
    if shared is None or module in (layer.router, layer.noise):
        return Replicate()
    if module is shared.down:
        return Shard(1) if name == "weight" else Replicate()
    return Shard(0)


def loss_context(plan: Plan) -> AbstractContextManager[Any]:
    """The context where a loss over vocabulary-parallel logits is computed and differentiated."""
    return loss_parallel() if plan.tp > 1 else nullcontext()


def vocab_parallel_loss(
    x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor, kernels: Kernels = "auto", softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The weighted loss of a vocabulary-parallel projection, by chunks: no rank ever has a whole row of logits.

    Each chunk communicates what the loss over all logits does.
    """
    assert isinstance(x, DTensor)
    assert isinstance(projection, DTensor)
    if x.placements != (Replicate(),):  # a tied model's norm has gathered it already
        x = x.redistribute(placements=[Replicate()])
    # Each rank's gradient of x is that of its own entries.
    entering = x.to_local(grad_placements=[Partial()])
    group, vocab = projection.device_mesh.get_group(), len(projection)
    largest = -(-vocab // group.size())
    shard = VocabShard(
        first=min(group.rank() * largest, vocab),
        largest=largest,
        ranks=group.size(),
        max=partial(_all_reduce, group, dist.ReduceOp.MAX),
        sum=partial(_all_reduce, group, dist.ReduceOp.SUM),
    )
    return cross_entropy.weighted_loss(entering, projection.to_local(), targets, weight, shard, kernels, softcap)


def _all_reduce(group: dist.ProcessGroup, kind: dist.ReduceOp.RedOpType, x: Tensor) -> Tensor:
    dist.all_reduce(x, kind, group=group)
    return x
