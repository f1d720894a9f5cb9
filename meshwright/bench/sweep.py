"""Several plans measured one after another, each beside its prediction; and this machine's profile. No torch here."""

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import load
from meshwright.config.presets import run_file
from meshwright.config.run import Run
from meshwright.cost.calibrate import PredictionSource, trainer
from meshwright.cost.flops import causal_step_flops, hardware_flops, step_flops, utilization
from meshwright.cost.memory import worst
from meshwright.cost.step_time import price
from meshwright.hardware.profile import Profile, read_profile
from meshwright.runtime.failure import Exit, report_of
from meshwright.runtime.place import Place
from meshwright.runtime.ranks import Remote, run_ranks
from meshwright.search import budget
from meshwright.search.budget import job_of
from meshwright.spec.units import plural

PROBE = Remote("meshwright.bench.probe", "probe_ranks")
WARM_UP = 5  # steps before the first that counts: compilation, autotuning, the allocator
LONGEST = 1800.0  # seconds that one plan, or a probe, may take
TOKENS, MEASURED = "tokens.bin", "measured.json"
MEASURE = Remote("meshwright.bench.measure", "measure")
FAMOUS = {  # the notes' table, as plans
    "one rank": "replicate=1",
    "DDP": "replicate={n}",
    "ZeRO-1": "shard={n},zero=1",
    "ZeRO-2": "shard={n},zero=2",
    "FSDP": "shard={n},zero=3",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: what was measured, or why it could not be."""

    name: str
    measured: dict[str, Any] | None
    error: str = ""
    exit_code: int = Exit.FAILED  # of the error


class SweepSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Where measurements are made, and how."""

    cache: Path
    folder: Path  # for tokens and traces
    machine: PredictionSource  # that predictions are about
    traced: int = 0  # steps at the end that are taken apart
    warm_up: int = WARM_UP  # steps at the start that do not count


def predicted(run: Run, found: dict[str, Any], here: PredictionSource) -> dict[str, Any]:
    """What the planner says of a run that was measured, and utilizations where the data sheet has no peak."""
    machines, source = here.of(found["device"], run.plan.world)
    if machines is None:
        return {"predicted_seconds": None, "predicted_bytes": None, "predicted_from": "", "mfu_of": ""}
    span = found["span"] if run.data.masks else None
    job = msgspec.structs.replace(job_of(run), cluster=machines, stack=trainer(found["device"]), span=span)
    answer = {
        "predicted_seconds": price(job).seconds,
        "predicted_bytes": worst(job).allocated,
        "predicted_from": source,
        "mfu_of": "the data sheet's peak" if found["mfu"] else "",
    }
    peak = machines.gpu.peak(run.plan.arithmetic) * run.plan.world
    if found["mfu"] or not peak:
        return answer
    seconds, size = found["step_seconds"], (run.sequence, run.batch, span)
    return answer | {
        "mfu": utilization(step_flops(run.arch, *size), seconds, peak),
        "mfu_causal": utilization(causal_step_flops(run.arch, *size), seconds, peak),
        "hfu": utilization(hardware_flops(run.arch, run.plan, *size), seconds, peak),
        "mfu_of": "the fastest matmul measured",
    }


def probe_here(ranks: int, quick: bool, target: Path) -> Profile:
    """Measure this machine with so many local ranks, and keep the profile in `target`."""
    run_ranks(PROBE, ranks, (probe_run(ranks), quick, target), LONGEST)
    return read_profile(target)


def probe_run(ranks: int) -> Run:
    """A run that is never trained: ranks meet over it."""
    words = ["arch.preset=tiny", f"plan.replicate={ranks}", f"batch={ranks}"]
    return load.load(None, words, ranks=None, default_ranks=1).run


def cached_probe(cache: Path, ranks: int, say: Callable[[str], None]) -> Profile:
    """The quick probe of this machine with so many ranks: measured once for each torch, and kept."""
    target = cache / "profiles" / f"{platform.node()}-{ranks}-torch-{version('torch')}.json"
    if not target.exists():
        say(f"measuring this machine once with {plural(ranks, 'rank')}, to predict from; kept in {target}")
        return probe_here(ranks, True, target)
    return read_profile(target)


def runs(
    target: str | None,
    overrides: list[str],
    plans: list[tuple[str, str]],
    steps: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    ranks: int | None = None,
    warm_up: int = WARM_UP,
) -> list[tuple[str, Run]]:
    """A run for each plan, of so many ranks if stated. A known model is fed random tokens; a run file its data."""
    file = run_file(target)
    words = [] if file else [f"arch.preset={target or 'tiny'}", f"data.source={folder / TOKENS}", "data.format=nanogpt"]
    words += [*overrides, f"steps={steps + warm_up}", "data.eval_fraction=0.0", "eval.every=0"]
    words += ["eval.sample_tokens=0", "checkpoint.every=0"]
    made = []
    for name, plan in plans:
        chosen = [f"plan.{word}" for word in plan.split(",") if word]
        loaded, choice = budget.resolved(load.load(file, [*words, *chosen], ranks=ranks, default_ranks=1))
        if choice is not None:
            say(f"{name or 'as given'}: goal.memory_gib = {loaded.run.goal.memory_gib:g}: {choice}")
        made.append((name, loaded.run))
    return made


def sweep(planned: list[tuple[str, Run]], setup: SweepSetup, report: Callable[[Row], None]) -> list[Row]:
    """Measure every run; `report` hears each row as it is there."""
    feed(planned, setup)
    rows = []
    for number, (name, run) in enumerate(planned):
        place = setup.folder / f"plan{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            run_ranks(MEASURE, run.plan.world, (run, setup.cache, place, setup.traced, setup.warm_up), LONGEST)
        except RuntimeError as error:
            rows.append(_failed(name, error))
        else:
            rows.append(_read(name, run, place, setup))
        report(rows[-1])
    return rows


def _failed(name: str, error: RuntimeError) -> Row:
    """Why a plan could not be measured: its rank's failure report, or the last line of a traceback."""
    if report := report_of(error):
        return Row(name=name, measured=None, error=str(report), exit_code=report.code)
    return Row(name=name, measured=None, error=str(error).strip().splitlines()[-1])


def feed(planned: list[tuple[str, Run]], setup: SweepSetup) -> None:
    """Random tokens for the runs that have no data of their own."""
    setup.folder.mkdir(parents=True, exist_ok=True)
    if fed := [run for _, run in planned if run.data.source == str(setup.folder / TOKENS)]:
        from meshwright.bench.measure import write_tokens

        needed = max((run.steps + 1) * run.batch * (run.sequence + 1) for run in fed)
        write_tokens(setup.folder / TOKENS, min(run.arch.vocab for run in fed), needed)


def rank_row(name: str, run: Run, place: Place, setup: SweepSetup) -> Row | None:
    """Be one rank of a run that somebody else has launched; the first has the row."""
    mine = setup.folder / f"rank{place.rank}"
    mine.mkdir(parents=True, exist_ok=True)
    MEASURE(place, run, setup.cache, mine, setup.traced, setup.warm_up)
    return _read(name, run, mine, setup) if place.rank == 0 else None


def _read(name: str, run: Run, place: Path, setup: SweepSetup) -> Row:
    found = msgspec.json.decode((place / MEASURED).read_bytes())
    return Row(name=name, measured=found | predicted(run, found, setup.machine))
