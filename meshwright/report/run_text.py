"""A run's report in text: short sections one below the other, several runs as a table, the loss drawn."""

import math
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from string import ascii_lowercase

from meshwright.report.plan_charts import Terminal, short
from meshwright.report.run_data import duration
from meshwright.report.run_summary import Attempt, Curve, RunReport, Saves, in_tenths, smoothed, thinned
from meshwright.runtime.records import BOUNDS
from meshwright.spec.units import GIB, plural

NAMES = 14  # columns of what a line is about
MOST_LISTED, MOST_EVALS = 12, 6  # attempts and events, and validation losses, that are listed one by one
LEAST_WAIT = 0.01  # share of its steps' time that a rank must have waited for data to be worth a line
COLUMNS, WIDTH = 26, 22  # columns of a comparison: of the first and of every other cell
ROWS, LEFT = 8, 10  # of the drawn loss, and columns beside it
LEAST = 3  # steps that are worth drawing
FULLER = 1.02  # × the least loaded rank's memory, from where on ranks differ
LEAST_COUNTED = 5  # steps of a run from where on their median says how fast it is
LEAST_PHASE = 0.05  # seconds from which on a phase of a start is told
LEAST_RATED = 64 * 2**20  # bytes of a save from which on its rate is the disk's or the cores', not that of its flushes
HEADS = ("run", "model", "steps", "last loss", "best validation", "tokens/s", "MFU %", "state", "last record", "plan")
NARROW = (
    "plan",
    "model",
    "MFU %",
    "last record",
    "best validation",
)  # columns that a narrow terminal lacks, first to go
LEAST_PLAN = 20  # letters of a plan that are worth showing
LONGEST = {"run": 28, "model": 24, "state": 28}  # letters of a cell; plans stand last, as long as there is room
STATES = {"done": "finished", "going": "running"}
LABELS = {"not-finite": "not finite"}  # of events whose name is not a word


def what_ran(report: RunReport) -> Iterator[str]:
    """What, on what, how far, and how it stands."""
    ran, standing = report.ran, report.standing
    yield f"{plain(ran.name)} ({plain(report.folder)})"
    yield _line("model", f"{ran.model}: {ran.parameters:,} parameters")
    yield _line("plan", ran.plan)
    device = plain(ran.device) or f"{ran.ranks} × unknown device"
    yield _line("ran on", device + (f"; torch {plain(ran.torch)}" if ran.torch else ""))
    yield _line("steps", f"{ran.step:,} of {ran.steps:,}, {plural(ran.tokens, 'token')} each")
    yield _line("state", plain(standing.words))
    if standing.remedy:
        yield _line("do", plain(standing.remedy))
    yield from (_line("note", plain(note)) for note in report.notes)


def beside_prediction(report: RunReport) -> Iterator[str]:
    """Each measurement beside its prediction, and what that was made from."""
    if report.steps is None:
        yield "Prediction and measurement: no step was recorded"
        return
    yield f"{'Prediction and measurement':<27}{'predicted':>11}{'measured':>12}{'difference':>12}"
    for name, predicted, measured in comparisons(report):
        figures = [shown(name, value) for value in (predicted, measured)]
        apart = difference(predicted, measured) if comparable(report, name) else ""
        yield f"  {name:<24}{figures[0]:>12}{figures[1]:>12}{apart:>12}".rstrip()
    yield from (f"  {words}" for words in reasons(report))


def reasons(report: RunReport) -> Iterator[str]:
    """What was counted, and what the prediction was made from, or why there is none."""
    steps, prediction = report.steps, report.prediction
    if steps is None:
        return
    after = f", {steps.left_out} after a start left out" if steps.left_out else ""
    spread = f"{short(steps.quickest)} to {short(steps.slowest)} s"
    yield f"measured: the median of {plural(steps.counted, 'step')}{after}; quickest to slowest {spread}"
    if prediction is None:
        yield report.no_prediction
        return
    interval = f"interval {short(prediction.low_seconds)} to {short(prediction.high_seconds)} s/step"
    yield f"predicted from {plain(prediction.source)}: {interval}"
    if not prediction.here:
        yield "difference: none, since the prediction is for other machines than the run ran on"
    elif steps.counted < LEAST_COUNTED:
        yield f"difference: of memory alone, since fewer than {LEAST_COUNTED} steps were measured"
    if report.utilized:
        yield f"MFU: of {report.utilized.of}, attention in full as torchtitan and nanoGPT count it; causal: as computed"
    if prediction.peak_bytes is None:
        yield "memory: of the whole process, with Python and torch; the prediction is of tensors alone"


