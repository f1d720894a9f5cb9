"""What a rank keeps outside its device: in the memory of its node, and on a disk."""

from collections.abc import Mapping

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory_line import Line, total
from meshwright.cost.memory_states import FIRST, hosted
from meshwright.cost.memory_widths import PIECE, SLOTS, widths
from meshwright.spec.params import count, params


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one rank. They are compared with a GPU's share of its node."""

    host: tuple[Line, ...] = ()
    disk: tuple[Line, ...] = ()

    @property
    def host_bytes(self) -> int:
        return total(self.host)

    @property
    def disk_bytes(self) -> int:
        return total(self.disk)


NOWHERE = Away()


def away(job: Job, sent: float, place: Mapping[str, int] = FIRST) -> Away:
    """Of a rank whose microbatches in flight have sent so many bytes of activations."""
    host = list(hosted(job.arch, job.plan, place, job.rounding))
    disk: tuple[Line, ...] = ()
    if sent:
        host.append(Line(name="activations", bytes=round(sent), why="what blocks keep for the backward"))
    if job.plan.offload != "none":
        near, far = _states(job)
        host += [line for line in (near, _pieces(job)) if line.bytes]
        disk = (far,) if far.bytes else ()
    return Away(host=tuple(host), disk=disk)


def _states(job: Job) -> tuple[Line, Line]:
    """Wide weights and moments, in memory and in files."""
    width = widths(job.plan, states=job.states).away
    whole = count(job.arch) * width
    near = whole if job.plan.offload == "host" else min(job.plan.offload_host_bytes, whole)
    why = f"wide weights and moments, {width} bytes a parameter"
    return Line(name="states", bytes=near, why=why), Line(name="states", bytes=whole - near, why=why)


def _pieces(job: Job) -> Line:
    """Buffers of pieces on their way, none larger than the largest weight: as optim/room.py counts them."""
    plan, wide = job.plan, 8 if job.plan.precision == "fp64" else 4
    fetched = widths(plan, states=job.states).away if plan.offload == "disk" else 0
    travelling = 2 * wide if plan.offload_update == "host" else 0
    largest = max(param.numel for param in params(job.arch))
    size = SLOTS * min(PIECE, largest) * (fetched + travelling)
    return Line(name="pieces", bytes=size, why="buffers of states, gradients and weights on their way")
