"""The program: reads argv, runs one verb, returns its exit code."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright import __version__
from meshwright.cli.options import sentences
from meshwright.runtime import failure
from meshwright.runtime.failure import Exit
from meshwright.runtime.place import PlaceError
from meshwright.spec.problem import InputError, Problem

LITTLE_ROOM = 2**28  # bytes


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
    "launch": Verb("launch", "write what starts a plan on Slurm, Kubernetes, Ray or a cloud, or submit it"),
    "doctor": Verb("doctor", "what is wrong with these machines: limits, versions, folders, links; under any launcher"),
    "report": Verb("report", "show what runs did beside the prediction, from their folders"),
    "generate": Verb("generate", "write text with the model of a run, a checkpoint or a Hugging Face folder"),
    "eval": Verb("eval", "the validation loss of a model on any data"),
    "models": Verb("info", "list the known models"),
    "clusters": Verb("info", "list the cards and networks that a cluster is made of"),
    "config": Verb("info", "show a resolved run, or the schema of run files"),
    "data": Verb("data", "show samples of a run with trained tokens marked, or tokenise its text beforehand"),
    "cache": Verb("cache", "show what is kept from one run to the next, or empty it"),
    "completion": Verb("completion", "print a script that completes words for bash, zsh or fish"),
    "convert": Verb("info", "convert a Hugging Face folder to a Meshwright model, or a trained model to it"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which the program has held back while it imported
        return _answer(parse(arguments))
    except KeyboardInterrupt:
        print("meshwright: interrupted before it was done; run the same command again", file=sys.stderr)
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(options: argparse.Namespace) -> int:
    """Run the verb. A mistake is reported to people, and to a program that asked for one JSON value."""
    if not _listens(options):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, failure.ASKS)  # which the program has held back
    try:
        code = options.verb(options)
        sys.stdout.flush()  # what is refused there is told here
        return code
    except (InputError, PlaceError) as error:
        print(sentences(error), file=sys.stderr)
        is_input = isinstance(error, InputError)
        found, code = (error.problems, error.exit_code) if is_input else ([Problem(str(error), "")], Exit.INPUT)
        if options.json:
            answer = {"state": "failed", "exit_code": int(code), "problems": found}
            print(msgspec.json.encode(answer).decode())
        return code
    except Exception as error:
        failed = failure.report_of(error)
        if failed is None and failure.is_full(error):
            failed = failure.of_full_disk(_full(options))
        if failed is None:
            raise
        print(failed, file=sys.stderr)
        if options.json:
            problem = Problem(failed.what, failed.remedy)
            answer = {"state": "failed", "exit_code": failed.code, "problems": [problem]}
            print(msgspec.json.encode(answer).decode())
        return failed.code


def _listens(options: argparse.Namespace) -> bool:
    """Whether the verb says what SIGTERM means, and lets it come when it can: those that start ranks of a run."""
    return options.verb.__name__ == "train" or getattr(options, "node_rank", None) is not None


def _full(options: argparse.Namespace) -> list[Path]:
    """The places that a verb may write to whose disk has little room: what it wrote in vain may be removed by now."""
    import shutil
    import tempfile

    from meshwright.cli import env

    named = [Path(value) for value in vars(options).values() if isinstance(value, str | Path)]
    places = [each.absolute() for each in (*named, Path(), env.cache(), Path(tempfile.gettempdir()))]
    there = {each if each.is_dir() else each.parent for each in places}
    return sorted(each for each in there if each.is_dir() and shutil.disk_usage(each).free < LITTLE_ROOM)


# What other tools call a flag of ours, and how ours is written.
THEIR_FLAGS = {
    "--gpus": "--cluster 8xh100",
    "--num-gpus": "--cluster 8xh100",
    "--hardware": "--cluster 8xh100",
    "--html": "--page FILE.html",
    "--nproc": "--ranks 2",
    "--nproc-per-node": "--ranks 2",
    "--nproc_per_node": "--ranks 2",
    "--num_processes": "--ranks 2",
    "--output_dir": "--folder FOLDER",
    "--output-dir": "--folder FOLDER",
}


def _unknown(flags: list[str], given: list[str], known: list[str]) -> str:
    """A flag that was mistyped, or a setting that was written as one and is shown as the word that it is."""
    from difflib import get_close_matches

    from meshwright.config import schema

    if not flags[0].startswith("-") and "--data" in known and Path(flags[0]).exists():
        return f"unknown: {flags[0]}; did you mean --data {flags[0]}?"
    if not flags[0].startswith("-"):
        return f"unknown: {' '.join(flags)}; leave it out, or see `--help`"
    flag, _, value = flags[0].partition("=")
    name = flag.lstrip("-").replace("-", "_")
    near = [THEIR_FLAGS[flag]] if THEIR_FLAGS.get(flag, "").split(" ")[0] in known else []
    near = near or get_close_matches(flag, [each for each in known if each != "--help"], n=1, cutoff=0.6)
    if key := schema.meant(name):
        behind = given[given.index(flags[0]) + 1 :]
        value = value or (behind[0] if behind and "=" not in behind[0] and behind[0][:1] not in ("", "-") else "…")
        return f"{flag} is not a flag: settings are words, such as {key}={value}"
    advice = schema.ADVICE.get(schema.topic(name))
    if near and not advice:
        return f"{flag} is not a flag; did you mean {near[0]}?"
    remedy = advice or "`--help` lists the flags, `meshwright config schema` every key"
    return f"{flag} is not a flag; {remedy}"


def _unknown_verb(word: str) -> str:
    """A verb that was mistyped, or a run file without one."""
    from difflib import get_close_matches

    if word.endswith(".toml") or "=" in word:
        return f"{word} is not a verb; write: meshwright train {word}"
    near = get_close_matches(word.lower(), VERBS, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(VERBS)}"
    return f"{word} is not a verb; {remedy}"


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a verb's parser its arguments, and the function that answers."""
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    module = import_module(f"meshwright.cli.{VERBS[name].module}")
    parser.set_defaults(verb=getattr(module, name))
    getattr(module, f"add_{name}", lambda parser: None)(parser)


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
    if not given:
        parser.error(f"no verb is named; use one of {', '.join(VERBS)}, or `meshwright --help`")
    if chosen and chosen not in VERBS:
        parser.error(_unknown_verb(chosen))
    for name, verb in VERBS.items():
        description = verb.help[0].upper() + verb.help[1:] + "."
        under = verbs.add_parser(name, help=verb.help, description=description, allow_abbrev=False)
        if name == chosen:
            add_arguments(under, name)
    options, rest = parser.parse_known_args(given)
    if rest and not hasattr(options, "words") and not any(word.startswith("-") for word in rest):
        behind = given[given.index(chosen) + 1 :]  # words on both sides of a flag, as in `convert RUN --step 3 FOLDER`
        options, rest = verbs.choices[chosen].parse_known_intermixed_args(behind)
    flags = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if flags:
        under = verbs.choices[chosen]
        under.error(_unknown(flags, given, list(under._option_string_actions)))
    if rest:
        options.words += rest  # key=value words after a flag
    return options
