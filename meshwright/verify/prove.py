"""The proof itself: the reference once, then each plan beside it. No torch in this process; the ranks have it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from meshwright.launch.ranks import RankError, Remote, Work, run_ranks
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from meshwright.spec.run import Run
from meshwright.verify.certificate import TOLERANCES, Certificate, Verdict, header, line
from meshwright.verify.plans import TEXT, Job, write_ragged

CERTIFICATE = "certificate.json"
LONGEST = 600.0  # seconds that one plan may take


def prove_all(jobs: list[Job], cache: Path, folder: Path, say: Callable[[str], None]) -> list[Verdict]:
    """Prove every job, saying each verdict as it falls, and leave the certificate in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ragged(folder / TEXT)
    width = max(len(name) for _, planned in jobs for name, _ in planned)
    certificates = []
    for reference, planned in jobs:
        tolerance, reason = TOLERANCES[reference.plan.precision]
        say(f"{count(reference.arch):,} parameters, {reference.steps} steps of {reference.tokens} positions")
        say(f"largest relative deviation from one process, {tolerance:.0e} allowed ({reason}):")
        say(header(width))
        certificates.append(prove(reference, planned, cache, folder, lambda verdict: say(line(verdict, width))))
    text = msgspec.json.format(msgspec.json.encode(certificates), indent=2) + b"\n"
    (folder / CERTIFICATE).write_bytes(text)
    return [verdict for certificate in certificates for verdict in certificate.verdicts]


def prove(
    reference: Run, planned: list[tuple[str, Run]], cache: Path, folder: Path, told: Callable[[Verdict], None]
) -> Certificate:
    """Compare every plan with one process; `told` hears each verdict as it falls."""
    tolerance, reason = TOLERANCES[reference.plan.precision]
    return Certificate(
        run=reference,
        steps=reference.steps,
        tolerance=tolerance,
        reason=reason,
        torch=_torch_version(),
        verdicts=tuple(beside(reference, planned, (_work("record"), cache), folder, told)),
    )


class Planned(Protocol):
    """Anything that a plan runs."""

    @property
    def plan(self) -> Plan: ...


AnyPlanned = TypeVar("AnyPlanned", bound=Planned)


def beside(
    reference: AnyPlanned,
    planned: list[tuple[str, AnyPlanned]],
    work: tuple[Work, Any],
    folder: Path,
    told: Callable[[Verdict], None],
) -> list[Verdict]:
    """Run the reference once and each plan beside it; `work` is record(place, run, given, folder) and its `given`."""
    (record, given), judge = work, _work("judge")
    tolerance, _ = TOLERANCES[reference.plan.precision]
    base = _fresh(folder / "reference")
    run_ranks(record, 1, (reference, given, base), LONGEST)
    verdicts = []
    for number, (name, run) in enumerate(planned):
        place = _fresh(folder / f"plan{number}")
        began = time.monotonic()
        try:
            run_ranks(record, run.plan.world, (run, given, place), LONGEST)
            run_ranks(judge, 1, (run, base, place, tolerance, time.monotonic() - began), LONGEST)
            verdict = msgspec.json.decode((place / "verdict.json").read_bytes(), type=Verdict)
        except RankError as error:
            verdict = _failed(str(error), time.monotonic() - began)
        verdict = msgspec.structs.replace(verdict, plan=name)
        shutil.rmtree(place)
        verdicts.append(verdict)
        told(verdict)
    shutil.rmtree(base)
    return verdicts


def _failed(error: str, seconds: float) -> Verdict:
    far = float("inf")
    return Verdict(
        plan="",
        passed=False,
        loss_deviation=far,
        norm_deviation=far,
        gradient_deviation=far,
        weight_deviation=far,
        first_bad=None,
        worst="",
        seconds=seconds,
        error=error,
    )


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _work(name: str) -> Work:
    return Remote("meshwright.verify.compare", name)


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")
