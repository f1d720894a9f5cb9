"""The front door: what a notebook or a script calls. Beside the command line it is the other edge of the program."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.config import load as loading
from meshwright.config.run import Run
from meshwright.runtime.place import Place, cores, local
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import plural

if TYPE_CHECKING:
    from torch import nn

    from meshwright.cost.job import Job
    from meshwright.hardware.cluster import Cluster
    from meshwright.parallel.model_spec import ModelSpec
    from meshwright.report.run_summary import RunReport
    from meshwright.search.best_first import Candidate, Candidates
    from meshwright.train.loop import EvalResult, StepResult
    from meshwright.verify.prove import ParityResult
    from meshwright.verify.prove_module import Batch, Loss

Say = Callable[[str], None]


def _silent(text: str) -> None:
    """Nobody is told."""


def load(file: str | Path | None = None, *overrides: str, ranks: int | None = None) -> Run:
    """The run of a run file and overrides such as "plan.tp=2"; without a file, the default run.

    A plan that leaves it open has `ranks` ranks: unless stated, as many as torchrun or others started, or one.
    """
    here = env.here()
    ranks = here.world if ranks is None and here is not None else ranks
    loaded = loading.load(None if file is None else Path(file), overrides, ranks=ranks)
    if loaded.run.goal.memory_gib is not None:
        from meshwright.search import budget

        loaded, _ = budget.resolved(loaded)
    return loaded.run


def price(run: "Run | Job", cluster: "Cluster | str | None" = None) -> "Candidate":
    """One plan: `.price` has its seconds and MFU, `.ledger` the memory of its most loaded rank, `.fit` whether it fits.

    The machines are a `Cluster` or words like "64xh100" (a card alone stands for as many as the plan has ranks); unless
    stated, those of the run's goal, and an H100 for each rank where it names none.
    """
    from meshwright.search.best_first import priced
    from meshwright.search.budget import job_of

    job = job_of(run) if isinstance(run, Run) else run
    if cluster is not None:
        job = msgspec.structs.replace(job, cluster=_machines(cluster, job.plan))
    return priced(job)


def _machines(given: "Cluster | str", plan: Plan) -> "Cluster":
    from meshwright.hardware.cluster import cluster

    machines = cluster(given) if isinstance(given, str) else given
    if machines.gpus == 1 and isinstance(given, str):
        return cluster(given, gpus=plan.world)
    if machines.gpus < plan.world:
        what = f"the plan has {plural(plan.world, 'rank')}, and {machines.name} has {plural(machines.gpus, 'GPU')}"
        raise InputError([Problem(what, "name more GPUs, or price a smaller plan", "cluster")])
    return machines


def search(
    model: str | Path | Arch,
    cluster: "Cluster | str",
    *overrides: str,
    sequence: int | None = None,
    batch: int | None = None,
    top: int = 5,
) -> "Candidates":
    """The best plans for a model on a cluster, best first; none where nothing fits.

    The model is one of `meshwright models`, a run file, a Hugging Face folder or an `Arch`. Overrides such as
    "plan.tp=8" state what is decided; a sequence and a batch that nobody states are the usual ones.
    """
    from meshwright.cli import query
    from meshwright.search.best_first import Candidates
    from meshwright.search.best_first import search as find
    from meshwright.search.space import refuse_empty

    sizes = [f"{key}={value}" for key, value in (("sequence", sequence), ("batch", batch)) if value is not None]
    arch, target = (model, None) if isinstance(model, Arch) else (None, str(model))
    asked, _ = query.open_run(target, [*overrides, *sizes], arch)
    machines = query.machines_of(cluster, asked.run.goal) if isinstance(cluster, str) else cluster
    question, _ = query.question_of(asked, machines, asked.run.goal.vary)
    found = find(question, top)
    if not found.counts.legal:
        refuse_empty(question)
    return Candidates(found.found)


def report(folder: str | Path, cluster: str = "", profile: str | Path | None = None) -> "RunReport":
    """What a run did, from its folder, beside the planner's prediction; the machines are stated as for the verb."""
    from meshwright.hardware.profile import read_profile
    from meshwright.report.run_data import facts
    from meshwright.report.run_summary import Given, reported

    given = Given(cluster=cluster, profile=None if profile is None else read_profile(Path(profile)))
    return reported(facts(Path(folder)), given)


def train(run: Run, folder: str | Path | None = None, say: Say = _silent) -> "Iterator[StepResult | EvalResult]":
    """Train by iterating: every step's result, and validation losses between.

    In one process, such as a notebook's, or as each rank of a job that torchrun, Slurm or MPI started. Data is
    prepared, the ranks meet, and part however the iteration ends. With a folder the state is saved there when it is
    due, and a run that is there already resumes from its newest checkpoint. `say` is told what happens, on rank 0.
    """
    words.require_training()
    here = env.here()
    started = 1 if here is None else here.world
    if run.plan.world != started:
        what = f"the plan has {plural(run.plan.world, 'rank')}, and {started} {'is' if started == 1 else 'are'} here"
        remedy = f"start the script by torchrun --nproc-per-node {run.plan.world}, or load the run with ranks={started}"
        raise InputError([Problem(what, remedy, "plan")])
    return _steps(run, here, None if folder is None else Path(folder), say)


def _steps(run: Run, here: Place | None, folder: Path | None, say: Say) -> "Iterator[StepResult | EvalResult]":
    from meshwright.data.prepare import prepare, with_epochs
    from meshwright.runtime.run_folder import Claim
    from meshwright.train import loop, rank
    from meshwright.train.build import build
    from meshwright.train.world import code, world

    code()  # as it is now: the ranks compare it when they meet
    with ExitStack() as leaving:
        store = Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-"))) / "store"
        place = here or local(0, 1, store, cores())
        say = say if place.rank == 0 else _silent
        run = with_epochs(run, env.cache(), say)
        corpus = prepare(run, env.cache(), say)
        if folder is not None:
            if place.rank == 0:
                leaving.callback(Claim(folder, run).release)
            for line in rank.check(run, corpus, folder, writes=place.rank == 0):
                say(line)
        mesh = leaving.enter_context(world(run, place, env.attempt()))
        state = build(run, corpus, mesh, folder)
        leaving.callback(state.optimizer.close)
        leaving.callback(state.loader.close)
        if folder is not None:
            rank.restore(state, run, mesh, folder, say)
        yield from loop.train(run, state, mesh, folder)


def parity(
    make_model: "Callable[[], nn.Module]",
    batches: "Sequence[Batch]",
    loss: "Loss",
    plans: Sequence[str | Plan],
    model_spec: "ModelSpec | None" = None,
    say: Say = _silent,
) -> "list[ParityResult]":
    """Train a module under each plan and in one process, and compare every number: `meshwright.verify.parity`."""
    words.require_training()
    from meshwright.verify import parity

    return parity(make_model, batches, loss, plans, model_spec, say)
