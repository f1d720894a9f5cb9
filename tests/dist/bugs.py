"""The classic bugs of distributed training, each put back into one rank's process before a proof runs."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.config.run import Run
from meshwright.data.loader import Loader
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.optim import clip, resident
from meshwright.runtime.place import Place
from meshwright.verify import evidence


def record(place: Place, run: Run, cache: Path, folder: Path, bug: str) -> None:
    """`compare.record` with a bug."""
    BUGS[bug](run)
    evidence.record(place, run, cache, folder)


def gradient_not_reduced(run: Run) -> None:
    """The sum over ranks that hold copies never happens."""
    reduce = dist.all_reduce

    def skip(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        return None if group is not None else reduce(*args, **kwargs)

    dist.all_reduce = skip


def optimizer_of_its_own_shard(run: Run) -> None:
    """Every rank takes its shard of a weight for the whole."""
    resident.cuts = lambda weight: ()


def norm_counted_twice(run: Run) -> None:
    """Every rank counts what it holds, copies included."""
    clip.copies = lambda weight, mesh: 1


def loss_averaged_per_rank(run: Run) -> None:
    """Each rank divides by its own tokens, and the ranks are averaged."""
    take = Loader.take

    def local_mean(self: Loader, step: int) -> Any:
        batch = take(self, step)
        mine = sum(int((microbatch.targets != IGNORE).sum()) for microbatch in batch.microbatches)
        return replace(batch, tokens=mine * run.plan.data)

    Loader.take = local_mean


def expert_left_out_of_the_norm(run: Run) -> None:
    """The norm forgets the experts' weights."""
    share = clip.square_share

    def forget(chunks: Any, mesh: Any) -> Any:
        kept = [
            (weight, weight.grad) for chunk in chunks for name, weight in chunk.named_parameters() if "experts" in name
        ]
        for weight, _ in kept:
            weight.grad = None
        total = share(chunks, mesh)
        for weight, gradient in kept:
            weight.grad = gradient
        return total

    clip.square_share = forget


def microbatch_dropped(run: Run) -> None:
    """The last microbatch of every step is lost."""
    take = Loader.take

    def drop(self: Loader, step: int) -> Any:
        batch = take(self, step)
        return replace(batch, microbatches=batch.microbatches[:-1])

    Loader.take = drop


BUGS: dict[str, Callable[[Run], None]] = {
    bug.__name__: bug
    for bug in (
        gradient_not_reduced,
        optimizer_of_its_own_shard,
        norm_counted_twice,
        loss_averaged_per_rank,
        expert_left_out_of_the_norm,
        microbatch_dropped,
    )
}


def fail_on_one(place: Place) -> None:
    """One rank raises while the other waits."""
    if place.rank == 1:
        raise ValueError("broken on purpose")
    time.sleep(60)
