"""Several plans measured one after another, each beside what the planner promised. No torch in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.time import price
from meshwright.launch.ranks import Remote, run_ranks
from meshwright.spec import load
from meshwright.spec.check import InputError
from meshwright.spec.cluster import cluster_of_device
from meshwright.spec.run import Run
from meshwright.spec.stack import stacks
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
    target: str | None, overrides: list[str], plans: list[tuple[str, str]], steps: int, folder: Path
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
        made.append((name, load.load(file, [*words, *chosen], ranks=None, default_ranks=1).run))
    return made


def sweep(
    planned: list[tuple[str, Run]], cache: Path, folder: Path, told: Callable[[Row], None], traced: int = 0
) -> list[Row]:
    """Measure every run; `told` hears each row as it falls."""
    folder.mkdir(parents=True, exist_ok=True)
    if fed := [run for _, run in planned if run.data.source == str(folder / TOKENS)]:
        _tokens(fed, folder)
    rows = []
    for number, (name, run) in enumerate(planned):
        place = folder / f"plan{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        row = _row(name, run, (run, cache, place, traced))
        rows.append(row)
        told(row)
    return rows


def _row(name: str, run: Run, arguments: tuple[Any, ...]) -> Row:
    place = arguments[2]
    try:
        run_ranks(MEASURE, run.plan.world, arguments, LONGEST)
    except RuntimeError as error:
        return Row(name=name, measured=None, error=str(error).strip().splitlines()[-1])
    found = msgspec.json.decode((place / "measured.json").read_bytes())
    return Row(name=name, measured=found | _promised(run, found["device"]))


def _promised(run: Run, device: str) -> dict[str, Any]:
    """What the planner says of the same run, where it knows the device."""
    try:
        machines = cluster_of_device(device, run.plan.world)
    except InputError:
        return {"predicted_seconds": None, "predicted_bytes": None}
    job = Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=machines, stack=stacks()["meshwright"])
    return {"predicted_seconds": price(job).seconds, "predicted_bytes": worst(job).allocated}


def _tokens(fed: list[Run], folder: Path) -> None:
    from meshwright.bench.tokens import write_tokens

    needed = max((run.steps + 1) * run.batch * (run.sequence + 1) for run in fed)
    write_tokens(folder / TOKENS, min(run.arch.vocab for run in fed), needed)
