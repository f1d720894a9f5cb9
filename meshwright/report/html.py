"""A page that stands alone: one file, no script, nothing fetched; light or dark as the reader has it.

Its pictures are SVG by hand: few elements, every text and attribute escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from meshwright.report.plan_charts import Pictures, PipelineChart, Point, StackedBar, between, short, ticks
from meshwright.spec.units import plural

LETTER = 6.6  # pixels that a letter of 12-pixel text takes at most, on average: labels are placed by it
WIDTH = 920.0
SERIES = 10  # colours of the page's style
BAR, ROW = 34.0, 22.0  # heights
LEFT, RIGHT = 150.0, 130.0  # margins of a bar
PLOT = 340.0  # height of the chart of plans
LANE = 26.0  # height of a rank's lane
SMALLEST = 13.0  # pixels of an action that is still named


def element(name: str, inner: str = "", **attributes: Any) -> str:
    """One element. Attributes are escaped; `inner` is markup already."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_written(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def _written(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    """Words at a place, shown as they are."""
    return element("text", escape(words) or " ", x=float(x), y=float(y), **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: Any) -> str:
    """A rectangle that says what it is when it is pointed at, or read aloud."""
    inner = element("title", escape(title)) if title else ""
    return element("rect", inner, x=float(x), y=float(y), width=float(width), height=float(height), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def drawing(width: float, height: float, name: str, description: str, parts: Iterable[str]) -> str:
    """A whole picture, which tells its name and what it shows to those who cannot see it."""
    known = element("title", escape(name)) + element("desc", escape(description))
    return element(
        "svg",
        known + "".join(parts),
        viewBox=f"0 0 {_written(float(width))} {_written(float(height))}",
        role="img",
        aria_label=f"{name}. {description}",
        preserveAspectRatio="xMinYMin meet",
    )


def fitted(words: str, pixels: float) -> str:
    """Words cut to a width, with a sign that they are."""
    letters = int(pixels / LETTER)
    if len(words) <= letters:
        return words
    return words[: max(letters - 1, 0)] + "…" if letters > 1 else ""


def uncovered(
    x: float, y: float, pixels: float, taken: list[tuple[float, float, float]], height: float, lowest: float
) -> float:
    """The height nearest to `y`, upwards first, at which words of a width meet no others of `taken` (x, y, width)."""
    for step in range(200):
        for other in (y - step * height, y + step * height):
            inside = height <= other <= lowest
            if inside and not any(
                abs(other - at) < height and x < left + width and left < x + pixels for left, at, width in taken
            ):
                return other
    return y


def whole(picture: StackedBar) -> str:
    """One stacked bar beside what there is room for, and below it each part where it lies in the stack."""
    total, limit, unit = picture.total, picture.limit, picture.unit
    scale = (WIDTH - LEFT - RIGHT) / picture.extent if picture.extent > 0 else 0.0
    stack, rows = [text(LEFT - 10, BAR / 2 + 5, "total", class_="name strong")], []
    for number, (entry, (start, end)) in enumerate(zip(picture.entries, picture.spans, strict=True)):
        x, y = LEFT + start * scale, BAR + 30 + number * ROW
        words, colour = f"{entry.name}: {short(entry.value)} {unit}", f"series-{number % SERIES}"
        if entry.value > 0:  # what is taken off is drawn over: the next part begins before the last one's end
            stack.append(rect(x, 4, entry.value * scale, BAR - 8, words, class_=colour))
        rows.append(text(LEFT - 10, y + ROW / 2 + 4, fitted(entry.name, LEFT - 20), class_="name"))
        width = max((end - start) * scale, 1.0)
        rows.append(rect(x, y + 4, width, ROW - 8, f"{words}. {entry.why}", class_=colour))
        share = f" ({entry.value / total:.0%})" if total else ""
        figure = f"{short(entry.value)} {unit}{share}"
        rows.append(text(WIDTH - RIGHT + 12, y + ROW / 2 + 4, figure, class_="figure"))
    words = short(total) + (f" of {short(limit)}" if limit else "") + f" {unit}"
    stack.append(text(WIDTH - RIGHT + 12, BAR / 2 + 5, words, class_="figure strong"))
    if limit:
        x = LEFT + limit * scale
        stack.append(line(x, 0, x, BAR + 4, class_="limit"))
        stack.append(text(x, BAR + 18, f"{picture.limit_name}: {short(limit)} {unit}", class_="limit-name"))
    described = ", ".join(f"{entry.name} {short(entry.value)}" for entry in picture.entries)
    room = f"; there is room for {short(limit)}" if limit else ""
    described += f"; total {short(total)} {unit}{room}."
    return drawing(WIDTH, BAR + 38 + len(picture.entries) * ROW, picture.title, described, [*stack, *rows])


def plans(points: tuple[Point, ...], limit_gib: float) -> str:
    """Memory to the right, seconds upwards; plans that nothing beats in both are numbered and joined by steps."""
    right, bottom = WIDTH - 30, PLOT - 40
    most_gib = max(limit_gib, *(point.gib for point in points)) * 1.05
    low, high = between(points)

    def x(gib: float) -> float:
        return 70 + gib / most_gib * (right - 70)

    def y(seconds: float) -> float:
        return bottom - (seconds - low) / (high - low) * (bottom - 20)

    parts = []
    for tick in ticks(most_gib, most=8):
        parts.append(line(x(tick), 14, x(tick), bottom, class_="grid"))
        parts.append(text(x(tick), bottom + 17, short(tick), class_="tick middle"))
    for tick in ticks(high, low, most=5):
        parts.append(line(70, y(tick), right, y(tick), class_="grid"))
        parts.append(text(62, y(tick) + 4, short(tick), class_="tick end"))
    parts.append(text(right, bottom + 34, "GiB on the most loaded rank", class_="tick end"))
    parts.append(text(8, 12, "s/step", class_="tick"))
    if limit_gib:
        edge = x(limit_gib)
        parts += [line(edge, 14, edge, bottom, class_="limit"), text(edge - 6, 24, "the device", class_="limit-name")]
    best = [point for point in points if point.front]
    places = [(x(point.gib), y(point.seconds)) for point in best]
    # From plan to plan: with more memory nothing is won until the next.
    steps = [corner for (_, before), (at, now) in pairwise(places) for corner in ((at, before), (at, now))]
    path = " ".join(f"{left:.1f},{top:.1f}" for left, top in (*places[:1], *steps))
    parts.append(element("polyline", points=path, class_="front"))
    for point in points:
        inner = element("title", escape(f"{point.label}: {short(point.gib)} GiB, {short(point.seconds)} s"))
        kind, radius = ("dot best", 5.0) if point.front else ("dot", 3.0)
        parts.append(element("circle", inner, cx=x(point.gib), cy=y(point.seconds), r=radius, class_=kind))
    parts += [text(left, top, name, class_="number") for name, left, top in labels(places, bottom)]
    front = "; ".join(f"{short(point.gib)} GiB in {short(point.seconds)} s: {point.label}" for point in best)
    return drawing(WIDTH, PLOT, "Plans by memory and time", f"Beaten by none in both: {front}.", parts)


def labels(places: list[tuple[float, float]], lowest: float) -> list[tuple[str, float, float]]:
    """A number for each place, beside it, where none lies on another."""
    found: list[tuple[str, float, float]] = []
    for number, (x, y) in enumerate(places, 1):
        taken = [(left, top, len(name) * LETTER) for name, left, top in found]
        clear = uncovered(x + 8, y - 6, len(str(number)) * LETTER, taken, 13.0, lowest)
        found.append((str(number), x + 8, clear))
    return found


def gantt(pipeline: PipelineChart) -> str:
    """A lane for each rank, its actions in time, with their microbatch where that has room."""
    timeline = pipeline.timeline
    is_whole = pipeline.shown == pipeline.microbatches  # else a beginning and an end alone, where most is idle
    left, scale = 70.0, (WIDTH - 70 - 110) / timeline.seconds
    parts = []
    for rank, row in enumerate(timeline.rows):
        y = rank * LANE
        parts.append(text(left - 8, y + LANE / 2 + 4, f"rank {rank}", class_="tick end"))
        parts.append(rect(left, y + 3, timeline.seconds * scale, LANE - 6, class_="idle"))
        for slot in row:
            action, x, width = slot.action, left + slot.start * scale, (slot.end - slot.start) * scale
            lighter = " second" * (action.stage // len(timeline.rows) % 2)  # every second chunk
            words = f"{action}: {short(slot.start)} to {short(slot.end)} s"
            parts.append(rect(x, y + 3, width, LANE - 6, words, class_=f"action {action.kind}{lighter}"))
            name = str(action.microbatch)
            if width >= max(SMALLEST, len(name) * LETTER + 4):
                parts.append(text(x + width / 2, y + LANE / 2 + 4, name, class_="action-name"))
        if is_whole:
            parts.append(text(WIDTH - 100, y + LANE / 2 + 4, f"{timeline.bubbles[rank]:.1%} idle", class_="tick"))
    bottom = len(timeline.rows) * LANE
    for tick in ticks(timeline.seconds, most=8):
        x = left + tick * scale
        parts.append(line(x, bottom, x, bottom + 5, class_="axis"))
        parts.append(text(x, bottom + 19, f"{short(tick)} s", class_="tick middle"))
    idle = f"{timeline.bubble:.1%} idle" if is_whole else "longer steps idle less"
    summary = f"{plural(len(timeline.rows), 'rank')}, {short(timeline.seconds)} seconds, {idle}."
    return drawing(WIDTH, bottom + 28, pipeline.title, summary, parts)


KINDS = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
STYLE = """\
:root {
  --paper: #ffffff; --ink: #1b1f24; --quiet: #57606a; --line: #d0d7de; --strong: #b42318; --idle: #eef1f4;
  --s0: #2f6fb3; --s1: #d97706; --s2: #2e8b57; --s3: #b0489a; --s4: #0e8f9e;
  --s5: #c2483d; --s6: #6d5bd0; --s7: #8a7a00; --s8: #5b7f95; --s9: #9a6b4f;
  --forward: #5b9bd5; --backward: #e0a458; --input: #e58f7b; --weight: #7fb77e; --on: #101418;
  --forward-second: #a5c8ec; --backward-second: #f1d09e; --input-second: #f3c1b5; --weight-second: #b9dcb8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --ink: #e6edf3; --quiet: #9da7b1; --line: #333b44; --strong: #ff8a80; --idle: #20262d;
    --s0: #6ea8e0; --s1: #f0a840; --s2: #63c08a; --s3: #e08acb; --s4: #4cc3d0;
    --s5: #f08a80; --s6: #a99bf5; --s7: #d3c04a; --s8: #9bb9cc; --s9: #d0a284;
  }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; color: var(--quiet); overflow-wrap: anywhere; }
