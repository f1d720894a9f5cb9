"""What `[eval]` asks for beside the validation loss: texts after prompts, and a command on the exported model."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.config.run import Run
from meshwright.spec.problem import InputError, Problem, mistake

FOLDER, OUTPUT, STEP = "{folder}", "{output}", "{step}"  # what stands in a command for what is known when it is run
# Words that only a shell would obey, and none is between.
OF_SHELLS = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")
MOST_PROMPTS, MOST_BYTES = 1024, 10**6  # in a file


def prompts(run: Run) -> tuple[str, ...]:
    """The texts that are continued: those of a list, or the lines of a file."""
    given = run.eval.prompts
    if not isinstance(given, str):
        return given
    file, remedy = Path(given).expanduser(), "give a text file, a prompt a line, or a list of texts"
    if not given:
        return ()
    try:
        if file.stat().st_size > MOST_BYTES:
            raise mistake(f"{file} is larger than {MOST_BYTES:,} bytes", remedy, "eval.prompts")
        lines = tuple(file.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise mistake(f"eval.prompts = {given} cannot be read: {why}", remedy, "eval.prompts") from None
    if not lines:
        raise mistake(f"eval.prompts = {given} has no lines", remedy, "eval.prompts")
    return lines


def command(run: Run, folder: str, output: str, step: int) -> list[str]:
    """The words of the command, split as a POSIX shell splits them and obeyed by none.

    What stands for the folder is put in afterwards, so that a folder with spaces stays one word.
    """
    values = {FOLDER: folder, OUTPUT: output, STEP: str(step)}
    found = []
    for word in shlex.split(run.eval.command):
        for name, value in values.items():
            word = word.replace(name, value)
        found.append(word)
    return found


def rules(run: Run) -> Iterator[Problem]:
    """What cannot be evaluated so."""
    yield from _prompts(run)
    yield from _command(run)
    for key, is_used in (("eval.prompts", bool(run.eval.prompts)), ("eval.command", bool(run.eval.command))):
        if is_used and run.faults.live:
            what = f"{key} needs all ranks together, and with faults.live some may be away"
            yield Problem(what, f"leave {key} out, and use `meshwright generate` or `convert` on a saved step", key)
        if getattr(run.eval, f"{key.removeprefix('eval.')}_every") and not is_used:
            yield Problem(f"{key}_every is set, and {key} is not", f"set {key}, or leave it out", f"{key}_every")
        elif getattr(run.eval, f"{key.removeprefix('eval.')}_every") and run.plan.is_served:
            what = f"{key}_every needs all ranks at one step, and plan.staleness lets each go its own way"
            yield Problem(what, f"leave {key}_every out: it is then done at the end", f"{key}_every")


def _prompts(run: Run) -> Iterator[Problem]:
    if run.eval.prompts and run.eval.sample_tokens == 0:
        what = "eval.prompts are to be continued, and eval.sample_tokens = 0"
        yield Problem(what, "set eval.sample_tokens, or leave eval.prompts out", "eval.sample_tokens")
    if not isinstance(run.eval.prompts, str):
        yield from _texts(run.eval.prompts)


def _texts(texts: tuple[str, ...]) -> Iterator[Problem]:
    if len(texts) > MOST_PROMPTS:
        what = f"eval.prompts has {len(texts)} prompts"
        yield Problem(what, f"use at most {MOST_PROMPTS}; `meshwright generate` takes more", "eval.prompts")
    empty = [number for number, text in enumerate(texts, 1) if not text.strip()]
    if empty:
        yield Problem(f"prompt {empty[0]} of eval.prompts is empty", "remove it, or fill it in", "eval.prompts")


def problems_here(run: Run, find: Callable[[str], str | None] = shutil.which) -> Iterator[Problem]:
    """What of it this machine lacks: the file of prompts, the program."""
    try:
        texts = prompts(run)
    except InputError as error:
        yield from error.problems
    else:
        yield from _texts(texts) if isinstance(run.eval.prompts, str) else ()
    program = shlex.split(run.eval.command)[0] if run.eval.command else ""
    if program and find(program) is None:
        what = f"eval.command runs {program}, which is not found here"
        yield Problem(what, f"install {program}, or give its whole path", "eval.command")


def _command(run: Run) -> Iterator[Problem]:
    text, key = run.eval.command, "eval.command"
    if not text:
        return
    if not 0 < run.eval.command_seconds < 1e7:  # a NaN lands here too
        what = f"eval.command_seconds = {run.eval.command_seconds} is out of range"
        yield Problem(what, "use a number above 0", "eval.command_seconds")
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield Problem(f"eval.command cannot be split into words: {error}", "close the quotation", key)
        return
    if not any(FOLDER in word for word in words):
        what = "eval.command does not say where the model's folder goes"
        yield Problem(what, f"write {FOLDER} in its place, as in pretrained={FOLDER}", key)
    if found := next((word for word in words if word in OF_SHELLS), ""):
        what = f"eval.command has {found!r}, which only a shell obeys, and none runs it"
        yield Problem(what, 'put it into a script, or write bash -c "…"', key)
    if words and FOLDER in words[0]:
        yield Problem(f"eval.command begins with {FOLDER}", "begin with the program to run", key)
