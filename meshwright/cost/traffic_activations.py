"""What activations and their gradients send: over tp, cp, ep and pp, for every microbatch.

A layer that the backward computes anew sends what its forward sent once more, up to the last result that the backward
needs. Recomputation by operation keeps what a collective returned; those that write into a buffer are issued again.
"""

import math
from collections.abc import Iterator

from meshwright.cost.traffic_collective import Collective, Kind
from meshwright.cost.traffic_held import Part, Seat, parts, placement
from meshwright.spec.arch import Arch

DRAW = 4  # bytes of a router's random number
COUNT = 8  # bytes of the number of an expert's rows


def activation_traffic(seat: Seat) -> Iterator[Collective]:
    """Everything that is sent because ranks share a sequence, a matrix, the experts or the layers."""
    for part in parts(seat):
        yield from _over_tp(part, seat)
        yield from _loss_over_tp(part, seat)
        yield from _attention_over_cp(part, seat)
        yield from _routers_over_cp(part, seat)
        yield from _over_ep(part, seat)
        yield from _over_pp(part, seat)


def _over_tp(part: Part, seat: Seat) -> Iterator[Collective]:
    """Hidden states are gathered before and summed and scattered after attention and the feed-forward layer.

    The backward mirrors it, so there are as many of the one as of the other; embedding and projection add half a pair
    each way. Of layers computed anew the last sum is not needed: it is the output of their run. What a compiler made
    is computed to its end all the same.
    """
    if seat.plan.tp == 1:
        return
    once, anew = 4 * part.layers + part.first + part.last, part.anew
    gathers = scatters = 2 * anew.layers
    if not seat.plan.compile:
        scatters -= anew.runs
    if anew.by_operation:
        gathers, scatters = anew.mixtures, 0
    repeated: tuple[tuple[Kind, int], ...] = (("all_gather", gathers), ("reduce_scatter", scatters))
    for kind, more in repeated:
        count = seat.plan.accumulate * (once + more)
        yield Collective(kind=kind, axis="tp", count=count, bytes=seat.stream * seat.narrow)


def _loss_over_tp(part: Part, seat: Seat) -> Iterator[Collective]:
    """For every position the maximum of its logits, the sum of their exponentials, and the target's own.

    In chunks of positions, the last of which may be smaller.
    """
    if seat.plan.tp > 1 and part.last:
        rows = seat.loss_rows
        chunks, rest = divmod(seat.plan.microbatch * seat.positions, rows)
        for numbers, times in ((rows, chunks), (rest, 1)):
            if numbers:
                count = 3 * seat.plan.accumulate * times
                yield Collective(kind="all_reduce", axis="tp", count=count, bytes=numbers * seat.wide)


def _attention_over_cp(part: Part, seat: Seat) -> Iterator[Collective]:
    if seat.plan.cp > 1:
        times, anew = (layers * seat.plan.accumulate for layers in (part.layers, part.anew.layers))
        yield from (_ring if seat.plan.cp_kind == "ring" else _ulysses)(times, anew, seat)


def _ring(times: int, anew: int, seat: Seat) -> Iterator[Collective]:
    """Keys and values go round forward and backward, and their gradients backward; the last of those is waited for."""
    plan = seat.plan
    numbers = 2 * plan.microbatch * seat.positions * seat.arch.kv_width // plan.tp
    for count, size, overlappable in (
        ((2 * times + anew) * (plan.cp - 1), numbers * seat.narrow, True),
        (times * (plan.cp - 2), numbers * seat.wide, True),
        (times, numbers * seat.wide, False),
    ):
        yield Collective(kind="send", axis="cp", count=count, bytes=size, overlappable=overlappable)


def _ulysses(times: int, anew: int, seat: Seat) -> Iterator[Collective]:
    """Queries, keys and values change places before attention and its output after; gradients the other way."""
    arch, plan = seat.arch, seat.plan
    held = plan.microbatch * seat.positions
    for width in (arch.q_width + 2 * arch.kv_width, arch.q_width):
        size = held * width // plan.tp * seat.narrow
        yield Collective(kind="all_to_all", axis="cp", count=2 * times + anew, bytes=size)


def _routers_over_cp(part: Part, seat: Seat) -> Iterator[Collective]:
    """A router sees whole sequences: its logits are gathered, and going back their gradients summed and scattered."""
    if seat.plan.cp == 1:
        return
    forward, backward = _mixture_passes(part, seat)
    tokens = seat.plan.microbatch * seat.sequence
    passes: tuple[tuple[Kind, int], ...] = (("all_gather", forward), ("reduce_scatter", backward))
    for kind, count in passes:
        yield Collective(kind=kind, axis="cp", count=count, bytes=tokens * seat.arch.experts * seat.wide)
    if seat.arch.router == "gshard":
        yield Collective(kind="all_gather", axis="cp", count=forward, bytes=tokens * DRAW)


def _mixture_passes(part: Part, seat: Seat) -> tuple[int, int]:
    """How often a step goes forward through layers with experts, and how often back."""
    times = seat.plan.accumulate
    return (part.mixtures + part.anew.mixtures) * times, part.mixtures * times


def _over_ep(part: Part, seat: Seat) -> Iterator[Collective]:
    """Each token's rows go to the experts' ranks and come back, and so do their gradients; first ranks tell how many.

    How many rows a rank gives to one exchange is up to the routers: what is listed is the mean over the ranks of ep.
    """
    if seat.plan.ep == 1:
        return
    forward, backward = _mixture_passes(part, seat)
    yield Collective(kind="all_to_all", axis="ep", count=forward, bytes=seat.arch.experts * COUNT)
    size = mean_rows(seat) * seat.arch.hidden * seat.narrow
    yield Collective(kind="all_to_all", axis="ep", count=2 * (forward + backward), bytes=size)


def mean_rows(seat: Seat) -> int:
    """Copies of tokens that a rank hands to experts in one mixture layer and microbatch, at most, on average.

    Exact where no token can be dropped, and for expert choice, which fills every slot.
    """
    arch = seat.arch
    if arch.router == "expert_choice":
        kept = arch.experts * slots(arch, 1, seat.sequence)
    else:
        kept = min(seat.sequence * arch.top_k, arch.experts * slots(arch, arch.top_k, seat.sequence))
    return math.ceil(seat.plan.microbatch * kept / seat.plan.cp)


def slots(arch: Arch, choices: int, sequence: int) -> int:
    """Tokens that one expert may take of a sequence; all of them when no capacity is set."""
    if arch.capacity == 0:
        return sequence
    return min(sequence, math.ceil(arch.capacity * choices * sequence / arch.experts))


def _over_pp(part: Part, seat: Seat) -> Iterator[Collective]:
    """A stage hands its output to the next and its input's gradient to the one before, where another rank has it."""
    ranks = placement(seat.plan)
    size = seat.stream // seat.plan.tp * seat.narrow
    for neighbour in (part.stage + 1, part.stage - 1):
        if 0 <= neighbour < len(ranks) and ranks[neighbour] != ranks[part.stage]:
            yield Collective(kind="send", axis="pp", count=seat.plan.accumulate, bytes=size, overlappable=True)
