"""A run's curves, made small enough to be drawn: a million steps are a few hundred points."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from meshwright.report.run_steps import HeldOut
from meshwright.spec.record import StepRecord

MOST = 400  # points of a curve
Pairs = list[tuple[float, float]]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values over steps, with points and moments worth a mark."""

    title: str
    unit: str
    line: tuple[tuple[float, float], ...]  # step and value
    line_name: str
    points: tuple[tuple[float, float], ...] = ()
    points_name: str = ""
    marks: tuple[tuple[int, str], ...] = ()  # a step, and what happened there

    @property
    def values(self) -> list[float]:
        return [value for _, value in (*self.line, *self.points)]


def losses(kept: Sequence[StepRecord], held: Iterable[HeldOut], marks: Iterable[tuple[int, str]] = ()) -> Curve:
    """The loss of every step, and those on what is never trained on."""
    finite = [(float(step.step), step.loss) for step in kept if math.isfinite(step.loss)]
    return Curve(
        title="Loss",
        unit="",
        line=tuple(thinned(finite, MOST, fmean)),
        line_name="training",
        points=tuple((float(each.step), each.loss) for each in held if math.isfinite(each.loss)),
        points_name="held-out",
        marks=tuple(marks),
    )


def seconds(kept: Sequence[StepRecord], marks: Iterable[tuple[int, str]] = ()) -> Curve:
    """The seconds of every step: their median as a line, the slowest of each neighbourhood as points."""
    pairs = [(float(step.step), step.seconds) for step in kept]
    slow = thinned(pairs, MOST // 4, max) if len(pairs) > MOST else []
    return Curve(
        title="Seconds a step",
        unit="s",
        line=tuple(thinned(pairs, MOST, median)),
        line_name="a step" if len(pairs) <= MOST else "median of neighbours",
        points=tuple(slow),
        points_name="slowest of neighbours",
        marks=tuple(marks),
    )


def thinned(pairs: Pairs, most: int, joined: Callable[[list[float]], float]) -> Pairs:
    """At most so many points, each of as many neighbours as any other."""
    if len(pairs) <= most:
        return pairs
    edges = [len(pairs) * number // most for number in range(most + 1)]
    groups = [pairs[start:end] for start, end in pairwise(edges)]
    return [(fmean(step for step, _ in group), joined([value for _, value in group])) for group in groups]
