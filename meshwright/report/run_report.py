"""A run's report: everything that can be concluded from its folder, as one value."""

from typing import Any, Literal

import msgspec

from meshwright.cost import goodput
from meshwright.report import run_steps, run_time
from meshwright.report.run_folder import Facts
from meshwright.report.run_promise import Promise, Utilized
from meshwright.report.run_records import RankSeen
from meshwright.report.run_state import Standing, Told, standing
from meshwright.report.run_steps import Losses, Steps
from meshwright.report.run_time import Attempt, Happened, Part, Saves
from meshwright.spec import zoo
from meshwright.spec.arch import Arch
from meshwright.spec.params import count
from meshwright.spec.record import AttemptRecord, EndRecord
from meshwright.spec.verdict import Verdict

PATIENCE = 120.0  # seconds, and so many times the slowest step
SLOWEST = 10.0


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What ran, and on what."""

    name: str
    model: str
    parameters: int
    plan: str
    ranks: int
    device: str  # as env.json has it; empty: not known
    torch: str
    tokens: int  # positions in one step
    steps: int  # that were asked for
    step: int  # that was reached


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to tell of one run. What is not known is null."""

    kind: Literal["report"] = "report"
    folder: str
    ran: Ran
    standing: Standing
    steps: Steps | None
    utilized: Utilized | None
    promise: Promise | None
    unpromised: str  # why nothing is promised
    losses: Losses | None
    wall_seconds: float
    parts: tuple[Part, ...]
    attempts: tuple[Attempt, ...]
    happened: tuple[Happened, ...]
    saves: Saves
    ranks: tuple[RankSeen, ...]
    notes: tuple[str, ...]


class Promised(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's part of a report."""

    promise: Promise | None = None
    utilized: Utilized | None = None
    why_not: str = ""


def steps_of(facts: Facts) -> Steps | None:
    """What was measured of the steps that were kept, and made as run.toml is now."""
    if not facts.changed:
        return run_steps.steps(facts.records, facts.kept, facts.ranks)
    records = run_time.last_session(facts.records)
    return run_steps.steps(records, goodput.kept(records), facts.ranks)


def report(facts: Facts, measured: Steps | None, promised: Promised) -> Report:
    """Everything that the files tell, beside what was promised."""
    kept, account = facts.kept, goodput.account(facts.records)
    return Report(
        folder=str(facts.path),
        ran=_ran(facts, kept[-1].step if kept else 0),
        standing=standing(_told(facts, measured)),
        steps=measured,
        utilized=promised.utilized,
        promise=promised.promise,
        unpromised=promised.why_not,
        losses=run_steps.losses(facts.records, kept),
        wall_seconds=account.wall,
        parts=run_time.parts(account),
        attempts=run_time.attempts(facts.records, facts.ends),
        happened=run_time.happened(facts.records),
        saves=run_time.saves(facts.records, facts.saved),
        ranks=facts.ranks,
        notes=facts.notes,
    )


def _ran(facts: Facts, step: int) -> Ran:
    run = facts.run
    return Ran(
        name=run.name,
        model=model_words(run.arch),
        parameters=count(run.arch),
        plan=str(run.plan),
        ranks=run.plan.world,
        device=_text(facts.environment.get("device")),
        torch=_text(facts.environment.get("torch")),
        tokens=run.tokens,
        steps=run.steps,
        step=step,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def model_words(arch: Arch) -> str:
    """A model by its name in the zoo, or by its shape."""
    known = next((name for name in zoo.preset_names() if zoo.preset(name) == arch), None)
    experts = f", {arch.experts} experts" if arch.experts else ""
    return known or f"{arch.layers} layers of {arch.hidden}{experts}, vocabulary of {arch.vocab:,}"


def _told(facts: Facts, measured: Steps | None) -> Told:
    """What there is to judge a run's standing by."""
    last = facts.records[-1] if facts.records else None
    ended = _end_of_last(facts)
    return Told(
        finished=facts.finished,
        owner=facts.owner,
        silent_seconds=facts.silent_seconds,
        patience=max(PATIENCE, SLOWEST * measured.slowest if measured else 0.0),
        said_end=isinstance(last, EndRecord),
        made_all=last is not None and last.step >= facts.run.steps,
        verdict=next(iter(facts.verdicts), ended),
        saved=facts.saved,
    )


def _end_of_last(facts: Facts) -> Verdict | None:
    """What ended the last attempt, if anybody saw it."""
    heads = [record for record in facts.records if isinstance(record, AttemptRecord)]
    return facts.ends.get(f"{heads[-1].session}-{heads[-1].number}") if heads else None
