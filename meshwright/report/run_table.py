"""Several runs side by side, a column for each, and how each differs from the first."""

from collections.abc import Iterator, Sequence

from meshwright.report.run_report import Report
from meshwright.report.run_text import comparisons, difference, loss_words, plain, shown

NAMES, WIDTH = 26, 22  # columns of the first and of every other cell
Row = tuple[str, list[float | None]]


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """The table, and below it what is missing of which run."""
    for name, cells in cells_of(reports):
        yield f"{name:<{NAMES}}" + "".join(f"{_fitted(cell):>{WIDTH}}" for cell in cells).rstrip()
    open_questions: dict[str, list[str]] = {}
    for each in reports:
        why = [f"nothing is promised: {each.unpromised}"] if each.unpromised else []
        for note in (*each.notes, *why):
            open_questions.setdefault(note, []).append(each.folder)
    yield from (f"{plain(', '.join(folders))}: {plain(note)}" for note, folders in open_questions.items())


def cells_of(reports: Sequence[Report]) -> Iterator[tuple[str, list[str]]]:
    """Every row: words as they are, figures with their difference to the first."""
    yield "", [plain(each.folder.rstrip("/").rpartition("/")[2]) for each in reports]
    yield "state", [each.standing.state for each in reports]
    yield "parameters", [f"{each.ran.parameters:,}" for each in reports]
    yield "ranks", [str(each.ran.ranks) for each in reports]
    yield "steps", [f"{each.ran.step:,} of {each.ran.steps:,}" for each in reports]
    for name, values in rows(reports):
        if any(value is not None for value in values):
            first, *others = values
            yield name, [_figure(name, first), *(_beside(name, first, other) for other in others)]


def rows(reports: Sequence[Report]) -> Iterator[Row]:
    """The figures by name; None where a run has none."""
    compared = [{name: (promised, measured) for name, promised, measured in comparisons(each)} for each in reports]
    for name in dict.fromkeys(name for each in compared for name in each):
        yield name, [each.get(name, (None, None))[1] for each in compared]
        yield f"  promised {name}", [each.get(name, (None, None))[0] for each in compared]
    losses = [each.losses for each in reports]
    yield "last loss", [each.last if each else None for each in losses]
    yield "mean last loss", [each.mean if each else None for each in losses]
    yield "held-out loss", [each.held_out[-1].loss if each and each.held_out else None for each in losses]
    yield "steps skipped", [each.skipped if each else None for each in losses]
    yield "wall seconds", [each.wall_seconds or None for each in reports]
    yield "goodput %", [each.parts[0].share * 100 if each.parts else None for each in reports]
    yield "attempts", [len(each.attempts) or None for each in reports]


def _beside(name: str, first: float | None, other: float | None) -> str:
    """A figure, and by how much it is above the first run's."""
    apart = difference(first, other)
    return f"{_figure(name, other)} {f'({apart})' if apart else '':>9}"


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return loss_words(value) if "loss" in name else shown(name.removeprefix("  promised "), value)


def _fitted(cell: str) -> str:
    return cell if len(cell) < WIDTH else f"…{cell[-(WIDTH - 2) :]}"
