"""What changes from step to step, and which part of it a rank holds."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.data.loader import Loader
from meshwright.optim.adamw import AdamW
from meshwright.train.scale import LossScale


def to_stderr(text: str) -> None:
    """Where people are told unless somebody says better."""
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class State:
    """Everything that changes from step to step."""

    chunks: list[nn.Module]
    optimizer: AdamW
    loader: Loader
    scale: LossScale
    step: int = 0
    stopped: bool = False  # asked to, before the last step
    saved: bool = True  # and what was done until then is on the disk
    say: Callable[[str], None] = to_stderr  # that a save has failed


def region_of(weight: Tensor) -> tuple[slice, ...]:
    """Which part of the whole weight this rank holds."""
    if not isinstance(weight, DTensor):
        return tuple(slice(0, size) for size in weight.shape)
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
