"""Fit the constants of the time model on published runs, and write them into the package's tables.

`python benchmarks/fit_time.py --data published_runs.csv` uses the rows whose suggested_use is "fit", source by source:
each source belongs to one stack, and fits that stack's constants and those of the accelerator that it alone tells of.
Without `--write` it only prints. docs/time.md says what the constants mean, docs/accuracy.md what the columns are.
"""

import argparse
import csv
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright.cost.calibrate import least
from meshwright.cost.job import Job
from meshwright.cost.step_time import price
from meshwright.hardware.stacks import Efficiency, efficiencies, efficiency_of, stacks
from meshwright.published.rows import job_of
from meshwright.runtime.files import replace_file

SPEC = Path(__file__).parents[1] / "meshwright" / "spec"
LEAST_MFU = 10.0  # percent: below it the rows of ultrascale_playbook are sick nodes as often as not
INSIDE = 0.9  # of the fitted rows that the interval should hold

Run = tuple[Job, float]  # and its measured seconds


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A source, the constants that it decides and how many of its rows are looked at while searching."""

    source: str
    stack: str
    constants: tuple[str, ...]
    every: int = 1  # of the rows, in the order of the file


FITS = (
    Fit(
        source="mosaicml_llm_foundry",
        stack="composer-fsdp",
        constants=(
            "a100.product",
            "a100.attention_forward",
            "a100.attention_backward",
            *(f"composer-fsdp.{name}" for name in ("product", "attention", "elementwise", "logit_passes")),
            *(f"composer-fsdp.{name}" for name in ("contention", "optimizer_bytes", "step_seconds")),
        ),
    ),
    Fit(
        source="vtrain_single",
        stack="megatron-deepspeed",
        every=7,
        constants=tuple(
            f"megatron-deepspeed.{name}"
            for name in (
                "product",
                "layer_seconds",
                "tp_seconds",
                "elementwise",
                "score_passes",
                "logit_passes",
                "accumulate_bytes",
                "optimizer_bytes",
                "step_seconds",
            )
        ),
    ),
    Fit(
        source="ultrascale_playbook",
        stack="nanotron",
        every=4,
        constants=tuple(
            f"nanotron.{name}"
            for name in (
                "product",
                "attention",
                "elementwise",
                "logit_passes",
                "layer_seconds",
                "tp_across_seconds",
                "calls",
                "optimizer_bytes",
                "step_seconds",
            )
        ),
    ),
)
# A constant may not leave what it means: shares stay below one, and what counts passes or bytes stays plausible.
MOST = {
    "a100.product": 0.87,  # the best that anyone measured
    "product": 1.0,
    "attention_forward": 0.65,
    "attention_backward": 0.55,
    "attention": 1.0,
    "optimizer_bytes": 150.0,
    "elementwise": 4.0,
}
LEAST = {
    "elementwise": 1.0,
    "logit_passes": 3.0,
    "score_passes": 4.0,
    "optimizer_bytes": 24.0,
    "accumulate_bytes": 6.0,
    "calls": 1.0,
    "step_seconds": 1e-3,
}


def main() -> None:
    """Fit, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a file with the columns of docs/accuracy.md")
    parser.add_argument("--write", action="store_true", help="put the constants into the package's tables")
    parser.add_argument("--source", help="only this one")
    arguments = parser.parse_args()
    with arguments.data.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, float] = {}
    for fit in FITS:
        if arguments.source in (None, fit.source):
            found |= fitted(fit, runs(rows, fit.source), found)
    if arguments.write:
        write(found)


def runs(rows: Sequence[Mapping[str, str]], source: str) -> list[Run]:
    """The rows of a source that may be fitted."""
    kept = []
    for row in rows:
        if row["source_group"] != source or row["suggested_use"] != "fit" or not row["iter_time_s"]:
            continue
        if source == "ultrascale_playbook" and float(row["mfu_pct"] or 0) < LEAST_MFU:
            continue
        job = job_of(row).job
        if job is not None:
            kept.append((job, float(row["iter_time_s"])))
    return kept


def fitted(fit: Fit, every: Sequence[Run], before: Mapping[str, float]) -> dict[str, float]:
    """The constants of one source, those before held, and its half-width of the interval."""
    some = every[:: fit.every]
    start = {name: constant(name) for name in fit.constants}
    most = {name: value for name in start if (value := bound(name, MOST))}
    least_value = {name: value for name in start if (value := bound(name, LEAST))}

    def misfit(found: Mapping[str, float]) -> float:
        return statistics.mean(abs(error) for error in errors(some, {**before, **found}))

    print(f"{fit.source}: {len(every)} rows, of which every {fit.every}. is searched; before {misfit({}):.4f}")
    found = least(misfit, start, most, least_value)
    residuals = sorted(abs(error) for error in errors(every, {**before, **found}))
    print(f"  MAPE {statistics.mean(residuals):.2%}, median {statistics.median(residuals):.2%}, ", end="")
    print(f"p90 {residuals[int(INSIDE * len(residuals))]:.2%}")
    found[f"{fit.stack}.spread"] = spread(every, {**before, **found})
    for name, value in found.items():
        print(f"  {name} = {value:.4g}")
    return found


def spread(every: Sequence[Run], found: Mapping[str, float]) -> float:
    """The half-width, before it is widened for a run's own reasons, of an interval that holds enough of the runs."""
    needed = []
    for job, seconds in every:
        job, efficiency = changed(job, found)
        answer = price(job, efficiency)
        widened = (answer.high_seconds / answer.seconds - 1) / job.stack.speed.spread
        needed.append((max(answer.seconds / seconds, seconds / answer.seconds) - 1) / widened)
    return sorted(needed)[int(INSIDE * len(needed))]


def bound(name: str, bounds: Mapping[str, float]) -> float:
    """The bound of a constant: its own, that of all with its name, or none."""
    return bounds.get(name) or bounds.get(name.split(".")[1], 0.0)


def constant(name: str) -> float:
    """What the package's tables say."""
    table, field = name.split(".")
    entry = next((each for each in efficiencies() if each.name == table), None)
    return getattr(entry or stacks()[table].speed, field)


def errors(some: Sequence[Run], found: Mapping[str, float]) -> list[float]:
    """Predicted ÷ measured − 1."""
    return [price(*changed(job, found)).seconds / seconds - 1 for job, seconds in some]


def changed(job: Job, found: Mapping[str, float]) -> tuple[Job, Efficiency]:
    """A job and its accelerator's efficiencies with other constants."""
    efficiency = efficiency_of(job.cluster.gpu)
    speed = {name.split(".")[1]: value for name, value in found.items() if name.startswith(f"{job.stack.name}.")}
    shares = {name.split(".")[1]: value for name, value in found.items() if name.startswith(f"{efficiency.name}.")}
    stack = msgspec.structs.replace(job.stack, speed=msgspec.structs.replace(job.stack.speed, **speed))
    return msgspec.structs.replace(job, stack=stack), msgspec.structs.replace(efficiency, **shares)


def write(found: Mapping[str, float]) -> None:
    """Put constants into the two tables, each in its place."""
    for file, suffix in ((SPEC / "efficiencies.toml", ""), (SPEC / "stacks.toml", ".speed")):
        text = file.read_text(encoding="utf-8")
        for name, value in found.items():
            table, field = name.split(".")
            pattern = rf"(^\[{re.escape(table + suffix)}\](?:(?!\n\[).)*?\n{field} = )\S+"
            text = re.sub(pattern, rf"\g<1>{value:.4g}", text, count=1, flags=re.DOTALL | re.MULTILINE)
        replace_file(file, text.encode())


if __name__ == "__main__":
    main()
