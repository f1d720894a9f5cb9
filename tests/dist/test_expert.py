"""Experts shared by ranks: rows travel as they should, and training is that of one device."""

from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_parallel import compare, folder  # noqa: F401
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trials import drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.presets import preset
from meshwright.models.moe import Experts, Later, MoELayer, RunExperts, run_experts
from meshwright.parallel.expert import Flight, run_over_ranks, sorted_by_expert
from meshwright.parallel.fsdp import even_dim
from meshwright.parallel.mesh import copies, local, region_of
from meshwright.train.build import build

SMALL = ("data.pack=documents", "arch.layers=2")
HIDDEN = preset("tiny-moe").hidden
ROWS = 24  # of every rank, of which its router fills some or all

# Rows of each rank for each of four experts.
LOADS = {
    "even": [[6, 6, 6, 6]] * 4,
    "uneven": [[1, 9, 2, 5], [7, 0, 0, 3], [0, 4, 11, 0], [3, 3, 3, 3]],
    "one-expert-takes-all": [[0, 0, ROWS, 0]] * 4,
    "a-rank-sends-nothing": [[5, 4, 3, 2], [0, 0, 0, 0], [0, 8, 8, 8], [1, 1, 1, 1]],
    "nobody-sends-anything": [[0, 0, 0, 0]] * 4,
}


def compare_experts(folder: Path, words: tuple[str, ...], plan: tuple[str, ...]) -> None:  # noqa: F811
    compare(folder, (*SMALL, *words), plan, arch="tiny-moe")


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def stack(held: slice) -> Experts:
    """Some of four experts, the same on every rank."""
    random = torch.Generator().manual_seed(1)
    experts = Experts(preset("tiny-moe")).double()
    for name, weight in list(experts.named_parameters()):
        values = torch.randn(weight.shape, generator=random, dtype=weight.dtype) / 8
        setattr(experts, name, nn.Parameter(values[held]))
    return experts


def held_by(rank: int, ranks: int) -> slice:
    return slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)