figure { margin: 0; overflow-x: auto; }
svg { width: 100%; min-width: 40rem; height: auto; display: block; font: 12px system-ui, sans-serif; fill: var(--ink); }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--quiet); }
table { border-collapse: collapse; margin: .5rem 0; font-size: 13px; width: 100%; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.name, .end { text-anchor: end; }
.middle, .action-name { text-anchor: middle; }
.strong { font-weight: 600; }
.figure, .tick { fill: var(--quiet); }
.limit { stroke: var(--strong); stroke-width: 2; }
.limit-name { fill: var(--strong); text-anchor: end; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--quiet); }
.front { fill: none; stroke: var(--s0); stroke-width: 1.5; }
.faint { fill: none; stroke-width: 1; opacity: .3; }
pre { padding: .6rem; background: var(--idle); font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; }
.dot { fill: var(--quiet); opacity: .6; }
.best { fill: var(--s0); opacity: 1; }
.number { font-weight: 600; }
.idle { fill: var(--idle); }
.action { stroke: var(--paper); stroke-width: .7; }
.F { fill: var(--forward); background: var(--forward); }
.B { fill: var(--backward); background: var(--backward); }
.I { fill: var(--input); background: var(--input); }
.W { fill: var(--weight); background: var(--weight); }
.F.second { fill: var(--forward-second); } .B.second { fill: var(--backward-second); }
.I.second { fill: var(--input-second); } .W.second { fill: var(--weight-second); }
.action-name { fill: var(--on); font-size: 11px; pointer-events: none; }
.series-0 { fill: var(--s0); } .series-1 { fill: var(--s1); } .series-2 { fill: var(--s2); }
.series-3 { fill: var(--s3); } .series-4 { fill: var(--s4); } .series-5 { fill: var(--s5); }
.series-6 { fill: var(--s6); } .series-7 { fill: var(--s7); } .series-8 { fill: var(--s8); }
.series-9 { fill: var(--s9); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem; vertical-align: -.1rem; }
"""


def page(pictures: Pictures) -> str:
    """The page of a plan."""
    wholes, points, pipeline = (pictures.memory, pictures.time), pictures.points, pictures.pipeline
    sections = [section(bar.title, whole(bar), parts_table(bar)) for bar in wholes]
    if len(points) > 1:
        best = enumerate((point for point in points if point.front), 1)
        rows = [
            (str(number), f"{short(each.gib)} GiB", f"{short(each.seconds)} s", each.label) for number, each in best
        ]
        below = table("the numbered plans", ("", "memory", "s/step", "plan"), rows, shown=True)
        sections.append(section("Plans by memory and time", plans(points, pictures.limit_gib), below))
    if pipeline is not None:
        slots = [slot for row in pipeline.timeline.rows for slot in row]
        used = {slot.action.kind for slot in slots}
        names = [f'<li><i class="{kind}"></i>{words}</li>' for kind, words in KINDS.items() if kind in used]
        if any(slot.action.stage >= len(pipeline.timeline.rows) for slot in slots):
            names.append("<li>a rank's second chunk is lighter</li>")
        legend = f'<ul class="legend">{"".join(names)}<li>numbers are microbatches</li></ul>'
        sections.append(section(pipeline.title, gantt(pipeline), legend))
    return document(pictures.title, pictures.heading, sections)


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


def section(title: str, drawn: str, below: str) -> str:
    """A picture with its title above and its numbers below it."""
    return f"<section>\n<h2>{escape(title)}</h2>\n<figure>{drawn}</figure>\n{below}\n</section>"


def parts_table(whole: StackedBar) -> str:
    """The same numbers to read, with the reason of each."""
    rows = [(entry.name, f"{short(entry.value)} {whole.unit}", entry.why) for entry in whole.entries]
    rows.append(("total", f"{short(whole.total)} {whole.unit}", ""))
    return table("the figures, with their reasons", ("part", whole.unit, "why"), rows)


def table(summary: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], shown: bool = False) -> str:
    """Numbers to read, opened by whoever wants them."""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<details{' open' if shown else ''}><summary>{escape(summary)}</summary>{inner}</details>"
