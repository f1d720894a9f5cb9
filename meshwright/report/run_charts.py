"""The page of a run, or of several below each other: the report's words, and its pictures."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.report import run_summary, run_text, svg
from meshwright.report.html import document, parts_table, section, table
from meshwright.report.plan_charts import ChartEntry, StackedBar, short, ticks
from meshwright.report.run_data import FolderFacts, duration
from meshwright.report.run_summary import Curve, RunReport
from meshwright.report.svg import LEFT, RIGHT, ROW, WIDTH

HEIGHT = 300.0
LEFT_EDGE, TOP, BELOW = 70.0, 24.0, 44.0  # margins of a curve
PAIR = 2 * ROW + 14  # height of a prediction and its measurement


def run_page(runs: Sequence[tuple[FolderFacts, RunReport]]) -> str:
    """The whole page; several runs begin with a table of them."""
    title = ", ".join(dict.fromkeys(report.ran.name for _, report in runs))
    if len(runs) == 1:
        facts, report = runs[0]
        return document(title, list(run_text.what_ran(report))[1:], _sections(facts, report))
    (_, names), *rows = run_text.cells_of([report for _, report in runs])
    body = [(name, *cells) for name, cells in rows]
    sections = [table("the runs side by side", ("", *names), body, shown=True)]
    for facts, report in runs:
        sections.append(f"<h1>{escape(report.ran.name)}</h1>")
        sections += [f"<p>{escape(line)}</p>" for line in run_text.what_ran(report)]
        sections += _sections(facts, report)
    return document(title, [f"{len(runs)} runs"], sections)


def _sections(facts: FolderFacts, report: RunReport) -> Iterator[str]:
    """The pictures of one run."""
    if any(None not in row for row in run_text.comparisons(report)):
        below = "".join(f"<p>{escape(line)}</p>" for line in run_text.reasons(report))
        yield section("Predicted and measured", pair_bars(report), below)
    marks = [(each.last_step, each.ended) for each in report.attempts if each.ended]
    marks += [(each.step, each.text) for each in report.happened]
    validation = report.losses.validation if report.losses else ()
    for drawn in (run_summary.loss_curve(facts.kept, validation, marks), run_summary.seconds(facts.kept, marks)):
        if drawn.line:
            yield section(drawn.title, curve(drawn), _legend(drawn))
    if report.parts:
        entries = tuple(ChartEntry(name=part.name, value=part.seconds) for part in report.parts if part.seconds > 0)
        spent = StackedBar(title=f"Where the time went: {duration(report.wall_seconds)}", unit="s", entries=entries)
        yield section(spent.title, svg.whole(spent), parts_table(spent))
    if report.attempts:
        heads = ("session.attempt", "steps", "lost", "ready after", "lasted", "ended by")
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
        yield table("every start of the ranks", heads, rows)


def pair_bars(report: RunReport) -> str:
    """Two bars for each figure that was predicted and measured, the longer one as long as there is room."""
    parts, described, top = [], [], 4.0
    for name, predicted, measured in run_text.comparisons(report):
        if predicted is None or measured is None:
            continue
        largest = max(predicted, measured) or 1.0  # each figure has its own scale
        parts.append(svg.text(LEFT - 10, top + ROW + 4, svg.fitted(name, LEFT - 20), class_="name"))
        for y, value, kind, colour in (
            (top, predicted, "predicted", "series-8"),
            (top + ROW, measured, "measured", "series-0"),
        ):
            words, width = run_text.shown(name, value), max(value / largest * (WIDTH - LEFT - RIGHT), 1.0)
            parts.append(svg.rect(LEFT, y + 3, width, ROW - 6, f"{name}, {kind}: {words}", class_=colour))
            parts.append(svg.text(WIDTH - RIGHT + 12, y + ROW / 2 + 4, f"{words} {kind}", class_="figure"))
        pair = (run_text.shown(name, value) for value in (predicted, measured))
        described.append(f"{name}: {' predicted, '.join(pair)} measured")
        top += PAIR
    return svg.drawing(WIDTH, top - 4, "Predicted and measured", "; ".join(described) + ".", parts)


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

    parts = []
    for tick in ticks(high, low, most=5):
        parts.append(svg.line(LEFT_EDGE, y(tick), right, y(tick), class_="grid"))
        parts.append(svg.text(LEFT_EDGE - 8, y(tick) + 4, short(tick), class_="tick end"))
    whole = [tick for tick in ticks(last, first, most=8) if tick == round(tick)]
    parts += [svg.text(x(tick), bottom + 17, f"{tick:,.0f}", class_="tick middle") for tick in whole]
    parts.append(svg.text(right, bottom + 36, "step", class_="tick end"))
    parts.append(svg.text(8, 14, drawn.unit or drawn.title, class_="tick"))
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


def _described(drawn: Curve) -> str:
    """The picture for those who cannot see it."""
    (first, began), (last, ended) = drawn.line[0], drawn.line[-1]
    words = f"{drawn.line_name}: {short(began)} at step {first:.0f}, {short(ended)} at step {last:.0f}"
    points = f"; {drawn.points_name}: {', '.join(short(value) for _, value in drawn.points[:20])}"
    marks = "; ".join(f"step {step}: {what}" for step, what in drawn.marks)
    return words + (points if drawn.points else "") + (f"; {marks}" if marks else "") + "."


def _legend(drawn: Curve) -> str:
    names = [f'<li><i style="background: var(--s0)"></i>{escape(drawn.line_name)}</li>']
    if drawn.points:
        names.append(f'<li><i style="background: var(--s1)"></i>{escape(drawn.points_name)}</li>')
    events = ""
    if drawn.marks:
        names.append('<li><i style="background: var(--strong)"></i>event (hover for details)</li>')
        events = table("events", ("step", "event"), [(f"{step:,}", what) for step, what in drawn.marks])
    return f'<ul class="legend">{"".join(names)}</ul>{events}'
