"""What is drawn of a plan, and how a terminal draws it: parts of a whole, plans by memory and time, a pipeline."""

import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import accumulate, pairwise

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.layer_time import layer_model
from meshwright.cost.memory import Ledger
from meshwright.cost.simulate import StageCost, Timeline, play, render
from meshwright.cost.step_time import Price, stages_of
from meshwright.spec.schedule import actions, stage_ranks
from meshwright.spec.units import GIB

ROUNDS = 2  # microbatches ÷ pp of a pipeline that are drawn at most: the rest is more of the same
LEAST = 8  # and not fewer than this
EIGHTHS = " ▏▎▍▌▋▊▉█"
COLOURS = (34, 33, 32, 35, 36, 31, 94, 93, 92, 95)  # of the terminal's own palette, so readable on its background
NARROWEST, WIDEST = 48, 160  # columns
NAMES, FIGURES = 21, 16  # columns beside a bar
ROWS = 14  # of the chart of plans
IDLE_FIGURES = 36  # columns that a Gantt row takes beside its actions


class ChartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a whole. One below zero is taken off."""

    name: str
    value: float
    why: str = ""


class StackedBar(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that add up, and what there is room for."""

    title: str
    unit: str
    entries: tuple[ChartEntry, ...]
    limit: float | None = None  # None: there is none
    limit_name: str = ""

    @property
    def total(self) -> float:
        return math.fsum(entry.value for entry in self.entries)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Where each part begins and ends on the way to the sum; one below zero lies on those before it."""
        edges = [*accumulate((entry.value for entry in self.entries), initial=0.0)]
        return [(min(pair), max(pair)) for pair in pairwise(edges)]

    @property
    def extent(self) -> float:
        """What a scale must have room for: the sum, the limit, and the highest reach before something is taken off."""
        return max([self.total, self.limit or 0.0, *(end for _, end in self.spans)])


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A plan by what it needs and how long it takes."""

    label: str
    gib: float
    seconds: float
    front: bool = False  # no plan takes less time in as little memory


