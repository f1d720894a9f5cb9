"""The kernels of a GPU attend to blocks as plain arithmetic does; the ranks of a ring are threads of one process."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import world

from meshwright.models.layers import causal_attention
from meshwright.parallel.attention import Block, _efficient_can, _flash_can, join, take
from meshwright.parallel.ring import Keys, Ring, ring_attention, ring_backward, ring_forward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (2, 8, 2, 512, 64)  # b, heads, kv_heads, sequence, head_dim
# Inputs of size 1 rounded to bf16 give results of size 1, gradients up to about 8, with a relative error of 2^-8 each;
# fp32 kernels may split their products into TF32 parts: ten bits fewer than float32 has, three times.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}


def rings(size: int) -> list[Ring]:
    """A ring of threads: a message is put into the next rank's queue."""
    queues: list[Queue[Tensor]] = [Queue() for _ in range(size)]

    def make(rank: int) -> Ring:
        def exchange(message: Tensor):
            queues[(rank + 1) % size].put(message)
            return queues[rank].get

        return Ring(rank=rank, size=size, exchange=exchange)

    return [make(rank) for rank in range(size)]


def around(queries: list[Tensor], keys: list[Keys], grads: list[Tensor]) -> list[Tensor]:
    """Output and gradients over the whole sequence, by as many threads as there are parts."""

    def work(q: Tensor, own: Keys, grad: Tensor, ring: Ring) -> tuple[Tensor, ...]:
        out, lse = ring_forward(q, own, ring)
        out = out.to(q.dtype)
        return out, *ring_backward(q, own, out, lse, grad, ring)

    cp = len(queries)
    with ThreadPoolExecutor(cp) as pool:
        parts = list(pool.map(work, queries, keys, grads, rings(cp), timeout=60))
    return [join(list(each), 2) for each in zip(*parts, strict=True)]


def draw(dtype: torch.dtype) -> list[Tensor]:
    b, heads, kv_heads, sequence, head_dim = SHAPE
    torch.manual_seed(0)
    return [
        torch.randn(b, count, sequence, head_dim, device="cuda").to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def ragged() -> Tensor:
    lengths = torch.tensor([1, 200, 1, 1, 150, 159])  # 512; they span slices and begin within them
    row = torch.arange(6).repeat_interleave(lengths)
    return torch.stack((row, row.flip(0))).cuda()


def expected(parts: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    *inputs, grad = (x.double() for x in parts)
    inputs = [x.requires_grad_() for x in inputs]
    out = causal_attention(*inputs, documents)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_ring_of_kernels_is_attention_over_the_whole(cp, told, dtype):
    parts = draw(dtype)
    documents = ragged() if told else None
    q, k, v, grads = ([take(x, 2, cp, rank) for rank in range(cp)] for x in parts)
    pieces = [None] * cp if documents is None else [take(documents, 1, cp, rank) for rank in range(cp)]
    mine = around(q, [Keys(*each) for each in zip(k, v, pieces, strict=True)], grads)
    for name, x, y in zip(("out", "dq", "dk", "dv"), mine, expected(parts, documents), strict=True):
        assert (x - y).norm() <= TOLERANCE[dtype] * y.norm(), name


def test_each_kernel_is_used_where_it_can_be():
    q, k, v, _ = draw(torch.bfloat16)
    same = torch.ones(2, 512, 512, dtype=torch.bool, device="cuda")
    assert _flash_can(Block(q, k, v, True, None))
    assert not _flash_can(Block(q, k, v, True, same))
    assert _efficient_can(Block(q, k, v, True, same))
    assert not _efficient_can(Block(q.double(), k.double(), v.double(), True, same))


def test_no_kernel_holds_the_weights_of_a_block():
    q, k, v, grad = (x.repeat(1, 1, 16, 1) for x in draw(torch.bfloat16))  # 8192 positions
    keys = Keys(k, v, None)
    (ring,) = rings(1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = ring_forward(q, keys, ring)
    ring_backward(q, keys, out.to(q.dtype), lse, grad, ring)
    weights = q.shape[0] * q.shape[1] * q.shape[2] ** 2 * 4
    assert torch.cuda.max_memory_allocated() - before < weights / 8


@world(2)
def test_ranks_that_share_a_gpu_through_gloo_attend_like_one():
    parts = draw(torch.float32)
    *inputs, grad = (take(x, 2, 2, dist.get_rank()) for x in parts)
    inputs = [x.requires_grad_() for x in inputs]
    documents = ragged()
    out = ring_attention(*inputs, take(documents, 1, 2, dist.get_rank()), dist.group.WORLD)
    mine = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    for x, y in zip(mine, expected(parts, documents), strict=True):
        theirs = take(y, 2, 2, dist.get_rank())
        assert (x - theirs).norm() <= TOLERANCE[torch.float32] * theirs.norm()
