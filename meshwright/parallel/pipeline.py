"""Pipeline parallelism: layers cut into stages, run by torch's runtime in the order of our own schedules.

A stage is the plain model without the layers of the others. Stages send each other the hidden states of a microbatch;
of our decoder, (b, s ÷ cp ÷ tp, hidden). A stage's weights are all-gathered once a step and stay until its last
backward; under zero 3 a rank holds only the three stages gathered that it computes next, as torch's runtime has it.
Gradients are reduced once, after the last microbatch, whatever `zero` says.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _Action, _PipelineScheduleRuntime

from meshwright.config.run import Run
from meshwright.parallel import fsdp, precision
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.model_spec import ModelSpec, stage_of
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import IN_SIGHT, actions, stage_ranks

# From a microbatch's outputs and targets to the sum of losses that is trained, and the one that is reported.
Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
# From a microbatch's input and a stage to a description of what that stage is sent, or past the last, what leaves it.
Streams = Callable[[Tensor, int], Tensor | tuple[Tensor, ...]]


def cut(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> list[nn.Module]:
    """The stages that this rank runs, in the order of the model."""
    if plan.pp == 1:
        return [model]
    return [part(model, plan, stage, model_spec) for stage in my_stages(plan, mesh)]


def my_stages(plan: Plan, mesh: Mesh) -> list[int]:
    """The stages on this rank."""
    return [stage for stage, rank in enumerate(placement(plan)) if rank == mesh.place["pp"]]


def placement(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return stage_ranks(plan.schedule, plan.pp, plan.chunks)


def part(model: nn.Module, plan: Plan, stage: int, model_spec: ModelSpec) -> nn.Module:
    """One stage of a plan, the model left as it is."""
    assert model_spec.stage_fn is not None, "refused before ranks start"
    return model_spec.stage_fn(copy.deepcopy(model), stage_of(plan, stage))


def stage_input(arch: Arch, plan: Plan, tokens: Tensor, stage: int) -> Tensor | tuple[Tensor, ...]:
    """What a stage of our decoder is sent for a microbatch, or what leaves the last one, without its elements."""
    if stage == 0:
        return tokens
    batch, positions = tokens.shape
    dtype = precision.compute_dtype(plan)
    if stage == len(plan.stages):
        logits = torch.empty(batch, positions, arch.vocab, dtype=dtype, device="meta")
        return (logits,) * (1 + arch.mtp_layers)
    shape = (batch, positions // plan.tp, arch.hidden)
    return torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)


class Pipeline:
    """A step of the pipeline: all microbatches through all stages, in the order of the plan's schedule."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        plan: Plan,
        mesh: Mesh,
        loss: Loss,
        streams: Streams,
        tied: dist.ProcessGroup | None = None,
    ) -> None:
        self.chunks, self.plan, self.mesh = chunks, plan, mesh
        self.loss, self.streams, self.tied = loss, streams, tied
        self.weight = torch.ones((), device=mesh.device)
        self.total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.runtime: _PipelineScheduleRuntime | None = None

    def step(self, x: Tensor, kwargs: dict[str, Any], targets: Tensor, weight: Tensor) -> Tensor:
        """Forward and backward of one step's microbatches, joined along dim 0; returns this rank's sum of losses."""
        self.weight = weight
        self.total = torch.zeros_like(self.total)
        if self.runtime is None:
            self.runtime = self._build(x[: self.plan.microbatch])
        given = {name: value for name, value in kwargs.items() if value is not None}  # torch 2.11 trips over None
        self.runtime.step(x, target=targets, losses=[], return_outputs=False, **given)
        add_tied(self.chunks, self.tied)
        return self.total

    def _weighed(self, outputs: Any, targets: Tensor) -> Tensor:
        loss, reported = self.loss(outputs, targets)
        self.total += reported.detach()
        return loss * self.weight.to(loss.dtype)

    def _build(self, x: Tensor) -> _PipelineScheduleRuntime:
        stages = [
            PipelineStage(
                chunk,
                stage,
                len(self.plan.stages),
                self.mesh.device,
                # Described, so that torch need not ask the other stages for it.
                input_args=self.streams(x, stage),
                output_args=self.streams(x, stage + 1),
                group=self.mesh.group("pp"),
            )
            for stage, chunk in zip(my_stages(self.plan, self.mesh), self.chunks, strict=True)
        ]
        for stage in stages:
            _meet_others_only(stage)
        runtime = _PipelineScheduleRuntime(
            stages,  # pyright: ignore[reportArgumentType]
            self.plan.grad_accum,
            loss_fn=self._weighed,
            scale_grads=False,  # torch's default divides by the number of microbatches; the loss is divided already
        )
        orders = actions(self.plan.schedule, self.plan.pp, self.plan.chunks, self.plan.grad_accum)
        runtime._prepare_schedule_with_comms(
            {rank: [_Action.from_str(str(action)) for action in order] for rank, order in enumerate(orders)}
        )
        if self.plan.zero < 3:
            lowered = runtime.pipeline_order_with_comms
            runtime.pipeline_order_with_comms = {rank: _gathered_once(order) for rank, order in lowered.items()}
        return runtime


