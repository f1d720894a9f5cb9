"""`meshwright verify`: plans train like one process, resumed runs like unbroken ones, checkpoints are whole."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.cli.train import examined
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import replace_file, require_folder
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import plural


def add_verify(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    words.add_plans(verb, 'for example "tp=2,pp=2,schedule=1f1b"; may be repeated')
    verb.add_argument("--matrix", action="store_true", help="the standard set of plans for up to --ranks ranks")
    verb.add_argument("--ranks", type=words.count, default=4, help="the largest world of --matrix (default 4)")
    verb.add_argument("--steps", type=words.count, default=3, help="optimizer steps to compare (default 3)")
    verb.add_argument("--folder", type=Path, help="where the certificate goes (default: runs/verify-NAME)")
    checksums = "instead: verify the checksums of a checkpoint, or of all of a run"
    verb.add_argument("--checkpoint", type=Path, metavar="DIR", help=checksums)
    verb.add_argument(
        "--resume", metavar="RUN", help="instead: stop a short form of a run, resume it, and compare bitwise"
    )
    verb.add_argument(
        "--tune",
        metavar="RUN",
        help="instead: a fine-tuning run's mask, stop tokens, packing, base, adapter and export",
    )


def verify(options: argparse.Namespace) -> int:
    """One process beside each plan, by the same seed and batches; exit 1 when one differs, 3 when one does not fit."""
    if options.checkpoint is not None:
        return _checkpoint(options)
    words.require_training()
    if options.resume is not None:
        return _resume(options)
    if options.tune is not None:
        return _tune(options)
    from meshwright.verify import prove

    target, overrides = words.target(options.words)
    wanted = prove.matrix(options.ranks, target, overrides) if options.matrix else options.plan
    if not wanted:  # one process beside itself proves nothing
        raise InputError([Problem("no plan to prove", 'name one with --plan "shard=2,zero=3", or all with --matrix')])
    folder = options.folder or Path("runs") / f"verify-{Path(target or 'matrix').stem}"
    jobs = prove.jobs(target, overrides, wanted, options.steps, folder)
    say = words.say_to(options.json)
    _require([reference for reference, _ in jobs if reference.data.source != str(folder / prove.TEXT)], folder, say)
    results = prove.prove_all(jobs, env.cache(), folder, say)
    if options.json:
        print(msgspec.json.encode(results).decode())
    say(
        f"{sum(v.passed for v in results)} of {plural(len(results), 'plan')} equal; "
        f"certificate: {folder / prove.CERTIFICATE}"
    )
    failed = [result for result in results if not result.passed]
    if not failed:
        return Exit.DONE
    return Exit.FAILED if any(result.fits for result in failed) else Exit.DOES_NOT_FIT


def _require(runs: list[Run], folder: Path, say: Callable[[str], None]) -> None:
    """Places to write to, and the data of runs that have their own: before the first rank starts."""
    from meshwright.data import prepare

    require_folder(folder, "name another --folder")
    if not runs:
        require_folder(env.cache(), prepare.REMEDY)
    for run in runs:
        prepare.prepare(run, env.cache(), say)


def _checkpoint(options: argparse.Namespace) -> int:
    """Exit 12 when a byte of what was saved is not what was written."""
    from meshwright.checkpoint.storage import CorruptError
    from meshwright.verify import integrity

    try:
        result = integrity.verify(options.checkpoint, words.say_to(options.json))
    except CorruptError as error:
        print(words.sentences(error), file=sys.stderr)
        return CorruptError.code
    if options.json:
        print(msgspec.json.encode(result).decode())
    return 0 if result.sound else CorruptError.code


def _resume(options: argparse.Namespace) -> int:
    """Exit 1 when a run that was stopped and resumed differs from one that was not."""
    from meshwright.verify import resume

    say = words.say_to(options.json)
    target, overrides = words.target([options.resume, *options.words])
    folder = options.folder or Path("runs") / f"verify-resume-{Path(target or 'default').stem}"
    runs = resume.runs(target, overrides, folder)
    _require(runs[:1], folder, say)
    result = resume.prove(runs, env.cache(), folder, say)
    if options.json:
        print(msgspec.json.encode(result).decode())
    return 0 if result.passed else 1


def _tune(options: argparse.Namespace) -> int:
    """Exit 1 when one of the checks of a fine-tuning run fails."""
    file, overrides = words.split([options.tune, *options.words])
    run = load.load(file, overrides, default_ranks=1).run
    if run.arch.tuning is msgspec.UNSET and not run.init.folder and not run.data.is_chat:
        what = f"{run.name} begins with drawn weights, trains all of them on every token, and is no fine-tuning run"
        raise mistake(what, "prove its plan by verify --plan, or name what it begins from: init.from", "init.from")
    from meshwright.data import prepare
    from meshwright.verify import tune
    from meshwright.verify.prove import CERTIFICATE

    say = words.say_to(options.json)
    folder = options.folder or Path("runs") / f"verify-tune-{run.name}"
    require_folder(folder, "name another --folder")
    run = prepare.with_epochs(run, env.cache(), say)
    corpus = prepare.prepare(run, env.cache(), say)
    with tempfile.TemporaryDirectory(prefix=".proof-", dir=folder) as place:
        certificate = tune.prove(run, corpus, Path(place), say)
    text = msgspec.json.encode(certificate)
    replace_file(folder / CERTIFICATE, msgspec.json.format(text, indent=2) + b"\n")
    if options.json:
        print(text.decode())
    say(f"{certificate.summary}; certificate: {folder / CERTIFICATE}")
    return Exit.DONE if certificate.passed else Exit.FAILED


def add_rehearse(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    from meshwright.verify.rehearse import FAULTS

    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--fault",
        choices=FAULTS,
        default="kill",
        metavar="FAULT",
        help=f"the fault to inject into its last rank: {', '.join(FAULTS)} (default: kill)",
    )
    verb.add_argument("--ranks", type=words.count, help="processes to start (default: as train)")
    verb.add_argument("--folder", type=Path, help="where the copies stay (default: a temporary folder)")


def rehearse(options: argparse.Namespace) -> int:
    """Exit 0 when the weights are those of a run without the fault, 1 when not."""
    words.require_training()
    run = examined(options.words, options.ranks).run
    from meshwright.verify.rehearse import rehearse as rehearsed

    say = words.say_to(options.json)
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearse-") as temporary:
        result = rehearsed(run, options.fault, options.folder or Path(temporary), say)
    if options.json:
        print(msgspec.json.encode(result).decode(), flush=True)
    weights = "bitwise equal weights" if result.same_weights else "DIFFERENT WEIGHTS"
    say(
        f"{result.fault}: recovered after {result.recovery_seconds:.1f} s, "
        f"{plural(result.lost_steps, 'step')} repeated, {weights} (sha256 {result.digest[:16] or 'none'})"
    )
    return Exit.DONE if result.same_weights else Exit.FAILED
