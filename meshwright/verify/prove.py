"""The proof itself: the reference once, then each plan beside it. No torch in this process; the ranks have it."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import msgspec

from meshwright.config import check, load
from meshwright.config.presets import preset, preset_names, run_file
from meshwright.config.run import ADASCALE_OPTIM, FP8_KEYS, ONEBIT_OPTIM, OUTER_OPTIM, Optim, Run
from meshwright.runtime.failure import Exit
from meshwright.runtime.ranks import Crew, RankError, Remote, Work, run_ranks
from meshwright.spec.params import count
from meshwright.spec.plan import AXES, Plan, Precision
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.schedule import Schedule

# precision -> largest relative deviation that rounding explains, and why.
TOLERANCES: dict[Precision, tuple[float, str]] = {
    "fp64": (1e-11, "float64 sums in another order: 1e-16 a term, some thousands of terms, a few updates"),
    "fp32": (2e-3, "fp32 sums in another order: 1e-7 a term, and AdamW divides small gradients by their own size"),
    "bf16": (1e-1, "bf16 keeps 8 bits: 4e-3 a product"),
    "fp16": (3e-2, "fp16 keeps 11 bits: 5e-4 a product"),
    "fp8": (3e-1, "fp8 keeps 4 bits: 5e-2 a product, and scales are those of what a rank has of a microbatch"),
}
EXACTLY = (
    1e-11,
    "reference arithmetic: the same FP8 numbers, all else in float64, as tokens whose inputs round change experts",
)
# Optimizers that divide signs by √v, and the ε from which on that amplifies no rounding: an element whose gradient is
# small beside others of its chunk moves by their size, divided by little more than ε.
DIVIDES_SIGNS, SIGNS_EPS = ("onebit_adam", "zero_one_adam"), 1e-5
DOUBLE_ROUNDING, SCALE_STEP = 1e-16, 2.0**-23  # scales of signs are fp32 under every precision
QUANTITIES = ("loss", "norm", "gradient", "weight")  # that are compared
TEXT, CERTIFICATE = "ragged.jsonl", "certificate.json"
VERSIONS = "versions.json"  # of the weights that each asynchronous worker had in each step
LONGEST = 600.0  # seconds that one plan may take
RECORD, JUDGE = (Remote("meshwright.verify.evidence", name) for name in ("record", "judge"))  # by name: they have torch
RECORD_EXACTLY = Remote("meshwright.verify.scaled", "record_exactly")
SCHEDULES = get_args(Schedule)
ONE = "one process"  # what plans are compared with
# Every axis alone and the combinations that must hold. Dense plans are proved on `tiny` (grouped queries, an odd
# vocabulary), plans with experts on `tiny-moe`; both on documents of very different lengths.
MATRIX = (
    "grad_accum=4",
    "replicate=2",
    "shard=2,zero=1",
    "shard=2,zero=2,grad_accum=2",
    "shard=2,zero=3",
    "tp=2",
    "cp=2",
    "cp=2,cp_kind=ulysses",
    *(f"pp=2,schedule={schedule}" for schedule in SCHEDULES),
    "pp=3,schedule=1f1b",
    "recompute=every-4",
    "shard=2,zero=3,recompute=full",
    "shard=2,zero=3,recompute=sqrt",
    "tp=2,recompute=selective",
    "pp=2,recompute=every-2",
    "shard=2,zero=3,activation_offload=true,recompute=full",
    "compile=true",
    "shard=2,zero=3,compile=true",
    "shard=2,zero=1,ep=2",
    "replicate=4,grad_accum=2",
    "replicate=2,shard=2,zero=3",
    "shard=4,zero=3",
    "tp=4",
    "shard=2,zero=3,tp=2",
    "shard=2,zero=3,cp=2",
    "cp=2,tp=2",
    "pp=2,cp=2",
    "pp=2,tp=2",
    *(f"pp=2,schedule={schedule},shard=2,zero=3" for schedule in SCHEDULES),
    "shard=2,zero=3,ep=2",
    "shard=2,zero=3,tp=2,ep=2",
    "shard=2,zero=3,ep=2,recompute=selective",
    "shard=4,zero=2,ep=2,grad_accum=2",
    "pp=2,shard=2,zero=3,tp=2",
    "pp=2,schedule=zbv,shard=2,zero=3,tp=2",
    "replicate=2,shard=2,zero=3,tp=2",
    *(f"replicate=2,sync_every=2,outer={outer}" for outer in ("average", "slowmo", "diloco")),
    "replicate=2,shard=2,zero=3,sync_every=2,outer=diloco,outer_quant=int8",
    "replicate=2,grad_reduce=int8",
    "replicate=2,powersgd=2",
    "replicate=2,shard=2,zero=3,grad_reduce=int4,gather=int8",
    "shard=4,zero=3,secondary_shard=2",
    "shard=4,zero=3,grad_reduce=int4,grad_reduce_node=2",
    "replicate=2,staleness=0",
    "replicate=2,staleness=2",
)
ALONE = Plan(microbatch=1)
# Keys, and those of their values, that a plan with parameter servers can have.
UNSERVED, SERVED = ("optim.name=", "optim.state_dtype=", "optim.master_weights="), ("=adamw", "=sgd", "=lion", "=fp32")
UNSCALED = frozenset(("tp", "cp", "ep", "sync_every", "grad_reduce", "powersgd", "staleness"))  # what AdaScale refuses
SPLIT_BATCH = ("replicate", "shard", "grad_accum")  # that make several microbatches of a step
# Of optimizers that compress, the plans with replicas and whatever cuts one, but for what sends otherwise.
CUT_REPLICAS = (
    "replicate=2,shard=2,zero=1",
    "replicate=2,shard=2,zero=2,grad_accum=2",
    "replicate=2,tp=2",
    "replicate=2,cp=2,zero=1",
    "replicate=2,pp=2,schedule=1f1b",
    "replicate=2,pp=2,schedule=zbv",
    "replicate=2,shard=2,zero=1,ep=2",
)
SENDS_OTHERWISE = frozenset(("sync_every", "grad_reduce", "powersgd", "gather", "staleness", "secondary_shard"))
ALIKE = {"onebit_adam": "adamw", "zero_one_adam": "adamw", "onebit_lamb": "lamb"}  # without anything compressed
Job = tuple[Run, list[tuple[str, Run]]]  # a reference, and each plan's words with its run
# Plans that compute something else than one process would, by the field that says so: they have a reference of their
# own, which does in one process, one after the other, what their ranks do. Its name, and who records it.
OWN_REFERENCES: dict[str, tuple[str, Remote]] = {
    "sync_every": (
        "one process that trains the replicas one after another and syncs them",
        Remote("meshwright.verify.lossy", "record_replicas"),
    ),
    **dict.fromkeys(
        ("grad_reduce", "powersgd", "gather"),
        (
            "one process that rounds each rank's gradients and weights on their way, and feeds the errors back",
            Remote("meshwright.verify.lossy", "record"),
        ),
    ),
    "staleness": (
        "one process that computes every worker's gradient by the weights that it had then",
        Remote("meshwright.verify.workers", "record_stale"),
    ),
    "adascale": ("one process, in microbatches of the same size", RECORD),
    # What a rank has of a microbatch has a scale of its own: of more tokens it would be another.
    "fp8": (
        "one process, in microbatches and parts of sequences of the same size",
        Remote("meshwright.verify.scaled", "record_alone"),
    ),
    "compresses": (
        "one process that is every worker and server in turn, with the same compression and error feedback",
        Remote("meshwright.verify.workers", "record"),
    ),
}
LOSSY = ("replicate", "shard", "zero", "grad_reduce", "powersgd", "error_feedback", "grad_reduce_node", "gather")
# The fields that such a reference shares with its plan, and that one process alone does without.
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "sync_every": ("replicate", "sync_every", "outer", "outer_fragments", "outer_quant"),
    "grad_reduce": LOSSY,
    "powersgd": LOSSY,
    "gather": ("gather",),
    "staleness": ("replicate", "staleness"),
    "adascale": ("microbatch",),
    "fp8": ("microbatch", "cp"),
    "compresses": ("replicate",),
}


class ParityResult(msgspec.Struct, frozen=True, kw_only=True):
    """One plan beside one process."""

    plan: str
    passed: bool
    loss_deviation: float  # largest relative difference of a step's loss
    norm_deviation: float  # of a step's gradient norm
    gradient_deviation: float  # of a parameter's gradient at the first step
    weight_deviation: float  # of a parameter's weight after the last step
    state_deviation: float = 0.0  # of a parameter's optimizer state after the last step, in float64
    first_bad: str | None  # the first step and quantity that left the tolerance
    worst: str  # the parameter with the largest deviation
    seconds: float
    error: str = ""  # the plan did not run to its end
    fits: bool = True  # else that is because memory did not suffice


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Several plans beside one process, over the same mathematics."""

    run: Run  # the reference
    steps: int
    tolerance: float
    reason: str
    reference: str = ONE  # what the plans are compared with
    torch: str
    verdicts: tuple[ParityResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.verdicts)


