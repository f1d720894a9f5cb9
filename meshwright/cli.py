"""The verbs. The only reader of argv; heavy imports are inside the verb that needs them."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from meshwright import __version__
from meshwright.spec import check, load, schema, zoo
from meshwright.spec.check import InputError, Problem
from meshwright.spec.params import active, count
from meshwright.spec.place import Place, PlaceError, place
from meshwright.spec.record import Summary
from meshwright.spec.run import Run

STARTED = time.time()
STARTED_VARIABLE = "MESHWRIGHT_STARTED"  # our launcher tells its ranks when the user pressed Enter

EXIT_CODES = """\
exit codes:
  0    done
  1    failed: a rank's error, a check that did not hold, or a fault of ours
  2    bad input: every problem is listed with its remedy, and nothing was started
  130  interrupted
"""
OVERRIDES = "dotted overrides in TOML syntax, for example steps=50 optim.rate=1e-3 data.source=my/*.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    try:
        options = _parse(arguments)
        return options.verb(options)
    except (InputError, PlaceError) as error:
        print(_told(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="meshwright",
        description="Plans, trains and proves large models across many GPUs.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    verbs = parser.add_subparsers(metavar="verb", required=True)

    verb = _verb(verbs, "train", train, "train a run file, or the default run")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=OVERRIDES)
    verb.add_argument("--ranks", type=_count, help="processes to start (default: 2 on a CPU, else one for each GPU)")
    verb.add_argument("--folder", type=Path, help="where the run lives (default: runs/NAME-DIGEST)")
    verb.add_argument("--fresh", action="store_true", help="set an earlier run in the folder aside and start anew")

    verb = _verb(verbs, "plan", plan, "what a plan implies: the collectives of one step")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=OVERRIDES)
    verb.add_argument("--traffic", action="store_true", required=True, help="list the collectives that one rank issues")

    verb = _verb(verbs, "verify", verify, "prove that plans train like one process")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=OVERRIDES)
    verb.add_argument(
        "--plan", action="append", default=[], help='for example "tp=2,pp=2,schedule=1f1b"; may be repeated'
    )
    verb.add_argument("--matrix", action="store_true", help="the standard set of plans for up to --ranks ranks")
    verb.add_argument("--ranks", type=_count, default=4, help="the largest world of --matrix (default 4)")
    verb.add_argument("--steps", type=_count, default=3, help="optimizer steps to compare (default 3)")
    verb.add_argument("--folder", type=Path, help="where the certificate goes (default: runs/verify-NAME)")

    verb = _verb(verbs, "models", models, "list the model zoo")

    verb = _verb(verbs, "config", config, "show a resolved run, or the schema of run files")
    verb.add_argument("what", choices=("show", "schema"))
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=OVERRIDES)
    verb.add_argument("--ranks", type=_count, help="as of train")

    verb = _verb(verbs, "convert", convert, "turn a Hugging Face folder into ours, or a trained model into theirs")
    verb.add_argument("source", type=Path, help="a Hugging Face folder, or a run folder")
    verb.add_argument("target", type=Path, help="the folder to write")
    verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the written weights")

    options, rest = parser.parse_known_args(arguments)
    flags = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")
    if rest:
        options.words += rest  # key=value words after a flag
    return options


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _verb(verbs: Verbs, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(verb=run)
    return parser


def models(options: argparse.Namespace) -> int:
    """The model zoo."""
    models = [(name, zoo.preset(name)) for name in zoo.preset_names()]
    if options.json:
        rows = [{"name": name, "parameters": count(arch), "arch": msgspec.to_builtins(arch)} for name, arch in models]
        print(msgspec.json.encode(rows).decode())
        return 0
    print(f"{'name':<16}{'parameters':>18}{'active':>18}  layers × hidden, heads/kv, vocabulary")
    for name, arch in models:
        shape = f"{arch.layers} × {arch.hidden}, {arch.heads}/{arch.kv_heads}, {arch.vocab:,}"
        print(f"{name:<16}{count(arch):>18,}{active(arch):>18,}  {shape}")
    return 0


def config(options: argparse.Namespace) -> int:
    """A resolved run with the origin of each value, or the schema of run files."""
    if options.what == "schema":
        print(msgspec.json.format(msgspec.json.encode(schema.json_schema())).decode())
        return 0
    file, overrides = _split(options.words)
    loaded = load.load(file, overrides, ranks=options.ranks, default_ranks=_default_ranks())
    if options.json:
        both = {"run": msgspec.to_builtins(loaded.run), "origins": loaded.origins}
        print(msgspec.json.encode(both).decode())
    else:
        print(load.write(loaded.run, loaded.origins), end="")
    return 0


def convert(options: argparse.Namespace) -> int:
    """Weights between Hugging Face's layout and ours."""
    _require_training()
    from meshwright.checkpoint.convert import convert as convert_folder
    from meshwright.checkpoint.judge import MismatchError

    try:
        report = convert_folder(options.source, options.target, _say(options.json), dtype=options.dtype)
    except MismatchError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(report).decode())
    return 0


