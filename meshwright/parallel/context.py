"""Context parallelism: each rank holds two slices of every sequence, an early and a late one, and only attention talks.

Everything but attention and routing looks at one position at a time, so a rank computes its own and nothing changes.
Attention sees the whole sequence by `ring` (keys and values travel) or `ulysses` (heads change places); a router, which
is defined per sequence, sees the gathered logits, which are small.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.layers import Attend, Attention, causal_attention
from meshwright.models.moe import Mixture
from meshwright.models.routers import Route, Routing
from meshwright.parallel.attention import join, take
from meshwright.parallel.collective import gather
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.ring import ring_attention
from meshwright.parallel.ulysses import ulysses_attention
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan


def split(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Put an attention over split sequences into every layer, and a router that sees whole ones."""
    if plan.cp == 1:
        return model
    group = mesh.group("cp")
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attention(plan, group)
        elif isinstance(module, Mixture):
            module.route = partial(route_whole, route=module.route, group=group)
    return model


def attention(plan: Plan, group: dist.ProcessGroup) -> Attend:
    """The attention of a plan."""
    if plan.cp_kind == "ring":
        return partial(ring_attention, group=group)
    return partial(ulysses_attention, group=group, attend=causal_attention)


def cut(plan: Plan, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """What this rank holds of a (b, sequence) tensor."""
    if plan.cp == 1:
        return lambda x: x
    return lambda x: take(x, 1, plan.cp, mesh.place["cp"])


def route_whole(logits: Tensor, arch: Arch, draw: Tensor | None, *, route: Route, group: dist.ProcessGroup) -> Routing:
    """Route whole sequences on every rank, then keep this rank's positions.

    Each rank weighs the per-sequence losses by its own positions, so that together they count every position once.
    """
    rank, ranks = group.rank(), group.size()
    whole = join(gather(logits, 1, group).chunk(ranks, 1), 1)
    with torch.no_grad():
        draws = None if draw is None else join(gather(draw, 1, group).chunk(ranks, 1), 1)
    routing = route(whole, arch, draws)
    mine = {name: take(getattr(routing, name), 1, ranks, rank) for name in ("experts", "gates", "kept")}
    return replace(routing, **mine, rows=min(routing.rows, mine["experts"].numel()))
