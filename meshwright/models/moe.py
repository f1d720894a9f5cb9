"""Mixture of experts (MoE): a feed-forward layer whose router sends each token to a few of many experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.kernels.experts import (
    Dispatch,
    combine_rows,
    dispatch_rows,
    dispatch_twice,
    grouped_matmul,
    row_gates,
    sum_to_tokens,
)
from meshwright.models.init import key, normal, signed, uniform
from meshwright.models.layers import ACTIVATIONS, Mlp, accum_dtype, clamped_swiglu
from meshwright.spec.arch import Arch


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of some sequences go: k assignments a token, in the order in which they are summed."""

    experts: Tensor  # (b, s, k) int64
    gates: Tensor  # (b, s, k) weight of the expert's output; 0 where dropped
    kept: Tensor  # (b, s, k) false where the assignment was dropped
    rows: int  # an upper bound of kept assignments, known without asking the device
    slots: int  # and of those of one expert; 0 without a capacity
    balance: Tensor  # (b,) E · Σ f · P of every sequence, 1 when experts share evenly
    z: Tensor  # (b,) mean squared log-sum-exp of every sequence
    load: Tensor  # (experts,) share of all assignments for each expert, before any is dropped
    asked: Tensor  # (experts,) int64, how many those are


# Logits, the architecture, draws, and what is added to scores before experts are chosen.
Route = Callable[[Tensor, Arch, Tensor | None, Tensor | None], Routing]


def top_k(logits: Tensor, arch: Arch, draw: Tensor | None, load_bias: Tensor | None = None) -> Routing:
    """The k best experts, weighed by their renormalized scores (Mixtral; with noisy logits, Shazeer 2017).

    Renormalized probabilities are the softmax over the chosen (gpt-oss). A bias of each expert's load, and groups of
    which a few are open to a token, bear on the choice alone (DeepSeek-V3).
    """
    if arch.router_score == "softmax" and arch.router_groups == 1 and load_bias is None:
        probabilities, gates, experts = _best(logits, arch.top_k)
    else:
        scores = logits.sigmoid() if arch.router_score == "sigmoid" else logits.softmax(-1)
        wanted = scores.detach() if load_bias is None else scores.detach() + load_bias
        order = _open(wanted, arch).sort(dim=-1, descending=True, stable=True).indices
        experts = order[..., : arch.top_k]
        gates = scores.gather(-1, experts)
        probabilities = scores / scores.sum(-1, keepdim=True) if arch.router_score == "sigmoid" else scores
    if arch.router_renormalise:
        gates = gates / gates.sum(-1, keepdim=True)
    kept = _served(experts, torch.ones_like(experts, dtype=torch.bool), arch, arch.expert_slots(logits.shape[1]))
    gates = gates if arch.router_scale == 1 else gates * arch.router_scale
    return _routing(logits, probabilities, experts, gates, kept, arch)


def _open(wanted: Tensor, arch: Arch) -> Tensor:
    """Scores of the experts in a token's best groups, minus infinity for the others.

    A group is as good as its best expert, or of sigmoid scores as its best two (DeepSeek V2, V3).
    """
    if arch.router_groups == 1:
        return wanted
    grouped = wanted.unflatten(-1, (arch.router_groups, -1))
    best = 2 if arch.router_score == "sigmoid" else 1
    groups = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = groups.sort(dim=-1, descending=True, stable=True).indices[..., : arch.router_top_groups]
    is_open = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, chosen, True)
    return grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)


def switch(logits: Tensor, arch: Arch, draw: Tensor | None, load_bias: Tensor | None = None) -> Routing:
    """The most probable expert, its output scaled by its probability (Fedus 2021)."""
    probabilities, gates, experts = _best(logits, 1)
    kept = _served(experts, torch.ones_like(experts, dtype=torch.bool), arch, arch.expert_slots(logits.shape[1]))
    return _routing(logits, probabilities, experts, gates, kept, arch)


def gshard(logits: Tensor, arch: Arch, draw: Tensor | None, load_bias: Tensor | None = None) -> Routing:
    """The two most probable experts; the second only when twice its gate beats `draw` (b, s) (Lepikhin 2020)."""
    probabilities, gates, experts = _best(logits, 2)
    gates = gates / gates.sum(-1, keepdim=True)
    wanted = torch.ones_like(experts, dtype=torch.bool)
    if draw is not None:
        wanted[..., 1] = 2 * gates[..., 1] > draw
    # All first choices are served before any second one, so here a later token may take an earlier one's slot.
    by_choice = experts.transpose(1, 2), wanted.transpose(1, 2)
    kept = _served(*by_choice, arch, arch.expert_slots(logits.shape[1])).transpose(1, 2)
    return _routing(logits, probabilities, experts, gates, kept, arch)


