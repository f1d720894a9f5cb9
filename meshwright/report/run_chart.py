"""The loss as a picture of characters, for the terminal."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from meshwright.report.chart import Screen
from meshwright.report.picture import short
from meshwright.report.run_series import losses as series
from meshwright.report.run_series import thinned
from meshwright.report.run_steps import HeldOut
from meshwright.spec.record import StepRecord

ROWS = 8
LEFT = 10  # columns beside the picture
LEAST = 3  # steps that are worth one


def losses(kept: Sequence[StepRecord], held: Iterable[HeldOut], screen: Screen) -> Iterator[str]:
    """Steps to the right, the loss upwards; o is held-out. Nothing where there is too little to draw."""
    curve = series(kept, held)
    if len(curve.line) < LEAST:
        return
    room = screen.width - LEFT - 2
    line = thinned(list(curve.line), room, fmean)
    steps, values = zip(*line, *curve.points, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    cells = [[" "] * room for _ in range(ROWS)]
    for mark, pairs in (("·", line), ("o", curve.points)):
        for step, value in pairs:
            row = round((high - value) / ((high - low) or 1.0) * (ROWS - 1))
            column = round((step - first) / ((last - first) or 1.0) * (room - 1))
            cells[min(max(row, 0), ROWS - 1)][min(max(column, 0), room - 1)] = mark
    for number, row in enumerate(cells):
        mark = short(high) if number == 0 else short(low) if number == ROWS - 1 else ""
        yield f"{mark:>{LEFT - 1}} ┤{''.join(row)}".rstrip()
    yield f"{'':>{LEFT}}└{'─' * room}"
    begin, end = f"step {kept[0].step:,}", f"{kept[-1].step:,}" + (" (o: held-out)" if curve.points else "")
    yield f"{'':>{LEFT}} {begin}{end:>{max(room - len(begin), len(end) + 1)}}"
