"""Plan: how one run uses the machines. Found by the planner, obeyed by the trainer, changed by neither afterwards."""

import difflib
import math
import re
from functools import cache, lru_cache
from itertools import accumulate
from typing import Literal

import msgspec

from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.problem import Problem
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
    grad_accum: int = 1  # forward and backward passes in one step
    precision: Precision = "fp32"  # of the arithmetic; weights and their sums are held in fp32 (fp64 in proofs)
    recompute: str = "none"  # what the backward computes anew: none, full, sqrt, selective, every-, first-, selective-K
    activation_quant: Literal["none", "fp8", "int8"] = (
        "none"  # what blocks keep for the backward, in eight bits: not exact
    )
    activation_offload: bool = False  # saved activations wait for the backward in host memory
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"  # of fp8: what has a scale of its own
    bf16_params: bool = (
        False  # a narrow copy of the weights is kept beside the wide ones, by one rank that shares nothing
    )
    optimizer_offload: Literal["none", "host", "disk"] = (
        "none"  # where one rank keeps wide weights and moments, if not beside it
    )
    optimizer_offload_update: Literal["host", "device"] = (
        "host"  # where they are updated; device: they travel there and back
    )
    optimizer_offload_host_bytes: int = 0  # of offload = disk: as much of them stays in host memory all the same
    optimizer_offload_folder: str = ""  # of offload = disk: where its files lie; empty: in the run's folder
    cpu_offload: bool = False  # weights, gradients and moments live in host memory; a block's come when it is used
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
        return self.microbatch * self.grad_accum * self.data

    def __str__(self) -> str:
        """The axes that are used, as a person would write them."""
        used = [f"{name}={value}" for name in (*AXES, "ep") if (value := getattr(self, name)) > 1]
        if self.zero:
            used.append(f"zero={self.zero}")
        if self.cp > 1:
            used.append(f"cp_kind={self.cp_kind}")
        if self.pp > 1:
            used += [f"schedule={self.schedule}", f"stages={'+'.join(map(str, self.stages))}"]
        used += [f"microbatch={self.microbatch}", f"grad_accum={self.grad_accum}", f"precision={self.precision}"]
        if self.recompute != "none":
            used.append(f"recompute={self.recompute}")
        if self.activation_quant != "none":
            used.append(f"activation_quant={self.activation_quant}")
        if self.activation_offload:
            used.append("activation_offload")
        used += [name for name in ("bf16_params",) if getattr(self, name)]
        if self.optimizer_offload != "none":
            used.append(
                f"optimizer_offload={self.optimizer_offload} optimizer_offload_update={self.optimizer_offload_update}"
            )
        if self.cpu_offload:
            used.append("cpu_offload")
        if self.kernels != "auto":
            used.append(f"kernels={self.kernels}")
        if self.compile:
            used.append("compile")
        if self.deterministic:
            used.append("deterministic")
        return " ".join(used)


WORDS = ("none", "full", "selective", "sqrt")
COUNTED = re.compile(r"(every|first|selective)-([1-9][0-9]{0,8})")
PATTERN = f"^({'|'.join(WORDS)}|{COUNTED.pattern})$"  # for whoever checks a run file by its schema


def problem(policy: str) -> Problem | None:
    """What is wrong with a word, if anything."""
    if policy in WORDS or COUNTED.fullmatch(policy):
        return None
    remedy = f"use one of {', '.join(WORDS)}, every-K, first-K or selective-K with a whole K of at least 1"
    if near := difflib.get_close_matches(policy, (*WORDS, "every-2", "first-2", "selective-2"), 1):
        remedy = f"did you mean {near[0]}? {remedy}"
    return Problem(f"plan.recompute = {policy!r} is not a recompute policy", remedy, "plan.recompute")


def by_operation(policy: str) -> bool:
    """Whether a block keeps what its costly operations return, and computes anew only the others."""
    return policy.startswith("selective")


@lru_cache(maxsize=1024)
def runs(policy: str, blocks: int) -> tuple[range, ...]:
    """Which blocks of a stage (or of a model without stages) are computed anew, those of one run together.

    Of a run only its input is kept from the forward to the backward. What is in no run keeps everything. Under
    `selective` each block is a run of its own, of which `by_operation` keeps more; under `selective-K` the first are.
    """
    assert problem(policy) is None, "refused before ranks start"
    if policy == "none":
        return ()
    counted = COUNTED.fullmatch(policy)
    if counted is None:
        length = max(round(math.sqrt(blocks)), 1) if policy == "sqrt" else 1
        return _cut(blocks, length)
    word, number = counted[1], int(counted[2])
    return _cut(blocks, number) if word == "every" else _cut(min(number, blocks), 1)


def _cut(blocks: int, length: int) -> tuple[range, ...]:
    """Blocks in runs of one length; the last may be shorter."""
    return tuple(range(start, min(start + length, blocks)) for start in range(0, blocks, length))


@cache
def balanced_stages(arch: Arch, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that the costliest stage costs least, and the others are as even as they can be.

    Cost is the weights a token is multiplied with, which is what a stage's time is made of: the output projection
    counts to the last stage, and the embedding, which is looked up, to none.
    """
    if not 1 <= stages <= arch.layers:
        return (0,) * stages  # refused by the rules, with the reason
    costs = [_layer_cost(arch, layer) for layer in range(arch.layers)]
    costs[-1] += arch.vocab * arch.hidden
    return _even(costs, stages, _least_bound(costs, stages))


def _layer_cost(arch: Arch, layer: int) -> int:
    total = 0
    for param in params(arch):
        if param.layer == layer:
            total += param.numel * arch.top_k // arch.experts if param.expert and arch.top_k else param.numel
    return total


def _least_bound(costs: list[int], stages: int) -> int:
    """The smallest cost that no stage needs to exceed, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(costs: list[int], bound: int) -> int:
    needed, spent = 1, 0
    for cost in costs:
        if spent + cost > bound:
            needed, spent = needed + 1, 0
        spent += cost
    return needed


def _even(costs: list[int], stages: int, bound: int) -> tuple[int, ...]:
    """Within a bound, the cut whose stage costs have the least sum of squares; among equals, longer stages first."""
    ends = [0, *accumulate(costs)]
    layers = len(costs)
    # best[i]: the least sum of squares of the stages from layer i to the end, and the first of those stages' lengths.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for remaining in range(1, stages + 1):
        following, best = best, {}
        for start in range(layers - remaining, -1, -1):
            for end in range(layers - remaining + 1, start, -1):
                cost = ends[end] - ends[start]
                if cost > bound or end not in following:
                    continue
                squares, lengths = following[end]
                total = squares + cost * cost
                if start not in best or total < best[start][0]:
                    best[start] = (total, (end - start, *lengths))
    return best[0][1]
