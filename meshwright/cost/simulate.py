"""A pipeline schedule played on a clock: how long, how idle, and how many activations each rank holds."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from meshwright.spec.schedule import Action, Message, Orders, Schedule, actions, flow, legal, stage_ranks

SHORT = 8  # ranks of a pipeline that stands for deeper ones
MOST_VISITS = 2048  # of a stage by a microbatch, in a step that is played action by action
ROUNDS = 4  # microbatches ÷ pp that are played at most: from then on a further round takes about as long as the last


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """What each stage costs on one microbatch. Stages differ: the first embeds, the last predicts."""

    forward_seconds: tuple[float, ...]
    input_seconds: tuple[float, ...]  # gradient of the stage's input, with whatever is recomputed for it
    weight_seconds: tuple[float, ...]  # gradients of its weights
    activation: tuple[float, ...]  # held from a forward to the end of its backward, in the caller's unit
    kept_after_input: float = 1.0  # share of the activation that the weight gradients still need


def even_cost(stages: int, chunks: int = 1) -> StageCost:
    """Every stage and every third of its work alike; the chunks of a rank hold one unit of activation together."""
    ones = (1.0,) * stages
    return StageCost(forward_seconds=ones, input_seconds=ones, weight_seconds=ones, activation=(1.0 / chunks,) * stages)


class TimelineSlot(msgspec.Struct, frozen=True, gc=False):
    """An action and when it runs, in seconds since the step began."""

    action: Action
    start: float
    end: float


class Peak(msgspec.Struct, frozen=True, gc=False):
    """The most activation that a rank holds, and the first moment it does."""

    activation: float
    seconds: float  # since the step began


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of a pipeline in time."""

    rows: tuple[tuple[TimelineSlot, ...], ...]  # of each rank, for a Gantt chart
    peaks: tuple[Peak, ...]  # of each rank

    @property
    def seconds(self) -> float:
        """From the first action of any rank to the last."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Time each rank works."""
        return tuple(sum(slot.end - slot.start for slot in row) for row in self.rows)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step that each rank is idle, 0 to 1."""
        seconds = self.seconds
        return tuple((seconds - busy) / seconds for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle, 0 to 1."""
        return sum(self.bubbles) / len(self.rows)


def play(orders: Orders, placement: Sequence[int], cost: StageCost, send_seconds: float = 0.0) -> Timeline:
    """Run every rank's order, each action as soon as its rank is free and its message has arrived.

    Sending takes time between ranks only, and occupies neither; a whole backward hands its gradient on at its end.
    """
    seconds = _seconds(cost)
    ends: dict[Message, float] = {}
    rows: list[list[TimelineSlot]] = [[] for _ in orders]
    clock = [0.0] * len(orders)
    for action, message in flow(orders, placement):
        stage, kind = action.stage, action.kind
        rank = placement[stage]
        start = clock[rank]
        if message is not None:
            travel = send_seconds if placement[message[1]] != rank else 0.0
            start = max(start, ends[message] + travel)
        clock[rank] = end = start + seconds[kind][stage]
        rows[rank].append(TimelineSlot(action, start, end))
        if kind != "W":
            ends["F" if kind == "F" else "I", stage, action.microbatch] = end
    assert all(len(row) == len(order) for row, order in zip(rows, orders, strict=True)), "the orders deadlock"
    return Timeline(rows=tuple(map(tuple, rows)), peaks=tuple(_peak(row, cost) for row in rows))