def results(run: RunExperts, experts: Experts, rank: int, counts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The output for a rank's rows and their gradient; the gradients of the experts."""
    x, grad = torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x.requires_grad_()
    y = run(experts, x, counts)
    gradients = torch.autograd.grad(y, [x, *experts.parameters()], grad)
    return [y.detach(), gradients[0]], list(gradients[1:])


def compare_rows(load: list[list[int]], recompute: bool = False, slots: int = 0) -> None:
    """This rank's rows through experts of all ranks, beside all ranks' rows through a whole stack, one by one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = torch.tensor(load[:ranks])
    run = partial(run_over_ranks, slots=slots, group=everyone())
    run = partial(checkpoint, run, use_reentrant=False) if recompute else run
    rows, weights = results(run, stack(held_by(rank, ranks)), rank, counts[rank])
    theirs = [results(run_experts, stack(slice(4)), other, counts[other]) for other in range(ranks)]
    for x, y in zip(rows, theirs[rank][0], strict=True):
        # Each row is computed as it would be alone; a matrix of more rows may be multiplied in other blocks.
        assert (x - y).abs().max() <= 1e-13
        assert x[int(counts[rank].sum()) :].eq(0).all()
    for number, x in enumerate(weights):
        whole = torch.stack([gradients[number] for _, gradients in theirs]).sum(0)
        # Sums of at most 4 · 24 products of size 1, in another order.
        assert (x - whole[held_by(rank, ranks)]).abs().max() <= 1e-12


@world(2)
def test_rows_find_experts_on_two_ranks():
    for load in LOADS.values():
        compare_rows(load)


@world(4)
def test_rows_find_experts_on_four_ranks():
    for load in LOADS.values():
        compare_rows(load)


@pytest.mark.parametrize("slots", [ROWS, ROWS + 3])
@world(2)
def test_slots_that_are_not_filled_change_nothing(slots):
    for load in LOADS.values():
        compare_rows(load, slots=slots)
        compare_rows(load, slots=slots, recompute=True)


@world(1)
def test_a_group_of_one_is_the_whole():
    for load in LOADS.values():
        compare_rows(load)


@world(2)
def test_recomputing_in_the_backward_changes_nothing():
    compare_rows(LOADS["uneven"], recompute=True)


@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_rows_are_sorted_by_expert_and_keep_the_order_of_ranks(coming):
    labels = [(rank, expert) for rank, row in enumerate(coming) for expert, rows in enumerate(row) for _ in range(rows)]
    order = sorted_by_expert(torch.tensor(coming), len(labels)).tolist()
    assert sorted(order) == list(range(len(labels)))
    assert [labels[row] for row in order] == sorted(labels, key=lambda label: (label[1], label[0]))


class Watch(TorchDispatchMode):
    """What was sent, as (operation, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.sent[func._opname, args[1].nbytes] += 1
        return func(*args, **(kwargs or {}))


@world(2)
def test_a_layer_sends_what_it_says():
    counts = torch.tensor(LOADS["uneven"][:2])
    rank = dist.get_rank()
    own, others = int(counts[rank].sum()), int(counts[:, held_by(rank, 2)].sum())
    row = HIDDEN * 8
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    with Watch() as ahead:
        y = run_over_ranks(stack(held_by(rank, 2)), x, counts[rank], group=everyone())
    with Watch() as back:
        y.sum().backward()
    both = Counter([("alltoall_base_", own * row), ("alltoall_base_", others * row)])
    assert ahead.sent == both + Counter([("alltoall_base_", 8 * 4)])
    assert back.sent == both


@world(2)
def test_slots_are_sent_without_counts():
    rank = dist.get_rank()
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    with Watch() as sent:
        counts = torch.tensor(LOADS["uneven"][rank])
        run_over_ranks(stack(held_by(rank, 2)), x, counts, slots=11, group=everyone()).sum().backward()
    assert sent.sent == Counter({("alltoall_base_", 4 * 11 * HIDDEN * 8): 4})


class Asked(TorchFunctionMode):
    """How often the host asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.times += name in ("tolist", "item", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__index__")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("slots", "times"), [(0, 1), (ROWS, 0)])
@world(2)
def test_the_host_asks_once_and_with_slots_never(slots, times):
    rank = dist.get_rank()
    experts = stack(held_by(rank, 2))
    experts.compute = lambda experts, x, counts: x * 2  # what a GPU's grouped matmuls need not ask for
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor(LOADS["uneven"][rank])
    with Asked() as asked:
        y = run_over_ranks(experts, x, counts, slots=slots, group=everyone())
        y.sum().backward()
    assert asked.times == times
    assert torch.equal(y[: counts.sum()], 2 * x[: counts.sum()])


class Noted(Function):
    """Notes when it runs, each way."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        notes.append("shared")
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        ctx.notes.append("shared back")
        return grads[0] * 2, None


@pytest.mark.parametrize("slots", [0, ROWS])
@world(2)
def test_rows_travel_beside_the_shared_experts_both_ways(slots):
    rank, notes = dist.get_rank(), []
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)

    def noted(name, method):
        def called(*args):
            notes.append(name)
            return method(*args)

        return called

    shared = Later(lambda: Noted.apply(x, notes))
    with (
        patch.object(Flight, "start", noted("start", Flight.start)),
        patch.object(Flight, "wait", noted("wait", Flight.wait)),
    ):
        counts = torch.tensor(LOADS["even"][rank])
        y = run_over_ranks(stack(held_by(rank, 2)), x, counts, shared, slots, group=everyone()) + shared()
        assert notes == ["start", "shared", "wait"]
        notes.clear()
        y.sum().backward()
        assert notes == ["start", "shared back", "wait"]


@pytest.mark.parametrize("zero", [1, 2, 3])
@world(2)
def test_two_ranks_that_share_experts_are_one_device(folder, zero):  # noqa: F811
    compare_experts(folder, (), ("plan.shard=2", "plan.ep=2", f"plan.zero={zero}", "plan.grad_accum=2"))


@pytest.mark.parametrize(
    "words",
    [
        ("arch.router=switch", "arch.top_k=1", "arch.capacity=1.0"),
        ("arch.router=gshard", "arch.capacity=1.0"),
        ("arch.router=noisy_topk",),
        ("arch.router=expert_choice", "arch.capacity=1.0"),
        ("arch.mlp=gelu", "arch.shared_experts=0", "arch.moe_every=2"),
        ("arch.capacity=0.5",),
    ],
    ids=["switch", "gshard", "noisy", "choice", "lean", "capacity"],
)
@world(2)
def test_every_router_reaches_experts_elsewhere(folder, words):  # noqa: F811
    compare_experts(folder, words, ("plan.shard=2", "plan.ep=2", "plan.zero=3"))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0.0, 1.0])
@world(2)
def test_a_compiled_layer_reaches_experts_elsewhere(capacity):
    torch._dynamo.reset()  # a second architecture in one process would make its capacity a symbol
    arch = msgspec.structs.replace(preset("tiny-moe"), capacity=capacity)
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        layer = MoELayer(arch, 0).double()
        for weight in layer.parameters():
            nn.init.normal_(weight, std=0.1)
        layer.experts = stack(held_by(dist.get_rank(), 2))
        layer.run = partial(run_over_ranks, group=everyone())
        x = torch.randn(2, 16, HIDDEN, dtype=torch.float64, requires_grad=True)
        y = (torch.compile(layer, backend="aot_eager") if compiled else layer)(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).abs().max() <= 1e-12


