"""A page that stands alone: one file, no script, nothing fetched; light or dark as the reader has it."""

from collections.abc import Iterable, Sequence
from html import escape

from meshwright.report import svg
from meshwright.report.plan_charts import Pictures, StackedBar, short

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
    sections = [section(whole.title, svg.whole(whole), parts_table(whole)) for whole in wholes]
    if len(points) > 1:
        best = enumerate((point for point in points if point.front), 1)
        rows = [
            (str(number), f"{short(each.gib)} GiB", f"{short(each.seconds)} s", each.label) for number, each in best
        ]
        below = table("the numbered plans", ("", "memory", "s/step", "plan"), rows, shown=True)
        sections.append(section("Plans by memory and time", svg.plans(points, pictures.limit_gib), below))
    if pipeline is not None:
        slots = [slot for row in pipeline.timeline.rows for slot in row]
        used = {slot.action.kind for slot in slots}
        names = [f'<li><i class="{kind}"></i>{words}</li>' for kind, words in KINDS.items() if kind in used]
        if any(slot.action.stage >= len(pipeline.timeline.rows) for slot in slots):
            names.append("<li>a rank's second chunk is lighter</li>")
        legend = f'<ul class="legend">{"".join(names)}<li>numbers are microbatches</li></ul>'
        sections.append(section(pipeline.title, svg.gantt(pipeline), legend))
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
