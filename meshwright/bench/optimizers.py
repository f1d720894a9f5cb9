"""Optimizers on one job: each tries as many learning rates over as many tokens, and its best run counts. No torch here.

The first rates lie around one that is usual for an optimizer where AdamW's is the run's own; each further one follows
from the losses so far, beyond the best where that is the outermost, else nearer to it. What a run found is kept by the
run's digest, so that a bench that was stopped goes on where it was.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from meshwright.bench.sweep import LONGEST
from meshwright.config import load
from meshwright.config.presets import run_file
from meshwright.config.run import Run, digest
from meshwright.runtime.failure import report_of
from meshwright.runtime.ranks import Remote, run_ranks
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.params import count
from meshwright.spec.problem import InputError, Problem

LEARN = Remote("meshwright.bench.measure", "learn")
FIRST = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the usual rate
RATES = 8  # that every optimizer tries
TIMED = 20  # steps that an optimizer's best rate is timed over by itself, where others ran beside it
# The usual rate ÷ AdamW's: SGD's gradients are not divided by their size, SM3's by a sum that only grows; Lion moves
# every element by the whole rate; LAMB's rate is a share of a matrix's own norm.
USUAL = {"sgd": 100.0, "sm3": 50.0, "lion": 0.2, "lamb": 5.0, "onebit_lamb": 5.0}
LOSSES = 10  # validation losses on the way
ASIDE = ("eval.sample_tokens=0", "checkpoint.every=0", "optim.weight_decay=0.0")  # decay would be another key to tune


class LearningPoint(msgspec.Struct, frozen=True, array_like=True):
    """A validation loss on the way."""

    step: int
    seconds: float  # of training until then
    loss: float | None  # None: not finite


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its first rank saw it."""

    points: tuple[LearningPoint, ...]
    step_seconds: float  # the median
    device: str

    @property
    def loss(self) -> float:
        """The last one; what is not finite is worse than any."""
        last = self.points[-1].loss
        return math.inf if last is None else last


class TriedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A learning rate, and the last validation loss with it."""

    rate: float
    loss: float | None


class OptimizerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer: all rates, and the run with the best; or why it has none."""

    name: str
    ranks: int = 1
    tried: tuple[TriedRate, ...] = ()
    rate: float | None = None
    best: Learned | None = None
    error: str = ""

    @property
    def loss(self) -> float:
        """The last one, by the best rate."""
        return self.best.loss if self.best else math.inf

    @property
    def is_edge(self) -> bool:
        """Whether the best rate is the lowest or the highest that was tried: a still better one may lie beyond."""
        return bool(self.tried) and self.rate in (self.tried[0].rate, self.tried[-1].rate)

    def reached(self, target: float) -> LearningPoint | None:
        """Where its loss first was down to the target."""
        points = self.best.points if self.best else ()
        return next((point for point in points if point.loss is not None and point.loss <= target), None)


