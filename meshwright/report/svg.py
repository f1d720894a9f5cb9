"""SVG by hand: few elements, every text and attribute escaped, nothing fetched from anywhere."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from meshwright.cost.simulate import TimelineSlot
from meshwright.report.plan_charts import PipelineChart, Point, StackedBar, between, short, ticks

LETTER = 6.6  # pixels that a letter of 12-pixel text takes at most, on average: labels are placed by it


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


WIDTH = 920.0
SERIES = 10  # colours of the page's style
BAR, ROW = 34.0, 22.0  # heights
LEFT, RIGHT = 150.0, 130.0  # margins of a bar
PLOT = 340.0  # height of the chart of plans
LANE = 26.0  # height of a rank's lane
SMALLEST = 13.0  # pixels of an action that is still named


def whole(picture: StackedBar) -> str:
    """One stacked bar beside what there is room for, and below it each part where it lies in the stack."""
    largest = max([picture.total, picture.limit or 0.0, *(end for _, end in spans(picture))])
    scale = (WIDTH - LEFT - RIGHT) / largest if largest > 0 else 0.0
    parts = [*_stack(picture, scale), *_limit(picture, scale)]
    top = BAR + 30
    for number, (entry, (start, end)) in enumerate(zip(picture.entries, spans(picture), strict=True)):
        y = top + number * ROW
        middle = y + ROW / 2 + 4
        parts.append(text(LEFT - 10, middle, fitted(entry.name, LEFT - 20), class_="name"))
        words = f"{entry.name}: {short(entry.value)} {picture.unit}. {entry.why}"
        width = max((end - start) * scale, 1.0)
        parts.append(rect(LEFT + start * scale, y + 4, width, ROW - 8, words, class_=_series(number)))
        parts.append(text(WIDTH - RIGHT + 12, middle, _share(entry.value, picture), class_="figure"))
    height = top + len(picture.entries) * ROW + 8
    return drawing(WIDTH, height, picture.title, _described(picture), parts)


def spans(picture: StackedBar) -> list[tuple[float, float]]:
    """Where each part begins and ends on the way to the sum; one below zero lies on those before it."""
    found, reached = [], 0.0
    for entry in picture.entries:
        after = reached + entry.value
        found.append((min(reached, after), max(reached, after)))
        reached = after
    return found


def _stack(picture: StackedBar, scale: float) -> Iterator[str]:
    yield text(LEFT - 10, BAR / 2 + 5, "total", class_="name strong")
    reached = 0.0
    for number, entry in enumerate(picture.entries):
        if entry.value > 0:
            words = f"{entry.name}: {short(entry.value)} {picture.unit}"
            yield rect(LEFT + reached * scale, 4, entry.value * scale, BAR - 8, words, class_=_series(number))
        reached += entry.value  # what is taken off is drawn over: the next part begins before the last one's end
    words = f"{short(picture.total)}" + (f" of {short(picture.limit)}" if picture.limit else "") + f" {picture.unit}"
    yield text(WIDTH - RIGHT + 12, BAR / 2 + 5, words, class_="figure strong")


def _limit(picture: StackedBar, scale: float) -> Iterator[str]:
    if not picture.limit:
        return
    x = LEFT + picture.limit * scale
    yield line(x, 0, x, BAR + 4, class_="limit")
    words = f"{picture.limit_name}: {short(picture.limit)} {picture.unit}"
    yield text(x, BAR + 18, words, class_="limit-name")


def _share(value: float, picture: StackedBar) -> str:
    share = f" ({value / picture.total:.0%})" if picture.total else ""
    return f"{short(value)} {picture.unit}{share}"


def _described(picture: StackedBar) -> str:
    parts = ", ".join(f"{entry.name} {short(entry.value)}" for entry in picture.entries)
    room = f"; there is room for {short(picture.limit)}" if picture.limit else ""
    return f"{parts}; total {short(picture.total)} {picture.unit}{room}."


def _series(number: int) -> str:
    return f"series-{number % SERIES}"


def plans(points: tuple[Point, ...], limit_gib: float) -> str:
    """Memory to the right, seconds upwards; plans that nothing beats in both are numbered and joined by steps."""
    right, bottom = WIDTH - 30, PLOT - 40
    most_gib = max(limit_gib, *(point.gib for point in points)) * 1.05
    low, high = between(points)

    def at(point: Point) -> tuple[float, float]:
        return 70 + point.gib / most_gib * (right - 70), bottom - (point.seconds - low) / (high - low) * (bottom - 20)

    parts = list(_axes(most_gib, (low, high), right, bottom))
    if limit_gib:
        x = 70 + limit_gib / most_gib * (right - 70)
        parts += [line(x, 14, x, bottom, class_="limit"), text(x - 6, 24, "the device", class_="limit-name")]
    best = [point for point in points if point.front]
    parts.append(element("polyline", points=_steps([at(point) for point in best]), class_="front"))
    for point in points:
        x, y = at(point)
        words = f"{point.label}: {short(point.gib)} GiB, {short(point.seconds)} s"
        inner = element("title", escape(words))
        parts.append(element("circle", inner, cx=x, cy=y, r=5.0 if point.front else 3.0, class_=_dot(point)))
    parts += [text(x, y, name, class_="number") for name, x, y in labels([at(point) for point in best], bottom)]
    front = "; ".join(f"{short(point.gib)} GiB in {short(point.seconds)} s: {point.label}" for point in best)
    return drawing(WIDTH, PLOT, "Plans by memory and time", f"Beaten by none in both: {front}.", parts)


def labels(places: list[tuple[float, float]], lowest: float) -> list[tuple[str, float, float]]:
    """A number for each place, beside it, where none lies on another."""
    found: list[tuple[str, float, float]] = []
    taken: list[tuple[float, float, float]] = []
    for number, (x, y) in enumerate(places, 1):
        name = str(number)
        width = len(name) * LETTER
        clear = uncovered(x + 8, y - 6, width, taken, 13.0, lowest)
        taken.append((x + 8, clear, width))
        found.append((name, x + 8, clear))
    return found


def _dot(point: Point) -> str:
    return "dot best" if point.front else "dot"


def _steps(places: list[tuple[float, float]]) -> str:
    """From plan to plan: with more memory nothing is won until the next."""
    found = []
    for number, (x, y) in enumerate(places):
        if number:
            found.append((x, places[number - 1][1]))
        found.append((x, y))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in found)


def _axes(most_gib: float, seconds: tuple[float, float], right: float, bottom: float) -> Iterator[str]:
    low, high = seconds
    for tick in ticks(most_gib, most=8):
        x = 70 + tick / most_gib * (right - 70)
        yield line(x, 14, x, bottom, class_="grid")
        yield text(x, bottom + 17, short(tick), class_="tick middle")
    for tick in ticks(high, low, most=5):
        y = bottom - (tick - low) / (high - low) * (bottom - 20)
        yield line(70, y, right, y, class_="grid")
        yield text(62, y + 4, short(tick), class_="tick end")
    yield text(right, bottom + 34, "GiB on the most loaded rank", class_="tick end")
    yield text(8, 12, "s/step", class_="tick")


def gantt(pipeline: PipelineChart) -> str:
    """A lane for each rank, its actions in time."""
    timeline = pipeline.timeline
    is_whole = pipeline.shown == pipeline.microbatches  # else a beginning and an end alone, where most is idle
    left, scale = 70.0, (WIDTH - 70 - 110) / timeline.seconds
    parts = []
    for rank, row in enumerate(timeline.rows):
        y = rank * LANE
        parts.append(text(left - 8, y + LANE / 2 + 4, f"rank {rank}", class_="tick end"))
        parts.append(rect(left, y + 3, timeline.seconds * scale, LANE - 6, class_="idle"))
        for slot in row:
            second = slot.action.stage // len(timeline.rows) % 2 == 1
            parts += _action(slot, left + slot.start * scale, y, (slot.end - slot.start) * scale, second)
        if is_whole:
            parts.append(text(WIDTH - 100, y + LANE / 2 + 4, f"{timeline.bubbles[rank]:.1%} idle", class_="tick"))
    bottom = len(timeline.rows) * LANE
    for tick in ticks(timeline.seconds, most=8):
        x = left + tick * scale
        parts.append(line(x, bottom, x, bottom + 5, class_="axis"))
        parts.append(text(x, bottom + 19, f"{short(tick)} s", class_="tick middle"))
    idle = f"{timeline.bubble:.1%} idle" if is_whole else "longer steps idle less"
    summary = f"{len(timeline.rows)} ranks, {short(timeline.seconds)} seconds, {idle}."
    return drawing(WIDTH, bottom + 28, pipeline.title, summary, parts)


def _action(slot: TimelineSlot, x: float, y: float, width: float, second: bool) -> Iterator[str]:
    """A rectangle with its microbatch, where that has room; those of every second chunk are lighter."""
    action = slot.action
    words = f"{action}: {short(slot.start)} to {short(slot.end)} s"
    yield rect(x, y + 3, width, LANE - 6, words, class_=f"action {action.kind}{' second' * second}")
    name = str(action.microbatch)
    if width >= max(SMALLEST, len(name) * LETTER + 4):
        yield text(x + width / 2, y + LANE / 2 + 4, name, class_="action-name")
