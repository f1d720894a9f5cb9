"""Forward and backward of one optimizer step, and forwards alone, for validation losses."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from meshwright.config.run import Run
from meshwright.data.loader import Batch, StepBatch
from meshwright.models.decoder import Decoder, one_ahead
from meshwright.models.layers import token_loss_sum
from meshwright.models.moe import MoELayer
from meshwright.parallel import context, fsdp, fused_kernels, tensor
from meshwright.parallel.deterministic import Tree
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.pipeline import Pipeline, relay, stage_input, tied_group
from meshwright.spec.plan import Plan

Microbatch = TypeVar("Microbatch")
ForwardBackward = Callable[[StepBatch, Tensor], Tensor]


def choose(run: Run, chunks: Sequence[nn.Module], mesh: Mesh) -> ForwardBackward:
    """How this plan runs the microbatches of a step: from a batch and the loss scale to this rank's sum of losses."""
    if run.plan.pp == 1:
        return partial(in_turn, chunks[0], run.plan, mesh)
    streams = partial(stage_input, run.arch, run.plan)
    loss = partial(loss_sums, further=run.arch.mtp_loss_weight)
    pipeline = Pipeline(chunks, run.plan, mesh, loss, streams, tied_group(run.arch, run.plan, mesh))
    return partial(in_pipeline, pipeline, chunks, run.plan, mesh)


def in_turn(model: nn.Module, plan: Plan, mesh: Mesh, batch: StepBatch, scale: Tensor) -> Tensor:
    """One microbatch after another; returns the sum of this rank's token losses.

    The divisor is the valid tokens of the whole step over all ranks, known beforehand, so that the gradient is the
    same however the tokens are cut into microbatches and ranks, ragged ones included.
    """
    weight = share_weight([model], scale / batch.tokens)
    return accumulated(model, plan, batch.microbatches, partial(losses, model, plan, mesh, weight))


def accumulated(
    model: nn.Module,
    plan: Plan,
    microbatches: Sequence[Microbatch],
    losses_of: Callable[[Microbatch], tuple[Tensor, Tensor]],
) -> Tensor:
    """Forward and backward of each microbatch's sum of losses, weighed; returns this rank's share of the plain sum."""
    total, tree = None, Tree(len(microbatches))
    last = len(microbatches) - 1
    for number, microbatch in enumerate(microbatches):
        fsdp.sum_gradients(model, plan, last=number == last)
        with tensor.loss_context(plan):
            weighed, loss = losses_of(microbatch)
            weighed.backward()
        total = tree.add(loss.detach().double() / plan.tp)  # every rank of tp has it
    assert total is not None, "the last microbatch completes the sum"
    return total


def in_pipeline(
    pipeline: Pipeline, chunks: Sequence[nn.Module], plan: Plan, mesh: Mesh, batch: StepBatch, scale: Tensor
) -> Tensor:
    """All microbatches through the stages, in the order of the plan's schedule; the divisor is the same."""
    weight, whole = share_weight(chunks, scale / batch.tokens), joined(batch.microbatches)
    return through_stages(pipeline, plan, *questions(chunks[0], plan, mesh, whole), weight)


def joined(microbatches: Sequence[Batch]) -> Batch:
    """The microbatches of a step as one: torch's runtime cuts it apart again."""
    documents = [microbatch.documents for microbatch in microbatches if microbatch.documents is not None]
    return Batch(
        tokens=torch.cat([microbatch.tokens for microbatch in microbatches]),
        targets=torch.cat([microbatch.targets for microbatch in microbatches]),
        positions=torch.cat([microbatch.positions for microbatch in microbatches]),
        documents=torch.cat(documents) if documents else None,
        index=torch.cat([microbatch.index for microbatch in microbatches]),
    )


def through_stages(
    pipeline: Pipeline, plan: Plan, kwargs: dict[str, Tensor | None], targets: Tensor, weight: Tensor
) -> Tensor:
    """Forward and backward of a step's microbatches, joined; `targets` are what its loss is told, cut like them."""
    with tensor.loss_context(plan):
        tokens = kwargs.pop("tokens")
        assert tokens is not None
        return pipeline.step(tokens, kwargs, targets, weight) / plan.tp


