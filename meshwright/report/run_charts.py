"""The page of a run, or of several with their losses on one chart: words, pictures, sample and run file."""

from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from meshwright.report import html, run_summary, run_text
from meshwright.report.html import LEFT, RIGHT, ROW, SERIES, WIDTH, document, parts_table, section, table
from meshwright.report.plan_charts import ChartEntry, StackedBar, short, ticks
from meshwright.report.run_data import FolderFacts, duration
from meshwright.report.run_summary import Curve, RunReport, Runs
from meshwright.runtime.files import printable
from meshwright.spec.units import plural

HEIGHT = 300.0
LEFT_EDGE, TOP, BELOW = 70.0, 24.0, 44.0  # margins of a curve
PAIR = 2 * ROW + 14  # height of a prediction and its measurement
SMOOTH = 0.6  # the weight of the moving average: what TensorBoard begins with


def run_page(runs: Runs, weight: float = SMOOTH) -> str:
    """The whole page; several runs begin with a table of them, and their losses on one chart."""
    title = ", ".join(dict.fromkeys(report.ran.name for _, report in runs))
    if len(runs) == 1:
        facts, report = runs[0]
        return document(title, list(run_text.what_ran(report))[1:], _sections(facts, report, weight))
    (_, names), *rows = run_text.cells_of([report for _, report in runs])
    sections = [
        table("the runs", run_text.HEADS, [run_text.overview_row(report) for _, report in runs], shown=True),
        table("the runs side by side", ("", *names), [(name, *cells) for name, cells in rows]),
    ]
    if losses := run_summary.named_losses(runs):
        sections.append(section("Loss", chart(losses, weight), _legend(losses, weight)))
    for name, (facts, report) in zip(names, runs, strict=True):
        inner = "".join(
            (*(f"<p>{escape(line)}</p>" for line in run_text.what_ran(report)), *_sections(facts, report, weight))
        )
        sections.append(f"<details><summary>{escape(name)}</summary>{inner}</details>")
    return document(title, [plural(len(runs), "run")], sections)


def _sections(facts: FolderFacts, report: RunReport, weight: float) -> Iterator[str]:
    """The pictures of one run, what its model wrote, and its run file."""
    if any(None not in row for row in run_text.comparisons(report)):
        below = "".join(f"<p>{escape(line)}</p>" for line in run_text.reasons(report))
        yield section("Predicted and measured", pair_bars(report), below)
    marks = [(each.last_step, each.ended) for each in report.attempts if each.ended]
    marks += [(each.step, each.text) for each in report.happened]
    for drawn, smooth in (
        (run_summary.loss_curve(facts.kept, report.losses), weight),
        (run_summary.seconds(facts.kept), 0.0),
    ):
        if drawn.line:
            marked = [msgspec.structs.replace(drawn, marks=tuple(marks))]
            yield section(drawn.title, chart(marked, smooth), _legend(marked, smooth))
    if report.parts:
        entries = tuple(ChartEntry(name=part.name, value=part.seconds) for part in report.parts if part.seconds > 0)
        spent = StackedBar(title=f"Where the time went: {duration(report.wall_seconds)}", unit="s", entries=entries)
        saves = "".join(f"<p>{escape(line)}</p>" for line in run_text.of_saves(report.saves))
        yield section(spent.title, html.whole(spent), saves + parts_table(spent))
    if report.attempts:
        heads = ("session.attempt", "steps", "lost", "ready after", "start", "lasted", "ended by")
        rows = [
            (
                f"{each.session}.{each.number}",
                f"{each.first_step:,} to {each.last_step:,}",
                f"{each.lost}",
                f"{short(each.at)} s",
                run_text.start_words(each),
                f"{short(each.seconds)} s",
                each.ended,
            )
            for each in report.attempts
        ]
        yield table("every start of the ranks", heads, rows)
    if evaluated := list(run_text.of_evaluation(report))[1:]:
        yield f"<section><h2>Evaluation</h2><pre>{escape(chr(10).join(evaluated))}</pre></section>"
    if report.sample:
        yield f"<section><h2>Sample</h2><pre>{escape(printable(report.sample))}</pre></section>"
    yield f"<details><summary>run.toml</summary><pre>{escape(printable(facts.text))}</pre></details>"


