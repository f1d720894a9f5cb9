"""The page of a run, or of several below each other: the report's words, and its pictures."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.report import figures, run_figures, run_series, run_text
from meshwright.report.page import document, parts_table, section, table
from meshwright.report.picture import Entry, Whole, short
from meshwright.report.run_figures import Pair
from meshwright.report.run_folder import Facts
from meshwright.report.run_report import Report
from meshwright.report.run_series import Curve
from meshwright.report.run_state import duration
from meshwright.report.run_steps import HeldOut
from meshwright.report.run_table import cells_of

Shown = tuple[Facts, Report]


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


def _pictures(facts: Facts, report: Report) -> Iterator[str]:
    if compared := pairs(report):
        below = "".join(f"<p>{escape(line)}</p>" for line in run_text.reasons(report))
        yield from section("Promised and measured", run_figures.pairs(compared), below)
    marks = moments(report)
    for drawn in (run_series.losses(facts.kept, _held(report), marks), run_series.seconds(facts.kept, marks)):
        if drawn.line:
            yield from section(drawn.title, run_figures.curve(drawn), _legend(drawn))
    if report.parts:
        spent = shares(report)
        yield from section(spent.title, figures.whole(spent), parts_table(spent))
    if report.attempts:
        yield _attempts(report)


def pairs(report: Report) -> list[Pair]:
    """Promises beside measurements, as bars."""
    return [
        Pair(
            name=name,
            promised=promised,
            measured=measured,
            words=(run_text.shown(name, promised), run_text.shown(name, measured)),
        )
        for name, promised, measured in run_text.comparisons(report)
        if promised is not None and measured is not None
    ]


def moments(report: Report) -> list[tuple[int, str]]:
    """Steps at which something happened: an attempt that ended, an event."""
    ended = [(each.last_step, each.ended) for each in report.attempts if each.ended]
    return ended + [(each.step, each.text) for each in report.happened]


def shares(report: Report) -> Whole:
    """The wall time by what it was spent on."""
    return Whole(
        title=f"Where the time went: {duration(report.wall_seconds)}",
        unit="s",
        entries=tuple(Entry(name=part.name, value=part.seconds) for part in report.parts if part.seconds > 0),
    )


def _held(report: Report) -> tuple[HeldOut, ...]:
    return report.losses.held_out if report.losses else ()


def _legend(drawn: Curve) -> str:
    names = [f'<li><i style="background: var(--s0)"></i>{escape(drawn.line_name)}</li>']
    if drawn.points:
        names.append(f'<li><i style="background: var(--s1)"></i>{escape(drawn.points_name)}</li>')
    if drawn.marks:
        names.append('<li><i style="background: var(--strong)"></i>something happened: point at it</li>')
    legend = f'<ul class="legend">{"".join(names)}</ul>'
    if not drawn.marks:
        return legend
    return legend + table("what happened", ("step", "what"), [(f"{step:,}", what) for step, what in drawn.marks])


def _attempts(report: Report) -> str:
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
