"""`meshwright verify`: a plan trains like one process, a stopped run goes on as if it never was, a save is whole."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.spec.check import InputError, Problem
from meshwright.spec.run import Run
from meshwright.spec.writing import require_folder
from meshwright.verbs import surroundings, words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "verify", verify, "prove that plans train like one process")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--plan", action="append", default=[], help='for example "tp=2,pp=2,schedule=1f1b"; may be repeated'
    )
    verb.add_argument("--matrix", action="store_true", help="the standard set of plans for up to --ranks ranks")
    verb.add_argument("--ranks", type=words.count, default=4, help="the largest world of --matrix (default 4)")
    verb.add_argument("--steps", type=words.count, default=3, help="optimizer steps to compare (default 3)")
    verb.add_argument("--folder", type=Path, help="where the certificate goes (default: runs/verify-NAME)")
    verb.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="instead: check every byte of a saved step, or of all of a run"
    )
    verb.add_argument(
        "--resume", metavar="RUN", help="instead: stop a short form of a run, go on, and compare to the last bit"
    )


def verify(options: argparse.Namespace) -> int:
    """The same seed and batches under one process and under each plan; exit 1 when one leaves the tolerance."""
    if options.checkpoint is not None:
        return _checkpoint(options)
    words.require_training()
    if options.resume is not None:
        return _resume(options)
    from meshwright.verify import plans, prove

    target, overrides = words.target(options.words)
    wanted = plans.matrix(options.ranks) if options.matrix else options.plan
    if not wanted:
        raise InputError([Problem("no plan to prove", 'name one with --plan "shard=2,zero=3", or all with --matrix')])
    folder = options.folder or Path("runs") / f"verify-{Path(target or 'matrix').stem}"
    jobs = plans.jobs(target, overrides, wanted, options.steps, folder)
    say = words.say_to(options.json)
    _require([reference for reference, _ in jobs if reference.data.source != str(folder / plans.TEXT)], folder, say)
    verdicts = prove.prove_all(jobs, surroundings.cache(), folder, say)
    if options.json:
        print(msgspec.json.encode(verdicts).decode())
    say(f"{sum(v.passed for v in verdicts)} of {len(verdicts)} plans equal; certificate: {folder / prove.CERTIFICATE}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _require(runs: list[Run], folder: Path, say: Callable[[str], None]) -> None:
    """Places to write to, and the data of runs that have their own: before the first rank starts."""
    from meshwright.data import cache, prepare

    require_folder(folder, "name another --folder")
    if not runs:
        require_folder(surroundings.cache(), cache.REMEDY)
    for run in runs:
        prepare.prepare(run, surroundings.cache(), say)


def _checkpoint(options: argparse.Namespace) -> int:
    """Exit 12 when a byte of what was saved is not what was written."""
    from meshwright.checkpoint.corrupt import CorruptError
    from meshwright.verify import integrity

    try:
        verdict = integrity.verify(options.checkpoint, words.say_to(options.json))
    except CorruptError as error:
        print(words.told(error), file=sys.stderr)
        return CorruptError.code
    if options.json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.sound else CorruptError.code


def _resume(options: argparse.Namespace) -> int:
    """Exit 1 when a run that was stopped and went on differs from one that was not."""
    from meshwright.verify import resume

    say = words.say_to(options.json)
    target, overrides = words.target([options.resume, *options.words])
    folder = options.folder or Path("runs") / f"verify-resume-{Path(target or 'default').stem}"
    runs = resume.runs(target, overrides, folder)
    _require(runs[:1], folder, say)
    verdict = resume.prove(runs, surroundings.cache(), folder, say)
    if options.json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.passed else 1