class Planned(Protocol):
    """Anything that a plan runs."""

    @property
    def plan(self) -> Plan: ...


AnyPlanned = TypeVar("AnyPlanned", bound=Planned)


def matrix(ranks: int, target: str | None = None, overrides: Sequence[str] = ()) -> list[str]:
    """The standard set for up to so many ranks; compiled plans only where there is a compiler that can do float64.

    Of a model of the zoo, those that it can have: experts to distribute, and no load bias where replicas part. Of an
    optimizer that compresses, those with replicas, and some more of them; what parameter servers may not have (whole
    tensors, states in few bits) has no plan with them. AdaScale has those with several microbatches, each
    whole on a rank.
    """
    compiles = not any(check.missing(Plan(microbatch=1, compile=True))) and check.compiles_doubles()
    lacks = set() if compiles else {"compile"}
    if target in preset_names():
        arch = preset(target)
        lacks |= {"secondary_shard" if arch.experts else "ep"}  # which reshards by rows, and stacks of experts have few
        lacks |= {"sync_every", "staleness"} if arch.router_load_bias else set()
    if any(word.startswith(UNSERVED) and not word.endswith(SERVED) for word in overrides):
        lacks.add("staleness")
    if "optim.adascale=true" in overrides:
        lacks |= UNSCALED
    compresses = any(word == f"optim.name={name}" for word in overrides for name in ALIKE)
    if compresses:
        lacks |= SENDS_OTHERWISE
    standard = (*MATRIX, *CUT_REPLICAS) if compresses else MATRIX
    plans = [plan for plan in standard if world(plan) <= ranks and not lacks & fields(plan).keys()]
    if "optim.adascale=true" in overrides:
        plans = [plan for plan in plans if math.prod(_number(_resolved(plan), name) for name in SPLIT_BATCH) > 1]
    return [plan for plan in plans if "replicate" in fields(plan)] if compresses else plans


