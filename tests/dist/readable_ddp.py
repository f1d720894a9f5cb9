"""Data parallelism in a page, for people who learn from it. Runs use `fully_shard`, which composes with the other axes.

Every rank holds the whole model and computes the gradient of its own samples; the sum over ranks is the gradient of all
of them. Two things make that fast: gradients travel in buckets, so that few large messages are sent instead of many
small ones, and a bucket leaves as soon as its last gradient is ready, while the backward goes on in earlier layers.

Ranks may use different parameters. So buckets leave in one order, those that wait for a gradient that does not come at
the end, with zeros in its place; the last one also counts the ranks that used each parameter. What none used has no
gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25_000_000


class Replicated(nn.Module):
    """A model of which every rank holds a copy. Call `finish()` between the backward and the optimizer."""

    def __init__(self, module: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__()
        self.module = module
        self.syncing = True
        self.buckets = list(_buckets(module, bucket_bytes))
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[Tensor, dist.Work]] = []
        for weight in module.parameters():
            dist.broadcast(weight.data, src=0)  # all copies begin equal
        for number, bucket in enumerate(self.buckets):
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _ready(self, number: int) -> None:
        """One more gradient of a bucket is there; with the last one the bucket leaves, if those before it have."""
        if not self.syncing:
            return
        self.missing[number] -= 1
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self._send(self.buckets[len(self.sent)])

    def _send(self, bucket: list[nn.Parameter]) -> None:
        parts = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
        if bucket is self.buckets[-1]:  # now it is known which gradients there are
            parts.append(parts[0].new_tensor([weight.grad is not None for weight in chain(*self.buckets)]))
        flat = torch.cat([part.flatten() for part in parts])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self.sent.append((flat, work))

    def finish(self) -> None:
        """Wait for the sums and put them where the optimizer looks."""
        for bucket in self.buckets[len(self.sent) :]:
            self._send(bucket)
        for _, work in self.sent:
            work.wait()
        weights = list(chain(*self.buckets))
        sums = torch.cat([flat for flat, _ in self.sent]).split([*(weight.numel() for weight in weights), len(weights)])
        for weight, total, users in zip(weights, sums[:-1], sums[-1].tolist(), strict=True):
            weight.grad = total.view_as(weight) if users else None
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent.clear()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients at home: only the last microbatch of a step needs to send."""
        self.syncing = False
        yield
        self.syncing = True


def _buckets(module: nn.Module, limit: int) -> Iterator[list[nn.Parameter]]:
    """Weights in the order in which their gradients appear, the last layer's first, cut where a bucket is full."""
    bucket: list[nn.Parameter] = []
    for weight in reversed([weight for weight in module.parameters() if weight.requires_grad]):
        if bucket and sum(each.nbytes for each in bucket) + weight.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(weight)
    yield bucket
