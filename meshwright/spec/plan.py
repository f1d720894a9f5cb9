"""Plan: how one run uses the machines. Found by the planner, obeyed by the trainer, changed by neither afterwards."""

from typing import Literal

import msgspec

from meshwright.spec.schedule import Schedule

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]

AXES = ("pp", "replicate", "shard", "cp", "tp")  # of the world, outermost to innermost: the chattiest are neighbours


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way of splitting the work. world = pp · replicate · shard · cp · tp."""

    replicate: int = 1  # copies of the (sharded) weights; gradients are summed over them
    shard: int = 1  # ranks that share one copy of the weights
    zero: Literal[0, 1, 2, 3] = (
        0  # what is sharded over shard · cp: 0 nothing, 1 states, 2 and gradients, 3 and weights
    )
    tp: int = 1  # ranks that share each matrix, with the sequence split between matrices
    cp: int = 1  # ranks that share each sequence
    cp_kind: Literal["ring", "ulysses"] = "ring"  # keys and values travel, or heads change places
    ep: int = 1  # ranks that share the experts; borrowed from shard · cp, not a factor of the world
    pp: int = 1  # ranks that share the layers
    schedule: Schedule = "1f1b"
    chunks: int = 1  # stages on each rank
    stages: tuple[int, ...] = ()  # layers of each stage, pp · chunks of them; empty when pp is 1
    microbatch: int  # sequences in one forward pass of one rank
    accumulate: int = 1  # forward and backward passes in one step
    precision: Precision = "fp32"  # of the arithmetic; weights and their sums are held in fp32 (fp64 in proofs)
    recompute: str = "none"  # what the backward computes anew: none, full, sqrt, selective, every-, first-, selective-K
    compress: Literal["none", "fp8", "int8"] = "none"  # what blocks keep for the backward, in eight bits: not exact
    activations: Literal["device", "host"] = "device"  # where it waits for the backward
    scaling: Literal["tensor", "row"] = "tensor"  # of fp8: what has a scale of its own
    shadow: bool = False  # a narrow copy of the weights is kept beside the wide ones, by one rank that shares nothing
    offload: Literal["none", "host", "disk"] = "none"  # where one rank keeps wide weights and moments, if not beside it
    offload_update: Literal["host", "device"] = "host"  # where they are updated; device: they travel there and back
    offload_host_bytes: int = 0  # of offload = disk: as much of them stays in host memory all the same
    offload_folder: str = ""  # of offload = disk: where its files lie; empty: in the run's folder
    offload_weights: bool = False  # weights, gradients and moments live in host memory; a block's come when it is used
    kernels: Literal["auto", "plain", "fused"] = "auto"  # hand-written ones; auto: where there is a GPU and Triton
    compile: bool = False  # blocks are compiled by torch before the first step
    deterministic: bool = False  # sums in a fixed order: the same bits for every replicate · shard

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Groups of ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of a weight and add up its gradient: without sharding cp replicates too."""
        return self.replicate if self.zero else self.replicate * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which a weight's part is sharded."""
        return self.shard * self.cp if self.zero else 1

    @property
    def attends_whole(self) -> bool:
        """Whether one call of attention sees whole sequences; a ring meets them block by block."""
        return self.cp == 1 or self.cp_kind == "ulysses"

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step, over the whole job."""
        return self.microbatch * self.accumulate * self.data

    def __str__(self) -> str:
        """The axes that are used, as a person would write them."""
        used = [f"{name}={value}" for name in (*AXES, "ep") if (value := getattr(self, name)) > 1]
        if self.zero:
            used.append(f"zero={self.zero}")
        if self.cp > 1:
            used.append(f"cp_kind={self.cp_kind}")
        if self.pp > 1:
            used += [f"schedule={self.schedule}", f"stages={'+'.join(map(str, self.stages))}"]
        used += [f"microbatch={self.microbatch}", f"accumulate={self.accumulate}", f"precision={self.precision}"]
        if self.recompute != "none":
            used.append(f"recompute={self.recompute}")
        if self.compress != "none":
            used.append(f"compress={self.compress}")
        if self.activations != "device":
            used.append(f"activations={self.activations}")
        used += [name for name in ("shadow",) if getattr(self, name)]
        if self.offload != "none":
            used.append(f"offload={self.offload} offload_update={self.offload_update}")
        if self.offload_weights:
            used.append("offload_weights")
        if self.kernels != "auto":
            used.append(f"kernels={self.kernels}")
        if self.compile:
            used.append("compile")
        if self.deterministic:
            used.append("deterministic")
        return " ".join(used)