@pytest.mark.parametrize("lender", ["replicate", "cp"])
@world(2)
def test_copies_lend_their_ranks(folder, lender):  # noqa: F811
    compare_experts(folder, (), (f"plan.{lender}=2", "plan.ep=2"))


COMPOSED = {
    "ep4": ("plan.shard=4", "plan.ep=4", "plan.zero=3"),
    "ep-in-shard": ("plan.shard=4", "plan.ep=2", "plan.zero=3"),
    "ep-in-shard-zero1": ("plan.shard=4", "plan.ep=2", "plan.zero=1", "plan.grad_accum=2"),
    "ep-in-replicate": ("plan.replicate=4", "plan.ep=2"),
    "tp": ("plan.shard=2", "plan.ep=2", "plan.tp=2", "plan.zero=3"),
    "tp-cp": ("plan.cp=2", "plan.ep=2", "plan.tp=2"),
    "hsdp": ("plan.replicate=2", "plan.shard=2", "plan.ep=2", "plan.zero=3", "plan.grad_accum=2"),
    "pp": ("plan.shard=2", "plan.ep=2", "plan.pp=2", "plan.zero=1", "plan.grad_accum=2"),
    "cp": ("plan.shard=2", "plan.cp=2", "plan.ep=2", "plan.zero=3"),
    "cp-and-shard": ("plan.shard=2", "plan.cp=2", "plan.ep=4", "plan.zero=2"),
}


@pytest.mark.parametrize("plan", COMPOSED)
@world(4)
def test_shared_experts_compose(folder, plan):  # noqa: F811
    compare_experts(folder, (), COMPOSED[plan])


UNEVEN = {  # of six experts, three a rank over two ranks or one, or all of them over four
    "ep-in-shard": COMPOSED["ep-in-shard"],
    "tp": COMPOSED["tp"],
    "shard": ("plan.shard=4", "plan.zero=3"),
}


@pytest.mark.parametrize("plan", UNEVEN)
@world(4)
def test_experts_that_do_not_come_out_even_are_cut_inside(folder, plan):  # noqa: F811
    compare_experts(folder, ("arch.experts=6",), UNEVEN[plan])


@pytest.mark.parametrize("experts", [4, 6])
@pytest.mark.parametrize("plan", ["ep-in-shard", "tp", "hsdp"])
@world(4)
def test_what_ranks_hold_is_every_expert_once(folder, plan, experts):  # noqa: F811
    run = make_run(folder, *SMALL, *COMPOSED[plan], f"arch.experts={experts}", arch="tiny-moe")
    mesh = mesh_of(run.plan)
    state = build(run, make_corpus(run, folder), mesh)
    state.loader.close()
    for name, weight in state.chunks[0].named_parameters():
        if ".experts." in name:
            held = torch.zeros(weight.shape)
            held[region_of(weight)] += 1 / copies(weight, mesh)
            dist.all_reduce(held)
            assert held.eq(1).all(), name
            assert local(weight).numel() * 4 == weight.numel() * run.plan.replicate, name  # alike on every rank


@world(2)
def test_low_precision_follows_the_wide_run(folder):  # noqa: F811
    words = (*SMALL, "plan.shard=2", "plan.ep=2", "plan.zero=3", "steps=8")
    low, wide = (make_run(folder, *words, f"plan.precision={name}", arch="tiny-moe") for name in ("bf16", "fp32"))
    mine, theirs = (drive(run, make_corpus(run, folder), mesh_of(run.plan)) for run in (low, wide))
    # bf16 keeps 8 bits: a loss of about 6 read to 0.4 % each, over eight steps of it.
    assert mine.losses == pytest.approx(theirs.losses, rel=2e-2)


def test_a_stack_is_cut_along_the_first_dim_that_comes_out_even():
    stacks = {(4, 6, 8): 0, (3, 6, 8): 1, (3, 5, 8): 2, (8, 6, 6): 0}
    for shape, dim in stacks.items():
        placement = even_dim(nn.Parameter(torch.empty(shape)), ranks=2)
        assert placement is not None
        assert placement.dim == dim
    assert even_dim(nn.Parameter(torch.empty(3, 5, 7)), ranks=2) is None  # then unevenly, along the first
    assert even_dim(nn.Parameter(torch.empty(3, 8)), ranks=2) is None  # no stack
