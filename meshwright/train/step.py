"""Forward and backward of one optimizer step."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.data.loader import Batch, StepBatch
from meshwright.models.loss import token_loss_sum
from meshwright.models.moe import Mixture
from meshwright.parallel import shard, tensor
from meshwright.parallel.mesh import local
from meshwright.spec.plan import Plan

ForwardBackward = Callable[[StepBatch, Tensor], Tensor]


def choose(plan: Plan, chunks: Sequence[nn.Module]) -> ForwardBackward:
    """How this plan runs the microbatches of a step."""
    (model,) = chunks
    return lambda batch, scale: accumulate(model, plan, batch, scale)


def accumulate(model: nn.Module, plan: Plan, batch: StepBatch, scale: Tensor) -> Tensor:
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
            loss = losses(model, microbatch)
            (loss * weight.to(loss.dtype)).backward()
        total += loss.detach() / plan.tp  # every rank of tp has it
    return total


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of token losses of one microbatch."""
    logits = model(batch.tokens, batch.positions, batch.documents, batch.index)
    return local(token_loss_sum(logits, batch.targets))


def mixtures(model: nn.Module) -> Iterator[Mixture]:
    """The layers that route tokens to experts."""
    return (module for module in model.modules() if isinstance(module, Mixture))
