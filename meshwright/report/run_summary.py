"""A run's report: everything that can be concluded from its folder, as one value."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

import msgspec

from meshwright.config import presets
from meshwright.config.run import Goal
from meshwright.cost import goodput
from meshwright.cost.calibrate import CPU, PredictionSource, measured, trainer
from meshwright.cost.flops import utilization
from meshwright.cost.goodput import Account
from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import Cluster, catalogue, cluster, recognised
from meshwright.hardware.profile import Profile
from meshwright.report.run_data import FolderFacts, RankSeen, Standing, StandingEvidence, standing
from meshwright.runtime.failure import Failure
from meshwright.runtime.records import (
    AttemptRecord,
    CommandRecord,
    EndRecord,
    EvalRecord,
    EventRecord,
    Record,
    SaveRecord,
    StepRecord,
    TextRecord,
)
from meshwright.search.budget import job_of
from meshwright.spec.arch import Arch
from meshwright.spec.params import count
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import html_table

WARM_UP = (5, 1, 0)  # steps after a start that do not count, the first number that leaves half of them
LAST = 20  # steps whose mean loss is reported, or a tenth of them where they are few
LOST = "a rank was killed or failed, and the ranks were restarted"
DEVICE = re.compile(r"\d+ × (?P<name>.+), \S+")  # as env.json has it: "8 × NVIDIA H100 80GB HBM3, nccl"
NO_PREDICTION = "no prediction"
SHEET, FASTEST = "the data sheet's peak", "the fastest matmul measured"
PATIENCE, PATIENT_STEPS = 120.0, 10.0  # seconds, and slowest steps, without a record until a run counts as over
MOST = 400  # points of a curve
Pairs = list[tuple[float, float]]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that count, those after every start left out."""

    counted: int
    left_out: int
    seconds: float  # the median
    quickest: float
    slowest: float
    tokens: float  # of a step, the median
    tokens_per_second: float  # those ÷ the median seconds
    flops: float  # the model's in one step, over the whole job, attention in full
    peak_bytes: int  # of the most loaded rank
    peak_rank: int
    flops_causal: float | None = None  # attention as it is computed; None: not recorded
    span: float | None = None  # mean over positions of the document that each is in; None: not recorded
    staleness: dict[int, int] = {}  # steps of all ranks by how many updates old their weights were


