"""Expert parallelism: each rank holds a few whole experts of every MoE layer; all-to-alls dispatch and combine rows.

The ranks of an ep group are taken from those that shard or replicate the dense weights, so each has tokens of its own.
A rank sends every row to the owner of its expert; the owner computes the rows of all ranks at once. An expert's
gradient is therefore already the sum over its group, and only the ranks that hold the same expert add theirs to it.

Without a capacity ranks first tell each other how many rows they send, and the host waits for that, once. With one an
expert has a known number of slots on every rank: all are sent, filled or not, and nobody asks or waits.

An all-to-all travels while other work is done: it is launched, and awaited where it lands. Going back the gradient is
launched where it landed, and awaited where it was launched: what the forward did between the two the backward does
between them as well, since it takes operations in the reverse of their order.

Auxiliary-loss-free load balancing (Wang 2024, DeepSeek-V3): a bias of each expert, moved by its load once a step.

The bias bears on which experts are chosen, and has no gradient: after each step it rises by `arch.router_load_rate` for
experts that fewer tokens asked for than the mean, and falls for the others. How many asked is counted in whole numbers
and summed over all ranks, so the same signs come out under every plan.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.mesh import Mesh, all_to_all
from meshwright.parallel.model_spec import note
from meshwright.parallel.tensor import hold_experts
from meshwright.spec.arch import Arch
from meshwright.spec.params import buffers, moved
from meshwright.spec.plan import Plan


def split(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Give each rank its experts of every MoE layer, and route rows to those of other ranks."""
    if plan.ep == 1:
        return model
    group = mesh.group("ep")
    for module in model.modules():
        if isinstance(module, MoELayer):
            hold_experts(module.experts, mesh)
            module.run = partial(run_over_ranks, group=group)
            note(module.experts, f"expert parallel over ep={plan.ep}")
    return model