def losses(model: nn.Module, plan: Plan, mesh: Mesh, weight: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of token losses of this rank's part of one microbatch: times a weight, and as it is."""
    kwargs, targets = questions(model, plan, mesh, batch)
    if fused_kernels.has_loss(model):
        return model(**kwargs, wanted=(targets, weight))
    further = model.arch.mtp_loss_weight if isinstance(model, Decoder) else 0.0
    trained, loss = loss_sums(model(**kwargs), targets, further)
    return trained * weight.to(loss.dtype), loss


def questions(model: nn.Module, plan: Plan, mesh: Mesh, batch: Batch) -> tuple[dict[str, Tensor | None], Tensor]:
    """What a model is called with in training, and the targets of what it returns.

    Multi-token prediction reads the tokens that follow, and has targets of its own beside the others. Both are shifted
    before sequences are cut, so that no rank asks a neighbour for a token.
    """
    kwargs, cut = arguments(plan, mesh, batch), context.cut(plan, mesh)
    if not (isinstance(model, Decoder) and model.training and model.arch.mtp_layers):
        return kwargs, cut(batch.targets)
    following, targets = one_ahead(batch.tokens, batch.targets, batch.documents)
    return kwargs | {"following": cut(following)}, cut(targets)


def held_loss(chunks: Sequence[nn.Module], run: Run, mesh: Mesh, batch: Batch) -> Tensor:
    """The same without gradients, under any plan; zero on ranks whose stage is not the last.

    Where training has only some logits at a time, so has this: a plan that fits must not fail here.
    """
    if fused_kernels.has_loss(chunks[0]):
        with tensor.loss_context(run.plan):
            return losses(chunks[0], run.plan, mesh, torch.ones((), device=mesh.device), batch)[1]
    logits = forward_only(chunks, run, mesh, batch)
    if logits is None:
        return torch.zeros((), device=mesh.device)
    with tensor.loss_context(run.plan):
        return loss_sum(logits, context.cut(run.plan, mesh)(batch.targets))


def forward_only(chunks: Sequence[nn.Module], run: Run, mesh: Mesh, batch: Batch) -> Tensor | None:
    """Logits of this rank's part of a microbatch, or None where another stage has them."""
    kwargs = arguments(run.plan, mesh, batch)
    return chunks[0](**kwargs) if run.plan.pp == 1 else relay(chunks, run, mesh, kwargs)


@contextmanager
def evaluating(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Forwards without gradients or draws; what they gathered is let go at the end."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        yield
    for chunk in chunks:
        chunk.train()
        fsdp.release(chunk)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of token losses, whole on every rank that shares the logits."""
    return local(token_loss_sum(logits, targets))


def loss_sums(logits: Tensor | tuple[Tensor, Tensor], targets: Tensor, further: float) -> tuple[Tensor, Tensor]:
    """The sum of token losses that is trained, and that of the next tokens, which is reported.

    They differ by multi-token prediction, whose loss is weighed.
    """
    if isinstance(logits, Tensor):
        return (total := loss_sum(logits, targets)), total
    total, later = map(loss_sum, logits, targets.unbind(-1))
    return total + further * later, total


def arguments(plan: Plan, mesh: Mesh, batch: Batch) -> dict[str, Tensor | None]:
    """What a model is called with: this rank's part of every sequence, but the documents of all of it."""
    cut = context.cut(plan, mesh)
    return {
        "tokens": cut(batch.tokens),
        "positions": cut(batch.positions),
        "documents": batch.documents,
        "index": cut(batch.index),
    }


def share_weight(chunks: Sequence[nn.Module], weight: Tensor) -> Tensor:
    """Tell the layers that inject a loss of their own what the loss is multiplied with."""
    for chunk in chunks:
        for layer in moe_layers(chunk):
            layer.loss_weight = weight
    return weight


def moe_layers(model: nn.Module) -> Iterator[MoELayer]:
    """The layers that route tokens to experts."""
    return (module for module in model.modules() if isinstance(module, MoELayer))