class EvalLoss(msgspec.Struct, frozen=True, kw_only=True):
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
    validation: tuple[EvalLoss, ...]
    best: EvalLoss | None  # the lowest of them
    skipped: int  # steps whose gradient was not finite: the weights were left alone
    spikes: int  # as the run itself saw them


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
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
    phases: dict[str, float] = {}  # seconds of its start, in order
    first_loss: float | None = None  # seconds from when the ranks stood ready to their first loss


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the run recorded itself."""

    step: int
    at: float  # seconds since its session began
    session: int
    what: str
    text: str
    rank: int | None


class Saves(msgspec.Struct, frozen=True, kw_only=True):
    """How long saves paused training."""

    count: int
    seconds: float
    longest: float
    newest: int | None  # step of the newest checkpoint in the folder
    bytes: int = 0  # of the newest that was recorded
    bytes_per_second: float = 0.0  # the median of all
    bound: str = ""  # what the most of them went into: disk, hashing, device link


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said about the machines."""

    cluster: str = ""
    profile: Profile | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner says of a step."""

    source: str  # what it was made from
    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int | None  # of the most loaded rank; None: what was measured is not comparable
    mfu_causal: float | None = None
    tflops: float | None = None
    here: bool = True  # for the machines that the run ran on, as far as anybody knows


class PredictedUtilization(msgspec.Struct, frozen=True, kw_only=True):
    """How well the machines were used."""

    mfu: float  # attention counted in full, as torchtitan and nanoGPT do
    of: str  # the peak it is a share of
    mfu_causal: float | None = None  # attention counted as it is computed; None: records of older versions
    tflops: float | None = None  # 1e12 operations a second of a rank, counted so


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
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
    data: str  # what it learnt from


class WrittenTexts(msgspec.Struct, frozen=True, kw_only=True):
    """What the model wrote after the prompts of `eval.prompts`."""

    step: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]


class CommandOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `eval.command` on the model after a step."""

    step: int
    state: str  # done, failed, skipped, timeout, stopped
    seconds: float
    code: int | None
    numbers: dict[str, float]
    text: str
    folder: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to report of one run. What is not known is null."""

    kind: Literal["report"] = "report"
    folder: str
    updated: float  # when the last record was written: seconds since the epoch
    ran: RunFacts
    standing: Standing
    steps: Steps | None
    utilized: PredictedUtilization | None
    prediction: Prediction | None
    no_prediction: str  # why there is none
    losses: Losses | None
    wall_seconds: float
    parts: tuple[TimePart, ...]
    attempts: tuple[Attempt, ...]
    happened: tuple[RunEvent, ...]
    saves: Saves
    ranks: tuple[RankSeen, ...]
    notes: tuple[str, ...]
    sample: str  # what the trained model wrote
    texts: tuple[WrittenTexts, ...]
    commands: tuple[CommandOutcome, ...]

    def _repr_html_(self) -> str:
        from meshwright.report import run_text  # which is made of this module's values

        ran = zip(run_text.HEADS, run_text.overview_row(self), strict=True)
        compared = (
            (name, f"{run_text.shown(name, measured)} (predicted {run_text.shown(name, predicted)})")
            for name, predicted, measured in run_text.comparisons(self)
        )
        return html_table(f"report on {self.folder}", ("", ""), {**dict(ran), **dict(compared)}.items())


Runs = Sequence[tuple[FolderFacts, RunReport]]


class PredictedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's part of a report."""

    prediction: Prediction | None = None
    utilized: PredictedUtilization | None = None
    why_not: str = ""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values over steps, with points and moments worth a mark."""

    title: str
    unit: str
    line: tuple[tuple[float, float], ...]  # step and value
    line_name: str
    points: tuple[tuple[float, float], ...] = ()
    points_name: str = ""
    marks: tuple[tuple[int, str], ...] = ()  # a step, and what happened there
    ends: tuple[int, int] = (0, 0)  # the first and the last step, which a thinned line may lack

    @property
    def values(self) -> list[float]:
        return [value for _, value in (*self.line, *self.points)]


def reported(each: FolderFacts, given: Given) -> RunReport:
    """One run beside the prediction for its machines, or for those that are stated."""
    measured = steps_of(each)
    return report(each, measured, _predicted(each, measured, given))


def _predicted(each: FolderFacts, steps: Steps | None, given: Given) -> PredictedFigures:
    """The planner's words about exactly this run; a reason where it has none."""
    run, device = each.run, device_of(each.environment)
    try:
        found, source = machines(device, run.goal, run.plan.world, given)
    except InputError as error:
        if given != Given():
            raise
        why = "; ".join(map(str, error.problems))
        return PredictedFigures(why_not=why if why.startswith(NO_PREDICTION) else f"{NO_PREDICTION}: {why}")
    span = steps.span if steps and run.data.masks else None
    job = msgspec.structs.replace(job_of(msgspec.structs.replace(run, goal=Goal())), cluster=found, span=span)
    prediction = predict(job, device, source)
    used = utilized(job, device, steps) if steps and prediction.here else None
    return PredictedFigures(prediction=prediction, utilized=used)


