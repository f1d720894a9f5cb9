"""`meshwright train`: the launcher of local ranks, and a rank that somebody else has launched."""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.spec import check, load
from meshwright.spec.check import InputError
from meshwright.spec.params import count
from meshwright.spec.place import Place
from meshwright.spec.record import Summary
from meshwright.spec.run import Run
from meshwright.verbs import surroundings, words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "train", train, "train a run file, or the default run")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--ranks", type=words.count, help="processes to start (default: 2 on a CPU, else one for each GPU)"
    )
    verb.add_argument("--folder", type=Path, help="where the run lives (default: runs/NAME-DIGEST)")
    verb.add_argument("--fresh", action="store_true", help="set an earlier run in the folder aside and start anew")


def train(options: argparse.Namespace) -> int:
    """Train: as the launcher of local ranks, or as one rank that somebody else has launched."""
    words.require_training()
    here = surroundings.here()
    ranks = options.ranks if here is None else here.world
    file, overrides = words.split(options.words)
    loaded, problems = load.examine(file, overrides, ranks=ranks, default_ranks=surroundings.default_ranks())
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

    say = words.say_to(options.json)
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
        ranks.start(command, run.plan.world, surroundings.of_ranks(), people.fileno())
        prepare(run, surroundings.cache(), say)
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
            words.say_to(options.json)(f"{folder} has finished this run; add --fresh to train it again")
            _tell(finished, options.json)
        return 0
    claim = folders.Claim(folder, run, fresh=options.fresh) if here.rank == 0 and not ours else None
    try:
        summary = _train_rank(run, here, folder, options.json)
    except Exception as error:
        traceback.print_exc()
        code = 2 if isinstance(error, InputError) else 1
        if ours:
            text = words.told(error) if code == 2 else traceback.format_exc()
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
    corpus = prepare(run, surroundings.cache(), view.say if here.launcher != "meshwright" else lambda text: None)
    started = surroundings.started()
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