class PipelineChart(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a pipeline, or its beginning and end where it is long."""

    title: str
    timeline: Timeline
    shown: int  # microbatches that are played
    microbatches: int


class Pictures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to see of an answer."""

    title: str
    heading: tuple[str, ...]
    memory: StackedBar
    time: StackedBar
    points: tuple[Point, ...] = ()
    limit_gib: float = 0.0
    pipeline: PipelineChart | None = None


def memory(ledger: Ledger, memory_bytes: float) -> StackedBar:
    """The ledger's lines beside the device's memory; empty ones are left out."""
    where = "a rank" if ledger.role == "only" else f"the {ledger.role} pipeline rank"
    return StackedBar(
        title=f"Memory of {where} at its peak, {ledger.moment}",
        unit="GiB",
        entries=tuple(
            ChartEntry(name=line.label, value=line.bytes / GIB, why=line.why) for line in ledger.lines if line.bytes
        ),
        limit=memory_bytes / GIB,
        limit_name="the device",
    )


def seconds(price: Price) -> StackedBar:
    """The waterfall: from the data sheet's seconds to a step's."""
    shares = [share for share in price.waterfall if share.seconds]
    entries = tuple(ChartEntry(name=share.label, value=share.seconds, why=share.why) for share in shares)
    return StackedBar(title="Where a step's seconds go", unit="s", entries=entries)


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points by memory, each marked that no other beats in both."""
    found, fastest = [], math.inf
    for point in sorted(points, key=lambda point: (point.gib, point.seconds, point.label)):
        best = point.seconds < fastest
        fastest = min(fastest, point.seconds)
        found.append(msgspec.structs.replace(point, front=best))
    return tuple(found)


def pipeline(job: Job) -> PipelineChart | None:
    """The Gantt chart of a job's pipeline; None where there is none."""
    plan = job.plan
    if plan.pp == 1:
        return None
    shown = min(plan.grad_accum, max(ROUNDS * plan.pp, LEAST))
    stages = stages_of(layer_model(job), job)
    blocked, travel = (stages.send, 0.0) if job.stack.speed.blocking_sends else (0.0, stages.send)
    cost = StageCost(
        forward_seconds=tuple(each.forward.seconds + blocked for each in stages.passes),
        input_seconds=tuple(each.recompute.seconds + each.input.seconds + blocked for each in stages.passes),
        weight_seconds=tuple(each.weight.seconds for each in stages.passes),
        activation=(1 / plan.chunks,) * len(stages.passes),  # in units of one microbatch on one rank
    )
    ranks = stage_ranks(plan.schedule, plan.pp, plan.chunks)
    part = "" if shown == plan.grad_accum else f", {shown} of {plan.grad_accum} microbatches"
    chunks = f" × {plan.chunks} chunks" if plan.chunks > 1 else ""
    return PipelineChart(
        title=f"The pipeline {plan.schedule}{chunks} over {plan.pp} ranks{part}",
        timeline=play(actions(plan.schedule, plan.pp, plan.chunks, shown), ranks, cost, travel),
        shown=shown,
        microbatches=plan.grad_accum,
    )


def between(points: Iterable[Point]) -> tuple[float, float]:
    """The seconds that a chart of plans spans: not from 0, or plans that differ by a tenth would lie on a line."""
    seconds = [point.seconds for point in points]
    span = max(seconds) - min(seconds) or max(seconds)
    return max(min(seconds) - span / 4, 0.0), max(seconds) + span / 8


def ticks(high: float, low: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers within two limits, apart by 1, 2 or 5 times a power of ten, `most` of them or fewer."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def short(value: float) -> str:
    """Three digits at most, never a power of ten."""
    return f"{Decimal(f'{value:.3g}'):f}" if abs(value) < 1000 else f"{value:.0f}"


def in_column(value: float) -> str:
    """Three digits, zeros at the end too, so that figures below each other are as exact; never a power of ten."""
    return f"{Decimal(f'{value:#.3g}'):f}" if abs(value) < 1000 else f"{value:.0f}"


class Terminal(msgspec.Struct, frozen=True, kw_only=True):
    """Where characters go."""

    columns: int = 100
    colour: bool = False

    @property
    def width(self) -> int:
        return min(max(self.columns, NARROWEST), WIDEST)


def charts(pictures: Pictures, screen: Terminal) -> Iterator[str]:
    """All pictures of an answer, one below the other."""
    yield from cascade(pictures.memory, screen)
    yield ""
    yield from cascade(pictures.time, screen)
    if len(pictures.points) > 1:
        yield ""
        yield from plans(pictures.points, pictures.limit_gib, screen)
    if pictures.pipeline is not None:
        yield ""
        yield from gantt(pictures.pipeline, screen)


def cascade(whole: StackedBar, screen: Terminal) -> Iterator[str]:
    """A bar for each part, beginning where the one before ended, and one for the sum beside what there is room for."""
    room, total, limit = screen.width - NAMES - FIGURES, whole.total, whole.limit
    scale = room / whole.extent if whole.extent > 0 else 0.0
    yield f"{whole.title} ({whole.unit})"
    for number, (entry, (start, end)) in enumerate(zip(whole.entries, whole.spans, strict=True)):
        painted = bar(start * scale, end * scale)[:room].ljust(room)
        if screen.colour:
            painted = f"\x1b[{COLOURS[number % len(COLOURS)]}m{painted}\x1b[0m"
        yield f"{entry.name[: NAMES - 1]:<{NAMES}}{painted}{short(entry.value):>8}"
    cells = list(bar(0.0, total * scale).ljust(room))
    if limit:  # the free room is dotted, with a mark at its end
        edge = min(round(limit * scale), room) - 1
        free = range(math.ceil(total * scale), edge)
        cells[free.start : free.stop] = "·" * len(free)
        cells[edge] = "▕" if cells[edge] in " ·" else cells[edge]
    of = f" of {short(limit)}" if limit else ""
    yield f"{'total':<{NAMES}}{''.join(cells)}{short(total) + of:>8}"


def bar(start: float, end: float) -> str:
    """Characters from column 0 to `end`, filled from `start` on; the ends to an eighth of a column."""
    first = math.floor(start)
    cells = [" "] * first
    for column in range(first, math.ceil(end)):
        covered = min(end, column + 1) - max(start, column)
        if start > column and end >= column + 1:  # a beginning inside a column: no character is filled on its right
            cells.append("█" if covered >= 0.5 else "▐" if covered >= 0.25 else " ")
        else:
            cells.append(EIGHTHS[max(round(covered * 8), 1)])
    return "".join(cells)


def plans(points: tuple[Point, ...], limit_gib: float, screen: Terminal) -> Iterator[str]:
    """Plans by memory and seconds: numbers are those that nothing beats in both, dots the others."""
    left = 9
    room = screen.width - left - 2
    most_gib = max(limit_gib, *(point.gib for point in points)) * 1.02
    low, high = between(points)
    cells = [[" "] * room for _ in range(ROWS)]

    def at(gib: float, seconds: float) -> tuple[int, int]:
        row = int((high - seconds) / (high - low) * ROWS)
        return min(row, ROWS - 1), min(int(gib / most_gib * room), room - 1)

    if limit_gib:
        for row in range(ROWS):
            cells[row][at(limit_gib, low)[1]] = "│"
    for point in points:
        if not point.front:
            row, column = at(point.gib, point.seconds)
            cells[row][column] = "·"
    best = [point for point in points if point.front]
    for number, point in enumerate(best, 1):
        row, column = at(point.gib, point.seconds)
        for offset, digit in enumerate(str(number)):
            cells[row][min(column + offset, room - 1)] = digit
    yield "Plans by memory and time: the numbered ones are beaten by none in both"
    for row in range(ROWS):
        mark = short(high - (high - low) * row / ROWS) + " s" if row % 4 == 0 else ""
        yield f"{mark:>{left - 1}} ┤{''.join(cells[row])}".rstrip()
    yield f"{'':>{left}}└{'─' * room}"
    yield f"{'':>{left}} {_scale_line(most_gib, room)}"
    for number, point in enumerate(best, 1):
        yield f"{number:>4}  {short(point.gib):>6} GiB  {short(point.seconds):>7} s  {point.label}"


def _scale_line(most: float, room: int) -> str:
    cells = [" "] * room
    for tick in ticks(most):
        text = short(tick) + (" GiB" if tick == 0 else "")
        first = min(int(tick / most * room), room - len(text))
        if all(cell == " " for cell in cells[max(first - 1, 0) : first + len(text)]):
            cells[first : first + len(text)] = text
    return "".join(cells).rstrip()


def gantt(pipeline: PipelineChart, screen: Terminal) -> Iterator[str]:
    """A line for each rank of a pipeline."""
    timeline = pipeline.timeline
    idle = f"{timeline.bubble:.1%} idle" if pipeline.shown == pipeline.microbatches else "longer steps idle less"
    yield f"{pipeline.title}: {short(timeline.seconds)} s, {idle}"
    yield from render(timeline, max(screen.width - IDLE_FIGURES, 20))
    yield "F forward, B backward, I and W its halves, · idle"
