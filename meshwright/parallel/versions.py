"""Names that differ between the versions of torch we run on, and nothing else."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# torch 2.13 renamed both, and warns at every use of the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
