"""Words that several verbs share: how they are read, and how people are told."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from meshwright.spec.check import InputError, Problem

OVERRIDES = "dotted overrides in TOML syntax, for example steps=50 optim.rate=1e-3 data.source=my/*.txt"

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    """A parser for one verb, with what all have in common."""
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(verb=run)
    return parser


def split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The run file, if the first word is one, and the overrides."""
    named, overrides = target(words)
    return (Path(named) if named else None), overrides


def target(words: list[str]) -> tuple[str | None, list[str]]:
    """The run file or model, if the first word is one, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def say_to(machine: bool) -> Callable[[str], None]:
    """Where people are told: a program's answer has standard output to itself."""
    stream = sys.stderr if machine else sys.stdout
    return lambda text: print(text, file=stream, flush=True)


def told(error: Exception) -> str:
    """A mistake, one sentence for each problem."""
    problems = [str(problem) for problem in error.problems] if isinstance(error, InputError) else [str(error)]
    if len(problems) == 1:
        return f"meshwright: {problems[0]}"
    return "\n  ".join([f"meshwright: {len(problems)} problems", *problems])


def require_training() -> None:
    """Planning needs nothing; training needs torch and its company."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "numpy", "tokenizers", "safetensors", "rich") if find_spec(name) is None]
    if missing:
        remedy = "run: pip install 'meshwright[train]'"
        raise InputError([Problem(f"this needs what is not installed: {', '.join(missing)}", remedy)])
