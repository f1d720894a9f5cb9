"""Plan: how one run uses the machines. Found by the planner, obeyed by the trainer, changed by neither afterwards."""

from typing import Literal

import msgspec

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way of splitting the work. world = replicate · shard."""

    replicate: int = 1  # copies of the weights; gradients are summed over them
    shard: int = 1  # ranks that share one copy of the weights
    zero: Literal[0, 1, 2, 3] = 0  # what is sharded: 0 nothing, 1 states, 2 and gradients, 3 and weights
    microbatch: int  # sequences in one forward pass of one rank
    accumulate: int = 1  # forward and backward passes in one step
    precision: Precision = "fp32"  # of the arithmetic; weights and their sums are held in fp32 (fp64 in proofs)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.replicate * self.shard

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step, over the whole job."""
        return self.microbatch * self.accumulate * self.data

    def __str__(self) -> str:
        """The axes that are used, as a person would say them."""
        axes = [f"{name}={value}" for name in ("replicate", "shard") if (value := getattr(self, name)) > 1]
        if self.zero:
            axes.append(f"zero={self.zero}")
        shape = f"microbatch={self.microbatch} accumulate={self.accumulate} precision={self.precision}"
        return " ".join([*axes, shape])
