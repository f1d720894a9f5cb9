"""The pictures of a run's page: curves over steps, and promises beside measurements."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

import msgspec

from meshwright.report import svg
from meshwright.report.figures import LEFT, RIGHT, ROW, WIDTH
from meshwright.report.picture import short, ticks
from meshwright.report.run_series import Curve

HEIGHT = 300.0
LEFT_EDGE, TOP, BELOW = 70.0, 24.0, 44.0  # margins of a curve
PAIR = 2 * ROW + 14  # height of a promise and its measurement
Place = Callable[[float], float]  # of a step or a value, in pixels


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised, and what was measured."""

    name: str
    promised: float | None
    measured: float | None
    words: tuple[str, str]  # both as people read them


def curve(drawn: Curve) -> str:
    """A line over steps, points beside it, and a mark wherever something happened."""
    right, bottom = WIDTH - 30, HEIGHT - BELOW
    steps = [step for step, _ in (*drawn.line, *drawn.points)]
    first, last = min(steps), max([*steps, min(steps) + 1])
    low, high = limits(drawn.values)

    def x(step: float) -> float:
        return LEFT_EDGE + (step - first) / (last - first) * (right - LEFT_EDGE)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    parts = [*_grid(drawn, (first, last), (low, high), x, y)]
    for step, what in drawn.marks:
        inner = svg.element("title", escape(f"step {step}: {what}"))
        place = min(max(x(step), LEFT_EDGE), right)
        parts.append(svg.element("line", inner, x1=place, y1=TOP, x2=place, y2=bottom, class_="limit"))
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in drawn.line)
    parts.append(svg.element("polyline", points=places, class_="front"))
    for step, value in drawn.points:
        inner = svg.element("title", escape(f"{drawn.points_name}, step {step:.0f}: {short(value)} {drawn.unit}"))
        parts.append(svg.element("circle", inner, cx=x(step), cy=y(value), r=3.0, class_="series-1"))
    return svg.drawing(WIDTH, HEIGHT, drawn.title, _told(drawn), parts)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """What the upright axis spans: a little more than the values, never nothing."""
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _grid(drawn: Curve, steps: tuple[float, float], values: tuple[float, float], x: Place, y: Place) -> Iterator[str]:
    right, bottom = WIDTH - 30, HEIGHT - BELOW
    for tick in ticks(values[1], values[0], most=5):
        yield svg.line(LEFT_EDGE, y(tick), right, y(tick), class_="grid")
        yield svg.text(LEFT_EDGE - 8, y(tick) + 4, short(tick), class_="tick end")
    for tick in (tick for tick in ticks(steps[1], steps[0], most=8) if tick == round(tick)):
        yield svg.text(x(tick), bottom + 17, f"{tick:,.0f}", class_="tick middle")
    yield svg.text(right, bottom + 36, "step", class_="tick end")
    yield svg.text(8, 14, drawn.unit or drawn.title, class_="tick")


def _told(drawn: Curve) -> str:
    """The picture for those who cannot see it."""
    (first, began), (last, ended) = drawn.line[0], drawn.line[-1]
    words = f"{drawn.line_name}: {short(began)} at step {first:.0f}, {short(ended)} at step {last:.0f}"
    points = f"; {drawn.points_name}: {', '.join(short(value) for _, value in drawn.points[:20])}"
    marks = "; ".join(f"step {step}: {what}" for step, what in drawn.marks)
    return words + (points if drawn.points else "") + (f"; {marks}" if marks else "") + "."


def pairs(drawn: Sequence[Pair]) -> str:
    """Two bars for each figure, the longer one as long as there is room; each figure has its own scale."""
    room = WIDTH - LEFT - RIGHT
    parts, told = [], []
    for number, pair in enumerate(drawn):
        top = number * PAIR + 4
        largest = max(pair.promised or 0.0, pair.measured or 0.0) or 1.0
        parts.append(svg.text(LEFT - 10, top + ROW + 4, svg.fitted(pair.name, LEFT - 20), class_="name"))
        bars = ((pair.promised, "promised", "series-8"), (pair.measured, "measured", "series-0"))
        for row, ((value, kind, colour), words) in enumerate(zip(bars, pair.words, strict=True)):
            y = top + row * ROW
            width = max((value or 0.0) / largest * room, 1.0)
            parts.append(svg.rect(LEFT, y + 3, width, ROW - 6, f"{pair.name}, {kind}: {words}", class_=colour))
            parts.append(svg.text(WIDTH - RIGHT + 12, y + ROW / 2 + 4, f"{words} {kind}", class_="figure"))
        told.append(f"{pair.name}: {pair.words[0]} promised, {pair.words[1]} measured")
    return svg.drawing(WIDTH, len(drawn) * PAIR, "Promised and measured", "; ".join(told) + ".", parts)
