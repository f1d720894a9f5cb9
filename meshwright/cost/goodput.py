"""Every second of a run's wall time, by what it was spent on: productive and kept, or one kind of badput."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from meshwright.runtime.records import AttemptRecord, EndRecord, EvalRecord, EventRecord, Record, SaveRecord, StepRecord

BADPUT: tuple[str, ...] = ("start-up", "data", "checkpoint", "eval", "recovery", "lost work", "finish")


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
    good = 0.0
    bad: dict[str, float] = dict.fromkeys(BADPUT, 0.0)
    session, last = "", 0.0
    for number, attempt in enumerate(attempts):
        head = attempt[0]
        assert isinstance(head, AttemptRecord)
        after_fault = head.session == session
        since = last if after_fault else head.began
        bad["recovery" if after_fault else "start-up"] += max(head.at - since, 0.0)
        kept_until = min((later[0].step for later in attempts[number + 1 :]), default=None)
        session, last = head.session, head.at
        for record in attempt[1:]:
            if isinstance(record, SaveRecord):  # beside the steps, whose time it is
                continue
            for name, seconds in _parts(record, max(record.at - last, 0.0), kept_until):
                if name == "good":
                    good += seconds
                else:
                    bad[name] += seconds
            last = max(last, record.at)
    return Account(good=good, bad=bad, attempts=len(attempts))


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


def _parts(record: Record, seconds: float, kept_until: int | None) -> Iterator[tuple[str, float]]:
    """What the time before a record went into."""
    lost = kept_until is not None and record.step > kept_until
    if isinstance(record, EndRecord):
        yield "finish", seconds
    elif lost:
        yield "lost work", seconds
    elif isinstance(record, EvalRecord):
        yield "eval", seconds
    elif isinstance(record, StepRecord):
        data = min(record.data_seconds, seconds)
        saving = min(record.save_seconds, seconds - data)
        yield "data", data
        yield "checkpoint", saving
        yield "good", seconds - data - saving
    elif isinstance(record, EventRecord):
        yield "good", seconds
