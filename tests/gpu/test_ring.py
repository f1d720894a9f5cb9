"""The kernels of a GPU attend to blocks as plain arithmetic does; the ranks of a ring are threads of one process."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import world

from meshwright.models.layers import causal_attention
from meshwright.parallel import context
from meshwright.parallel.context import (
    AttentionBlock,
    Keys,
    Ring,
    join,
    ring_attention,
    ring_backward,
    ring_forward,
    take,
    ulysses_attention,
)

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
    mine = around(q, [Keys(*each, documents) for each in zip(k, v, strict=True)], grads)
    for name, x, y in zip(("out", "dq", "dk", "dv"), mine, expected(parts, documents), strict=True):
        assert (x - y).norm() <= TOLERANCE[dtype] * y.norm(), name


KERNELS = {
    "flash": (context.flash, context.flash_gradients),
    "cudnn": (context.cudnn, context.cudnn_gradients),
    "efficient": (context.efficient, context.efficient_gradients),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "columns", "causal"), [(512, 512, True), (512, 256, False), (256, 512, False)])
def test_a_kernel_is_plain_arithmetic(kernel, rows, columns, causal):
    attend, gradients = KERNELS[kernel]
    q, k, v, grad = draw(torch.bfloat16)
    # The queries are the later ones, cut out of a larger tensor, as a ring cuts them.
    block = AttentionBlock(q[:, :, -rows:], k[:, :, :columns], v[:, :, :columns], causal, None)
    out, lse = context.plain(block)
    mine = (*attend(block), *gradients(block, out.to(q.dtype), lse, grad[:, :, -rows:]))
    theirs = (out, lse, *context.plain_gradients(block, out.to(q.dtype), lse, grad[:, :, -rows:]))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), mine, theirs, strict=True):
        assert (x - y).norm() <= TOLERANCE[torch.bfloat16] * y.norm(), name


def test_each_kernel_is_used_where_it_can_be():
    q, k, v, _ = draw(torch.bfloat16)
    same = torch.ones(2, 512, 512, dtype=torch.bool, device="cuda")
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert context._kernel(AttentionBlock(q, k, v, True, None)) == KERNELS["cudnn" if hopper else "flash"]
    assert context._kernel(AttentionBlock(q, k, v, True, same)) == KERNELS["efficient"]
    assert context._kernel(AttentionBlock(q.float(), k.float(), v.float(), True, None)) == KERNELS["efficient"]
    wide = AttentionBlock(q.double(), k.double(), v.double(), True, same)
    assert context._kernel(wide) == (context.plain, context.plain_gradients)


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
    rank, group, documents = dist.get_rank(), dist.group.WORLD, ragged()
    parts = draw(torch.float32)
    theirs = [take(x, 2, 2, rank) for x in expected(parts, documents)]
    for attend in (ring_attention, partial(ulysses_attention, attend=causal_attention)):
        *inputs, grad = (take(x, 2, 2, rank) for x in parts)
        inputs = [x.requires_grad_() for x in inputs]
        out = attend(*inputs, documents, group=group)
        for x, y in zip((out.detach(), *torch.autograd.grad(out, inputs, grad)), theirs, strict=True):
            assert (x - y).norm() <= TOLERANCE[torch.float32] * y.norm()