def comparable(report: RunReport, name: str) -> bool:
    """Whether a measurement may be held against its prediction: by machines, and by enough steps."""
    enough = report.steps is not None and report.steps.counted >= LEAST_COUNTED
    return report.prediction is not None and report.prediction.here and (enough or name == "peak GiB")


def comparisons(report: RunReport) -> list[tuple[str, float | None, float | None]]:
    """What can be compared: a name with its unit, what was predicted and what was measured."""
    steps, prediction = report.steps, report.prediction
    used = report.utilized
    mfu = (prediction.mfu if prediction else None, used.mfu if used else None)
    causal = (prediction.mfu_causal if prediction else None, used.mfu_causal if used else None)
    rate = (prediction.tflops if prediction else None, used.tflops if used else None)
    peak = prediction.peak_bytes if prediction else None
    rows = [
        ("s/step", prediction and prediction.seconds, steps and steps.seconds),
        ("tokens/s", prediction and prediction.tokens_per_second, steps and steps.tokens_per_second),
        ("MFU %", *(value * 100 if value is not None else None for value in mfu)),
        ("MFU %, causal", *(value * 100 if value is not None else None for value in causal)),
        ("TFLOP/s, causal", *rate),
        ("peak GiB", peak / GIB if peak is not None else None, steps.peak_bytes / GIB if steps else None),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def shown(name: str, value: float | None) -> str:
    """A figure of a table; a dash for what nobody knows."""
    if value is None or value != value:
        return "–"
    return f"{value:,.0f}" if name == "tokens/s" and value >= 100 else short(value)


def difference(first: float | None, other: float | None) -> str:
    """By how much the other is above the first, in percent; where that would be many times as much, the factor."""
    if first is None or other is None or not first or other != other or first != first:
        return ""
    ratio = other / first
    if not 0.1 < ratio < 10:
        return f"{ratio:.3g}×"
    return f"{ratio - 1:+.1%}".replace("-0.0%", "+0.0%")


def of_losses(report: RunReport) -> Iterator[str]:
    """First, last, and what was remarkable."""
    found = report.losses
    if found is None:
        yield "Loss: none was recorded"
        return
    yield "Loss"
    yield _line("first", f"{loss_words(found.first)} at step {found.first_step:,}")
    over = f"; mean of the last {found.mean_of}: {found.mean:.4f}" if found.mean_of > 1 else ""
    yield _line("last", f"{loss_words(found.last)} at step {found.last_step:,}{over}")
    if found.validation:
        before = f"… {len(found.validation) - MOST_EVALS} earlier, " if len(found.validation) > MOST_EVALS else ""
        newest = [f"{loss_words(each.loss)} at step {each.step:,}" for each in found.validation[-MOST_EVALS:]]
        yield _line("validation", before + ", ".join(newest))
    yield _line("steps", f"{found.skipped} skipped (the gradient was not finite), {found.spikes} spikes")
    if report.steps is not None and report.steps.staleness:
        counts = report.steps.staleness
        shares = ", ".join(f"{age} in {count:,} ({count / sum(counts.values()):.0%})" for age, count in counts.items())
        yield _line("staleness", f"updates behind, by steps of all ranks: {shares}")


def of_evaluation(report: RunReport) -> Iterator[str]:
    """What commands gave, step by step, and what the model last wrote after prompts; nothing where there is neither."""
    if not report.commands and not report.texts:
        return
    yield "Evaluation"
    begun = [each for each in report.commands if each.state != "skipped"]
    for each in begun[-MOST_LISTED:]:
        given = ", ".join(f"{plain(name)} {value:.4g}" for name, value in each.numbers.items())
        code = f" with exit code {each.code}" if each.code else ""
        why = f"{each.state}{code}: {plain(each.text)}" if each.state != "done" else plain(each.text) or "done"
        yield _line(f"step {each.step:,}", given or why)
    if left_out := len(report.commands) - len(begun):
        yield _line("left out", f"{left_out} command{'s' * (left_out > 1)}, while an earlier one still ran")
    for last in report.texts[-1:]:
        yield _line("texts", f"after step {last.step:,}, of {plural(len(report.texts), 'time')} (--json has all)")
        for prompt, text in list(zip(last.prompts, last.texts, strict=True))[:MOST_LISTED]:
            yield f"    {plain(prompt)} → {plain(text)}"


def loss_words(loss: float) -> str:
    """A loss as people read it."""
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def of_time(report: RunReport) -> Iterator[str]:
    """Shares that add up, attempts, events and saves."""
    if not report.parts:
        yield "Where the time went: no start was recorded"
        return
    yield f"Where the time went: {duration(report.wall_seconds)} from start to last record"
    used = [part for part in report.parts if part.seconds > 0]
    for part, share in zip(used, in_tenths([part.share for part in used]), strict=True):
        yield f"  {part.name:<{NAMES}}{share:>6.1f} %{duration(part.seconds):>12}"
    yield f"  {'total':<{NAMES}}{100:>6.1f} %{duration(report.wall_seconds):>12}"
    yield from of_saves(report.saves)
    if len(report.attempts) > 1:
        yield from _attempts(report)
    elif report.attempts and report.attempts[0].phases:
        yield _line("start", start_words(report.attempts[0]))
    if report.happened:
        yield _line("events", str(len(report.happened)))
    for each in report.happened[:MOST_LISTED]:
        when = f"step {each.step:,}, after {duration(each.at)}"
        yield f"    {when}: {LABELS.get(each.what, each.what)}: {plain(each.text)}"
    if len(report.happened) > MOST_LISTED:
        yield f"    … {len(report.happened) - MOST_LISTED} more (--json has all)"


def of_saves(saves: Saves) -> Iterator[str]:
    """How long saves paused training; how large they are, and how fast they were written.

    A small one is over in a moment, and of that no rate is told.
    """
    newest = f"; newest checkpoint: step {saves.newest:,}" if saves.newest is not None else "; no checkpoint is there"
    paused = f", paused training for {duration(saves.seconds)} in total, {duration(saves.longest)} at most"
    yield _line("saves", f"{saves.count}{paused if saves.count else ''}{newest}")
    if saves.bytes >= LEAST_RATED:
        rate = f"{saves.bytes_per_second / 1e9:.2f} GB/s, bound by {BOUNDS[saves.bound]}"
        yield _line("written", f"{saves.bytes / 1e9:.3g} GB a save, at {rate}")
    elif saves.bytes:
        yield _line("written", f"{saves.bytes / 1e6:.3g} MB a save")


def _attempts(report: RunReport) -> Iterator[str]:
    sessions = report.attempts[-1].session
    yield _line("attempts", f"{len(report.attempts)} in {sessions} session{'s' * (sessions > 1)}")
    for each in report.attempts[:MOST_LISTED]:
        lost = f", {each.lost} of them lost" if each.lost else ""
        ended = f": {plain(each.ended)}" if each.ended else ""
        steps = f"steps {each.first_step + 1:,} to {each.last_step:,} in {duration(each.seconds)}{lost}"
        done = steps if each.last_step > each.first_step else "no step"
        yield f"    {each.session}.{each.number}  ready after {duration(each.at)}, {done}{ended}"
        if each.phases:
            yield f"         start: {start_words(each)}"
    if len(report.attempts) > MOST_LISTED:
        yield f"    … {len(report.attempts) - MOST_LISTED} more (--json has all)"


def start_words(attempt: Attempt) -> str:
    """What a start was spent on, phase by phase."""
    parts = [f"{name} {duration(seconds)}" for name, seconds in attempt.phases.items() if seconds >= LEAST_PHASE]
    first = f"; first loss {duration(attempt.first_loss)} later" if attempt.first_loss is not None else ""
    return ", ".join(parts) + first


def of_ranks(report: RunReport) -> Iterator[str]:
    """Which rank waited, which was most loaded, which was a straggler; nothing where the records do not say."""
    lines = []
    ranks = report.ranks
    slow = [each for each in report.happened if each.what == "straggler"]
    if len(ranks) > 1 and report.steps is not None:
        waited = max(ranks, key=lambda rank: rank.data_seconds)
        if waited.data_seconds > LEAST_WAIT * report.steps.seconds * max(waited.steps, 1):
            usual = median([rank.data_seconds for rank in ranks])
            waits = f"rank {waited.rank} waited longest, {duration(waited.data_seconds)}; median {duration(usual)}"
            lines.append(_line("data", waits))
        full, empty = (pick(ranks, key=lambda rank: rank.memory_bytes) for pick in (max, min))
        if full.memory_bytes > FULLER * empty.memory_bytes:
            most = f"most loaded rank {full.rank}, {full.memory_bytes / GIB:.2f} GiB"
            lines.append(_line("memory", f"{most}; least loaded rank {empty.rank}, {empty.memory_bytes / GIB:.2f} GiB"))
    lines += [_line("own work", plain(each.text)) for each in slow[-1:]]
    if lines:
        yield f"Ranks: records of {len(ranks)}"
        yield from lines


def plain(text: str) -> str:
    """One line, and nothing that speaks to the terminal: folders and names are other people's words."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _line(name: str, text: str) -> str:
    return f"  {name:<{NAMES}}{text}"


def lines(reports: Sequence[RunReport]) -> Iterator[str]:
    """The table, and below it what is missing of which run."""
    for name, cells in cells_of(reports):
        fitted = [cell if len(cell) < WIDTH else f"…{cell[-(WIDTH - 2) :]}" for cell in cells]
        yield f"{name:<{COLUMNS}}" + "".join(f"{cell:>{WIDTH}}" for cell in fitted).rstrip()
    open_questions: dict[str, list[str]] = {}
    for each in reports:
        for note in filter(None, (*each.notes, each.no_prediction)):
            open_questions.setdefault(note, []).append(each.folder)
    yield from (f"{plain(', '.join(folders))}: {plain(note)}" for note, folders in open_questions.items())


def cells_of(reports: Sequence[RunReport]) -> Iterator[tuple[str, list[str]]]:
    """Every row: words as they are, figures with their difference to the first, where both are of the same kind."""
    yield "", [plain(each.folder.rstrip("/").rpartition("/")[2]) for each in reports]
    yield "state", [each.standing.state for each in reports]
    yield "parameters", [f"{each.ran.parameters:,}" for each in reports]
    yield "ranks", [str(each.ran.ranks) for each in reports]
    yield "steps", [f"{each.ran.step:,} of {each.ran.steps:,}" for each in reports]
    for name, values in rows(reports):
        if any(value is not None for value in values):
            apart = [_apart(name, (reports[0], values[0]), other) for other in zip(reports, values, strict=True)]
            beside = [f"{_figure(name, value)} {by:>9}" for value, by in zip(values[1:], apart[1:], strict=True)]
            yield name, [_figure(name, values[0]), *beside]


def _apart(name: str, first: tuple[RunReport, float | None], other: tuple[RunReport, float | None]) -> str:
    """The difference of two runs, in brackets; "" where it would mean nothing.

    Counts and shares have none. A loss is held against another of the same data after as many steps, seconds and memory
    of a step against those of an equally large model and batch, and a whole run's time against that of as many steps.
    """
    (one, before), (two, now) = first, other
    if before is None or now is None or name in ("steps skipped", "goodput %", "attempts"):
        return ""
    as_far, as_large = one.ran.step == two.ran.step, one.ran.parameters == two.ran.parameters
    if "loss" in name:
        apart = f"{now - before:+.4f}"
        return f"({apart})" if as_far and one.ran.data == two.ran.data and math.isfinite(now - before) else ""
    alike = as_large and (one.ran.tokens == two.ran.tokens or name.endswith(("tokens/s", "MFU %")))
    if name == "wall seconds":
        alike = alike and as_far
    elif not name.startswith("  predicted") and name != "peak GiB":
        alike = alike and all(each.steps and each.steps.counted >= LEAST_COUNTED for each in (one, two))
    by = difference(before, now) if alike else ""
    return f"({by})" if by else ""


def rows(reports: Sequence[RunReport]) -> Iterator[tuple[str, list[float | None]]]:
    """The figures by name; None where a run has none."""
    compared = [{name: (predicted, measured) for name, predicted, measured in comparisons(each)} for each in reports]
    for name in dict.fromkeys(name for each in compared for name in each):
        yield name, [each.get(name, (None, None))[1] for each in compared]
        yield f"  predicted {name}", [each.get(name, (None, None))[0] for each in compared]
    losses = [each.losses for each in reports]
    yield "last loss", [each.last if each else None for each in losses]
    yield "mean last loss", [each.mean if each else None for each in losses]
    yield "validation loss", [each.validation[-1].loss if each and each.validation else None for each in losses]
    yield "best validation loss", [each.best.loss if each and each.best else None for each in losses]
    yield "steps skipped", [each.skipped if each else None for each in losses]
    yield "wall seconds", [each.wall_seconds or None for each in reports]
    yield "goodput %", [each.parts[0].share * 100 if each.parts else None for each in reports]
    yield "attempts", [len(each.attempts) or None for each in reports]


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return loss_words(value) if "loss" in name else shown(name.removeprefix("  predicted "), value)


def overview(reports: Sequence[RunReport], columns: int | None) -> Iterator[str]:
    """A line for each run of a folder of runs; a narrow terminal is spared the columns that matter least."""
    rows = [dict(zip(HEADS, overview_row(each), strict=True)) for each in reports]
    cut = [{name: _cut(text, LONGEST.get(name)) for name, text in row.items()} for row in rows]
    widths = {name: max(len(name), *(len(row[name]) for row in cut)) for name in HEADS}
    left_out = []
    while columns and len(left_out) < len(NARROW) and sum(widths.values()) + 2 * len(widths) - 2 > columns:
        if not left_out:  # the plan may be cut before it goes
            widths["plan"] -= min(sum(widths.values()) + 2 * len(widths) - 2 - columns, widths["plan"])
            if widths["plan"] >= LEAST_PLAN:
                break
        left_out.append(NARROW[len(left_out)])
        del widths[left_out[-1]]
    for row in ({name: name for name in HEADS}, *cut):
        yield "  ".join(f"{_cut(row[name], width):{_side(name)}{width}}" for name, width in widths.items()).rstrip()
    if left_out:
        yield f"too narrow for {', '.join(left_out)}: a wider terminal, a pipe or --page shows them"


def overview_row(report: RunReport) -> tuple[str, ...]:
    """A run in a line, by HEADS."""
    ran, standing, losses, steps = report.ran, report.standing, report.losses, report.steps
    best = losses.best if losses else None
    return (
        plain(report.folder.rstrip("/").rpartition("/")[2]),
        ran.model,
        f"{ran.step:,} of {ran.steps:,}",
        loss_words(losses.last) if losses else "–",
        f"{best.loss:.4f}" if best else "–",
        shown("tokens/s", steps.tokens_per_second if steps else None),
        shown("MFU %", report.utilized.mfu * 100 if report.utilized else None),
        STATES.get(standing.state) or plain(standing.words.partition(",")[0]),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(report.updated)),
        ran.plan,
    )


def _side(name: str) -> str:
    return "<" if name in ("run", "model", "state", "plan") else ">"


def _cut(text: str, letters: int | None) -> str:
    return text if letters is None or len(text) <= letters else f"{text[: letters - 1]}…"


def losses(curves: Sequence[Curve], screen: Terminal, weight: float = 0.0) -> Iterator[str]:
    """Steps to the right, losses upwards: of one run · and o for validation, of several a letter each, smoothed.

    Nothing where there is too little to draw.
    """
    drawn = [each for each in curves if len(each.line) >= LEAST][: len(ascii_lowercase)]
    if not drawn:
        return
    room = screen.width - LEFT - 2
    lines = [thinned(list(each.line), room, fmean) for each in drawn]
    marked = [("·", lines[0]), ("o", drawn[0].points)]
    if len(drawn) > 1:
        marked = [(ascii_lowercase[number], smoothed(line, weight)) for number, line in enumerate(lines)]
    steps, values = zip(*(pair for _, pairs in marked for pair in pairs), strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    cells = [[" "] * room for _ in range(ROWS)]
    for mark, pairs in marked:
        for step, value in pairs:
            row = round((high - value) / ((high - low) or 1.0) * (ROWS - 1))
            column = round((step - first) / ((last - first) or 1.0) * (room - 1))
            cells[min(max(row, 0), ROWS - 1)][min(max(column, 0), room - 1)] = mark
    for number, row in enumerate(cells):
        mark = short(high) if number == 0 else short(low) if number == ROWS - 1 else ""
        yield f"{mark:>{LEFT - 1}} ┤{''.join(row)}".rstrip()
    yield f"{'':>{LEFT}}└{'─' * room}"
    begin, end = f"step {min(each.ends[0] for each in drawn):,}", f"{max(each.ends[1] for each in drawn):,}"
    end += " (o: validation)" if marked[1][0] == "o" and marked[1][1] else ""
    yield f"{'':>{LEFT}} {begin}{end:>{max(room - len(begin), len(end) + 1)}}"
    if len(drawn) > 1:
        yield "loss, smoothed: " + "  ".join(
            f"{mark} {plain(each.line_name)}" for (mark, _), each in zip(marked, drawn, strict=True)
        )