def report(facts: FolderFacts, measured: Steps | None, predicted: PredictedFigures) -> RunReport:
    """Everything that the files say, beside the prediction."""
    run, kept, account = facts.run, facts.kept, goodput.account(facts.records)
    device, torch = (facts.environment.get(name) for name in ("device", "torch"))
    return RunReport(
        folder=str(facts.path),
        updated=facts.updated,
        ran=RunFacts(
            name=run.name,
            model=model_words(run.arch),
            parameters=count(run.arch),
            plan=str(run.plan),
            ranks=run.plan.world,
            device=device if isinstance(device, str) else "",
            torch=torch if isinstance(torch, str) else "",
            tokens=run.tokens,
            steps=run.steps,
            step=kept[-1].step if kept else 0,
            data=" + ".join(f"{each.weight:g} × {each.source}" for each in run.data.mix) or run.data.source,
        ),
        standing=standing(_evidence(facts, measured)),
        steps=measured,
        utilized=predicted.utilized,
        prediction=predicted.prediction,
        no_prediction=predicted.why_not,
        losses=losses(facts.records, kept),
        wall_seconds=account.wall,
        parts=parts(account),
        attempts=attempts(facts.records, facts.ends),
        happened=happened(facts.records),
        saves=saves(facts.records, facts.saved),
        ranks=facts.ranks,
        notes=facts.notes,
        sample=facts.sample,
        texts=texts(facts.records),
        commands=commands(facts.commands),
    )


def model_words(arch: Arch) -> str:
    """A model by its name, or by its shape."""
    known = next((name for name in presets.preset_names() if presets.preset(name) == arch), None)
    experts = f", {arch.experts} experts" if arch.experts else ""
    return known or f"{arch.layers} layers of {arch.hidden}{experts}, vocabulary of {arch.vocab:,}"


def _evidence(facts: FolderFacts, measured: Steps | None) -> StandingEvidence:
    """What there is to judge a run's standing by."""
    last = facts.records[-1] if facts.records else None
    heads = [record for record in facts.records if isinstance(record, AttemptRecord)]
    ended = facts.ends.get(f"{heads[-1].session}-{heads[-1].number}") if heads else None
    return StandingEvidence(
        finished=facts.finished,
        owner=facts.owner,
        silent_seconds=facts.silent_seconds,
        patience=max(PATIENCE, PATIENT_STEPS * measured.slowest if measured else 0.0),
        said_end=isinstance(last, EndRecord),
        made_all=last is not None and last.step >= facts.run.steps,
        failure=next(iter(facts.failures), ended),
        saved=facts.saved,
    )


def steps_of(facts: FolderFacts) -> Steps | None:
    """What was measured of the steps that were kept, and made as run.toml is now."""
    if not facts.changed:
        return steps(facts.records, facts.kept, facts.ranks)
    records = last_session(facts.records)
    return steps(records, goodput.kept(records), facts.ranks)


