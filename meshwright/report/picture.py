"""What is drawn, apart from how: parts of a whole, plans by memory and time, a pipeline's step."""

import math
from collections.abc import Iterable

import msgspec

from meshwright.cost.memory import Ledger
from meshwright.cost.simulate import Timeline
from meshwright.cost.time import Price

GIB = 2**30


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a whole. One below zero is taken off."""

    name: str
    value: float
    why: str = ""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that add up, and what there is room for."""

    title: str
    unit: str
    entries: tuple[Entry, ...]
    limit: float | None = None  # None: there is none
    limit_name: str = ""

    @property
    def total(self) -> float:
        return math.fsum(entry.value for entry in self.entries)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A plan by what it needs and how long it takes."""

    label: str
    gib: float
    seconds: float
    front: bool = False  # no plan takes less time in as little memory


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a pipeline, or its beginning and end where it is long."""

    title: str
    timeline: Timeline
    shown: int  # microbatches that are played
    microbatches: int


class Pictures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to see of an answer."""

    title: str
    heading: tuple[str, ...]
    memory: Whole
    time: Whole
    points: tuple[Point, ...] = ()
    limit_gib: float = 0.0
    pipeline: Pipeline | None = None


def memory(ledger: Ledger, memory_bytes: float) -> Whole:
    """The ledger's lines beside the device's memory; empty ones are left out."""
    where = "a rank" if ledger.role == "only" else f"the {ledger.role} pipeline rank"
    return Whole(
        title=f"Memory of {where} at its peak, {ledger.moment}",
        unit="GiB",
        entries=tuple(
            Entry(name=line.name, value=line.bytes / GIB, why=line.why) for line in ledger.lines if line.bytes
        ),
        limit=memory_bytes / GIB,
        limit_name="the device",
    )


def seconds(price: Price) -> Whole:
    """The waterfall: from the data sheet's seconds to a step's."""
    entries = (Entry(name=share.name, value=share.seconds, why=share.why) for share in price.waterfall)
    return Whole(title="Where a step's seconds go", unit="s", entries=tuple(each for each in entries if each.value))


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points by memory, each marked that no other beats in both."""
    found, fastest = [], math.inf
    for point in sorted(points, key=lambda point: (point.gib, point.seconds, point.label)):
        best = point.seconds < fastest
        fastest = min(fastest, point.seconds)
        found.append(msgspec.structs.replace(point, front=best))
    return tuple(found)


def between(points: Iterable[Point]) -> tuple[float, float]:
    """The seconds that a chart of plans spans: not from 0, or plans that differ by a tenth would lie on a line."""
    seconds = [point.seconds for point in points]
    span = max(seconds) - min(seconds) or max(seconds)
    return max(min(seconds) - span / 4, 0.0), max(seconds) + span / 8


def ticks(high: float, low: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers within two limits, apart by 1, 2 or 5 times a power of ten, `most` of them or fewer."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def short(value: float) -> str:
    """Three digits, never a power of ten."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
