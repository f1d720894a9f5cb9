"""The program: reads argv, runs one verb, returns its exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import msgspec

from meshwright import __version__
from meshwright.cli.options import sentences
from meshwright.runtime import failure
from meshwright.runtime.failure import Exit
from meshwright.runtime.place import PlaceError
from meshwright.spec.problem import InputError, Problem


class Verb(NamedTuple):
    """Where a verb is, and what it does: its module has a function of its name, and `add_NAME` for its arguments."""

    module: str  # of this package
    help: str


# Only the module of the verb that is asked for is imported: help and a wrong word are answered at once.
VERBS = {
    "train": Verb("train", "train a run file, or the default run"),
    "plan": Verb("plan", "will it fit, which parallelism is best, how fast, and why: predicted without a GPU"),
    "advise": Verb("info", "which technique a model needs on a cluster: too big, too slow, does it scale"),
    "verify": Verb("verify", "prove that plans train like one process"),
    "rehearse": Verb("verify", "fault-injection rehearsal: kill a rank and check recovery"),
    "bench": Verb("bench", "benchmark a step against the prediction, or a device"),
    "report": Verb("report", "show what runs did beside the prediction, from their folders"),
    "models": Verb("info", "list the known models"),
    "clusters": Verb("info", "list the cards and networks that a cluster is made of"),
    "config": Verb("info", "show a resolved run, or the schema of run files"),
    "convert": Verb("info", "convert a Hugging Face folder to a Meshwright model, or a trained model to it"),
}


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
    """Run the verb. A mistake is reported to people, and to a program that asked for one JSON value."""
    try:
        return options.verb(options)
    except (InputError, PlaceError) as error:
        print(sentences(error), file=sys.stderr)
        if options.json:
            found = error.problems if isinstance(error, InputError) else [Problem(str(error), "")]
            answer = {"state": "failed", "exit_code": int(Exit.INPUT), "problems": found}
            print(msgspec.json.encode(answer).decode())
        return Exit.INPUT


def _unknown(flags: list[str], rest: list[str]) -> str:
    """A setting that was written as a flag is shown as the word that it is."""
    from meshwright.config import schema

    key, _, value = flags[0].lstrip("-").partition("=")
    if not flags[0].startswith("-") or key not in schema.every_key():
        return f"unknown: {' '.join(flags)}"
    behind = rest[rest.index(flags[0]) + 1 :]
    value = value or (behind[0] if behind and "=" not in behind[0] else "…")
    return f"{flags[0]} is not a flag: settings are words, such as {key}={value}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The verb and its words."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="Plans, trains and proves large models across many GPUs.",
        epilog=failure.table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    verbs = parser.add_subparsers(metavar="verb", required=True)
    chosen = next((word for word in given if not word.startswith("-")), "")
    for name, verb in VERBS.items():
        under = verbs.add_parser(name, help=verb.help, description=verb.help[0].upper() + verb.help[1:] + ".")
        if name == chosen:
            under.add_argument("--json", action="store_true", help="machine-readable output")
            module = import_module(f"meshwright.cli.{verb.module}")
            under.set_defaults(verb=getattr(module, name))
            getattr(module, f"add_{name}", lambda parser: None)(under)
    options, rest = parser.parse_known_args(given)
    flags = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if flags:
        verbs.choices[chosen].error(_unknown(flags, rest))
    if rest:
        options.words += rest  # key=value words after a flag
    return options
