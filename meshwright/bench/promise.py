"""What the planner says of a run on the machine that it was measured on, and what it says that from. No torch here."""

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cost.flops import hardware_flops, step_flops, utilization
from meshwright.cost.memory import worst
from meshwright.cost.promise import Machine, trainer
from meshwright.cost.time import price
from meshwright.launch.ranks import Remote, run_ranks
from meshwright.search.budget import job_of
from meshwright.spec import load
from meshwright.spec.profile import Profile, read_profile
from meshwright.spec.run import Run

PROBE = Remote("meshwright.bench.probe_ranks", "probe_ranks")
LONGEST = 1800.0  # seconds that a probe may take


def promised(run: Run, found: dict[str, Any], here: Machine) -> dict[str, Any]:
    """What the planner says of a run that was measured, and utilizations where the data sheet has no peak."""
    machines, source = here.of(found["device"], run.plan.world)
    if machines is None:
        return {"predicted_seconds": None, "predicted_bytes": None, "promised_from": "", "mfu_of": ""}
    job = msgspec.structs.replace(job_of(run), cluster=machines, stack=trainer(found["device"]))
    answer = {
        "predicted_seconds": price(job).seconds,
        "predicted_bytes": worst(job).allocated,
        "promised_from": source,
        "mfu_of": "the data sheet's peak" if found["mfu"] else "",
    }
    peak = machines.gpu.peak(run.plan.precision) * run.plan.world
    return answer if found["mfu"] or not peak else answer | _utilized(run, found["step_seconds"], peak)


def _utilized(run: Run, seconds: float, peak: float) -> dict[str, Any]:
    """Of a device that has no data sheet here."""
    done = hardware_flops(run.arch, run.plan, run.sequence, run.batch)
    return {
        "mfu": utilization(step_flops(run.arch, run.sequence, run.batch), seconds, peak),
        "hfu": utilization(done, seconds, peak),
        "mfu_of": "the fastest product measured",
    }


def probe_here(ranks: int, quick: bool, target: Path) -> Profile:
    """Measure this machine with so many local ranks, and keep the profile in `target`."""
    run_ranks(PROBE, ranks, (probe_run(ranks), quick, target), LONGEST)
    return read_profile(target)


def probe_run(ranks: int) -> Run:
    """A run that is never trained: ranks meet over it."""
    words = ["arch.preset=tiny", f"plan.replicate={ranks}", f"batch={ranks}"]
    return load.load(None, words, ranks=None, default_ranks=1).run


def kept(cache: Path, ranks: int, say: Callable[[str], None]) -> Profile:
    """The quick probe of this machine with so many ranks: measured once for each torch, and kept."""
    target = cache / "profiles" / f"{platform.node()}-{ranks}-torch-{version('torch')}.json"
    if not target.exists():
        say(f"measuring this machine once with {ranks} rank(s), for promises; kept in {target}")
        return probe_here(ranks, True, target)
    return read_profile(target)