def makespan(schedule: Schedule, pp: int, microbatches: int, cost: StageCost, send_seconds: float = 0.0) -> float:
    """Seconds of a step, as `play` finds them; long steps are continued from their last full round.

    A pipeline too deep to be played for every plan of a search is priced by a shorter one: beyond the busiest rank's
    work, the time to fill and drain it grows with its ranks.
    """
    chunks = len(cost.forward_seconds) // pp
    if pp > SHORT and pp * chunks * min(microbatches, ROUNDS * pp) > MOST_VISITS:
        return _deep(schedule, pp, microbatches, cost, send_seconds)
    surplus = max(-(-(microbatches - ROUNDS * pp) // pp), 0)
    played = microbatches - surplus * pp
    seconds = _end(schedule, pp, chunks, played, cost, send_seconds)
    if surplus == 0:
        return seconds
    return seconds + surplus * (seconds - _end(schedule, pp, chunks, played - pp, cost, send_seconds))


def _deep(schedule: Schedule, pp: int, microbatches: int, cost: StageCost, send_seconds: float) -> float:
    """The busiest rank's work, and the idle time of a short pipeline of mean stages, stretched."""
    stages = len(cost.forward_seconds)
    chunks = stages // pp
    placement = stage_ranks(schedule, pp, chunks)
    whole = [sum(each) for each in zip(cost.forward_seconds, cost.input_seconds, cost.weight_seconds, strict=True)]
    busiest = max(sum(whole[stage] for stage in range(stages) if placement[stage] == rank) for rank in range(pp))
    means = (sum(cost.forward_seconds), sum(cost.input_seconds), sum(cost.weight_seconds))
    forward, back, weight = ((each / stages,) * (SHORT * chunks) for each in means)
    short = StageCost(
        forward_seconds=forward, input_seconds=back, weight_seconds=weight, activation=(0.0,) * (SHORT * chunks)
    )
    fewer = max(round(min(microbatches, ROUNDS * pp) * SHORT / pp), 1)
    while legal(schedule, SHORT, chunks, fewer):
        fewer += 1
    idle = _end(schedule, SHORT, chunks, fewer, short, send_seconds) - fewer * sum(whole) / pp
    return microbatches * busiest + idle * (pp - 1) / (SHORT - 1)


def _end(schedule: Schedule, pp: int, chunks: int, microbatches: int, cost: StageCost, send_seconds: float) -> float:
    by_kind = _seconds(cost)
    durations = [*by_kind["F"], *by_kind["B"], *by_kind["I"], *by_kind["W"]]
    steps = _steps(schedule, pp, chunks, microbatches)
    clock = [0.0] * pp
    ends = [0.0] * len(steps)
    for number, (rank, duration, waits_for, travels) in enumerate(steps):
        start = clock[rank]
        if waits_for >= 0:
            arrival = ends[waits_for] + send_seconds if travels else ends[waits_for]
            if arrival > start:
                start = arrival
        clock[rank] = ends[number] = start + durations[duration]
    return max(clock)


@lru_cache(maxsize=128)
def _steps(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> tuple[tuple[int, int, int, bool], ...]:
    """Every action in an order in which it can run: rank, place of its duration, the action it waits for, by wire?"""
    placement = stage_ranks(schedule, pp, chunks)
    stages = len(placement)
    offset = {kind: place * stages for place, kind in enumerate("FBIW")}
    sent: dict[Message, int] = {}
    steps = []
    for number, (action, message) in enumerate(flow(actions(schedule, pp, chunks, microbatches), placement)):
        rank = placement[action.stage]
        waits_for = -1 if message is None else sent[message]
        travels = message is not None and placement[message[1]] != rank
        steps.append((rank, offset[action.kind] + action.stage, waits_for, travels))
        if action.kind != "W":
            sent["F" if action.kind == "F" else "I", action.stage, action.microbatch] = number
    return tuple(steps)


def _seconds(cost: StageCost) -> dict[str, tuple[float, ...]]:
    """Seconds of each kind of action on each stage."""
    whole = tuple(map(sum, zip(cost.input_seconds, cost.weight_seconds, strict=True)))
    return {"F": cost.forward_seconds, "B": whole, "I": cost.input_seconds, "W": cost.weight_seconds}


def _peak(row: Sequence[TimelineSlot], cost: StageCost) -> Peak:
    """A forward takes its stage's activation, and the backward gives it back at its end, in parts when it is split."""
    freed_by = {"B": 1.0, "I": 1.0 - cost.kept_after_input, "W": cost.kept_after_input}
    held = 0.0
    peak = Peak(0.0, 0.0)
    for slot in row:
        activation = cost.activation[slot.action.stage]
        if slot.action.kind != "F":
            held -= freed_by[slot.action.kind] * activation
            continue
        held += activation
        if held > peak.activation:
            peak = Peak(held, slot.start)
    return peak


def render(timeline: Timeline, columns: int = 100) -> list[str]:
    """A line of text for each rank: its actions in time, · where it is idle, and what that comes to."""
    scale = _scale(timeline, columns)
    label = _label(timeline, scale)
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = ["·"] * round(timeline.seconds * scale)
        for slot in row:
            first, end = round(slot.start * scale), round(slot.end * scale)
            cells[first:end] = label(slot.action).ljust(end - first, "-")[: end - first]
        figures = f"{timeline.bubbles[rank]:6.1%} idle, {timeline.peaks[rank].activation:.3g} held"
        lines.append(f"rank {rank:<2} {''.join(cells)} {figures}")
    return lines


def _scale(timeline: Timeline, columns: int) -> float:
    """Columns a second: a whole number of them for the shortest action, where they suffice."""
    shortest = min(slot.end - slot.start for row in timeline.rows for slot in row)
    each = int(columns * shortest / timeline.seconds)
    return each / shortest if each else columns / timeline.seconds


def _label(timeline: Timeline, scale: float) -> Callable[[Action], str]:
    """The fullest name that fits every action: with its stage where ranks hold several, its microbatch, or its kind."""
    slots = [slot for row in timeline.rows for slot in row]
    room = min(round(slot.end * scale) - round(slot.start * scale) for slot in slots)
    several = any(slot.action.stage >= len(timeline.rows) for slot in slots)
    names: list[Callable[[Action], str]] = [lambda action: f"{action.kind}{action.microbatch}"]
    if several:
        names.insert(0, lambda action: f"{action}-")  # the dash keeps 0F1 and 0F2 apart; letters keep F1 and F2
    fitting = (name for name in names if all(len(name(slot.action)) <= room for slot in slots))
    return next(fitting, lambda action: action.kind)
