"""Several plans measured one after another, each beside what the planner promised. No torch in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.time import price
from meshwright.launch.ranks import run_ranks
from meshwright.spec import load
from meshwright.spec.check import InputError, Problem
from meshwright.spec.cluster import cluster
from meshwright.spec.run import Run
from meshwright.spec.stack import stacks
from meshwright.spec.zoo import preset_names

WARM_UP = 5  # steps before the first that counts: compilation, autotuning, the allocator
LONGEST = 1800.0  # seconds that one plan may take
TOKENS = "tokens.bin"
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
    file = None if target is None or target in preset_names() else Path(target)
    if file is not None and not file.is_file():
        known = ", ".join(preset_names()[:4])
        raise InputError(
            [Problem(f"{target!r} is neither a run file nor a model", f"name a .toml, or one of {known} …")]
        )
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
    _tokens(planned, folder)
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
        run_ranks(Remote(), run.plan.world, arguments, LONGEST)
    except RuntimeError as error:
        return Row(name=name, measured=None, error=str(error).strip().splitlines()[-1])
    found = msgspec.json.decode((place / "measured.json").read_bytes())
    return Row(name=name, measured=found | _promised(run, found["device"]))


def _promised(run: Run, device: str) -> dict[str, Any]:
    """What the planner says of the same run, where it knows the device."""
    try:
        machines = cluster(f"{run.plan.world}x{_card(device)}")
    except InputError:
        return {"predicted_seconds": None, "predicted_bytes": None}
    job = Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=machines, stack=stacks()["meshwright"])
    return {"predicted_seconds": price(job).seconds, "predicted_bytes": worst(job).allocated}


def _card(device: str) -> str:
    return device.lower().removeprefix("nvidia ").split()[0]


def _tokens(planned: list[tuple[str, Run]], folder: Path) -> None:
    from meshwright.bench.tokens import write_tokens

    needed = max((run.steps + 1) * run.batch * (run.sequence + 1) for _, run in planned)
    write_tokens(folder / TOKENS, min(run.arch.vocab for _, run in planned), needed)


class Remote:
    """Measures where it is run, so that this process need not import torch."""

    def __call__(self, *arguments: Any) -> None:
        from meshwright.bench.measure import measure

        measure(*arguments)