def plan(options: argparse.Namespace) -> int:
    """The collectives of one optimizer step, as the first rank issues them."""
    from meshwright.cost.traffic import bytes_by_axis, traffic

    target, overrides = _target(options.words)
    words = [f"arch.preset={target}", *overrides] if target in zoo.preset_names() else overrides
    file = None if target is None or target in zoo.preset_names() else Path(target)
    run = load.load(file, words).run
    collectives = traffic(run.arch, run.plan, run.sequence, masked=run.data.mask_documents)
    if options.json:
        print(msgspec.json.encode(collectives).decode())
        return 0
    print(f"plan: {run.plan}")
    print(f"{'kind':<16}{'axis':<18}{'calls':>8}{'bytes a call':>18}")
    for each in collectives:
        print(f"{each.kind:<16}{each.axis:<18}{each.count:>8}{each.bytes:>18,}")
    print(
        "in all: " + (", ".join(f"{axis} {size:,}" for axis, size in bytes_by_axis(collectives).items()) or "nothing")
    )
    return 0


def verify(options: argparse.Namespace) -> int:
    """The same seed and batches under one process and under each plan; exit 1 when one leaves the tolerance."""
    _require_training()
    from meshwright.verify import plans, prove

    target, overrides = _target(options.words)
    wanted = plans.matrix(options.ranks) if options.matrix else options.plan
    if not wanted:
        raise InputError([Problem("no plan to prove", 'name one with --plan "shard=2,zero=3", or all with --matrix')])
    folder = options.folder or Path("runs") / f"verify-{Path(target or 'matrix').stem}"
    jobs = plans.jobs(target, overrides, wanted, options.steps, folder)
    say = _say(options.json)
    verdicts = prove.prove_all(jobs, _cache(), folder, say)
    if options.json:
        print(msgspec.json.encode(verdicts).decode())
    say(f"{sum(v.passed for v in verdicts)} of {len(verdicts)} plans equal; certificate: {folder / prove.CERTIFICATE}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def train(options: argparse.Namespace) -> int:
    """Train: as the launcher of local ranks, or as one rank that somebody else has launched."""
    _require_training()
    here = place(os.environ)
    ranks = options.ranks if here is None else here.world
    file, overrides = _split(options.words)
    loaded, problems = load.examine(file, overrides, ranks=ranks, default_ranks=_default_ranks())
    if loaded is not None and (here is None or here.rank == 0):
        from meshwright.data import prepare

        problems += [load.placed(problem, loaded.origins) for problem in prepare.problems(loaded.run)]
    if loaded is None or problems:
        raise InputError(problems)
    return _launch(loaded.run, options) if here is None else _rank(loaded.run, here, options)


def _launch(run: Run, options: argparse.Namespace) -> int:
    """Start the ranks of one machine, and make the tokens while they import torch."""
    from meshwright.data.prepare import prepare
    from meshwright.launch import folder as folders
    from meshwright.launch.local import Ranks, end_on_term

    say = _say(options.json)
    folder = options.folder or folders.default(run)
    claim = folders.Claim(folder, run, fresh=options.fresh)
    if claim.finished is not None:
        say(f"{folder} has finished this run; add --fresh to train it again")
        _tell(claim.finished, options.json)
        return 0
    _announce(run, folder, say)
    command = [sys.executable, "-m", "meshwright", "train", str(folder / folders.RUN), "--folder", str(folder)]
    people = sys.stderr if options.json else sys.stdout
    ranks = Ranks(folder)
    end_on_term()
    try:
        ranks.start(command, run.plan.world, {**os.environ, STARTED_VARIABLE: str(STARTED)}, people.fileno())
        prepare(run, _cache(), say)
        failure = ranks.wait()
    except BaseException:
        ranks.end()
        claim.abandon()
        raise
    finally:
        ranks.end()
        claim.release()
    if failure is not None:
        print(f"rank {failure.rank} failed: {failure.text}\nlogs: {folder / 'logs'}", file=sys.stderr)
        return 2 if failure.code == 2 else 1
    _tell(folders.read_summary(folder), options.json)
    return 0


def _announce(run: Run, folder: Path, say: Callable[[str], None]) -> None:
    for warning in check.warnings(run):
        say(f"warning: {warning}")
    world = run.plan.world
    say(f"{run.name}: {run.steps} steps of {run.tokens:,} tokens, {count(run.arch):,} parameters; in {folder}")
    say(f"plan: {run.plan}")
    say(f"starting {world} ranks (or: torchrun --nproc-per-node {world} -m meshwright train …)")


def _rank(run: Run, here: Place, options: argparse.Namespace) -> int:
    """Be one rank of a job that torchrun, Slurm, MPI or our own launcher started."""
    from meshwright.launch import folder as folders
    from meshwright.launch import local

    ours = here.launcher == "meshwright"
    folder = options.folder or folders.default(run)
    if ours:
        local.die_with_parent()
    elif not options.fresh and (finished := folders.read_summary(folder)) is not None:
        if here.rank == 0:
            _say(options.json)(f"{folder} has finished this run; add --fresh to train it again")
            _tell(finished, options.json)
        return 0
    claim = folders.Claim(folder, run, fresh=options.fresh) if here.rank == 0 and not ours else None
    try:
        summary = _train_rank(run, here, folder, options.json)
    except Exception as error:
        traceback.print_exc()
        code = 2 if isinstance(error, InputError) else 1
        if ours:
            text = _told(error) if code == 2 else traceback.format_exc()
            local.write_failure(folder, local.Failure(rank=here.rank, at=time.time(), code=code, text=text))
        return code
    if here.rank == 0:
        folders.write_summary(folder, summary)
        if claim is not None:
            claim.release()
            _tell(summary, options.json)
    return 0


def _train_rank(run: Run, here: Place, folder: Path, machine: bool) -> Summary:
    from meshwright.data.prepare import prepare
    from meshwright.train.rank import run_rank  # imports torch: the launcher makes the tokens meanwhile
    from meshwright.train.screen import default_stream, screen

    # Under our launcher rank 0's standard output is where people read, whatever the launcher's own is for.
    stream = default_stream(machine and here.launcher != "meshwright")
    view = screen(stream, run.log.every, quiet=here.rank != 0)
    corpus = prepare(run, _cache(), view.say if here.launcher != "meshwright" else lambda text: None)
    started = float(os.environ.get(STARTED_VARIABLE, STARTED))
    return run_rank(run, here, folder, corpus, view, started)


def _tell(summary: Summary | None, machine: bool) -> None:
    """How a run ended: one object for a program, a few lines and the sample for a person."""
    assert summary is not None, "a run that ends well leaves a summary"
    if machine:
        print(msgspec.json.encode(summary).decode(), flush=True)
        return
    held = f", held-out {summary.held_out_loss:.4f}" if summary.held_out_loss is not None else ""
    lines = [
        "",
        f"done: {summary.step} steps in {summary.seconds:.0f} s on {summary.ranks} ranks",
        f"  loss        {summary.first_loss:.4f} → {summary.loss:.4f}{held}",
        f"  speed       {summary.tokens_per_second:,.0f} tokens/s",
        f"  first loss  after {summary.seconds_to_first_loss:.1f} s",
        f"  memory      {summary.peak_bytes / 2**30:.2f} GiB at the peak of one rank",
        f"  folder      {summary.folder} (run.toml, steps.rank*.jsonl, model/)",
    ]
    if summary.sample:
        lines += ["  sample", *(f"    {line}" for line in summary.sample.splitlines())]
    lines += [
        "try next:",
        "  meshwright train data.source='my/*.txt'          your own text",
        f"  meshwright convert {summary.folder} my-model    a Hugging Face folder",
        "  meshwright config show                            every setting and where it came from",
    ]
    print("\n".join(lines), flush=True)


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The run file, if the first word is one, and the overrides."""
    target, overrides = _target(words)
    return (Path(target) if target else None), overrides


def _target(words: list[str]) -> tuple[str | None, list[str]]:
    """The run file or model, if the first word is one, and the overrides."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def _default_ranks() -> int:
    from meshwright.launch.local import gpus

    return gpus(os.environ) or 2


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def _say(machine: bool) -> Callable[[str], None]:
    stream = sys.stderr if machine else sys.stdout
    return lambda text: print(text, file=stream, flush=True)


def _require_training() -> None:
    """Planning needs nothing; training needs torch and its company."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "numpy", "tokenizers", "safetensors", "rich") if find_spec(name) is None]
    if missing:
        remedy = "run: pip install 'meshwright[train]'"
        raise InputError([Problem(f"this needs what is not installed: {', '.join(missing)}", remedy)])


def _told(error: Exception) -> str:
    problems = [str(problem) for problem in error.problems] if isinstance(error, InputError) else [str(error)]
    if len(problems) == 1:
        return f"meshwright: {problems[0]}"
    return "\n  ".join([f"meshwright: {len(problems)} problems", *problems])


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
