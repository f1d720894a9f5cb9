"""Where a run's time went: shares of the wall clock, every attempt, what happened, and what saving cost."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from meshwright.cost.goodput import Account
from meshwright.spec.record import AttemptRecord, EndRecord, EventRecord, Record, StepRecord
from meshwright.spec.verdict import Verdict

GOOD = "goodput"
LOST = "a rank was killed or failed, and the ranks were started again"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the wall time."""

    name: str
    seconds: float
    share: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """From one start of the ranks to what ended it."""

    session: int  # which launcher or job, from 1
    number: int  # of the attempt in its session
    first_step: int  # where it began
    last_step: int  # as far as its records go
    lost: int  # steps that a later start went back behind
    at: float  # seconds from the session's beginning until the ranks stood ready
    seconds: float  # from there to its last record
    ended: str  # by what; empty: nothing says so


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the run recorded itself."""

    step: int
    at: float  # seconds since its session began
    session: int
    what: str
    text: str
    rank: int | None


class Saves(msgspec.Struct, frozen=True, kw_only=True):
    """How long steps stood still for checkpoints."""

    count: int
    seconds: float
    longest: float
    newest: int | None  # step of the newest checkpoint in the folder


def parts(account: Account) -> tuple[Part, ...]:
    """The shares, goodput first; none where no attempt was recorded."""
    if not account.wall:
        return ()
    seconds = {GOOD: account.good, **account.bad}
    return tuple(Part(name=name, seconds=each, share=each / account.wall) for name, each in seconds.items())


def in_tenths(shares: Sequence[float]) -> list[float]:
    """Shares as percentages with one decimal that add up to 100: what rounding leaves goes to whom it robbed most."""
    exact = [share * 1000 for share in shares]
    whole = [int(each) for each in exact]
    lacking = round(sum(exact)) - sum(whole)
    robbed = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in robbed[:lacking]:
        whole[number] += 1
    return [each / 10 for each in whole]


def attempts(records: Iterable[Record], ends: Mapping[str, Verdict]) -> tuple[Attempt, ...]:
    """Every start of the ranks, in order."""
    heads: list[AttemptRecord] = []
    lasts: list[Record] = []
    for record in records:
        if isinstance(record, AttemptRecord):
            heads.append(record)
            lasts.append(record)
        elif heads:
            lasts[-1] = record
    sessions = numbered(heads)
    found = []
    for number, (head, last) in enumerate(zip(heads, lasts, strict=True)):
        later = heads[number + 1 :]
        reached = max(last.step, head.step)
        back_to = min((other.step for other in later), default=reached)
        found.append(
            Attempt(
                session=sessions[head.session],
                number=head.number,
                first_step=head.step,
                last_step=reached,
                lost=max(reached - max(back_to, head.step), 0),
                at=max(head.at - head.began, 0.0),
                seconds=max(last.at - head.at, 0.0),
                ended=_ended(head, last, later, ends),
            )
        )
    return tuple(found)


def _ended(head: AttemptRecord, last: Record, later: Sequence[AttemptRecord], ends: Mapping[str, Verdict]) -> str:
    if told := ends.get(f"{head.session}-{head.number}"):
        return told.what
    if isinstance(last, EndRecord):
        return "asked to end" if later else ""
    if not later:
        return ""
    return LOST if later[0].session == head.session else "ended without a word; the same run was started again"


def numbered(heads: Iterable[AttemptRecord]) -> dict[str, int]:
    """The sessions by number, from 1."""
    found: dict[str, int] = {}
    for head in heads:
        found.setdefault(head.session, len(found) + 1)
    return found


def last_session(records: Sequence[Record]) -> Sequence[Record]:
    """The records from the last session's first start on."""
    heads = [(place, record) for place, record in enumerate(records) if isinstance(record, AttemptRecord)]
    first = next((place for place, head in heads if head.session == heads[-1][1].session), 0)
    return records[first:]


def happened(records: Iterable[Record]) -> tuple[Happened, ...]:
    """The events, with the time since their session began."""
    sessions: dict[str, int] = {}
    head: AttemptRecord | None = None
    found = []
    for record in records:
        if isinstance(record, AttemptRecord):
            head = record
            sessions.setdefault(head.session, len(sessions) + 1)
        elif isinstance(record, EventRecord):
            found.append(
                Happened(
                    step=record.step,
                    at=max(record.at - head.began, 0.0) if head else 0.0,
                    session=sessions[head.session] if head else 1,
                    what=record.what,
                    text=record.text,
                    rank=record.rank,
                )
            )
    return tuple(found)


def saves(records: Iterable[Record], saved: Sequence[int]) -> Saves:
    """What saving cost, and the newest save there is."""
    stood = [record.save_seconds for record in records if isinstance(record, StepRecord) and record.save_seconds > 0]
    return Saves(
        count=len(stood), seconds=sum(stood), longest=max(stood, default=0.0), newest=saved[-1] if saved else None
    )
