"""Losses of several runs as a picture of its own, for pages: over steps, seconds, or whatever else was counted."""

import math
from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from meshwright.report import html
from meshwright.report.plan_charts import short, ticks

COLOURS = (
    "#2f6fb3", "#d97706", "#2e8b57", "#b0489a", "#0e8f9e", "#c2483d", "#6d5bd0", "#8a7a00", "#5b7f95", "#9a6b4f",
)  # fmt: skip
PANEL, GAP, TOP, BELOW = 300.0, 56.0, 46.0, 44.0  # width of one pair of axes, and room around it
HEIGHT = 260.0  # of the axes
LEGEND = 18.0  # height of a line
STYLE = "font: 12px system-ui, sans-serif; background: #ffffff"
QUIET, GRID = "#57606a", "#d0d7de"


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One run's."""

    name: str
    points: tuple[tuple[float, float], ...]  # what was counted, and the loss by then


class LossPanel(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of axes."""

    title: str
    unit: str  # of what was counted
    curves: tuple[LossCurve, ...]
    logarithmic: bool = False  # to the right; then nothing was counted at 0 or below


def picture(name: str, panels: Sequence[LossPanel], most: float = math.inf) -> str:
    """The panels side by side with one legend below; one name has one colour. Losses above `most` are cut."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    values = [min(loss, most) for panel in panels for curve in panel.curves for _, loss in curve.points]
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or 0.1
    between = (low - room, high + room)
    parts = [
        part
        for place, panel in enumerate(panels)
        for part in _panel(panel, GAP + place * (PANEL + GAP), between, names, most)
    ]
    width = len(panels) * (PANEL + GAP) + 20
    columns = max(int(width // 220), 1)
    for number, each in enumerate(names):
        x = GAP + number % columns * 220
        y = TOP + HEIGHT + BELOW + number // columns * LEGEND
        parts.append(html.line(x, y - 4, x + 22, y - 4, stroke=colour(number), stroke_width=2.0, **_dashes(number)))
        parts.append(html.text(x + 28, y, html.fitted(each, 190.0)))
    height = TOP + HEIGHT + BELOW + math.ceil(len(names) / columns) * LEGEND
    ends = "; ".join(f"{panel.title}: {', '.join(_end(curve) for curve in panel.curves)}" for panel in panels)
    drawn = html.drawing(width, height, name, f"Last losses. {ends}.", parts)
    attributes = f'xmlns="http://www.w3.org/2000/svg" style="{STYLE}" width="{width:.0f}" height="{height:.0f}"'
    return drawn.replace("<svg", f"<svg {attributes}", 1) + "\n"


def colour(number: int) -> str:
    """Of the curve with a number; where there are more curves than colours, the next ones are dashed too."""
    return COLOURS[number % len(COLOURS)]


def _dashes(number: int) -> dict[str, str]:
    return {"stroke_dasharray": "5 3"} if number >= len(COLOURS) else {}


def _end(curve: LossCurve) -> str:
    where, loss = curve.points[-1]
    return f"{curve.name} {short(loss)} at {short(where)}"


def _panel(panel: LossPanel, left: float, between: tuple[float, float], names: list[str], most: float) -> Iterator[str]:
    """Axes, ticks and curves."""
    counted = [where for curve in panel.curves for where, _ in curve.points]
    scale = math.log10 if panel.logarithmic else float
    first, last = (scale(edge) for edge in (min(counted), max(counted)))
    last, bottom, (low, high) = max(last, first + 1e-9), TOP + HEIGHT, between

    def x(where: float) -> float:
        return left + (scale(where) - first) / (last - first) * PANEL

    def y(loss: float) -> float:
        return bottom - (min(loss, most) - low) / (high - low) * HEIGHT

    yield html.text(left, TOP - 22, panel.title, font_weight="bold")
    for tick in ticks(high, low, most=6):
        yield html.line(left, y(tick), left + PANEL, y(tick), stroke=GRID)
        yield html.text(left - 6, y(tick) + 4, short(tick), text_anchor="end", fill=QUIET)
    places = [10.0**power for power in range(math.ceil(first), math.floor(last) + 1)] if panel.logarithmic else []
    for tick in places or ticks(max(counted), min(counted), most=5):
        yield html.line(x(tick), TOP, x(tick), bottom, stroke=GRID)
        yield html.text(x(tick), bottom + 15, short(tick), text_anchor="middle", fill=QUIET)
    yield html.text(left + PANEL, bottom + 30, panel.unit, text_anchor="end", fill=QUIET)
    for curve in panel.curves:
        number = names.index(curve.name)
        path = " ".join(f"{x(where):.1f},{y(loss):.1f}" for where, loss in curve.points)
        inner = html.element("title", escape(_end(curve)))
        stroke = {"fill": "none", "stroke": colour(number), "stroke_width": 1.6, **_dashes(number)}
        yield html.element("polyline", inner, points=path, **stroke)
