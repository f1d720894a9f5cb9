"""The loss of a language model, as a sum: whoever knows the step's tokens divides."""

import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.layers import wide


def weighed_loss(x: Tensor, projection: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of x @ projection.T: times a weight, to be differentiated, and as it is."""
    total = token_loss_sum(F.linear(x, projection), targets)
    return total * weight.to(total.dtype), total


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of logits (b, s, vocab) over the targets (b, s) that are not IGNORE."""
    # Widening inside the softmax spares a wide copy of the logits, the largest tensor of a step.
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=wide(logits))
    return F.nll_loss(log_probabilities, targets.flatten(), ignore_index=IGNORE, reduction="sum")