def jobs(target: str | None, overrides: list[str], plans: list[str], steps: int, folder: Path) -> list[Job]:
    """Everything to be proved, each part beside its own reference. Nothing is written yet."""
    made = []
    with_experts = [plan for plan in plans if _number(fields(plan), "ep") > 1]
    dense = [plan for plan in plans if plan not in with_experts]
    # Unless something is named, plans with experts are proved on a model that has some.
    groups = [("tiny", dense), ("tiny-moe", with_experts)] if target is None else [(target, plans)]
    for model, group in groups:
        if not group:
            continue
        reference, planned = runs(model, overrides, group, steps, folder / TEXT)
        if problems := [problem for run in planned for problem in check.missing(run.plan)]:
            raise InputError(problems[:1])  # the same for every plan
        apart: dict[Plan, Job] = {}
        for name, run in zip(group, planned, strict=True):
            own = own_reference(reference, run)
            apart.setdefault(own.plan, (own, []))[1].append((name, run))
        made += apart.values()
    return made


def own_field(planned: Planned) -> str | None:
    """The field by which a plan has a reference of its own, or its optimizer; None: one process is its reference."""
    if isinstance(planned, Run) and (planned.compresses or planned.optim.adascale):
        return "compresses" if planned.compresses else "adascale"
    rounds = "fp8" if isinstance(planned, Run) and planned.plan.precision == "fp8" else None
    if planned.plan.staleness == 0:  # plain training
        return rounds
    return next((name for name in OWN_FIELDS if hasattr(planned.plan, name) and planned.plan.uses(name)), rounds)


