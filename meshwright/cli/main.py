"""The program: reads argv, runs one verb, tells its exit code."""

import argparse
import os
import sys
from collections.abc import Sequence

import msgspec

from meshwright import __version__
from meshwright.cli import bench, info, plan, report, train, verify
from meshwright.cli import options as words
from meshwright.config import schema
from meshwright.runtime import failure
from meshwright.runtime.failure import Exit
from meshwright.runtime.place import PlaceError
from meshwright.spec.problem import InputError, Problem

VERBS = (
    train.add,
    plan.add,
    info.add_advise,
    verify.add,
    verify.add_rehearse,
    bench.add,
    report.add,
    info.add_models,
    info.add_clusters,
    info.add_config,
    info.add_convert,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    try:
        return _answer(parse(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(options: argparse.Namespace) -> int:
    """Run the verb. A mistake is told to people, and to a program that asked for one JSON value."""
    try:
        return options.verb(options)
    except (InputError, PlaceError) as error:
        print(words.told(error), file=sys.stderr)
        if options.json:
            found = error.problems if isinstance(error, InputError) else [Problem(str(error), "")]
            answer = {"state": "failed", "exit_code": int(Exit.INPUT), "problems": found}
            print(msgspec.json.encode(answer).decode())
        return Exit.INPUT


def _unknown(flags: list[str], rest: list[str]) -> str:
    """A setting that was written as a flag is shown as the word that it is."""
    key, _, value = flags[0].lstrip("-").partition("=")
    if not flags[0].startswith("-") or key not in schema.every_key():
        return f"unknown: {' '.join(flags)}"
    behind = rest[rest.index(flags[0]) + 1 :]
    value = value or (behind[0] if behind and "=" not in behind[0] else "…")
    return f"{flags[0]} is not a flag: settings are words, such as {key}={value}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The verb and its words."""
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="Plans, trains and proves large models across many GPUs.",
        epilog=failure.table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    verbs = parser.add_subparsers(metavar="verb", required=True)
    for add in VERBS:
        add(verbs)
    options, rest = parser.parse_known_args(arguments)
    flags = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if flags:
        parser.error(_unknown(flags, rest))
    if rest:
        options.words += rest  # key=value words after a flag
    return options
