"""Several plans measured one after another, each beside what the planner promised. No torch in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.bench.promise import Machine, promised
from meshwright.launch.ranks import Remote, run_ranks
from meshwright.search import budget
from meshwright.spec import load
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.spec.zoo import run_file

WARM_UP = 5  # steps before the first that counts: compilation, autotuning, the allocator
LONGEST = 1800.0  # seconds that one plan may take
TOKENS = "tokens.bin"
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


def runs(
    target: str | None,
    overrides: list[str],
    plans: list[tuple[str, str]],
    steps: int,
    folder: Path,
    say: Callable[[str], None],
) -> list[tuple[str, Run]]:
    """A run for each plan. A model of the zoo is fed random tokens; a run file its own data."""
    file = run_file(target)
    words = [] if file else [f"arch.preset={target or 'tiny'}", f"data.source={folder / TOKENS}", "data.format=nanogpt"]
    words += overrides
    words += [
        f"steps={steps + WARM_UP}",
        "data.held_out=0.0",
        "held.every=0",
        "held.sample_tokens=0",
        "checkpoint.every=0",
    ]
    made = []
    for name, plan in plans:
        chosen = [f"plan.{word}" for word in plan.split(",") if word]
        loaded, choice = budget.resolved(load.load(file, [*words, *chosen], ranks=None, default_ranks=1))
        if choice is not None:
            say(f"{name or 'as given'}: goal.memory_gib = {loaded.run.goal.memory_gib:g}: {choice}")
        made.append((name, loaded.run))
    return made


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """Where measurements are made, and how."""

    cache: Path
    folder: Path  # for tokens and traces
    machine: Machine  # that promises are about
    traced: int = 0  # steps at the end that are taken apart


def sweep(planned: list[tuple[str, Run]], lab: Lab, told: Callable[[Row], None]) -> list[Row]:
    """Measure every run; `told` hears each row as it falls."""
    feed(planned, lab)
    rows = []
    for number, (name, run) in enumerate(planned):
        place = lab.folder / f"plan{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        row = _row(name, run, place, lab)
        rows.append(row)
        told(row)
    return rows


def feed(planned: list[tuple[str, Run]], lab: Lab) -> None:
    """Random tokens for the runs that have no data of their own."""
    lab.folder.mkdir(parents=True, exist_ok=True)
    if fed := [run for _, run in planned if run.data.source == str(lab.folder / TOKENS)]:
        _tokens(fed, lab.folder)


def rank_row(name: str, run: Run, place: Place, lab: Lab) -> Row | None:
    """Be one rank of a run that somebody else has launched; the first has the row."""
    mine = lab.folder / f"rank{place.rank}"
    mine.mkdir(parents=True, exist_ok=True)
    MEASURE(place, run, lab.cache, mine, lab.traced)
    return _read(name, run, mine, lab) if place.rank == 0 else None


def _row(name: str, run: Run, place: Path, lab: Lab) -> Row:
    try:
        run_ranks(MEASURE, run.plan.world, (run, lab.cache, place, lab.traced), LONGEST)
    except RuntimeError as error:
        return Row(name=name, measured=None, error=str(error).strip().splitlines()[-1])
    return _read(name, run, place, lab)


def _read(name: str, run: Run, place: Path, lab: Lab) -> Row:
    found = msgspec.json.decode((place / "measured.json").read_bytes())
    return Row(name=name, measured=found | promised(run, found, lab.machine))


def _tokens(fed: list[Run], folder: Path) -> None:
    from meshwright.bench.tokens import write_tokens

    needed = max((run.steps + 1) * run.batch * (run.sequence + 1) for run in fed)
    write_tokens(folder / TOKENS, min(run.arch.vocab for run in fed), needed)