class OptimizerTable(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    run: str
    parameters: int
    steps: int
    tokens: int  # of one run
    device: str
    rows: tuple[OptimizerRow, ...]

    @property
    def target(self) -> float:
        """The loss that others are timed to: AdamW's last one."""
        return next((row.loss for row in self.rows if row.name == "adamw"), -math.inf)


def job(target: str | None, overrides: list[str]) -> Run:
    """The run that all optimizers make, with AdamW: a file's, or the default one."""
    file = run_file(target)
    if file is None and target is not None:
        text = f"--optimizers trains on text, and {target} is a model alone"
        raise InputError(
            [Problem(text, f"name a run file, or give arch.preset={target} and data.source", "data.source")]
        )
    return _run(file, overrides, "adamw", None)


def _run(file: Path | None, overrides: list[str], name: str, rate: float | None) -> Run:
    """The run of one optimizer. Those that compress need somebody to send to."""
    words = [*ASIDE, *overrides, f"optim.name={name}"]
    if rate is not None:
        words.append(f"optim.lr={rate!r}")
    one = load.load(file, [*ASIDE, *overrides]).run
    words.append(f"eval.every={max(one.steps // LOSSES, 1)}")
    if OPTIMIZERS[name].compresses and one.plan.world == 1:
        words.append("plan.replicate=2")
    return load.load(file, words).run


class OptimizerBench:
    """The job, and where its runs are kept."""

    def __init__(self, target: str | None, overrides: list[str], folder: Path, cache: Path) -> None:
        self.one = job(target, overrides)
        if self.one.data.eval_fraction == 0:
            text = "--optimizers compares validation losses, and data.eval_fraction = 0"
            raise InputError([Problem(text, "leave data.eval_fraction out", "data.eval_fraction")])
        self.file, self.overrides = run_file(target), overrides
        self.folder, self.cache = folder, cache

    def compare(
        self, names: Iterable[str], say: Callable[[str], None], *, rates: int = RATES, at_once: int = 1
    ) -> OptimizerTable:
        """Train every optimizer with every rate, so many of them at a time; `say` hears of each run as it is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(at_once) as pool:
            rows = tuple(pool.map(lambda name: self._row(name, rates, say), names))
        if at_once > 1:
            rows = tuple(self._timed_alone(row) for row in rows)
        one = self.one
        device = next((row.best.device for row in rows if row.best), "")
        return OptimizerTable(
            run=one.name,
            parameters=count(one.arch),
            steps=one.steps,
            tokens=one.tokens * one.steps,
            device=device,
            rows=rows,
        )

    def _row(self, name: str, rates: int, say: Callable[[str], None]) -> OptimizerRow:
        found: dict[float, Learned] = {}  # by factors of the usual rate
        ranks, usual = 1, self.one.optim.lr * USUAL.get(name, 1.0)
        while len(found) < rates:
            factor = next_factor({each: learned.loss for each, learned in found.items()})
            rate = _rate(usual, factor)
            try:
                run = _run(self.file, self.overrides, name, rate)
                ranks = run.plan.world
                learned = self._learned(run)
            except InputError as error:
                return OptimizerRow(name=name, error="; ".join(problem.text for problem in error.problems))
            except RuntimeError as error:
                report = report_of(error)
                return OptimizerRow(name=name, error=str(report) if report else str(error).strip().splitlines()[-1])
            found[factor] = learned
            shown = f"{learned.loss:.4f}" if math.isfinite(learned.loss) else "not finite"
            say(f"{name:<14} lr {rate:<8g} loss {shown}  {learned.step_seconds:.3f} s/step")
        tried = tuple(TriedRate(rate=_rate(usual, each), loss=found[each].points[-1].loss) for each in sorted(found))
        best = min(found, key=lambda each: found[each].loss)
        return OptimizerRow(name=name, ranks=ranks, tried=tried, rate=_rate(usual, best), best=found[best])

    def _timed_alone(self, row: OptimizerRow) -> OptimizerRow:
        """The same losses, with the seconds that a step takes when no other run shares the device."""
        if row.best is None:
            return row
        steps = min(self.one.steps, max(TIMED, self.one.optim.warmup + 1))
        alone = _run(self.file, [*self.overrides, f"steps={steps}"], row.name, row.rate)
        seconds = self._learned(alone).step_seconds
        points = tuple(LearningPoint(each.step, each.step * seconds, each.loss) for each in row.best.points)
        return msgspec.structs.replace(row, best=msgspec.structs.replace(row.best, points=points, step_seconds=seconds))

    def _learned(self, run: Run) -> Learned:
        """Train, unless this very run was trained before."""
        file = self.folder / f"{digest(run)}-{run.steps}.json"
        if not file.exists():
            run_ranks(LEARN, run.plan.world, (run, self.cache, file), LONGEST)
        return msgspec.json.decode(file.read_bytes(), type=Learned)


def next_factor(losses: Mapping[float, float]) -> float:
    """The next rate to try, as a factor of the usual one, by the losses of those before.

    Twice beyond the best where that is the lowest or the highest, else halfway into the wider of the gaps beside it.
    """
    if left := [factor for factor in FIRST if factor not in losses]:
        return left[0]
    tried = sorted(losses)
    place = tried.index(min(tried, key=losses.__getitem__))
    if place == 0:
        return tried[0] / 2
    if place == len(tried) - 1:
        return tried[-1] * 2
    below, best, above = tried[place - 1 : place + 2]
    # Of gaps alike, the one to the better neighbour.
    other = max((below, above), key=lambda each: (round(abs(math.log(each / best)), 6), -losses[each]))
    return math.sqrt(best * other)


def _rate(usual: float, factor: float) -> float:
    return float(f"{usual * factor:.3g}")


def table(answer: OptimizerTable) -> str:
    """The answer as the page shows it."""
    head = "| | learning rate | validation loss | steps to AdamW's | s/step | seconds to AdamW's |"
    lines = [head, "|---|--:|--:|--:|--:|--:|"]
    for row in sorted(answer.rows, key=lambda row: row.loss):
        if row.best is None:
            lines.append(f"| {row.name} | {row.error} | | | | |")
            continue
        point = row.reached(answer.target)
        steps, seconds = (str(point.step), f"{point.seconds:.1f}") if point else ("–", "–")
        rate = f"{row.rate:g}" + (" (edge)" if row.is_edge else "")
        name = row.name if row.ranks == 1 else f"{row.name}, {row.ranks} replicas"
        lines.append(f"| {name} | {rate} | {row.loss:.3f} | {steps} | {row.best.step_seconds:.3f} | {seconds} |")
    return "\n".join(lines)
