"""The collectives that one optimizer step of a plan implies, as one rank issues them.

A test runs the real step and finds exactly these calls; docs/traffic.md has the formulas in words.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from meshwright.cost.traffic_activations import activation_traffic
from meshwright.cost.traffic_collective import Axis, Collective, merged
from meshwright.cost.traffic_deterministic import deterministic_traffic
from meshwright.cost.traffic_held import Seat
from meshwright.cost.traffic_weights import weight_traffic
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

VERDICT = 3 * 8  # bytes, in double precision: the step's loss, the gradient's square norm, how many ranks must stop
FIRST: Mapping[str, int] = {}  # the place of the first rank: every coordinate is 0


def traffic(arch: Arch, plan: Plan, sequence: int, *, place: Mapping[str, int] = FIRST) -> tuple[Collective, ...]:
    """What one rank sends in one step of training, held-out losses left out.

    `place`: the rank's coordinates on the plan's axes. Ranks differ by their pipeline stages, and by the length of
    their part of an odd vocabulary.
    """
    seat = Seat(arch=arch, plan=plan, sequence=sequence, place=place)
    if plan.deterministic:
        return merged(deterministic_traffic(seat))
    return merged(chain(weight_traffic(seat), activation_traffic(seat), _verdict(plan)))


def bytes_by_axis(collectives: Iterable[Collective]) -> dict[Axis, int]:
    """Bytes of all calls on each axis."""
    totals: dict[Axis, int] = {}
    for each in collectives:
        totals[each.axis] = totals.get(each.axis, 0) + each.total_bytes
    return totals


def _verdict(plan: Plan) -> Iterator[Collective]:
    """All ranks agree on the loss, the norm and whether to stop before anyone moves a weight."""
    if plan.world > 1:
        yield Collective(kind="all_reduce", axis="world", count=1, bytes=VERDICT)
