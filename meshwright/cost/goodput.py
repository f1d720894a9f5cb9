"""Every second of a run's wall time, by what it was spent on: productive and kept, or one kind of badput.

Steps, saves and validation losses carry when they happened on the device; when they were written down, a few steps
later, does not matter. A step is good for as long as its neighbours take: what is above is compilation in the first one
after a start, and a stall in any other.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec

from meshwright.runtime.records import (
    AttemptRecord,
    CommandRecord,
    EndRecord,
    EventRecord,
    Record,
    SaveRecord,
    StepRecord,
    Timed,
)

BADPUT: tuple[str, ...] = (
    "start-up",
    "compile",
    "data",
    "checkpoint",
    "eval",
    "stall",
    "recovery",
    "lost work",
    "finish",
)
ENOUGH = 4  # steps, beside the first, whose median says what one usually takes
STALLED, LEAST_SECONDS = 3.0, 0.25  # times that, and so much above it: else steps differ for reasons of their own


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by purpose; they add up to the wall time."""

    good: float
    bad: dict[str, float]
    attempts: int

    @property
    def wall(self) -> float:
        return self.good + sum(self.bad.values())

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that were kept, 0 to 1."""
        return self.good / self.wall if self.wall else 1.0

    @property
    def badput(self) -> dict[str, float]:
        """The other shares."""
        return {name: seconds / self.wall for name, seconds in self.bad.items()} if self.wall else {}


def account(records: Iterable[Record]) -> Account:
    """The account of one rank's records, over all its attempts and sessions.

    Each record closes the time since the one before it, so nothing is counted twice and nothing is left out. What a
    session did after its last record, killed, nobody saw.
    """
    attempts = _attempts(records)
    spent: dict[str, float] = dict.fromkeys(("good", *BADPUT), 0.0)
    session, last = "", 0.0
    for number, attempt in enumerate(attempts):
        head = attempt[0]
        assert isinstance(head, AttemptRecord)
        after_fault = head.session == session
        since = last if after_fault else head.began
        spent["recovery" if after_fault else "start-up"] += max(head.at - since, 0.0)
        kept_until = min((later[0].step for later in attempts[number + 1 :]), default=None)
        session = head.session
        spans, last = _spans(attempt)
        for name, seconds in _parts(spans, kept_until):
            spent[name] += seconds
    good = spent.pop("good")
    return Account(good=good, bad=spent, attempts=len(attempts))


def kept(records: Iterable[Record]) -> list[StepRecord]:
    """The steps that the weights went through: those that a restart went back behind are left out."""
    steps: dict[int, StepRecord] = {}
    for record in records:
        if isinstance(record, AttemptRecord):
            steps = {step: made for step, made in steps.items() if step <= record.step}
        elif isinstance(record, StepRecord):
            steps[record.step] = record
    return list(steps.values())


def first_loss_seconds(records: Iterable[Record]) -> float:
    """From Enter to the first loss of the run."""
    began = None
    for record in records:
        if isinstance(record, AttemptRecord) and began is None:
            began = record.began
        if isinstance(record, StepRecord) and began is not None:
            return record.at - began
    raise AssertionError("a finished run has made a step")


def _attempts(records: Iterable[Record]) -> list[Sequence[Record]]:
    found: list[list[Record]] = []
    for record in records:
        if isinstance(record, AttemptRecord):
            found.append([])
        if found:
            found[-1].append(record)
    return [*found]


class _Span(msgspec.Struct, frozen=True, kw_only=True):
    """The time that one record closes."""

    record: Record
    seconds: float
    before: float = 0.0  # of them, until an evaluation was begun
    data: float = 0.0
    saving: float = 0.0
    compiling: float = 0.0
    recovering: float = 0.0

    @property
    def own(self) -> float:
        """What a step took for itself."""
        return self.seconds - self.data - self.saving - self.compiling - self.recovering


def _spans(attempt: Sequence[Record]) -> tuple[list[_Span], float]:
    """The spans of an attempt one after another, and when the last one ended."""
    last, found = attempt[0].at, []
    timed = any(isinstance(record, StepRecord) and record.ended > 0 for record in attempt)
    for record in attempt[1:]:
        if isinstance(record, SaveRecord | CommandRecord) or (timed and isinstance(record, EventRecord)):
            continue  # made, or told of, while steps were on their way: it took no time of its own
        ended = record.ended if isinstance(record, StepRecord | Timed) and record.ended > 0 else record.at
        found.append(_span(record, max(ended - last, 0.0), last))
        last = max(last, ended)
    return found, last


def _span(record: Record, seconds: float, last: float) -> _Span:
    if isinstance(record, Timed):
        return _Span(record=record, seconds=seconds, before=min(max(record.began - last, 0.0), seconds))
    if isinstance(record, EndRecord):
        return _Span(record=record, seconds=seconds, saving=min(record.save_seconds, seconds))
    if not isinstance(record, StepRecord):
        return _Span(record=record, seconds=seconds)
    data = min(record.data_seconds, seconds)
    saving = min(record.save_seconds, seconds - data)
    compiling = min(record.compile_seconds, seconds - data - saving)
    recovering = min(record.recovery_seconds, seconds - data - saving - compiling)
    return _Span(record=record, seconds=seconds, data=data, saving=saving, compiling=compiling, recovering=recovering)


def _parts(spans: Sequence[_Span], kept_until: int | None) -> Iterator[tuple[str, float]]:
    """What the spans of an attempt went into."""
    steps = [span for span in spans if isinstance(span.record, StepRecord)]
    usual = median(span.own for span in steps[1:]) if len(steps) > ENOUGH else None
    for span in spans:
        if isinstance(span.record, EndRecord):
            yield "checkpoint", span.saving
            yield "finish", span.seconds - span.saving
        elif kept_until is not None and span.record.step > kept_until:
            yield "lost work", span.seconds
        elif isinstance(span.record, Timed):
            yield "good", span.before
            yield "eval", span.seconds - span.before
        elif isinstance(span.record, StepRecord):
            yield from _step_parts(span, usual, first=span is steps[0])
        else:
            yield "good", span.seconds


def _step_parts(span: _Span, usual: float | None, first: bool) -> Iterator[tuple[str, float]]:
    """A step's own time is good as far as it is usual."""
    above = 0.0 if usual is None else max(span.own - usual, 0.0)
    stalled = usual is not None and span.own > STALLED * usual and above > LEAST_SECONDS
    yield "data", span.data
    yield "checkpoint", span.saving
    yield "recovery", span.recovering
    yield "compile", span.compiling + (above if first else 0.0)
    yield "stall", above if stalled and not first else 0.0
    yield "good", span.own - (above if first or stalled else 0.0)
