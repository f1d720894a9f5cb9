"""Updates by a kernel that passes once over all tensors of a group."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from meshwright.kernels.adamw import Group, Moves
from meshwright.optim.clip import Verdict
from meshwright.parallel.mesh import local

if TYPE_CHECKING:
    from meshwright.optim.adamw import AdamW

Update = Callable[[list[int], float, float, Verdict], None]


def grouped(optimizer: "AdamW", make: Callable[[list[int]], Group]) -> Update:
    """The update of some of an optimizer's weights; `make` puts them together, once."""
    groups: dict[tuple[int, ...], Group] = {}

    def update(indices: list[int], rate: float, decay: float, verdict: Verdict) -> None:
        key, optim = tuple(indices), optimizer.optim
        if key not in groups:
            groups[key] = make(indices)
        weights = [optimizer.weights[i] for i in indices]
        given = next((weight.grad.dtype for weight in weights if weight.grad is not None), None)  # one kernel, one type
        gradients = [
            local(torch.zeros_like(weight, dtype=given) if weight.grad is None else weight.grad) for weight in weights
        ]
        moves = Moves(rate, optim.beta1, optim.beta2, optim.eps, optimizer.count, verdict.factor, verdict.finite)
        groups[key].update(gradients, decay, moves)

    return update
