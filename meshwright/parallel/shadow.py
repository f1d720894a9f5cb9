"""A narrow copy of the weights that the arithmetic reads, beside the wide ones that the optimizer moves.

For one rank that shares nothing: no weight is cast in a step, and gradients come and stay narrow. With several
microbatches they are added up in fp32.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.parallel import precision
from meshwright.parallel.mesh import local
from meshwright.spec.plan import Plan


def attach(chunks: Iterable[nn.Module], plan: Plan) -> None:
    """Let every weight be the narrow copy of a wide one, once it has its first value."""
    if not plan.shadow:
        return
    for chunk in chunks:
        for weight in chunk.parameters():
            weight.master = weight.data  # pyright: ignore[reportAttributeAccessIssue]
            weight.data = weight.data.to(precision.compute_dtype(plan))
            if plan.accumulate > 1:
                weight.grad_dtype = torch.float32


def wide(weight: Tensor) -> Tensor:
    """This rank's part of a weight as the optimizer moves it."""
    return getattr(weight, "master", local(weight.detach()))


def is_shadow(weight: Tensor) -> bool:
    """Whether a weight is the narrow copy of another."""
    return hasattr(weight, "master")


@torch.no_grad()
def refresh(chunks: Iterable[nn.Module]) -> None:
    """Make the narrow copies anew after the wide weights were written to."""
    for chunk in chunks:
        for weight in chunk.parameters():
            if is_shadow(weight):
                weight.copy_(wide(weight))
