"""A user's command on the exported model: how it is begun, what became of it, and the last one if it never ended.

Nothing here needs torch: a launcher makes up for the last command of a run whose ranks are gone.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.config import evaluation
from meshwright.config.run import Run
from meshwright.config.weights import MODEL
from meshwright.runtime import errand
from meshwright.runtime.errand import Errand, Order, Result
from meshwright.runtime.files import printable
from meshwright.runtime.records import CommandRecord, line, read_lines

EVALS = "evals"  # in a run's folder, a folder a step: what commands said and wrote
EXPORT, COMMAND = "export", "command"  # what is run, and the names of what each said
LOOK_SECONDS = 0.2
SHOWN = 4  # numbers of a command in its line
KIND = b'"kind":"command"'  # in a record's line


def place(folder: Path, step: int) -> Path:
    """Where all is that has to do with the command of a step."""
    return folder / EVALS / f"step-{step}"


def started(run: Run, folder: Path, step: int, model: Path, remove: tuple[Path, ...] = ()) -> Errand:
    """A process that exports a model and runs the command on it; `remove`: folders that nobody needs afterwards."""
    home = place(folder, step)
    exported, output = home / "model-hf", home / "output"
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(exported, ignore_errors=True)
    merge = ("--merge",) if run.adapter.kind != "none" else ()
    convert = (sys.executable, "-m", "meshwright", "convert", str(model), str(exported), *merge)
    words = evaluation.command(run, str(exported.absolute()), str(output.absolute()), step)
    order = Order(
        commands=((EXPORT, convert), (COMMAND, tuple(words))),
        seconds=run.eval.command_seconds,
        remove=tuple(str(path) for path in (exported, *remove)),
    )
    return Errand(home, order)


def make_up(run: Run, folder: Path, say: Callable[[str], None]) -> None:
    """Run the last command of a finished run, if the run was ended before it had; how it goes is in the records."""
    if not is_owed(run, folder):
        return
    say(f"running eval.command on the model of step {run.steps}: the run was ended before it had")
    try:
        under_way = started(run, folder, run.steps, folder / MODEL)
    except OSError as error:
        say(f"warning: eval.command of step {run.steps} failed: {error}")
        return
    try:
        while (result := under_way.poll()) is None:
            time.sleep(LOOK_SECONDS)
    except BaseException:
        under_way.stop()
        raise
    record = msgspec.structs.replace(outcome(run.steps, under_way.folder, result), at=time.monotonic())
    with open(folder / "steps.rank0.jsonl", "ab") as records:
        records.write(line(record))
    say(command_line(record))


def is_owed(run: Run, folder: Path) -> bool:
    """Whether a run whose steps are all done has still to run its last command."""
    return bool(run.eval.command) and not has_ended(folder, run.steps)


def has_ended(folder: Path, step: int) -> bool:
    """Whether the command of a step has ended by itself, or has had its time, by the records of whoever led."""
    lines = (text for file in folder.glob("steps.rank*.jsonl") for text in file.read_bytes().splitlines())
    found, _ = read_lines(text for text in lines if KIND in text)
    return any(isinstance(each, CommandRecord) and each.step == step and each.state != "stopped" for each in found)


def outcome(step: int, folder: Path, result: Result) -> CommandRecord:
    """What became of a command, from the files that it left."""
    file = errand.said(folder, result.name or COMMAND)
    is_done = result.state == "done"
    given = errand.numbers(file, folder / "output") if is_done else {}
    found = {name: value for name, value in given.items() if math.isfinite(value)}
    strange = ", ".join(name for name in given if name not in found)
    words = {"timeout": "it took longer than eval.command_seconds", "stopped": "training ended before it"}
    text = words.get(result.state) or errand.last_line(file)
    if result.name == EXPORT and result.state == "failed":
        text = f"the model could not be exported: {text}"
    return CommandRecord(
        step=step,
        state=result.state,
        seconds=result.seconds,
        code=result.code,
        numbers=found,
        text=f"not finite: {strange}"[:500] if strange else "" if found else text[-500:],
        folder=str(folder),
    )


def command_line(record: CommandRecord) -> str:
    """What became of a command, in a line."""
    who = f"eval.command of step {record.step}"
    if record.state == "done":
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(record.numbers.items())[:SHOWN])
        more = f" and {len(record.numbers) - SHOWN} more" if len(record.numbers) > SHOWN else ""
        said = "; ".join(part for part in (shown + more, printable(record.text)) if part)
        return f"{who}: {said or 'done'} ({record.seconds:.0f} s)"
    if record.state == "skipped":
        return f"{who} is left out, and so are those of later steps: {record.text}"
    code = f" with exit code {record.code}" if record.code else ""
    where = f"; see {record.folder}" if record.folder else ""
    words = " ".join(printable(record.text).split())
    return f"warning: {who} {record.state}{code}: {words[:160]}{where}. Training is not affected"
