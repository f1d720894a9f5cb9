"""Optimizers of whole tensors, each written plainly for one tensor that is whole, without anything of ours."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.config.run import Optim

# From a weight, its gradient, its own states, the update's number, rate and decay to the updated weight.
Reference = Callable[[Optim, Tensor, Tensor, dict[str, Tensor], int, float], Tensor]


def adafactor(
    optim: Optim, weight: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int, rate: float
) -> Tensor:
    beta2 = 1 - step**-0.8
    squares = gradient**2 + optim.eps1
    if weight.dim() == 1:
        states["v"] = second = beta2 * states.get("v", 0) + (1 - beta2) * squares
    else:
        states["R"] = rows = beta2 * states.get("R", 0) + (1 - beta2) * squares.mean(dim=-1)
        states["C"] = columns = beta2 * states.get("C", 0) + (1 - beta2) * squares.mean(dim=-2)
        second = torch.einsum("...r,...c->...rc", rows, columns) / rows.mean(dim=-1)[..., None, None]
    update = gradient / second.sqrt()
    update = update / max(1.0, update.pow(2).mean().sqrt().item())
    if optim.beta1 > 0:
        states["m"] = update = optim.beta1 * states.get("m", 0) + (1 - optim.beta1) * update
    scale = max(optim.eps2, weight.pow(2).mean().sqrt().item()) if optim.relative_step else 1.0
    decay = optim.weight_decay if weight.dim() > 1 else 0.0
    return weight - rate * decay * weight - rate * scale * update


def lamb(optim: Optim, weight: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int, rate: float) -> Tensor:
    states["m"] = first = optim.beta1 * states.get("m", 0) + (1 - optim.beta1) * gradient
    states["v"] = second = optim.beta2 * states.get("v", 0) + (1 - optim.beta2) * gradient**2
    update = (first / (1 - optim.beta1**step)) / ((second / (1 - optim.beta2**step)).sqrt() + optim.eps)
    if weight.dim() == 1:
        return weight - rate * update
    update = update + optim.weight_decay * weight
    size, length = math.sqrt(weight.pow(2).sum().item()), math.sqrt(update.pow(2).sum().item())
    return weight - rate * (size / length if size and length else 1.0) * update


def sm3(optim: Optim, weight: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int, rate: float) -> Tensor:
    if weight.dim() == 1:
        states["v"] = bound = states.get("v", 0) + gradient**2
    else:
        rows = states.get("R", torch.zeros_like(weight[..., 0]))
        columns = states.get("C", torch.zeros_like(weight[..., 0, :]))
        bound = (
            torch.minimum(rows[..., :, None].expand_as(weight), columns[..., None, :].expand_as(weight)) + gradient**2
        )
        states["R"], states["C"] = bound.max(dim=-1).values, bound.max(dim=-2).values
    update = torch.nan_to_num(gradient / bound.sqrt(), nan=0.0)
    states["m"] = optim.momentum * states.get("m", 0) + (1 - optim.momentum) * update
    decay = optim.weight_decay if weight.dim() > 1 else 0.0
    return weight - rate * decay * weight - rate * states["m"]


def lion(optim: Optim, weight: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int, rate: float) -> Tensor:
    before = states.get("m", torch.zeros_like(weight))
    update = torch.sign(optim.beta1 * before + (1 - optim.beta1) * gradient)
    states["m"] = optim.beta2 * before + (1 - optim.beta2) * gradient
    decay = optim.weight_decay if weight.dim() > 1 else 0.0
    return weight - rate * (update + decay * weight)


REFERENCES: dict[str, Reference] = {"adafactor": adafactor, "lamb": lamb, "sm3": sm3, "lion": lion}
