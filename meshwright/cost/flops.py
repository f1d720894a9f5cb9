"""Floating-point operations of a model, and how well a machine is used."""

from functools import cache

from meshwright.spec.arch import Arch
from meshwright.spec.params import params

TRAINING = 3  # one forward, and a backward of two products for each of its one


@cache
def forward_flops_per_token(arch: Arch, sequence: int) -> float:
    """Multiplications and additions of matrix products for one token of a sequence, causality not halving attention.

    Counting attention in full is the convention of torchtitan, nanoGPT and Megatron, so that utilizations compare.
    """
    products = 2 * _multiplied(arch)
    scores_and_values = 2 * 2 * arch.layers * arch.q_width * sequence
    return products + scores_and_values


def step_flops(arch: Arch, sequence: int, batch: int) -> float:
    """The model's operations in one optimizer step, recomputation not counted."""
    return TRAINING * forward_flops_per_token(arch, sequence) * sequence * batch


def utilization(flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """Model FLOPs utilization, 0 to 1. `flops` are the model's, recomputation not counted."""
    return flops / (seconds * peak_flops_per_second)


def _multiplied(arch: Arch) -> float:
    """Weights that one token is multiplied with: tables are looked up, and of the experts only the chosen work."""
    total = float(arch.vocab * arch.hidden)  # the output projection, tied or not
    for param in params(arch):
        if param.name in ("embed.weight", "positions.weight", "head.weight") or len(param.shape) < 2:
            continue
        total += param.numel * _share(arch) if param.expert else param.numel
    return total


def _share(arch: Arch) -> float:
    """The part of the routed experts that works on one token."""
    if arch.router == "expert_choice":
        return arch.capacity / arch.experts
    return arch.top_k / arch.experts