def run_over_ranks(
    experts: Experts,
    x: Tensor,
    counts: Tensor,
    beside: Callable[[], Any] | None = None,
    slots: int = 0,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """All experts of the group: x (T, hidden) sorted by expert, counts (experts,) rows for each; zeros past the last.

    `beside` is called while the rows travel to their experts, and differentiated while their gradients come back.
    `slots`: no expert has more of these rows; 0 if that is not known. Each rank takes part in
    - forward: without slots one all-to-all of 8 · experts bytes, which says how many rows are coming; then two of rows,
      to their experts and back, where it sends rows · hidden · itemsize bytes and has as many returned. Rows are Σ
      counts, or experts · slots;
    - backward: the two of rows again, the gradients of what came back going first.
    What it receives for its own experts, and returns, the routers of all ranks decide, unless there are slots.
    """
    route = slotted(counts, slots, len(x), group) if slots else announced(counts, len(x), group)
    flight = Flight(group, route.sent, route.received)
    leaving = launched(picked(x, *route.leave), flight)
    if beside is not None:
        beside()
    y = experts(picked(landed(leaving, flight), *route.arrive), route.counts)
    returned = all_to_all(picked(y, *reversed(route.arrive)), group, route.received, route.sent)
    return picked(returned, *reversed(route.leave))


Pick = tuple[Tensor, Tensor | None]  # where each row comes from, and whether it comes at all


@dataclass(frozen=True, slots=True)
class ExpertRoute:
    """Where the rows of one MoE layer and microbatch go. What leads there is told with what leads back."""

    sent: list[int]  # rows to each rank of the group
    received: list[int]  # rows from each
    counts: Tensor  # (experts held,) rows for each, from all ranks; on the host
    leave: tuple[Pick, Pick]  # from rows sorted by expert to those that are sent
    arrive: tuple[Pick, Pick]  # from rows by (rank, expert), as received, to (expert, rank)


def announced(counts: Tensor, rows: int, group: dist.ProcessGroup) -> ExpertRoute:
    """Exchange how many of at most `rows` rows each rank sends to each expert; waits for the device, once."""
    leaving = counts.view(group.size(), -1)  # (rank, expert it holds)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    going, received = torch.stack([leaving, coming]).tolist()
    return route_of(going, received, coming, rows)


def route_of(leaving: list[list[int]], coming: list[list[int]], known: Tensor, rows: int) -> ExpertRoute:
    """The route of counts (rank, expert held), those that come on the host and on the device."""
    sent, received = [sum(each) for each in leaving], [sum(each) for each in coming]
    by_expert = sorted_by_expert(known, sum(received))
    row = torch.arange(rows, device=known.device)
    total = sum(sent)
    return ExpertRoute(
        sent=sent,
        received=received,
        # On the host, where experts read it: on the device they would wait for the rows in flight.
        counts=torch.tensor([sum(each) for each in zip(*coming, strict=True)], dtype=torch.int64, device="cpu"),
        leave=((row[:total], None), (row.clamp(max=max(total - 1, 0)), row < total)),  # dropped ones lie past the last
        arrive=((by_expert, None), (by_expert.argsort(), None)),
    )


def slotted(counts: Tensor, slots: int, rows: int, group: dist.ProcessGroup) -> ExpertRoute:
    """The route of as many rows for every expert; asks nobody."""
    ranks, device = group.size(), counts.device
    held = len(counts) // ranks
    ends = counts.cumsum(0)
    starts, slot = ends - counts, torch.arange(slots, device=device)
    source = (starts[:, None] + slot).clamp(max=rows - 1).flatten()
    row = torch.arange(rows, device=device)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    place = (expert * slots + row - starts[expert]).clamp(max=len(counts) * slots - 1)
    grid = torch.arange(ranks * held * slots, device=device)
    by_expert = grid.view(ranks, held, slots).transpose(0, 1).flatten()
    by_rank = grid.view(held, ranks, slots).transpose(0, 1).flatten()
    return ExpertRoute(
        sent=[held * slots] * ranks,
        received=[held * slots] * ranks,
        counts=torch.full((held,), ranks * slots, dtype=torch.int64, device="cpu"),
        leave=((source, (slot < counts[:, None]).flatten()), (place, row < ends[-1])),
        arrive=((by_expert, None), (by_rank, None)),
    )


def sorted_by_expert(coming: Tensor, rows: int) -> Tensor:
    """The order that sorts rows by expert, then rank, which lie by rank, then expert: coming (rank, expert) of each."""
    ranks, experts = coming.shape
    expert = torch.arange(experts, device=coming.device).repeat(ranks)
    return expert.repeat_interleave(coming.flatten(), output_size=rows).argsort(stable=True)


def picked(x: Tensor, there: Pick, back: Pick) -> Tensor:
    """Some rows in another order, and zeros; the gradient of plain indexing would need atomics, though no two meet."""
    return _Picked.apply(x, *there, *back)


def _pick(x: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
    if len(x) == 0:
        return x.new_zeros(len(index), *x.shape[1:])
    return x[index] if valid is None else torch.where(valid[:, None], x[index], 0)


class _Picked(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, valid: Tensor | None, back: Tensor, back_valid: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(back, back_valid)
        return _pick(x, index, valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _pick(grads[0], *ctx.saved_tensors), None, None, None, None


class Flight:
    """One exchange of rows among a group, and back: how many go to each rank, how many come, and what is on its way."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.work: dist.Work | None = None
        self.held: tuple[Tensor, ...] = ()  # what is sent, until it has been, and what arrives

    def start(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows; what is returned is not there before `wait`."""
        rows, arriving = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        self.work = dist.all_to_all_single(arriving, rows, received, sent, group=self.group, async_op=True)
        self.held = rows, arriving
        return arriving

    def wait(self) -> Tensor:
        """What has arrived, for all that comes after; on a GPU its stream waits, and the host does not."""
        if self.work is not None:  # a group of fakes is done at once
            self.work.wait()
        *_, arrived = self.held
        self.work, self.held = None, ()
        return arrived


class _Launch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(x, flight.sent, flight.received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.wait(), None  # what autograd hands over only has the shape of what was sent


class _Land(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        flight.start(grads[0], flight.received, flight.sent)
        return grads[0], None


def _launched(x: Tensor, flight: Flight) -> Tensor:
    """The rows that are coming in, to be read after they have `landed` alone."""
    return _Launch.apply(x, flight)


def _landed(x: Tensor, flight: Flight) -> Tensor:
    """The rows, arrived."""
    return _Land.apply(x, flight)


# The compiler knows collectives that it waits for by itself, and leaves these out of its graphs.
Step = Callable[[Tensor, Flight], Tensor]
launched = cast(Step, torch.compiler.disable(_launched))
landed = cast(Step, torch.compiler.disable(_landed))


def update_load_bias(chunks: Iterable[nn.Module], arch: Arch, mesh: Mesh, applies: Tensor) -> None:
    """Move the biases of all layers by the counts of a step; `applies` is 0 where the step is skipped, and else 1.

    One all-reduce of 8 · layers with experts · experts bytes over all ranks: those of other stages add zeros, and those
    that see the same tokens count them as often as each other.
    """
    places = {param.name: number for number, param in enumerate(moved(arch))}
    if not places:
        return
    asked = torch.zeros(len(places), arch.experts, dtype=torch.int64, device=mesh.device)
    layers = {
        places[f"{name}.load_bias"]: module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, MoELayer) and f"{name}.load_bias" in places
    }
    for place, layer in layers.items():
        assert layer.asked is not None, "the architecture says so"
        asked[place] = layer.asked
        layer.asked.zero_()
    if mesh.world > 1:
        dist.all_reduce(asked)
    for place, layer in layers.items():
        layer.update_load_bias(asked[place], applies)


def learned_buffers(chunk: nn.Module, arch: Arch) -> dict[str, Tensor]:
    """The learned buffers of a part of the model, by name."""
    names = {param.name for param in buffers(arch)}
    return {name: buffer for name, buffer in chunk.named_buffers() if name in names}
