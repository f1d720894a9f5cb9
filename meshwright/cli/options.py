"""Arguments that several verbs share: how they are read, and where messages go."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.runtime import terminal
from meshwright.runtime.failure import Exit
from meshwright.spec.problem import InputError, Problem, install_command, mistake

if TYPE_CHECKING:  # imported by the verbs that use them
    import torch

    from meshwright.checkpoint.model_folder import ModelFolder

OVERRIDES = "dotted overrides in TOML syntax, for example steps=50 optim.lr=1e-3 data.source=my/*.txt"


def split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The run file, if the first word is one, and the overrides."""
    named, overrides = target(words)
    return (None if named is None else Path(named)), overrides


def target(words: list[str]) -> tuple[str | None, list[str]]:
    """The run file or model, if the first word is one, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 among them."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 0")
    return int(text)


def plan_words(text: str) -> str:
    """The words of a plan, of which there are some."""
    if not text.strip(" ,"):
        raise argparse.ArgumentTypeError(f"{text!r} names no plan; write one, such as shard=2,zero=3")
    return text


def add_plans(verb: argparse.ArgumentParser, what: str) -> None:
    """A run, and plans for it: what `bench` and `verify` take."""
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=OVERRIDES)
    verb.add_argument("--plan", type=plan_words, action="append", default=[], help=what)


def positions(text: str) -> int:
    """The tokens of a sample or a document, as people write them: 8192, or 8k, which is 8 · 1024."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if found is None or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 1, such as 8192 or 8k")
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def samples(text: str) -> int:
    """The sequences of one optimizer step."""
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        remedy = "a batch is counted in sequences: tokens of a step ÷ --sequence"
        raise argparse.ArgumentTypeError(f"{error}; {remedy}") from None


SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}  # a letter behind a number


def amount(text: str) -> float:
    """A number above 0 as people write it: 1.5e12, 15T, $2, 2.50/h."""
    found = re.fullmatch(r"\$?\s*([\d.,_]+(?:e[+-]?\d+)?)\s*([kKmMbBgGtT]?)(?:/h|/hour)?", text.strip())
    with suppress(ValueError):
        if found and 0 < (number := float(re.sub("[,_]", "", found[1]))) < 1e30:
            return number * next(scale for letter, scale in SCALES.items() if letter.lower() == found[2].lower())
    raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0, such as 1.5e12, 15T or $2")


def share(text: str) -> float:
    """A share of something: 5% or 0.05."""
    with suppress(ValueError):
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= number < 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} should be a share, such as 5% or 0.05")


def say_to(machine: bool) -> Callable[[str], None]:
    """Where messages for people go: a program's answer has standard output to itself."""
    stream = sys.stderr if machine else sys.stdout
    return lambda text: print(terminal.fitted(text, stream), file=stream, flush=True)


def columns() -> int | None:
    """The columns of the terminal that output goes to; None for a pipe."""
    return terminal.columns(sys.stdout)


def show(options: argparse.Namespace, record: Any, lines: Iterable[str]) -> None:
    """An answer, for a program or for a person."""
    if options.json:
        print(msgspec.json.encode(record).decode())
        return
    width = columns()
    for line in lines:
        hang = terminal.HANG if "  " in line.strip() else ""  # what is left of a table's row is none
        for part in terminal.wrapped([line], width, hang):
            print(part)


def pasted(label: str, command: Iterable[str], columns: int | None) -> str:
    """A command as a shell takes it, in lines that go on where the terminal has fewer columns than it."""
    lines, indent = [label], " " * 4
    for word in map(shlex.quote, command):
        if columns is not None and len(lines[-1]) + len(word) + 3 > columns:
            lines[-1] += " \\"
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def toml(value: Any) -> str:
    """A value as an override states it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def sentences(error: Exception) -> str:
    """A mistake, one sentence for each problem."""
    problems = [str(problem) for problem in error.problems] if isinstance(error, InputError) else [str(error)]
    if len(problems) == 1:
        return f"meshwright: {problems[0]}"
    return "\n  ".join([f"meshwright: {len(problems)} problems", *problems])


def require_training() -> None:
    """Planning needs nothing; training needs torch and a few more packages."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "numpy", "tokenizers", "safetensors", "rich") if find_spec(name) is None]
    if missing:
        what = f"training needs packages that are not installed: {', '.join(missing)}"
        raise InputError([Problem(what, f"run: {install_command('train')}")])


def add_device(verb: argparse.ArgumentParser) -> None:
    """Where a whole model runs, and in what dtype."""
    verb.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the weights are stored")


def with_weights(options: argparse.Namespace, work: Callable[["ModelFolder", "torch.device"], None]) -> int:
    """Do something with the weights that the words name, on the device that they name; the exit code."""
    require_training()
    import torch

    from meshwright.checkpoint.model_folder import open_folder
    from meshwright.checkpoint.storage import CorruptError

    if options.device == "cuda" and not torch.cuda.is_available():
        raise mistake("there is no GPU that torch can use", "use --device cpu")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        work(open_folder(options.model), device)
    except CorruptError as error:
        print(f"meshwright: {error}; name another step of the run, as RUN@STEP", file=sys.stderr)
        return Exit.CORRUPT
    except torch.OutOfMemoryError:
        print(
            "meshwright: the GPU has too little memory for it; use --device cpu, or --dtype bfloat16", file=sys.stderr
        )
        return Exit.DOES_NOT_FIT
    return Exit.DONE
