"""Model states of programs that keep narrow weights and a gradient buffer whole beside a shared optimizer."""

import math
from collections.abc import Mapping
from functools import lru_cache

from meshwright.cost.job import Job
from meshwright.cost.memory_line import Rest
from meshwright.cost.memory_work import padded_vocab
from meshwright.cost.traffic_held import Seat, groups, local_shape
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, Split
from meshwright.spec.plan import Plan

MOMENTS = 8.0  # bytes of a parameter's two, in fp32


def buffered(job: Job, place: Mapping[str, int]) -> Rest:
    """Weights and one gradient buffer for the whole step; the optimizer's copy and moments, from zero 1 in shares."""
    holds, plan = job.stack.holds, job.plan
    rest, experts = parameters(job.arch, plan, padded_vocab(job), place.get("pp", 0))
    numbers = rest + experts
    data = plan.replicate * plan.shard * plan.cp
    shared = rest / data + experts / max(data // plan.ep, 1)  # an expert's copies are on fewer ranks
    moved = shared if plan.zero else numbers
    kept = shared if plan.zero == 3 else numbers
    summed = shared if plan.zero >= 2 else numbers
    moments = min(MOMENTS, holds.optimizer_bytes)
    among = f"over {data} ranks" if plan.zero and data > 1 else "whole"
    return Rest(
        lines=(
            ("weights", holds.weight_bytes * kept, f"{holds.weight_bytes:g} bytes a parameter"),
            ("master", (holds.optimizer_bytes - moments) * moved, f"the optimizer's fp32 copy, {among}"),
            ("gradients", holds.gradient_bytes * summed, f"one buffer, {holds.gradient_bytes:g} bytes a parameter"),
            ("moments", moments * moved, f"two in fp32, {among}"),
            ("gathered", 0, "gathered inputs whose memory cannot be reused at once"),
            ("activations", 0, "what microbatches in flight have left for their backward"),
            ("recompute", 0, "the blocks that are computed anew together, beyond what was kept of them"),
            ("backward", 0, "gradients of activations inside one block"),
            ("logits", 0, "of the loss, forward and backward"),
            ("buffers", holds.bucket_bytes * numbers * (data > 1), "what gradients are gathered in for their sum"),
            ("update", 0, "what the optimizer's step makes beside its states"),
            ("workspace", holds.workspace_bytes, "of the device's libraries"),
        ),
        buffered=True,
        update=holds.update_bytes * moved,
    )


@lru_cache(maxsize=4096)
def parameters(arch: Arch, plan: Plan, vocab: int, rank: int) -> tuple[int, int]:
    """Numbers in a rank's part of its weights, the vocabulary filled up; those of experts that ep shares out apart."""
    seat = Seat(arch=arch, plan=plan, sequence=0, place={"pp": rank})
    found = {False: 0, True: 0}
    for group in groups(seat):
        found[group.shared_by_ep] += group.count * sum(_numbers(param, seat, vocab) for param in group.params)
    return found[False], found[True]


def _numbers(param: Param, seat: Seat, vocab: int) -> int:
    if param.layer < 0 and param.split in (Split.VOCAB, Split.COLUMN):
        return vocab // seat.plan.tp * param.shape[1]
    return math.prod(local_shape(param, seat))
