"""The states of a rank whose weights lie in shards, with the buffers through which gradients are summed."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache

from meshwright.cost.job import Job
from meshwright.cost.memory_line import Name, Rest
from meshwright.cost.memory_states import gathered_outside, states
from meshwright.cost.memory_widths import MOMENTS, slot_bytes, update_bytes
from meshwright.cost.traffic_held import Seat, groups, local_shape
from meshwright.spec.arch import Arch
from meshwright.spec.params import count, params


def sharded(job: Job, place: Mapping[str, int]) -> Rest:
    """Of our own trainer, and of others that shard as `fully_shard` does."""
    plan, holds = job.plan, job.stack.holds
    held = {line.name: line for line in states(job.arch, plan, place, job.rounding)}
    outside = gathered_outside(job.arch, plan, place) if plan.zero == 3 and plan.pp == 1 else held["gathered"].bytes
    updated = held["moments"].bytes / MOMENTS / (8 if plan.precision == "fp64" else 4)
    largest = largest_weight(job.arch) // plan.shards
    slots = slot_bytes(plan, largest, job.states)
    lines: list[tuple[Name, float, str]] = [(line.name, line.bytes, line.why) for line in held.values()]
    return Rest(
        lines=(
            *lines,
            ("activations", 0, "what microbatches in flight have left for their backward"),
            ("recompute", 0, "the blocks that are computed anew together, beyond what was kept of them"),
            ("backward", 0, "gradients of activations inside one block"),
            ("logits", 0, "log-probabilities, and at the loss their gradients"),
            ("buffers", _reducing(job, place), "a block's gradient as it came, and wide for the sum over ranks"),
            ("update", slots, "what the optimizer's step makes beside its states, and pieces of them on their way"),
            ("workspace", holds.workspace_bytes, "of the device's libraries"),
        ),
        buffered=False,
        block_share=max(param_counts(job.arch)[0]) / count(job.arch),
        begin_share=param_counts(job.arch)[1] / count(job.arch),
        gathered_at_loss=outside,
        gathered_at_end=_left_at_end(job, place),
        outside=gathered_outside(job.arch, plan, place),
        outside_sums=_outside_sums(job, place),
        update=holds.update_bytes * updated + slots + update_bytes(plan, largest, job.rounding, job.states),
    )


@cache
def largest_weight(arch: Arch) -> int:
    """Numbers of the largest weight."""
    return max(param.numel for param in params(arch))


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


def _left_at_end(job: Job, place: Mapping[str, int]) -> float | None:
    """Gathered weights when a lone backward reaches the first block: each block's go when its gradient is summed."""
    plan = job.plan
    if plan.zero == 3 or plan.shadow or plan.accumulate > 1 or plan.pp > 1:  # a shadow stays, as between microbatches
        return None
    blocks, outside, seat = _unsummed(job, place)
    return (blocks + outside) * seat.narrow if gathered_outside(job.arch, plan, place) else None


def _outside_sums(job: Job, place: Mapping[str, int]) -> float:
    """Of what is outside the blocks, the gradient as it came, and its copy in the precision of sums."""
    _, outside, seat = _unsummed(job, place)
    if job.plan.shadow or job.plan.pp > 1 or _unmoved(job, seat):
        return 0
    return outside * (seat.narrow + seat.wide) + _leaving(job, outside, seat)


def _unmoved(job: Job, seat: Seat) -> bool:
    """Whether gradients stay where autograd puts them: on a lone rank that computes with its own weights."""
    return job.plan.world == 1 and seat.narrow == seat.wide and not job.plan.offload_weights


def _leaving(job: Job, numbers: int, seat: Seat) -> int:
    """Of summed gradients on their way to host memory, this rank's part; elsewhere it is among the gradients."""
    return numbers * seat.wide // job.plan.shards if job.plan.offload_weights else 0


def _arriving(job: Job, largest: int, seat: Seat) -> int:
    """A block's weights from host memory: this rank's part, narrowed for the gather, and of one weight the wide one."""
    if not job.plan.offload_weights:
        return 0
    weight = largest_weight(job.arch) * seat.wide // job.plan.shards
    return weight + (largest * seat.narrow // job.plan.shards if job.plan.shards > 1 else 0)


def _unsummed(job: Job, place: Mapping[str, int]) -> tuple[int, int, Seat]:
    """Numbers in the largest block, and outside the blocks, before they are cut into shards."""
    seat = Seat(arch=job.arch, plan=job.plan, sequence=0, place=place)
    blocks, outside = [0], 0
    for group in groups(seat):
        numbers = sum(math.prod(local_shape(param, seat)) for param in group.params)
        if group.params[0].layer >= 0:
            blocks.append(numbers)
        else:
            outside += numbers
    return max(blocks), outside, seat


def _reducing(job: Job, place: Mapping[str, int]) -> int:
    """The largest block's gradient as it came, and its copy in the precision of sums; a lone fp32 rank has neither.

    What is outside the blocks is summed last, so the output projection's gradient waits as it came. Beside a shadow
    torch adds up weight by weight, and nothing at all if there is one microbatch.
    """
    if job.plan.shadow and job.plan.accumulate == 1:
        return 0
    seat = Seat(arch=job.arch, plan=job.plan, sequence=0, place=place)
    if _unmoved(job, seat):
        return 0
    if job.plan.shadow:
        largest = max(math.prod(local_shape(param, seat)) for group in groups(seat) for param in group.params)
        return largest * (seat.narrow + seat.wide)
    largest, outside, _ = _unsummed(job, place)
    waits = outside if job.plan.pp == 1 else 0  # a pipeline keeps all gradients wide, among those that wait
    moving = _leaving(job, largest, seat) + _arriving(job, largest, seat)
    return largest * (seat.narrow + seat.wide) + waits * seat.narrow + moving
