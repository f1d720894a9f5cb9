"""The page of a run, or of several below each other: the report's words, and its pictures."""

from collections.abc import Callable, Iterator, Sequence
from html import escape

import msgspec

from meshwright.report import run_summary, run_text, svg
from meshwright.report.html import document, parts_table, section, table
from meshwright.report.plan_charts import ChartEntry, StackedBar, short, ticks
from meshwright.report.run_data import FolderFacts, duration
from meshwright.report.run_summary import Curve, EvalLoss, RunReport
from meshwright.report.run_text import cells_of
from meshwright.report.svg import LEFT, RIGHT, ROW, WIDTH

HEIGHT = 300.0
LEFT_EDGE, TOP, BELOW = 70.0, 24.0, 44.0  # margins of a curve
PAIR = 2 * ROW + 14  # height of a prediction and its measurement
Place = Callable[[float], float]  # of a step or a value, in pixels


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted and a measured figure."""

    name: str
    predicted: float | None
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
    return svg.drawing(WIDTH, HEIGHT, drawn.title, _described(drawn), parts)


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


def _described(drawn: Curve) -> str:
    """The picture for those who cannot see it."""
    (first, began), (last, ended) = drawn.line[0], drawn.line[-1]
    words = f"{drawn.line_name}: {short(began)} at step {first:.0f}, {short(ended)} at step {last:.0f}"
    points = f"; {drawn.points_name}: {', '.join(short(value) for _, value in drawn.points[:20])}"
    marks = "; ".join(f"step {step}: {what}" for step, what in drawn.marks)
    return words + (points if drawn.points else "") + (f"; {marks}" if marks else "") + "."


def pair_bars(drawn: Sequence[Pair]) -> str:
    """Two bars for each figure, the longer one as long as there is room; each figure has its own scale."""
    room = WIDTH - LEFT - RIGHT
    parts, described = [], []
    for number, pair in enumerate(drawn):
        top = number * PAIR + 4
        largest = max(pair.predicted or 0.0, pair.measured or 0.0) or 1.0
        parts.append(svg.text(LEFT - 10, top + ROW + 4, svg.fitted(pair.name, LEFT - 20), class_="name"))
        bars = ((pair.predicted, "predicted", "series-8"), (pair.measured, "measured", "series-0"))
        for row, ((value, kind, colour), words) in enumerate(zip(bars, pair.words, strict=True)):
            y = top + row * ROW
            width = max((value or 0.0) / largest * room, 1.0)
            parts.append(svg.rect(LEFT, y + 3, width, ROW - 6, f"{pair.name}, {kind}: {words}", class_=colour))
            parts.append(svg.text(WIDTH - RIGHT + 12, y + ROW / 2 + 4, f"{words} {kind}", class_="figure"))
        described.append(f"{pair.name}: {pair.words[0]} predicted, {pair.words[1]} measured")
    return svg.drawing(WIDTH, len(drawn) * PAIR, "Predicted and measured", "; ".join(described) + ".", parts)


Shown = tuple[FolderFacts, RunReport]


def run_page(runs: Sequence[Shown]) -> str:
    """The whole page; several runs begin with a table of them."""
    title = ", ".join(dict.fromkeys(report.ran.name for _, report in runs))
    heading = list(run_text.what_ran(runs[0][1]))[1:] if len(runs) == 1 else [f"{len(runs)} runs"]
    return document(title, heading, _sections(runs))


def _sections(runs: Sequence[Shown]) -> Iterator[str]:
    if len(runs) > 1:
        (_, names), *rows = cells_of([report for _, report in runs])
        yield table("the runs side by side", ("", *names), [(name, *cells) for name, cells in rows], shown=True)
    for facts, report in runs:
        if len(runs) > 1:
            yield f"<h1>{escape(report.ran.name)}</h1>"
            yield from (f"<p>{escape(line)}</p>" for line in run_text.what_ran(report))
        yield from _pictures(facts, report)


def _pictures(facts: FolderFacts, report: RunReport) -> Iterator[str]:
    if compared := pairs(report):
        below = "".join(f"<p>{escape(line)}</p>" for line in run_text.reasons(report))
        yield from section("Predicted and measured", pair_bars(compared), below)
    marks = moments(report)
    for drawn in (
        run_summary.loss_curve(facts.kept, _validation(report), marks),
        run_summary.seconds(facts.kept, marks),
    ):
        if drawn.line:
            yield from section(drawn.title, curve(drawn), _legend(drawn))
    if report.parts:
        spent = shares(report)
        yield from section(spent.title, svg.whole(spent), parts_table(spent))
    if report.attempts:
        yield _attempts(report)


def pairs(report: RunReport) -> list[Pair]:
    """Predictions beside measurements, as bars."""
    return [
        Pair(
            name=name,
            predicted=predicted,
            measured=measured,
            words=(run_text.shown(name, predicted), run_text.shown(name, measured)),
        )
        for name, predicted, measured in run_text.comparisons(report)
        if predicted is not None and measured is not None
    ]


def moments(report: RunReport) -> list[tuple[int, str]]:
    """Steps at which something happened: an attempt that ended, an event."""
    ended = [(each.last_step, each.ended) for each in report.attempts if each.ended]
    return ended + [(each.step, each.text) for each in report.happened]


def shares(report: RunReport) -> StackedBar:
    """The wall time by what it was spent on."""
    return StackedBar(
        title=f"Where the time went: {duration(report.wall_seconds)}",
        unit="s",
        entries=tuple(ChartEntry(name=part.name, value=part.seconds) for part in report.parts if part.seconds > 0),
    )


def _validation(report: RunReport) -> tuple[EvalLoss, ...]:
    return report.losses.validation if report.losses else ()


def _legend(drawn: Curve) -> str:
    names = [f'<li><i style="background: var(--s0)"></i>{escape(drawn.line_name)}</li>']
    if drawn.points:
        names.append(f'<li><i style="background: var(--s1)"></i>{escape(drawn.points_name)}</li>')
    if drawn.marks:
        names.append('<li><i style="background: var(--strong)"></i>event (hover for details)</li>')
    legend = f'<ul class="legend">{"".join(names)}</ul>'
    if not drawn.marks:
        return legend
    return legend + table("events", ("step", "event"), [(f"{step:,}", what) for step, what in drawn.marks])


def _attempts(report: RunReport) -> str:
    rows = [
        (
            f"{each.session}.{each.number}",
            f"{each.first_step:,} to {each.last_step:,}",
            f"{each.lost}",
            f"{short(each.at)} s",
            f"{short(each.seconds)} s",
            each.ended,
        )
        for each in report.attempts
    ]
    heads = ("session.attempt", "steps", "lost", "ready after", "lasted", "ended by")
    return table("every start of the ranks", heads, rows)
