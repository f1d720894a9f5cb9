"""The states of a rank whose weights lie in shards, with the buffers through which gradients are summed."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache

from meshwright.cost.job import Job
from meshwright.cost.memory_line import Name, Rest
from meshwright.cost.memory_states import gathered_outside, states
from meshwright.cost.traffic_held import Seat, groups, local_shape
from meshwright.spec.arch import Arch
from meshwright.spec.params import count, params


def sharded(job: Job, place: Mapping[str, int]) -> Rest:
    """Of our own trainer, and of others that shard as `fully_shard` does."""
    plan, holds = job.plan, job.stack.holds
    held = {line.name: line for line in states(job.arch, plan, place)}
    outside = gathered_outside(job.arch, plan, place) if plan.zero == 3 and plan.pp == 1 else held["gathered"].bytes
    updated = held["moments"].bytes / 2 / (8 if plan.precision == "fp64" else 4)
    lines: list[tuple[Name, float, str]] = [(line.name, line.bytes, line.why) for line in held.values()]
    return Rest(
        lines=(
            *lines,
            ("activations", 0, "what microbatches in flight have left for their backward"),
            ("recompute", 0, "the blocks that are computed anew together, beyond what was kept of them"),
            ("backward", 0, "gradients of activations inside one block"),
            ("logits", 0, "log-probabilities, and at the loss their gradients"),
            ("buffers", _reducing(job, place), "a block's gradient as it came, and wide for the sum over ranks"),
            ("update", 0, "what the optimizer's step makes beside its states"),
            ("workspace", holds.workspace_bytes, "of the device's libraries"),
        ),
        buffered=False,
        block_share=max(param_counts(job.arch)[0]) / count(job.arch),
        begin_share=param_counts(job.arch)[1] / count(job.arch),
        gathered_at_loss=outside,
        update=holds.update_bytes * updated,
    )


@cache
def param_counts(arch: Arch) -> tuple[tuple[int, ...], int]:
    """Parameters of each block, and of what is before the blocks and nowhere else."""
    blocks = Counter[int]()
    for param in params(arch):
        blocks[param.layer] += param.numel
    begin = sum(
        param.numel
        for param in params(arch)
        if param.name.startswith("positions") or (param.name.startswith("embed") and not arch.tied)
    )
    return tuple(blocks[layer] for layer in range(arch.layers)), begin


def _reducing(job: Job, place: Mapping[str, int]) -> int:
    """The largest block's gradient as it came, and its copy in the precision of sums; a lone fp32 rank has neither.

    What is outside the blocks is summed last, so the output projection's gradient waits as it came. Beside a shadow
    torch adds up weight by weight, and nothing at all if there is one microbatch.
    """
    if job.plan.shadow and job.plan.accumulate == 1:
        return 0
    seat = Seat(arch=job.arch, plan=job.plan, sequence=0, place=place)
    if job.plan.world == 1 and seat.narrow == seat.wide:
        return 0
    if job.plan.shadow:
        largest = max(math.prod(local_shape(param, seat)) for group in groups(seat) for param in group.params)
        return largest * (seat.narrow + seat.wide)
    blocks, outside = [0], 0
    for group in groups(seat):
        numbers = sum(math.prod(local_shape(param, seat)) for param in group.params)
        if group.params[0].layer >= 0:
            blocks.append(numbers)
        else:
            outside += numbers
    waits = outside if job.plan.pp == 1 else 0  # a pipeline keeps all gradients wide, among those that wait
    return max(blocks) * (seat.narrow + seat.wide) + waits * seat.narrow
