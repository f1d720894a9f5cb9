"""What was measured of a run's steps: seconds, tokens, utilization, memory, losses."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from meshwright.report.run_records import RankSeen
from meshwright.spec.record import AttemptRecord, EventRecord, HeldRecord, Record, StepRecord

WARM_UP = (5, 1, 0)  # steps after a start that do not count, the first number that leaves half of them
LAST = 20  # steps whose mean loss is told, or a tenth of them where they are few


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that count, those after every start left out."""

    counted: int
    left_out: int
    seconds: float  # the median
    quickest: float
    slowest: float
    tokens: float  # of a step, the median
    tokens_per_second: float  # those ÷ the median seconds
    flops: float  # the model's in one step, over the whole job
    peak_bytes: int  # of the fullest rank
    peak_rank: int


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """A loss on what is never trained on."""

    step: int
    loss: float


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """How the loss went. One that is not finite is NaN, and null in JSON."""

    first: float
    first_step: int
    last: float
    last_step: int
    mean: float  # of the last steps, those that are finite
    mean_of: int
    held_out: tuple[HeldOut, ...]
    skipped: int  # steps whose gradient was not finite: the weights were left alone
    spikes: int  # as the run itself saw them


def steps(records: Iterable[Record], kept: Sequence[StepRecord], ranks: Sequence[RankSeen]) -> Steps | None:
    """Of the steps that were kept; None where none was made."""
    counted = steady(records, kept)
    if not counted:
        return None
    seconds = [step.seconds for step in counted]
    middle, tokens = median(seconds), median([step.tokens for step in counted])
    fullest = max(ranks, key=lambda rank: rank.memory_bytes)
    return Steps(
        counted=len(counted),
        left_out=len(kept) - len(counted),
        seconds=middle,
        quickest=min(seconds),
        slowest=max(seconds),
        tokens=tokens,
        tokens_per_second=tokens / middle if middle > 0 else math.nan,
        flops=counted[-1].flops,
        peak_bytes=fullest.memory_bytes,
        peak_rank=fullest.rank,
    )


def steady(records: Iterable[Record], kept: Sequence[StepRecord]) -> list[StepRecord]:
    """The kept steps without the first ones after each start, which compile, tune and warm up."""
    begun, age = 0, {}
    for record in records:
        if isinstance(record, AttemptRecord):
            begun = record.step
        elif isinstance(record, StepRecord):
            age[record.step] = record.step - begun
    for young in WARM_UP:
        found = [step for step in kept if age[step.step] > young]
        if 2 * len(found) >= len(kept):
            return found
    return []


def losses(records: Sequence[Record], kept: Sequence[StepRecord]) -> Losses | None:
    """Of the steps that were kept; None where none was made."""
    if not kept:
        return None
    tail = kept[-min(LAST, max(len(kept) // 10, 1)) :]
    finite = [step.loss for step in tail if math.isfinite(step.loss)]
    return Losses(
        first=kept[0].loss,
        first_step=kept[0].step,
        last=kept[-1].loss,
        last_step=kept[-1].step,
        mean=fmean(finite) if finite else math.nan,
        mean_of=len(finite),
        held_out=held_out(records),
        skipped=sum(step.skipped for step in kept),
        spikes=sum(isinstance(record, EventRecord) and record.what == "spike" for record in records),
    )


def held_out(records: Iterable[Record]) -> tuple[HeldOut, ...]:
    """The newest held-out loss of each step that was kept."""
    found: dict[int, float] = {}
    for record in records:
        if isinstance(record, AttemptRecord):
            found = {step: loss for step, loss in found.items() if step <= record.step}
        elif isinstance(record, HeldRecord):
            found[record.step] = record.loss
    return tuple(HeldOut(step=step, loss=loss) for step, loss in sorted(found.items()))
