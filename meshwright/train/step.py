"""Forward and backward of one optimizer step."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.data.loader import Batch, StepBatch
from meshwright.models.loss import token_loss_sum
from meshwright.models.moe import Mixture
from meshwright.parallel import context, shard, tensor
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.plan import Plan

ForwardBackward = Callable[[StepBatch, Tensor], Tensor]


def choose(plan: Plan, chunks: Sequence[nn.Module], mesh: Mesh) -> ForwardBackward:
    """How this plan runs the microbatches of a step: from a batch and the loss scale to this rank's sum of losses."""
    (model,) = chunks
    return partial(accumulate, model, plan, mesh)


def accumulate(model: nn.Module, plan: Plan, mesh: Mesh, batch: StepBatch, scale: Tensor) -> Tensor:
    """One microbatch after another; returns the sum of this rank's token losses.

    The divisor is the valid tokens of the whole step over all ranks, known beforehand, so that the gradient is the
    same however the tokens are cut into microbatches and ranks, ragged ones included.
    """
    weight = scale / batch.tokens
    for mixture in mixtures(model):
        mixture.loss_weight = weight
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    last = len(batch.microbatches) - 1
    for number, microbatch in enumerate(batch.microbatches):
        shard.sum_gradients(model, plan, last=number == last)
        with tensor.loss_context(plan):
            loss = losses(model, plan, mesh, microbatch)
            (loss * weight.to(loss.dtype)).backward()
        total += loss.detach() / plan.tp  # every rank of tp has it
    return total


def losses(model: nn.Module, plan: Plan, mesh: Mesh, batch: Batch) -> Tensor:
    """The sum of token losses of this rank's part of one microbatch."""
    cut = context.cut(plan, mesh)
    documents = None if batch.documents is None else cut(batch.documents)
    logits = model(cut(batch.tokens), cut(batch.positions), documents, cut(batch.index))
    return local(token_loss_sum(logits, cut(batch.targets)))


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    """The layers that route tokens to experts."""
    return (module for module in model.modules() if isinstance(module, Mixture))
