"""What the planner says of a run that has run: its own plan priced on the machines that it ran on."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.cost.calibrate import measured
from meshwright.cost.flops import utilization
from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.promise import CPU, Machine, trainer
from meshwright.cost.time import price
from meshwright.report.run_steps import Steps
from meshwright.spec.catalogue import catalogue, recognised
from meshwright.spec.cluster import Cluster, cluster
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.profile import Profile
from meshwright.spec.run import Goal

DEVICE = re.compile(r"\d+ × (?P<name>.+), \S+")  # as env.json has it: "8 × NVIDIA H100 80GB HBM3, nccl"
SHEET, FASTEST = "the data sheet's peak", "the fastest product measured"


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said about the machines."""

    cluster: str = ""
    profile: Profile | None = None


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner says of a step."""

    source: str  # what it was made from
    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int | None  # of the fullest rank; None: what was measured is not comparable


class Utilized(msgspec.Struct, frozen=True, kw_only=True):
    """How well the machines were used."""

    mfu: float
    of: str  # the peak it is a share of


def device_of(environment: Mapping[str, Any]) -> str:
    """The device's own name; empty where nobody wrote it down."""
    words = environment.get("device")
    found = DEVICE.fullmatch(words) if isinstance(words, str) else None
    if found is None:
        return ""
    return CPU if found["name"].startswith("CPU") else found["name"]


def machines(device: str, goal: Goal, ranks: int, given: Given) -> tuple[Cluster, str]:
    """What a promise is made from: what the user says, else what the run was planned for, else the device's card."""
    if given.cluster:
        found = cluster(given.cluster, gpus=ranks)
        if given.profile is None:
            return found, f"--cluster {given.cluster}"
        return measured(found, given.profile, trainer(device)), f"--cluster {given.cluster} and the profile given"
    if given.profile is None and (planned := _planned(device, goal, ranks)) is not None:
        return planned, f"the catalogue's {planned.gpu.name}, in the cluster of the run file"
    if not device:
        what = "nothing says on what this ran (env.json)"
        raise InputError([Problem(what, "name the machines with --cluster, or their profile with --profile")])
    found, source = Machine(given=given.profile, probed=lambda: None).of(device, ranks)
    if found is None:
        raise InputError([_unknown(device, ranks)])
    return found, source if given.profile else f"{source}'s {found.gpu.name}"


def _planned(device: str, goal: Goal, ranks: int) -> Cluster | None:
    """The cluster that the run file names, where its card is the one that the run ran on."""
    card = recognised(device, catalogue().cards)
    if card is None or not goal.cluster:
        return None
    try:
        found = cluster(goal.cluster, network=goal.network or "", gpus=ranks)
    except InputError:  # a file of the user's own that is not here
        return None
    return found if found.gpu.name == card else None


def _unknown(device: str, ranks: int) -> Problem:
    """A device that no data sheet describes."""
    what = "no data sheet describes a CPU" if device == CPU else f"the catalogue does not have {device}"
    return Problem(what, f"run there `meshwright bench --probe --ranks {ranks}`, and give --profile profile.json here")


def promise(job: Job, device: str, source: str) -> Promise:
    """The planner's answer about exactly this job."""
    job = msgspec.structs.replace(job, stack=trainer(device))
    found = price(job)
    return Promise(
        source=source,
        seconds=found.seconds,
        low_seconds=found.low_seconds,
        high_seconds=found.high_seconds,
        tokens_per_second=found.tokens_per_second_per_gpu * job.plan.world,
        mfu=found.mfu if job.cluster.gpu.peak(job.plan.precision) else None,
        # A process on a CPU holds Python and torch as well, which the ledger of tensors knows nothing of.
        peak_bytes=None if device == CPU else worst(job).allocated,
    )


def utilized(job: Job, device: str, steps: Steps) -> Utilized | None:
    """Of what was measured; None where no peak is known."""
    peak = job.cluster.gpu.peak(job.plan.precision) * job.plan.world
    if not peak or not steps.seconds:
        return None
    known = recognised(device, catalogue().cards) is not None or job.cluster.gpu.name in catalogue().cards
    return Utilized(mfu=utilization(steps.flops, steps.seconds, peak), of=SHEET if known else FASTEST)
