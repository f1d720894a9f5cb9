"""Mixture of experts: a feed-forward layer where a router sends each token to a few of many experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.models.init import key, normal, uniform
from meshwright.models.layers import ACTIVATIONS, Mlp, wide
from meshwright.models.routers import ROUTERS, Route, Routing
from meshwright.spec.arch import Arch


class Experts(nn.Module):
    """Feed-forward networks of one shape, their weights stacked. Counted from the tensors, so the stack may be cut."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        inward, outward = (arch.expert_ffn, arch.hidden), (arch.hidden, arch.expert_ffn)
        self.gate = nn.Parameter(torch.empty(arch.experts, *inward)) if arch.mlp == "swiglu" else None
        self.up = nn.Parameter(torch.empty(arch.experts, *inward))
        self.down = nn.Parameter(torch.empty(arch.experts, *outward))
        self.activate = ACTIVATIONS[arch.mlp]

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, counts (experts,) of them for each, through their experts; zeros past the last."""
        sizes = counts.tolist()
        *slices, rest = x.split([*sizes, len(x) - sum(sizes)])
        # Unbound once: the gradient is one stack, where indexing would add up a whole stack per expert.
        gates = [None] * len(sizes) if self.gate is None else self.gate.unbind()
        weights = zip(slices, gates, self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([*(self._one(*each) for each in weights), torch.zeros_like(rest)])

    def _one(self, x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        inner = F.linear(x, up)
        inner = self.activate(inner) if gate is None else self.activate(F.linear(x, gate)) * inner
        return F.linear(inner, down)


RunExperts = Callable[[Experts, Tensor, Tensor], Tensor]


def run_experts(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """All experts where they are: x (T, hidden) sorted by expert, counts (experts,) rows for each."""
    return experts(x, counts)


class Mixture(nn.Module):
    """A router, its experts, and the experts that every token passes through."""

    def __init__(self, arch: Arch, layer: int) -> None:
        super().__init__()
        self.arch = arch
        self.router = nn.Linear(arch.hidden, arch.experts, bias=False)
        self.noise = nn.Linear(arch.hidden, arch.experts, bias=False) if arch.router == "noisy_topk" else None
        self.experts = Experts(arch)
        self.shared = Mlp(arch, arch.shared_experts * arch.expert_ffn) if arch.shared_experts else None

        self.key = key(0, f"blocks.{layer}.mlp.draws")  # of the router's draws; a run may put its own seed's here
        self.route: Route = ROUTERS[arch.router]  # these two may be replaced
        self.run: RunExperts = run_experts
        # The auxiliary gradient's share of the loss: 1 ÷ the step's valid tokens, set by whoever divides the loss.
        self.loss_weight = torch.ones((), dtype=torch.float64, device="cpu")
        self.share = 1.0  # of the auxiliary gradient: 1 ÷ ranks that each inject it for the same tokens
        self.statistics: Tensor | None = None  # of the last forward in training: mean balance loss, load per expert

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """x (b, s, hidden); index (b, s) keys what the router draws, None (or evaluation) draws nothing."""
        index = index if self.training else None
        routing = self.route(self._logits(x, index), self.arch, self._draw(index))
        if self.training:
            self.statistics = torch.cat([routing.balance.mean()[None], routing.load]).detach()
        y = self._mix(x, routing)
        return carry(y, self._auxiliary(routing), self.loss_weight * self.share) if self._has_auxiliary else y

    def _logits(self, x: Tensor, index: Tensor | None) -> Tensor:
        # In low precision logits collide and tokens flip between experts, so the router works wide (Fedus 2021, §2.4).
        x = x.to(wide(x))
        logits = F.linear(x, self.router.weight.to(x.dtype))
        if self.noise is None or index is None:
            return logits
        elements = index[..., None] * self.arch.experts + torch.arange(self.arch.experts, device=x.device)
        return logits + normal(self.key, elements) * F.softplus(F.linear(x, self.noise.weight.to(x.dtype)))

    def _draw(self, index: Tensor | None) -> Tensor | None:
        return uniform(self.key, index) if self.arch.router == "gshard" and index is not None else None

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        tokens = x.flatten(0, 1)
        order = _sort(routing, self.arch.experts)
        rows = self.run(self.experts, _spread(tokens, order), order.counts)
        gates = routing.gates.flatten()[order.assignment]
        y = _gather(rows * gates[:, None], order).to(x.dtype).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    @property
    def _has_auxiliary(self) -> bool:
        return self.arch.balance_loss != 0 or self.arch.z_loss != 0

    def _auxiliary(self, routing: Routing) -> Tensor:
        """A sequence counts as often as it has positions, like the token losses beside which it stands."""
        per_sequence = self.arch.balance_loss * routing.balance + self.arch.z_loss * routing.z
        return per_sequence.sum() * routing.experts.shape[1]


@dataclass(frozen=True, slots=True)
class Order:
    """The assignments of a batch sorted by expert, as rows; dropped ones come last or not at all."""

    assignment: Tensor  # (T,) the assignment of each row, counted over tokens and their k choices
    token: Tensor  # (T,) the token of each row
    row: Tensor  # (tokens, k) the row of each assignment
    kept: Tensor  # (tokens, k)
    counts: Tensor  # (experts,) rows of each expert


def _sort(routing: Routing, experts: int) -> Order:
    choices = routing.experts.shape[-1]
    expert, order = torch.where(routing.kept, routing.experts, experts).flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=expert.device), right=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    assignment = order[: routing.rows]
    return Order(
        assignment=assignment,
        token=assignment // choices,
        row=place.clamp(max=routing.rows - 1).view(-1, choices),
        kept=routing.kept.flatten(0, 1),
        counts=ends.diff(prepend=ends.new_zeros(1)),
    )


def _spread(tokens: Tensor, order: Order) -> Tensor:
    """A copy of a token for each of its rows, (T, hidden)."""
    return _Spread.apply(tokens, order.token, order.row, order.kept)


def _gather(rows: Tensor, order: Order) -> Tensor:
    """The sum of each token's rows, (tokens, hidden)."""
    return _Gather.apply(rows, order.token, order.row, order.kept)


def _sum_rows(rows: Tensor, places: Tensor, kept: Tensor) -> Tensor:
    # Choice by choice, in a fixed order: atomic additions have none, and the last bits would differ from run to run.
    total = rows.new_zeros(len(places), rows.shape[1], dtype=wide(rows))
    for place, held in zip(places.unbind(1), kept.unbind(1), strict=True):
        total = total + torch.where(held[:, None], rows[place], 0)
    return total


class _Spread(Function):
    """The transpose of _Gather: each is the other's gradient, so neither direction needs atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, row: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(row, kept)
        return tokens[token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_rows(grads[0], *ctx.saved_tensors).to(grads[0].dtype), None, None, None


class _Gather(Function):
    """The transpose of _Spread."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, row: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_rows(rows, row, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return grads[0][token], None, None, None


def carry(x: Tensor, auxiliary: Tensor, weight: Tensor) -> Tensor:
    """x itself; going back, `auxiliary` receives the gradient `weight`, as if the loss held weight · auxiliary."""
    return _Carry.apply(x, auxiliary, weight)


class _Carry(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.to(auxiliary).expand_as(auxiliary))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0], weight, None
