"""Attention over a split sequence is attention over the whole one, forward and backward, by ring and by exchange."""

from collections import Counter
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from worlds import world

from meshwright.models.layers import Attend, causal_attention
from meshwright.parallel.context import ring_attention, take, ulysses_attention

KINDS = ("ring", "ulysses")
SHAPES = {  # (b, heads, kv_heads, sequence, head_dim)
    "one-head-each": (1, 4, 4, 32, 8),
    "grouped": (2, 8, 4, 48, 8),
    "slices-of-one": (3, 4, 4, 8, 4),  # 2 · cp positions where cp = 4
    "odd": (2, 4, 4, 24, 5),
}
# float64 sums of at most 48 terms of size 1, in another order: 48 · 1e-16. fp32 has 2^29 times the error of float64.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


def bound(kind: str, group: dist.ProcessGroup | None = None) -> Attend:
    """The attention of a kind, as a model calls it."""
    group = group or dist.group.WORLD
    if kind == "ring":
        return partial(ring_attention, group=group)
    return partial(ulysses_attention, group=group, attend=causal_attention)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient of the output, the same on every rank."""
    b, heads, kv_heads, sequence, head_dim = shape
    random = torch.Generator().manual_seed(sequence)
    counts = (heads, kv_heads, kv_heads, heads)
    draw = partial(torch.randn, generator=random, dtype=torch.float64)
    return [draw(b, count, sequence, head_dim).to(dtype) for count in counts]


def ragged(b: int, sequence: int) -> Tensor:
    """Documents that span slices, begin in the middle of one and last one position, otherwise in each row."""
    rows = []
    for row in range(b):
        lengths = [1, 2 + row, sequence // 2, 1, 1, sequence]
        rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:sequence])
    return torch.stack(rows)


def results(attend: Attend, parts: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    *inputs, grad = parts
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attend(*inputs, documents)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def cut(parts: list[Tensor], dim: int) -> list[Tensor]:
    return [take(x, dim, dist.get_world_size(), dist.get_rank()) for x in parts]


def compare(kind: str, shape: tuple[int, ...], told: bool, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype)
    documents = ragged(shape[0], shape[3]) if told else None
    mine = results(bound(kind), cut(parts, 2), documents)
    theirs = cut(results(causal_attention, [x.double() for x in parts], documents), 2)
    assert [x.dtype for x in mine] == [dtype] * 4
    for name, x, y in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=True):
        assert (x - y).abs().max() <= TOLERANCE[dtype], f"{name} of {kind}"


def compare_all(shapes: tuple[str, ...]) -> None:
    for kind, shape, told, dtype in product(KINDS, shapes, (False, True), TOLERANCE):
        compare(kind, SHAPES[shape], told, dtype)


@world(1)
def test_a_group_of_one_is_the_whole():
    compare_all(("grouped",))


@world(2)
def test_two_ranks_attend_like_one():
    compare_all(tuple(SHAPES))


@world(4)
def test_four_ranks_attend_like_one():
    compare_all(tuple(SHAPES))


@world(3)
def test_a_ring_takes_any_number_of_ranks_and_heads():
    for told in (False, True):
        compare("ring", (2, 4, 1, 36, 8), told, torch.float64)


@world(4)
def test_an_exchange_repeats_the_whole_exactly():
    parts = tensors(SHAPES["grouped"], torch.float64)
    documents = ragged(2, 48)
    for told in (None, documents):
        mine = results(bound("ulysses"), cut(parts, 2), told)
        theirs = cut(results(causal_attention, parts, told), 2)
        # Heads are independent and each is computed as it would be alone: at most the kernel's split differs.
        assert max((x - y).abs().max() for x, y in zip(mine, theirs, strict=True)) <= 1e-15


@world(4)
def test_two_groups_of_two_do_not_meet():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    group = pairs[pair]
    parts = [x + pair for x in tensors(SHAPES["grouped"], torch.float64)]  # each pair has its own numbers
    theirs = results(causal_attention, parts, None)
    for kind in KINDS:
        mine = results(bound(kind, group), [take(x, 2, 2, group.rank()) for x in parts], None)
        for x, y in zip(mine, theirs, strict=True):
            assert (x - take(y, 2, 2, group.rank())).abs().max() < TOLERANCE[torch.float64]


@world(2)
def test_low_precision_is_summed_wide():
    parts = tensors(SHAPES["grouped"], torch.bfloat16)
    mine = results(bound("ring"), cut(parts, 2), None)
    theirs = cut(results(causal_attention, [x.double() for x in parts], None), 2)
    for x, y in zip(mine, theirs, strict=True):
        assert x.dtype == torch.bfloat16
        # One rounding to 8 bits of each result, and in the gradients one of the saved output: 2^-8 each, of 4 or less.
        assert (x - y).abs().max() <= 2 * 2**-8 * 4


class Watch(TorchDispatchMode):
    """What was sent, as (operation, bytes), and the bytes of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and not func._opname.startswith("recv"):
            given = args[0] if func._opname == "send" else args[1]
            self.sent[func._opname, sum(x.nbytes for x in tree_leaves(given))] += 1
        elif func.namespace == "aten":
            self.largest = max([self.largest, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def traffic(attend: Attend, told: bool, dtype: torch.dtype) -> tuple[Watch, Watch]:
    """Forward and backward of this rank's part of the grouped shape, each watched."""
    *inputs, grad = cut(tensors(SHAPES["grouped"], dtype), 2)
    documents = ragged(2, 48) if told else None
    for x in inputs:
        x.requires_grad_()
    with Watch() as ahead:
        out = attend(*inputs, documents)
    with Watch() as back:
        out.backward(grad)
    return ahead, back


@world(4)
def test_a_ring_sends_what_it_says():
    held = 48 // 4
    numbers = 2 * 2 * 4 * held * 8  # k and v · b · kv_heads · s ÷ cp · head_dim
    for told, dtype in product((False, True), (torch.float64, torch.bfloat16)):
        ahead, back = traffic(bound("ring"), told, dtype)
        there = numbers * dtype.itemsize
        home = numbers * max(dtype.itemsize, 4)
        assert ahead.sent == Counter({("send", there): 3})
        assert back.sent == Counter({("send", there): 3}) + Counter({("send", home): 3})


@world(4)
def test_an_exchange_sends_what_it_says():
    held = 48 // 4
    there, home = 2 * (8 + 2 * 4) * held * 8 * 4, 2 * 8 * held * 8 * 4
    both = Counter({("alltoall_base_", there): 1, ("alltoall_base_", home): 1})
    for told in (False, True):
        ahead, back = traffic(bound("ulysses"), told, torch.float32)
        assert ahead.sent == both
        assert back.sent == both


@world(4)
def test_a_ring_never_holds_the_weights_of_the_whole_sequence():
    for told in (False, True):
        for seen in traffic(bound("ring"), told, torch.float64):
            assert seen.largest == 2 * 8 * (48 // 4) ** 2 * 8  # b · heads · the own block, float64: 1/16 of the whole


@world(2)
def test_a_message_is_under_way_while_the_previous_block_is_computed():
    events: list[str] = []

    class Order(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._opname in ("send", "logsumexp"):
                events.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Order():
        bound("ring")(*cut(tensors(SHAPES["grouped"], torch.float64), 2)[:3], None)
    assert events == ["send", "logsumexp", "logsumexp"]


@world(2)
def test_recomputing_in_the_backward_changes_nothing():
    parts = cut(tensors(SHAPES["grouped"], torch.float64), 2)
    documents = ragged(2, 48)
    for kind in KINDS:
        kept = results(bound(kind), parts, documents)
        made = results(partial(checkpoint, bound(kind), use_reentrant=False), parts, documents)
        assert all(torch.equal(x, y) for x, y in zip(kept, made, strict=True))