def expert_choice(logits: Tensor, arch: Arch, draw: Tensor | None, load_bias: Tensor | None = None) -> Routing:
    """Each expert takes the tokens of the sequence that want it most (Zhou 2022). Looks at later tokens."""
    probabilities = logits.softmax(-1)
    ranked = probabilities.argsort(dim=1, descending=True, stable=True)  # per expert, best token first
    chosen = ranked[:, : arch.expert_slots(logits.shape[1])]
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
    counts = _asks(experts, asked, arch.experts).sum((1, 2))
    demand = counts.to(logits.dtype)
    share = demand / demand.sum(-1, keepdim=True)  # f: of each sequence's assignments, (b, experts)
    return Routing(
        experts=experts,
        gates=gates * kept,
        kept=kept,
        rows=batch * min(positions * choices, arch.experts * arch.expert_slots(positions)),
        slots=batch * arch.expert_slots(positions) if arch.capacity else 0,
        balance=arch.experts * (share * probabilities.mean(1)).sum(-1),
        z=logits.logsumexp(-1).square().mean(1),
        load=share.mean(0),
        asked=counts.sum(0),
    )


def _asks(experts: Tensor, wanted: Tensor, count: int) -> Tensor:
    """Whether each assignment asks for each expert: one more dim, of experts."""
    return (experts[..., None] == torch.arange(count, device=experts.device)) & wanted[..., None]


class Experts(nn.Module):
    """Feed-forward networks of one shape, weights stacked; counted from the tensors, so the stack may be sharded."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        inward, outward = (arch.expert_ffn, arch.hidden), (arch.hidden, arch.expert_ffn)
        self.gate = nn.Parameter(torch.empty(arch.experts, *inward)) if arch.gated else None
        self.up = nn.Parameter(torch.empty(arch.experts, *inward))
        self.down = nn.Parameter(torch.empty(arch.experts, *outward))
        self.gate_bias = self.up_bias = self.down_bias = None
        if arch.moe_bias:
            self.gate_bias = nn.Parameter(torch.empty(arch.experts, arch.expert_ffn)) if arch.gated else None
            self.up_bias = nn.Parameter(torch.empty(arch.experts, arch.expert_ffn))
            self.down_bias = nn.Parameter(torch.empty(arch.experts, arch.hidden))
        self.drops = arch.capacity > 0 or arch.router == "gshard"  # there may be rows past the last expert's
        self.activate = ACTIVATIONS[arch.mlp]  # transforms may put other functions here
        if arch.mlp == "swiglu_clamped":
            self.gated = clamped_swiglu
        self.multiply: Multiply = grouped_matmul  # where rows are grouped
        self.place: Callable[[Tensor], Tensor] = _whole  # of a bias of the output, of which a rank may hold a part
        self.compute: Compute = one_by_one

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, counts (experts,) of them for each, through their experts; zeros past the last."""
        return self.compute(self, x, counts)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated product; transforms may put another function here."""
        return self.activate(gate) * up

    def product(self, stack: str, x: Tensor, ends: Tensor) -> Tensor:
        """Rows grouped by expert times their expert's matrix of the stack of a name."""
        return self.multiply(x, getattr(self, stack), ends)


