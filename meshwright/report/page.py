"""A page that stands alone: one file, no script, nothing fetched; light or dark as the reader has it."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from meshwright.cost.simulate import Timeline
from meshwright.report import figures
from meshwright.report.picture import Pictures, Point, Whole, short
from meshwright.report.style import STYLE

KINDS = {"F": "forward", "B": "backward", "I": "backward, its input's half", "W": "backward, its weights' half"}


def page(pictures: Pictures) -> str:
    """The page of a plan."""
    return document(pictures.title, pictures.heading, _sections(pictures))


def document(title: str, heading: Iterable[str], sections: Iterable[str]) -> str:
    """A whole page. Whatever a user wrote is shown as text; sections are markup already."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Whatever slipped through would still not run, or fetch anything.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in heading),
            *sections,
            "</main>",
            "</body>",
            "</html>\n",
        ]
    )


def _sections(pictures: Pictures) -> Iterator[str]:
    yield from section(pictures.memory.title, figures.whole(pictures.memory), parts_table(pictures.memory))
    yield from section(pictures.time.title, figures.whole(pictures.time), parts_table(pictures.time))
    if len(pictures.points) > 1:
        drawn = figures.plans(pictures.points, pictures.limit_gib)
        yield from section("Plans by memory and time", drawn, _plans_table(pictures.points))
    if pictures.pipeline is not None:
        drawn = figures.gantt(pictures.pipeline)
        yield from section(pictures.pipeline.title, drawn, _legend(pictures.pipeline.timeline))


def section(title: str, drawn: str, below: str) -> Iterator[str]:
    """A picture with its title above and its numbers below it."""
    yield "<section>"
    yield f"<h2>{escape(title)}</h2>"
    yield f"<figure>{drawn}</figure>"
    yield below
    yield "</section>"


def parts_table(whole: Whole) -> str:
    """The same numbers to read, with the reason of each."""
    rows = [(entry.name, f"{short(entry.value)} {whole.unit}", entry.why) for entry in whole.entries]
    rows.append(("in all", f"{short(whole.total)} {whole.unit}", ""))
    return table("the numbers, with their reasons", ("part", whole.unit, "why"), rows)


def _plans_table(points: tuple[Point, ...]) -> str:
    best = [point for point in points if point.front]
    rows = [
        (str(number), f"{short(point.gib)} GiB", f"{short(point.seconds)} s", point.label)
        for number, point in enumerate(best, 1)
    ]
    return table("the numbered plans", ("", "memory", "a step", "plan"), rows, shown=True)


def table(summary: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], shown: bool = False) -> str:
    """Numbers to read, opened by whoever wants them."""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<details{' open' if shown else ''}><summary>{escape(summary)}</summary>{inner}</details>"


def _legend(timeline: Timeline) -> str:
    slots = [slot for row in timeline.rows for slot in row]
    used = {slot.action.kind for slot in slots}
    names = [f'<li><i class="{kind}"></i>{words}</li>' for kind, words in KINDS.items() if kind in used]
    if any(slot.action.stage >= len(timeline.rows) for slot in slots):
        names.append("<li>a rank's second chunk is lighter</li>")
    return f'<ul class="legend">{"".join(names)}<li>numbers are microbatches</li></ul>'
