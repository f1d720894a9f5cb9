"""Routers: which tokens each expert sees, and with what weight.

A router is a pure function of the logits of whole sequences. Balance, capacity and expert choice are defined per
sequence, never per batch, so that no way of splitting a batch changes the mathematics.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.arch import Arch


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of some sequences go: k assignments a token, in the order in which they are summed."""

    experts: Tensor  # (b, s, k) int64
    gates: Tensor  # (b, s, k) weight of the expert's output; 0 where dropped
    kept: Tensor  # (b, s, k) false where the assignment was dropped
    rows: int  # no more assignments than this can be kept: a bound known without asking the device
    balance: Tensor  # (b,) E · Σ f · P of every sequence, 1 when experts share evenly
    z: Tensor  # (b,) mean squared log-sum-exp of every sequence
    load: Tensor  # (experts,) share of all assignments that asked for each expert, before any was dropped


Route = Callable[[Tensor, Arch, Tensor | None], Routing]


def top_k(logits: Tensor, arch: Arch, draw: Tensor | None) -> Routing:
    """The k most probable experts, their probabilities renormalized (Mixtral; with noisy logits, Shazeer 2017)."""
    probabilities, gates, experts = _best(logits, arch.top_k)
    kept = _served(experts, torch.ones_like(experts, dtype=torch.bool), arch, slots(arch, logits.shape[1]))
    return _routing(logits, probabilities, experts, gates / gates.sum(-1, keepdim=True), kept, arch)


def switch(logits: Tensor, arch: Arch, draw: Tensor | None) -> Routing:
    """The most probable expert, its output scaled by its probability (Fedus 2021)."""
    probabilities, gates, experts = _best(logits, 1)
    kept = _served(experts, torch.ones_like(experts, dtype=torch.bool), arch, slots(arch, logits.shape[1]))
    return _routing(logits, probabilities, experts, gates, kept, arch)


def gshard(logits: Tensor, arch: Arch, draw: Tensor | None) -> Routing:
    """The two most probable experts; the second only when twice its gate beats `draw` (b, s) (Lepikhin 2020)."""
    probabilities, gates, experts = _best(logits, 2)
    gates = gates / gates.sum(-1, keepdim=True)
    wanted = torch.ones_like(experts, dtype=torch.bool)
    if draw is not None:
        wanted[..., 1] = 2 * gates[..., 1] > draw
    # All first choices are served before any second one, so here a later token may take an earlier one's slot.
    by_choice = experts.transpose(1, 2), wanted.transpose(1, 2)
    kept = _served(*by_choice, arch, slots(arch, logits.shape[1])).transpose(1, 2)
    return _routing(logits, probabilities, experts, gates, kept, arch)


def expert_choice(logits: Tensor, arch: Arch, draw: Tensor | None) -> Routing:
    """Each expert takes the tokens of the sequence that want it most (Zhou 2022). Looks at later tokens."""
    probabilities = logits.softmax(-1)
    ranked = probabilities.argsort(dim=1, descending=True, stable=True)  # per expert, best token first
    chosen = ranked[:, : slots(arch, logits.shape[1])]
    kept = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
    experts = torch.arange(arch.experts, device=logits.device).expand_as(logits)
    return _routing(logits, probabilities, experts, probabilities, kept, arch)


ROUTERS: dict[str, Route] = {
    "topk": top_k,
    "noisy_topk": top_k,
    "switch": switch,
    "gshard": gshard,
    "expert_choice": expert_choice,
}


def slots(arch: Arch, positions: int) -> int:
    """Tokens one expert may take of a sequence; all of them when no capacity is set."""
    if arch.capacity == 0:
        return positions
    choices = 1 if arch.router == "expert_choice" else arch.top_k
    return min(positions, math.ceil(arch.capacity * choices * positions / arch.experts))


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """All probabilities, and the k largest with their experts; the lower expert wins a tie on every device."""
    probabilities = logits.softmax(-1)
    values, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    return probabilities, values[..., :k], experts[..., :k]


def _served(experts: Tensor, wanted: Tensor, arch: Arch, limit: int) -> Tensor:
    """Wanted assignments (b, …, …) that find one of an expert's slots free when served in the order they lie in."""
    if arch.capacity == 0:
        return wanted
    asks = _asks(experts, wanted, arch.experts)
    rank = asks.flatten(1, 2).cumsum(1, dtype=torch.int32).view(asks.shape).gather(-1, experts[..., None])[..., 0]
    return wanted & (rank <= limit)


def _routing(
    logits: Tensor, probabilities: Tensor, experts: Tensor, gates: Tensor, kept: Tensor, arch: Arch
) -> Routing:
    batch, positions, choices = experts.shape
    # Every expert of expert choice takes its fill, so what is kept is what was asked.
    asked = kept if arch.router == "expert_choice" else torch.ones_like(kept)
    demand = _asks(experts, asked, arch.experts).sum((1, 2)).to(logits.dtype)
    share = demand / demand.sum(-1, keepdim=True)  # f: of each sequence's assignments, (b, experts)
    return Routing(
        experts=experts,
        gates=gates * kept,
        kept=kept,
        rows=batch * min(positions * choices, arch.experts * slots(arch, positions)),
        balance=arch.experts * (share * probabilities.mean(1)).sum(-1),
        z=logits.logsumexp(-1).square().mean(1),
        load=share.mean(0),
    )


def _asks(experts: Tensor, wanted: Tensor, count: int) -> Tensor:
    """Whether each assignment asks for each expert: one more dim, of experts."""
    return (experts[..., None] == torch.arange(count, device=experts.device)) & wanted[..., None]