def steps(records: Iterable[Record], kept: Sequence[StepRecord], ranks: Sequence[RankSeen]) -> Steps | None:
    """The steps that were kept, as one value; None where none was made."""
    counted = steady(records, kept)
    if not counted:
        return None
    seconds = [step.seconds for step in counted]
    middle, tokens = median(seconds), median([step.tokens for step in counted])
    most_loaded = max(ranks, key=lambda rank: rank.memory_bytes)
    return Steps(
        counted=len(counted),
        left_out=len(kept) - len(counted),
        seconds=middle,
        quickest=min(seconds),
        slowest=max(seconds),
        tokens=tokens,
        tokens_per_second=tokens / middle if middle > 0 else math.nan,
        flops=fmean(step.flops for step in counted),
        flops_causal=fmean(step.flops_causal for step in counted)
        if all(step.flops_causal for step in counted)
        else None,
        span=fmean(step.span for step in counted) if all(step.span for step in counted) else None,
        peak_bytes=most_loaded.memory_bytes,
        peak_rank=most_loaded.rank,
        staleness=dict(sorted(sum((Counter(rank.staleness) for rank in ranks), Counter[int]()).items())),
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
    """The losses of the steps that were kept; None where none was made."""
    if not kept:
        return None
    tail = kept[-min(LAST, max(len(kept) // 10, 1)) :]
    finite = [step.loss for step in tail if math.isfinite(step.loss)]
    evals = validation(records)
    return Losses(
        first=kept[0].loss,
        first_step=kept[0].step,
        last=kept[-1].loss,
        last_step=kept[-1].step,
        mean=fmean(finite) if finite else math.nan,
        mean_of=len(finite),
        validation=evals,
        best=min((each for each in evals if math.isfinite(each.loss)), key=lambda each: each.loss, default=None),
        skipped=sum(step.skipped for step in kept),
        spikes=sum(isinstance(record, EventRecord) and record.what == "spike" for record in records),
    )


def validation(records: Iterable[Record]) -> tuple[EvalLoss, ...]:
    """The newest validation loss of each step that was kept."""
    found: dict[int, float] = {}
    for record in records:
        if isinstance(record, AttemptRecord):
            found = {step: loss for step, loss in found.items() if step <= record.step}
        elif isinstance(record, EvalRecord):
            found[record.step] = record.loss
    return tuple(EvalLoss(step=step, loss=loss) for step, loss in sorted(found.items()))


def texts(records: Iterable[Record]) -> tuple[WrittenTexts, ...]:
    """What was written after prompts, the newest of every step."""
    found: dict[int, WrittenTexts] = {}
    for record in records:
        if isinstance(record, AttemptRecord):
            found = {step: each for step, each in found.items() if step <= record.step}
        elif isinstance(record, TextRecord):
            found[record.step] = WrittenTexts(step=record.step, prompts=record.prompts, texts=record.texts)
    return tuple(found[step] for step in sorted(found))


def commands(records: Iterable[CommandRecord]) -> tuple[CommandOutcome, ...]:
    """What commands gave, by step; of one that was run again, its last."""
    names = [field.name for field in msgspec.structs.fields(CommandOutcome)]
    found = {each.step: CommandOutcome(**{name: getattr(each, name) for name in names}) for each in records}
    return tuple(found[step] for step in sorted(found))


def parts(account: Account) -> tuple[TimePart, ...]:
    """The shares, goodput first; none where no attempt was recorded."""
    if not account.wall:
        return ()
    seconds = {"goodput": account.good, **account.bad}
    return tuple(TimePart(name=name, seconds=each, share=each / account.wall) for name, each in seconds.items())


def in_tenths(shares: Sequence[float]) -> list[float]:
    """Shares as percentages with one decimal that add up to 100: what rounding leaves goes to whom it robbed most."""
    exact = [share * 1000 for share in shares]
    whole = [int(each) for each in exact]
    lacking = round(sum(exact)) - sum(whole)
    robbed = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in robbed[:lacking]:
        whole[number] += 1
    return [each / 10 for each in whole]


def attempts(records: Iterable[Record], ends: Mapping[str, Failure]) -> tuple[Attempt, ...]:
    """Every start of the ranks, in order."""
    heads: list[AttemptRecord] = []
    lasts: list[Record] = []
    firsts: list[float] = []  # when each made its first step; 0: it made none
    for record in records:
        if isinstance(record, AttemptRecord):
            heads.append(record)
            lasts.append(record)
            firsts.append(0.0)
        elif heads:
            lasts[-1] = record
            firsts[-1] = firsts[-1] or (record.ended or record.at if isinstance(record, StepRecord) else 0.0)
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
                phases=head.phases,
                first_loss=firsts[number] - head.at if firsts[number] else None,
            )
        )
    return tuple(found)


def _ended(head: AttemptRecord, last: Record, later: Sequence[AttemptRecord], ends: Mapping[str, Failure]) -> str:
    if failed := ends.get(f"{head.session}-{head.number}"):
        return failed.what
    if not later:
        return ""
    if isinstance(last, EndRecord):
        return "finished, and gone on with later" if last.finished else "stopped by SIGTERM"
    return (
        LOST if later[0].session == head.session else "ended without a failure report; the same run was started again"
    )


def numbered(records: Iterable[Record]) -> dict[str, int]:
    """The sessions by number, from 1."""
    sessions = dict.fromkeys(record.session for record in records if isinstance(record, AttemptRecord))
    return {session: number for number, session in enumerate(sessions, 1)}


def last_session(records: Sequence[Record]) -> Sequence[Record]:
    """The records from the last session's first start on."""
    heads = [(place, record) for place, record in enumerate(records) if isinstance(record, AttemptRecord)]
    first = next((place for place, head in heads if head.session == heads[-1][1].session), 0)
    return records[first:]


def happened(records: Sequence[Record]) -> tuple[RunEvent, ...]:
    """The events, with the time since their session began."""
    sessions, found = numbered(records), []
    head: AttemptRecord | None = None
    for record in records:
        if isinstance(record, AttemptRecord):
            head = record
        elif isinstance(record, EventRecord):
            found.append(
                RunEvent(
                    step=record.step,
                    at=max(record.at - head.began, 0.0) if head else 0.0,
                    session=sessions[head.session] if head else 1,
                    what=record.what,
                    text=record.text,
                    rank=record.rank,
                )
            )
    return tuple(found)


def saves(records: Sequence[Record], saved: Sequence[int]) -> Saves:
    """What saving cost, and the newest save there is."""
    stood = [record.save_seconds for record in records if isinstance(record, StepRecord) and record.save_seconds > 0]
    newest = saved[-1] if saved else None
    paused = Saves(count=len(stood), seconds=sum(stood), longest=max(stood, default=0.0), newest=newest)
    written = [record for record in records if isinstance(record, SaveRecord)]
    if not written:  # none was made, or by an earlier version
        return paused
    bounds = [record.bound for record in written]
    return msgspec.structs.replace(
        paused,
        bytes=written[-1].bytes,
        bytes_per_second=median(record.bytes / record.seconds for record in written),
        bound=max(bounds, key=bounds.count),
    )


def device_of(environment: Mapping[str, Any]) -> str:
    """The device's own name; empty where nobody wrote it down."""
    words = environment.get("device")
    found = DEVICE.fullmatch(words) if isinstance(words, str) else None
    if found is None:
        return ""
    return CPU if found["name"].startswith("CPU") else found["name"]


def machines(device: str, goal: Goal, ranks: int, given: Given) -> tuple[Cluster, str]:
    """What a prediction is made from: what the user says, else what the run was planned for, else the device's card."""
    if given.cluster:
        found = cluster(given.cluster, gpus=ranks)
        if given.profile is None:
            return found, f"--cluster {given.cluster}"
        return measured(found, given.profile, trainer(device)), f"--cluster {given.cluster} and the profile given"
    if given.profile is None and (planned := _planned(device, goal, ranks)) is not None:
        return planned, f"the catalogue's {planned.gpu.name}, in the cluster of the run file"
    if not device:
        what = f"{NO_PREDICTION}: env.json does not name the device"
        raise InputError([Problem(what, "name the machines with --cluster, or their profile with --profile")])
    found, source = PredictionSource(given=given.profile, probed=lambda: None).of(device, ranks)
    if found is None:
        what = f"{NO_PREDICTION} for CPUs" if device == CPU else f"{NO_PREDICTION}: unknown card {device}"
        measure = f"measure this machine with `meshwright bench --probe --ranks {ranks}`"
        raise InputError([Problem(what, f"{measure}, then add --profile profile.json")])
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


def predict(job: Job, device: str, source: str) -> Prediction:
    """The planner's prediction for exactly this job."""
    job = msgspec.structs.replace(job, stack=trainer(device))
    found = price(job)
    return Prediction(
        source=source,
        seconds=found.seconds,
        low_seconds=found.low_seconds,
        high_seconds=found.high_seconds,
        tokens_per_second=found.tokens_per_second_per_gpu * job.plan.world,
        mfu=found.mfu if job.cluster.gpu.peak(job.plan.precision) else None,
        mfu_causal=found.mfu_causal if job.cluster.gpu.peak(job.plan.precision) else None,
        tflops=found.flops_per_second / 1e12 if job.cluster.gpu.peak(job.plan.precision) else None,
        # A process on a CPU holds Python and torch as well, which the ledger of tensors knows nothing of.
        peak_bytes=None if device == CPU else worst(job).allocated,
        here=_ran_on(device, job.cluster),
    )


def _ran_on(device: str, machines: Cluster) -> bool:
    """Whether a prediction may be held against the run: not one for other machines than it ran on."""
    card, name = recognised(device, catalogue().cards), machines.gpu.name
    return name == card or name not in catalogue().cards or (card is None and device != CPU)


def utilized(job: Job, device: str, steps: Steps) -> PredictedUtilization | None:
    """The utilization that was measured; None where no peak is known."""
    peak = job.cluster.gpu.peak(job.plan.precision) * job.plan.world
    if not peak or not steps.seconds:
        return None
    known = recognised(device, catalogue().cards) is not None or job.cluster.gpu.name in catalogue().cards
    causal = steps.flops_causal
    return PredictedUtilization(
        mfu=utilization(steps.flops, steps.seconds, peak),
        of=SHEET if known else FASTEST,
        mfu_causal=utilization(causal, steps.seconds, peak) if causal else None,
        tflops=causal / steps.seconds / job.plan.world / 1e12 if causal else None,
    )


def named_losses(runs: Runs) -> list[Curve]:
    """The losses of several runs, each by the name of its folder; those without any are left out."""
    found = [(facts.path.name, loss_curve(facts.kept, report.losses)) for facts, report in runs]
    return [msgspec.structs.replace(curve, line_name=name) for name, curve in found if curve.line]


def loss_curve(kept: Sequence[StepRecord], losses: Losses | None) -> Curve:
    """The loss of every step, and those on what is never trained on."""
    validation = losses.validation if losses else ()
    finite = [(float(step.step), step.loss) for step in kept if math.isfinite(step.loss)]
    return Curve(
        title="Loss",
        unit="",
        line=tuple(thinned(finite, MOST, fmean)),
        line_name="training",
        points=tuple((float(each.step), each.loss) for each in validation if math.isfinite(each.loss)),
        points_name="validation",
        ends=(kept[0].step, kept[-1].step) if kept else (0, 0),
    )


def smoothed(pairs: Sequence[tuple[float, float]], weight: float) -> Pairs:
    """The exponential moving average: each point counts `weight` times as much as the one after it."""
    found, total, of = [], 0.0, 0.0
    for step, value in pairs:
        total, of = weight * total + value, weight * of + 1.0
        found.append((step, total / of))
    return found


def seconds(kept: Sequence[StepRecord]) -> Curve:
    """The seconds of every step: their median as a line, the slowest of each neighbourhood as points."""
    pairs = [(float(step.step), step.seconds) for step in kept]
    slow = thinned(pairs, MOST // 4, max) if len(pairs) > MOST else []
    return Curve(
        title="Seconds per step",
        unit="s",
        line=tuple(thinned(pairs, MOST, median)),
        line_name="a step" if len(pairs) <= MOST else "median of neighbours",
        points=tuple(slow),
        points_name="slowest of neighbours",
    )


def thinned(pairs: Pairs, most: int, joined: Callable[[list[float]], float]) -> Pairs:
    """At most so many points, each of as many neighbours as any other."""
    if len(pairs) <= most:
        return pairs
    edges = [len(pairs) * number // most for number in range(most + 1)]
    groups = [pairs[start:end] for start, end in pairwise(edges)]
    return [(fmean(step for step, _ in group), joined([value for _, value in group])) for group in groups]