def pair_bars(report: RunReport) -> str:
    """Two bars for each figure that was predicted and measured, the longer one as long as there is room."""
    parts, described, top = [], [], 4.0
    for name, predicted, measured in run_text.comparisons(report):
        if predicted is None or measured is None:
            continue
        largest = max(predicted, measured) or 1.0  # each figure has its own scale
        parts.append(html.text(LEFT - 10, top + ROW + 4, html.fitted(name, LEFT - 20), class_="name"))
        for y, value, kind, colour in (
            (top, predicted, "predicted", "series-8"),
            (top + ROW, measured, "measured", "series-0"),
        ):
            words, width = run_text.shown(name, value), max(value / largest * (WIDTH - LEFT - RIGHT), 1.0)
            parts.append(html.rect(LEFT, y + 3, width, ROW - 6, f"{name}, {kind}: {words}", class_=colour))
            parts.append(html.text(WIDTH - RIGHT + 12, y + ROW / 2 + 4, f"{words} {kind}", class_="figure"))
        pair = (run_text.shown(name, value) for value in (predicted, measured))
        described.append(f"{name}: {' predicted, '.join(pair)} measured")
        top += PAIR
    return html.drawing(WIDTH, top - 4, "Predicted and measured", "; ".join(described) + ".", parts)


def chart(curves: Sequence[Curve], weight: float = 0.0) -> str:
    """Lines over steps on one pair of axes, points beside them, and a mark wherever something happened.

    With a weight each line is drawn smoothed, over itself as it was, faint.
    """
    right, bottom = WIDTH - 30, HEIGHT - BELOW
    steps = [step for each in curves for step, _ in (*each.line, *each.points)]
    first, last = min(steps), max([*steps, min(steps) + 1])
    low, high = limits([value for each in curves for value in each.values])

    def x(step: float) -> float:
        return LEFT_EDGE + (step - first) / (last - first) * (right - LEFT_EDGE)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    def path(pairs: Sequence[tuple[float, float]], **attributes: str) -> str:
        places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in pairs)
        return html.element("polyline", points=places, **attributes)

    title, unit = curves[0].title, curves[0].unit
    parts = []
    for tick in ticks(high, low, most=5):
        parts.append(html.line(LEFT_EDGE, y(tick), right, y(tick), class_="grid"))
        parts.append(html.text(LEFT_EDGE - 8, y(tick) + 4, short(tick), class_="tick end"))
    whole = [tick for tick in ticks(last, first, most=8) if tick == round(tick)]
    parts += [html.text(x(tick), bottom + 17, f"{tick:,.0f}", class_="tick middle") for tick in whole]
    parts.append(html.text(right, bottom + 36, "step", class_="tick end"))
    parts.append(html.text(8, 14, unit or title, class_="tick"))
    for step, what in (mark for each in curves for mark in each.marks):
        inner = html.element("title", escape(f"step {step}: {what}"))
        place = min(max(x(step), LEFT_EDGE), right)
        parts.append(html.element("line", inner, x1=place, y1=TOP, x2=place, y2=bottom, class_="limit"))
    if weight:
        parts += [path(each.line, class_="faint", style=_stroke(number)) for number, each in enumerate(curves)]
    for number, each in enumerate(curves):
        line = run_summary.smoothed(each.line, weight) if weight else each.line
        parts.append(path(line, class_="front", style=_stroke(number)))
        for step, value in each.points:
            words = f"{each.points_name}, step {step:.0f}: {short(value)} {unit}"
            inner = html.element("title", escape(f"{each.line_name}: {words}" if len(curves) > 1 else words))
            colour = f"series-{number % SERIES if len(curves) > 1 else 1}"
            parts.append(html.element("circle", inner, cx=x(step), cy=y(value), r=3.0, class_=colour))
    return html.drawing(WIDTH, HEIGHT, title, " ".join(map(_described, curves)), parts)


def _stroke(number: int) -> str:
    """The colour of a line; where there are more lines than colours, the next ones are dashed."""
    dashes = f"; stroke-dasharray: {6 * (number // SERIES)} 3" if number >= SERIES else ""
    return f"stroke: var(--s{number % SERIES}){dashes}"


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


def _legend(curves: Sequence[Curve], weight: float) -> str:
    """What is drawn how, and below it the events to read."""
    names = [
        f'<li><i style="background: var(--s{number % SERIES})"></i>{escape(each.line_name)}</li>'
        for number, each in enumerate(curves)
    ]
    points = sorted({each.points_name for each in curves if each.points})
    if len(curves) == 1:
        names += [f'<li><i style="background: var(--s1)"></i>{escape(name)}</li>' for name in points]
    else:
        names += [f"<li>points: {escape(name)}</li>" for name in points]
    names += [f"<li>faint: as measured; strong: its moving average (--smooth {weight:g})</li>"] if weight else []
    events = [(f"{step:,}", what) for each in curves for step, what in each.marks]
    names += ['<li><i style="background: var(--strong)"></i>event (hover for details)</li>'] if events else []
    return f'<ul class="legend">{"".join(names)}</ul>{table("events", ("step", "event"), events) if events else ""}'