def own_reference(reference: Run, run: Run) -> Run:
    """What a plan is compared with: one process, or its own reference, which no other axis cuts."""
    field = own_field(run)
    if field is None:
        return reference
    shared = {name: getattr(run.plan, name) for name in OWN_FIELDS[field]}
    own = msgspec.structs.replace(reference.plan, bf16_params=False, **shared)
    from meshwright.cost.traffic import reductions  # not before the words are known to be right

    times = reductions(run.plan) if own.reduces_lossily else 1  # each rounds
    share = own.microbatch if field in ("adascale", "fp8") else run.batch // own.data // times
    accumulated = msgspec.structs.replace(own, microbatch=share, grad_accum=run.batch // own.data // share)
    return msgspec.structs.replace(run, plan=accumulated)


def fields(plan: str) -> dict[str, str]:
    """The words of "tp=2,pp=2,schedule=1f1b"."""
    words = [word.strip() for word in plan.split(",") if word.strip()]
    if bad := [word for word in words if "=" not in word]:
        what = f"of --plan {plan!r} is not field=value"
        raise InputError([Problem(f"{word!r} {what}", "write tp=2,shard=2") for word in bad])
    return dict(word.removeprefix("plan.").split("=", 1) for word in words)


def world(plan: str) -> int:
    """Ranks that a plan needs."""
    return math.prod(_number(fields(plan), axis) for axis in AXES)


def runs(target: str | None, overrides: list[str], plans: list[str], steps: int, text: Path) -> tuple[Run, list[Run]]:
    """The reference and a run for each plan, all of one mathematics: a run file's, or a preset's on ragged text."""
    file = run_file(target)
    words = list(overrides) if file else [*_ragged(target or "tiny", plans, text), *overrides]
    # A plan whose replicas never sync proves nothing.
    steps = max(steps, *(_number(fields(plan), "sync_every") for plan in plans))
    words += [f"steps={steps}", "data.eval_fraction=0.0", "eval.every=0", "eval.sample_tokens=0"]
    words = [word for word in words if not word.startswith("plan.")]
    rounding = _rounding(plans, overrides)
    # One process has no outer loop, nobody to compress for, and one microbatch, of which no meter tells noise.
    names = (*OUTER_OPTIM, *ONEBIT_OPTIM, *ADASCALE_OPTIM)
    plain = [f"optim.{name}={str(getattr(Optim(), name)).lower()}" for name in names]
    plain += ["log.noise_scale=false", *_words({**rounding, "grad_accum": "1"})]
    planned = [load.load(file, [*words, *_words({**rounding, **_resolved(plan)})]).run for plan in plans]
    plain += [f"optim.name={ALIKE[name]}" for name in {run.optim.name for run in planned} if name in ALIKE]
    return load.load(file, [*words, *plain], ranks=1).run, planned


def _rounding(plans: list[str], overrides: list[str]) -> dict[str, str]:
    """Float64 unless a precision is named; then both sides use it, and how it rounds."""
    stated = dict(word.removeprefix("plan.").split("=", 1) for word in overrides if word.startswith("plan."))
    found = {}
    for key in ("precision", *FP8_KEYS):
        named = {value for given in (stated, *map(fields, plans)) if (value := given.get(key))}
        if len(named) > 1:
            raise mistake("the plans name different precisions", "prove one precision at a time")
        found |= dict.fromkeys((key,) if named else (), "".join(named))
    return {"precision": "fp64"} | found


_NEUTRAL = dict.fromkeys((*AXES, "ep", "sync_every", "outer_fragments", "secondary_shard", "grad_reduce_node"), "1")
_NEUTRAL |= {"outer_quant": "none", "grad_reduce": "default", "powersgd": "0", "gather": "default"}


def _words(plan: dict[str, str]) -> list[str]:
    """A plan as overrides, every axis stated, so that none is left over from a run file."""
    return [f"plan.{key}={value}" for key, value in (_NEUTRAL | plan).items()]


def _resolved(plan: str) -> dict[str, str]:
    """A plan's words; a pipeline needs several microbatches: unless stated, twice as many as it has ranks."""
    given = fields(plan)
    pp = _number(given, "pp")
    return ({"grad_accum": str(2 * pp)} if pp > 1 else {"grad_accum": "1"}) | given


def _ragged(preset: str, plans: list[str], text: Path) -> list[str]:
    """Documents of very different lengths, the least batch that all plans divide, a sequence that all plans cut."""
    shapes = [_resolved(plan) for plan in plans]
    batch = math.lcm(4, *(math.prod(_number(shape, name) for name in SPLIT_BATCH) for shape in shapes))
    parts = math.lcm(1, *(2 * _number(shape, "cp") * _number(shape, "tp") for shape in shapes))
    return [
        f"arch.preset={preset}",
        f"data.source={text}",
        "data.pack=documents",
        f"batch={batch}",
        f"sequence={parts * math.ceil(32 / parts)}",
        "optim.lr=1e-2",
        "optim.warmup=0",
    ]


def _number(given: dict[str, str], key: str) -> int:
    text = given.get(key, "1")
    if not text.isdecimal() or int(text) < 1:
        raise mistake(f"{key}={text} of --plan is not a count", "use whole numbers of at least 1")
    return int(text)


def write_ragged(file: Path) -> None:
    """Some documents of one word and some of hundreds, so that ranks and microbatches hold unlike numbers of tokens."""
    lengths = [1 + number * number * 7 % 61 for number in range(400)]
    with file.open("w") as lines:
        count = 0
        for length in lengths:
            words = [f"word{number % 37} and {number * number % 101}" for number in range(count, count + length)]
            count += length
            lines.write(msgspec.json.encode({"text": " ".join(words)}).decode() + "\n")


def prove_all(jobs: list[Job], cache: Path, folder: Path, say: Callable[[str], None]) -> list[ParityResult]:
    """Prove every job, saying each result as it is there, and leave the certificate in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ragged(folder / TEXT)
    width = max(len(name) for _, planned in jobs for name, _ in planned)
    certificates = []
    for reference, planned in jobs:
        say(f"{count(reference.arch):,} parameters, {reference.steps} steps of {reference.tokens} positions")
        tolerance, reason = allowed(reference)
        record = RECORD_EXACTLY if is_exact(reference) else RECORD
        certificates.append(
            Certificate(
                run=reference,
                steps=reference.steps,
                tolerance=tolerance,
                reason=reason,
                torch=version("torch"),
                reference=named(reference)[0],
                verdicts=tuple(beside(reference, planned, (record, cache), folder, say, width)),
            )
        )
    text = msgspec.json.format(msgspec.json.encode(certificates), indent=2) + b"\n"
    (folder / CERTIFICATE).write_bytes(text)
    return [result for certificate in certificates for result in certificate.verdicts]


def named(reference: Planned) -> tuple[str, Remote]:
    """What a reference is, in words, and who records it."""
    field = own_field(reference)
    return (ONE, RECORD) if field is None else OWN_REFERENCES[field]


def is_exact(planned: Planned) -> bool:
    """Whether a plan is proved in reference arithmetic, because FP8 that rounds otherwise changes who is an expert."""
    return isinstance(planned, Run) and planned.arch.experts > 0 and own_field(planned) == "fp8"


def allowed(reference: Planned) -> tuple[float, str]:
    """The largest relative deviation that rounding explains, and why."""
    if is_exact(reference):
        return EXACTLY
    if isinstance(reference, Run) and reference.plan.precision == "fp64" and (told := _of_signs(reference)):
        return told
    return TOLERANCES[reference.plan.precision]


def _of_signs(reference: Run) -> tuple[float, str] | None:
    """What rounding comes to where signs are divided by a small √v; None: nothing of its own."""
    optim = reference.optim
    if optim.name not in DIVIDES_SIGNS or optim.eps >= SIGNS_EPS:
        return None
    each = max(DOUBLE_ROUNDING / optim.eps, SCALE_STEP)
    why = "which amplifies rounding, until it takes a scale to the next number of fp32"
    return reference.steps * each, f"signs are divided by √v + {optim.eps:g}, {why}: {each:.1e} an update"


class KeptRanks:
    """The ranks of one plan, kept for the next one that has as many."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.crew: Crew | None = None

    def run(self, plan: Plan, arguments: tuple[Any, ...]) -> None:
        """Do the work on the ranks of a plan."""
        # Of a function torch remembers only so many compiled forms: later ones would not be compiled.
        if self.crew is not None and (len(self.crew.ends) != plan.world or plan.compile):
            self.close()
        self.crew = self.crew or Crew(self.work, plan.world)
        try:
            self.crew.run(arguments, LONGEST)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        """End them."""
        if self.crew is not None:
            self.crew.close()
        self.crew = None


def beside(
    reference: AnyPlanned,
    planned: list[tuple[str, AnyPlanned]],
    work: tuple[Work, Any],
    folder: Path,
    say: Callable[[str], None],
    width: int,
) -> list[ParityResult]:
    """Run the reference once and each plan beside it, and say each result in a table whose first column has a width.

    `work` is record(place, run, given, folder) and its `given`.
    """
    record, given = work
    tolerance, reason = allowed(reference)
    whom, reference_record = named(reference)
    say(f"largest relative deviation from {whom}, {tolerance:.0e} allowed ({reason}):")
    say(f"{'plan':<{width}}  {'  '.join(f'{name:>8}' for name in QUANTITIES)}")
    base = _fresh(folder / "reference")
    follows = own_field(reference) == "staleness"  # each plan's own order of events

    def refer(place: Path | None) -> None:
        if follows and place is not None:
            shutil.copy(place / VERSIONS, base)
        if follows == (place is not None):
            run_ranks(record if whom == ONE else reference_record, 1, (reference, given, base), LONGEST)

    refer(None)
    results = []
    with closing(KeptRanks(record)) as ranks, closing(KeptRanks(JUDGE)) as judge:
        for number, (name, run) in enumerate(planned):
            place = _fresh(folder / f"plan{number}")
            began = time.monotonic()
            try:
                ranks.run(run.plan, (run, given, place))
                refer(place)
                judge.run(ALONE, (run, base, place, tolerance, time.monotonic() - began))
                result = msgspec.json.decode((place / "result.json").read_bytes(), type=ParityResult)
            except RankError as error:
                far = {f"{quantity}_deviation": math.inf for quantity in QUANTITIES}
                spent = {"seconds": time.monotonic() - began, "error": str(error.report or error)}
                fits = error.report is None or error.report.code != Exit.DOES_NOT_FIT
                result = ParityResult(plan=name, passed=False, first_bad=None, worst="", fits=fits, **far, **spent)
            result = msgspec.structs.replace(result, plan=name)
            shutil.rmtree(place)
            results.append(result)
            words = "equal" if result.passed else _trouble(result)
            deviations = [f"{getattr(result, f'{quantity}_deviation'):8.1e}" for quantity in QUANTITIES]
            say(f"{name:<{width}}  {'  '.join(deviations)}   {words}")
    shutil.rmtree(base)
    return results


def _trouble(found: ParityResult) -> str:
    if not found.fits:
        return f"DOES NOT FIT\n{found.error}"
    return f"DIFFERS: {found.first_bad or found.error.splitlines()[-1]}"


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