# Rows sorted by expert, how many each has, what may be computed beside, and how many each has at most (0: any number).
RunExperts = Callable[[Experts, Tensor, Tensor, "Later | None", int], Tensor]
Compute = Callable[[Experts, Tensor, Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def one_by_one(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """Each expert on its segment of the rows, whose sizes the host asks for."""
    sizes = counts.tolist()
    *segments, rest = x.split([*sizes, len(x) - sum(sizes)])
    down_bias = None if experts.down_bias is None else experts.place(experts.down_bias)
    # Unbound once: the gradient is one stack, where indexing would add up a whole stack per expert.
    stacks = (experts.gate, experts.up, experts.down, experts.gate_bias, experts.up_bias, down_bias)
    each = [[None] * len(sizes) if stack is None else stack.unbind() for stack in stacks]
    results: list[Tensor] = []
    for rows, gate, up, down, gate_bias, up_bias, out_bias in zip(segments, *each, strict=True):
        inner = F.linear(rows, up, up_bias)
        inner = experts.activate(inner) if gate is None else experts.gated(F.linear(rows, gate, gate_bias), inner)
        results.append(F.linear(inner, down, out_bias))
    return torch.cat([*results, torch.zeros_like(rest)])


def grouped(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """All experts by grouped matmuls (MegaBlocks, Gale 2022); the host does not learn how many rows each has."""
    ends = counts.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
    y = experts.product("down", _inner(experts, x, x, ends), ends)
    if experts.down_bias is not None:
        y = y + row_biases(experts.place(experts.down_bias), ends, len(y))
    return torch.where(torch.arange(len(y), device=y.device)[:, None] < ends[-1], y, 0) if experts.drops else y


def _inner(experts: Experts, x: Tensor, twin: Tensor, ends: Tensor) -> Tensor:
    """What is between the first matmuls and the last; `twin` is x, for the second of the first."""
    up = _biased(experts.product("up", x, ends), experts.up_bias, ends)
    if experts.gate is None:
        return experts.activate(up)
    return experts.gated(_biased(experts.product("gate", twin, ends), experts.gate_bias, ends), up)


def _biased(y: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return y if bias is None else y + row_biases(bias, ends, len(y))


def row_biases(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Of a bias of every expert, that of each row's; rows past the last are given the last expert's."""
    expert = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
    return bias[expert.clamp(max=len(bias) - 1)]


def _whole(bias: Tensor) -> Tensor:
    return bias


class Later:
    """A tensor that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.result: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.result is None:
            self.result = self.compute()
        return self.result


def run_experts(experts: Experts, x: Tensor, counts: Tensor, beside: Later | None = None, slots: int = 0) -> Tensor:
    """All experts on this rank: x (T, hidden) sorted by expert, counts (experts,) rows for each."""
    return experts(x, counts)


Mix = Callable[["MoELayer", Tensor, Routing], Tensor]


class MoELayer(nn.Module):
    """A router, its experts, and the experts that every token passes through."""

    def __init__(self, arch: Arch, layer: int) -> None:
        super().__init__()
        self.arch = arch
        self.router = nn.Linear(arch.hidden, arch.experts, bias=arch.moe_bias)
        self.noise = nn.Linear(arch.hidden, arch.experts, bias=False) if arch.router == "noisy_topk" else None
        self.experts = Experts(arch)
        self.shared = Mlp(arch, arch.shared_experts * arch.expert_ffn) if arch.shared_experts else None

        # Learned by their load, and not by gradients: `update_load_bias` moves it, once a step.
        self.load_bias: Tensor | None
        self.asked: Tensor | None
        learns = arch.router_load_bias
        self.register_buffer("load_bias", torch.zeros(arch.experts) if learns else None)
        self.register_buffer("asked", torch.zeros(arch.experts, dtype=torch.int64) if learns else None, False)
        self.begin(0, f"blocks.{layer}.mlp", torch.device("cpu"))
        self.route: Route = ROUTERS[arch.router]  # transforms may replace these five
        self.mix: Mix = mix
        self.run: RunExperts = run_experts
        self.dispatch = partial(dispatch_rows, kernels="plain")
        self.combine = partial(combine_rows, kernels="plain")
        # The auxiliary gradient's share of the loss: 1 ÷ the step's valid tokens, set by whoever divides the loss.
        self.loss_weight = torch.ones((), dtype=torch.float64, device="cpu")
        self.share = 1.0  # of the auxiliary gradient: 1 ÷ ranks that each inject it for the same tokens
        self.statistics: Tensor | None = None  # of the last forward in training: mean balance loss, load per expert

    def begin(self, seed: int, name: str, device: torch.device) -> None:
        """Take the draws of a seed and a module's name, for rows on a device."""
        # A tensor, so that the compiled code of one block serves all of them.
        self.key = torch.tensor(signed(key(seed, f"{name}.draws")), device=device)
        if self.asked is not None and not self.asked.is_meta:
            self.asked.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> "MoELayer":
        """As of every module, but for the load bias: its steps would be lost in low precision."""
        super()._apply(fn, recurse)
        if self.load_bias is not None:
            self.load_bias = self.load_bias.to(accum_dtype(self.load_bias))
        return self

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """x (b, s, hidden); index (b, s) keys what the router draws, None (or evaluation) draws nothing."""
        index = index if self.training else None
        routing = self.route(self._logits(x, index), self.arch, self._draw(index), self.load_bias)
        if self.training and self.asked is not None:
            # Twice where a block is recomputed: only which experts have more than the mean is asked.
            self.asked += routing.asked
        if self.training:
            self.statistics = torch.cat([routing.balance.mean()[None], routing.load]).detach()
        y = self.mix(self, x, routing)
        if self.arch.balance_loss == 0 and self.arch.z_loss == 0:
            return y
        # A sequence counts as often as it has positions, like the token losses beside it.
        per_sequence = self.arch.balance_loss * routing.balance + self.arch.z_loss * routing.z
        return carry(y, per_sequence.sum() * x.shape[1], self.loss_weight * self.share)

    def _logits(self, x: Tensor, index: Tensor | None) -> Tensor:
        # In low precision logits collide and tokens flip between experts, so the router is fp32 (Fedus 2021, §2.4).
        x = x.to(accum_dtype(x))
        bias = None if self.router.bias is None else self.router.bias.to(x.dtype)
        logits = F.linear(x, self.router.weight.to(x.dtype), bias)
        if self.noise is None or index is None:
            return logits
        elements = index[..., None] * self.arch.experts + torch.arange(self.arch.experts, device=x.device)
        return logits + normal(self.key, elements) * F.softplus(F.linear(x, self.noise.weight.to(x.dtype)))

    @torch.no_grad()
    def update_load_bias(self, asked: Tensor, applies: Tensor) -> None:
        """Raise the bias of experts that fewer tokens asked for than the mean, lower that of others (Wang 2024).

        asked (experts,) int64 of the whole step; `applies` is 0 where the step is skipped, and else 1.
        """
        assert self.load_bias is not None, "asked of layers that have one"
        step = (asked.sum() - asked * len(asked)).sign().to(self.load_bias.dtype)
        self.load_bias += self.arch.router_load_rate * step * applies.to(self.load_bias.dtype)

    def _draw(self, index: Tensor | None) -> Tensor | None:
        return uniform(self.key, index) if self.arch.router == "gshard" and index is not None else None


def mix(layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
    """The gated sum of the experts' outputs, and what the shared experts add."""
    order = _sort(routing, layer.arch.experts)
    # No name for the experts' input: it would live on until the rows are combined.
    shared = None if layer.shared is None else Later(partial(layer.shared, x))
    rows = layer.run(layer.experts, layer.dispatch(x.flatten(0, 1), order), order.counts, shared, routing.slots)
    y = layer.combine(rows, routing.gates.flatten(0, 1), order).view_as(x)
    return y if shared is None else y + shared()


def mix_grouped(layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
    """The same by grouped matmuls on one rank, the gates inside the experts: for the compiler to fuse.

    An expert is linear after its activation, so a gate may come before its last matmul: the experts' outputs are then
    summed as they are, and not saved for the gates' gradient. Rows past the last expert's are undefined throughout, and
    no sum takes them.
    """
    order, experts = _sort(routing, layer.arch.experts), layer.experts
    ends = order.counts.cumsum(0, dtype=torch.int32)
    weights = row_gates(routing.gates.flatten(0, 1), order)
    inner = _inner(experts, *dispatch_twice(x.flatten(0, 1), order), ends)
    rows = experts.product("down", (inner * weights[:, None]).to(x.dtype), ends)
    if experts.down_bias is not None:
        rows = rows + (row_biases(experts.down_bias, ends, len(rows)) * weights[:, None]).to(x.dtype)
    y = sum_to_tokens(rows, order).view_as(x)
    return y if layer.shared is None else y + layer.shared(x)


def _sort(routing: Routing, experts: int) -> Dispatch:
    choices = routing.experts.shape[-1]
    # A GPU sorts digit by digit: short numbers take a quarter of the passes.
    short = torch.int16 if experts < torch.iinfo(torch.int16).max else torch.int64
    expert, order = torch.where(routing.kept, routing.experts, experts).to(short).flatten().sort(stable=True)
    ends = torch.searchsorted(expert.long(), torch.arange(experts, device=expert.device), right=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    assignment = order[: routing.rows]
    return Dispatch(
        assignment=assignment,
        token=assignment // choices,
        row=place.clamp(max=routing.rows - 1).view(-1, choices),
        kept=routing.kept.flatten(0, 1),
        counts=ends.diff(prepend=ends.new_zeros(1)),
    )


def carry(x: Tensor, auxiliary: Tensor, weight: Tensor) -> Tensor:
    """x itself; in the backward `auxiliary` gets the gradient `weight`, as if weight · auxiliary were in the loss."""
    return _Carry.apply(x, auxiliary, weight)


class _Carry(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor, weight: Tensor) -> Tensor:
        # A product, not a copy to the device: a weight on the host goes with the launch, and nobody waits.
        ctx.save_for_backward((torch.ones_like(auxiliary) * weight).to(auxiliary.dtype))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0], weight, None