def _gathered_once(order: Sequence[_Action]) -> list[_Action]:
    """A rank's order with each stage unsharded before its first use and resharded after its last, not in between.

    Torch's runtime holds three stages unsharded and takes no other number: with more on a rank it gathers them again
    for every round of microbatches, which is what zero 3 pays to hold less, and no other stage of ZeRO.
    """
    first, last = dict[int, int](), dict[int, int]()
    for place, action in enumerate(order):
        if action.computation_type == UNSHARD:
            first.setdefault(action.stage_index, place)
        elif action.computation_type == RESHARD:
            last[action.stage_index] = place
    kept = {*first.values(), *last.values()}
    moves = (UNSHARD, RESHARD)
    return [action for place, action in enumerate(order) if place in kept or action.computation_type not in moves]


def _meet_others_only(stage: PipelineStage) -> None:
    """Torch greets a stage's neighbours before the first step; 2.11 also those on the same rank, which Gloo refuses."""
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [hello for hello in greetings() if hello.peer != dist.get_rank()]


def relay(chunks: Sequence[nn.Module], run: Run, mesh: Mesh, kwargs: dict[str, Any]) -> Tensor | None:
    """A forward without a backward, stage after stage; the rank of the last stage gets the output, the others None."""
    plan, group = run.plan, mesh.group("pp")
    ranks, mine = placement(plan), dict(zip(my_stages(plan, mesh), chunks, strict=True))
    x = kwargs.pop("tokens")
    hidden = (x.shape[0], x.shape[1] // plan.tp, run.arch.hidden)
    for stage, rank in enumerate(ranks):
        if stage not in mine:
            continue
        if stage > 0 and ranks[stage - 1] != rank:
            x = torch.empty(hidden, dtype=precision.compute_dtype(plan), device=mesh.device)
            dist.recv(x, group=group, group_src=ranks[stage - 1])
        x = mine[stage](x, **kwargs)
        if plan.zero == 3 and plan.chunks > IN_SIGHT:  # no more stay gathered than in a step
            fsdp.release(mine[stage])
        if stage + 1 < len(ranks) and ranks[stage + 1] != rank:
            dist.send(x.contiguous(), group=group, group_dst=ranks[stage + 1])
    return x if len(ranks) - 1 in mine else None


def tied_group(arch: Arch, plan: Plan, mesh: Mesh) -> dist.ProcessGroup | None:
    """The two ranks that hold an embedding of both ends, where they are two."""
    ranks = placement(plan)
    if not arch.embeds_at_both_ends or ranks[0] == ranks[-1]:
        return None
    mine = None
    for pipeline in mesh.fine.mesh.movedim(0, -1).reshape(-1, plan.pp).tolist():
        pair = [pipeline[ranks[0]], pipeline[ranks[-1]]]
        group = dist.new_group(pair)
        if mesh.rank in pair:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


def add_tied(chunks: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of the two copies of an embedding, which then stay equal."""
    copies = [
        local(weight.grad)
        for chunk in chunks
        for name, weight in chunk.named_parameters()
        if name in getattr(chunk, "tied_across_stages", ()) and weight.grad is not None
    ]
    with torch.no_grad():
        if len(copies) == 2:  # both ends on one rank
            copies[0] += copies[1]
            copies[1].copy_(copies[0])
        elif copies and group is not None:
            dist.all_reduce(copies[0], group=group)
