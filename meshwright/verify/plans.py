"""Which plans to prove: those that were named, or the standard set for a number of ranks. No torch."""

import math
from pathlib import Path
from typing import get_args

import msgspec

from meshwright.spec import compiler, load
from meshwright.spec.check import InputError, Problem
from meshwright.spec.plan import AXES, Plan
from meshwright.spec.run import Run
from meshwright.spec.schedule import Schedule
from meshwright.spec.zoo import run_file

TEXT = "ragged.jsonl"
SCHEDULES = get_args(Schedule)

# Every axis alone and the products that must hold. Dense plans are proved on `tiny` (grouped queries, an odd
# vocabulary), plans with experts on `tiny-moe`; both on documents of very different lengths.
MATRIX = (
    "accumulate=4",
    "replicate=2",
    "shard=2,zero=1",
    "shard=2,zero=2,accumulate=2",
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
    "shard=2,zero=3,activations=host,recompute=full",
    "compile=true",
    "shard=2,zero=3,compile=true",
    "shard=2,zero=1,ep=2",
    "replicate=4,accumulate=2",
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
    "shard=4,zero=2,ep=2,accumulate=2",
    "pp=2,shard=2,zero=3,tp=2",
    "pp=2,schedule=zbv,shard=2,zero=3,tp=2",
    "replicate=2,shard=2,zero=3,tp=2",
)


def matrix(ranks: int) -> list[str]:
    """The standard set for up to so many ranks; compiled plans only where there is a compiler that can do float64."""
    compiles = not any(compiler.missing(Plan(microbatch=1, compile=True))) and compiler.compiles_doubles()
    return [plan for plan in MATRIX if world(plan) <= ranks and (compiles or "compile" not in fields(plan))]


Job = tuple[Run, list[tuple[str, Run]]]  # a reference, and each plan's words with its run


def jobs(target: str | None, overrides: list[str], plans: list[str], steps: int, folder: Path) -> list[Job]:
    """Everything to be proved, each part beside its own reference. Nothing is written yet."""
    made = []
    for model, group in by_model(target, plans):
        reference, planned = runs(model, overrides, group, steps, folder / TEXT)
        if problems := [problem for run in planned for problem in compiler.missing(run.plan)]:
            raise InputError(problems[:1])  # the same for every plan
        made.append((reference, list(zip(group, planned, strict=True))))
    return made


def by_model(target: str | None, plans: list[str]) -> list[tuple[str | None, list[str]]]:
    """Plans by what they are proved on: unless something is named, those with experts need a model that has some."""
    if target is not None:
        return [(target, plans)]
    with_experts = [plan for plan in plans if _number(fields(plan), "ep") > 1]
    dense = [plan for plan in plans if plan not in with_experts]
    return [(model, group) for model, group in (("tiny", dense), ("tiny-moe", with_experts)) if group]


def fields(plan: str) -> dict[str, str]:
    """The words of "tp=2,pp=2,schedule=1f1b"."""
    words = [word.strip() for word in plan.split(",") if word.strip()]
    if bad := [word for word in words if "=" not in word]:
        raise InputError(
            [Problem(f"{word!r} of --plan {plan!r} is not field=value", "write tp=2,shard=2") for word in bad]
        )
    return dict(word.removeprefix("plan.").split("=", 1) for word in words)


def world(plan: str) -> int:
    """Ranks that a plan needs."""
    return math.prod(_number(fields(plan), axis) for axis in AXES)


def runs(target: str | None, overrides: list[str], plans: list[str], steps: int, text: Path) -> tuple[Run, list[Run]]:
    """The reference and a run for each plan, all of one mathematics: a run file's, or a preset's on ragged text."""
    file, words = _mathematics(target, overrides, plans, text)
    words += [f"steps={steps}", "data.held_out=0.0", "held.every=0", "held.sample_tokens=0"]
    words = [word for word in words if not word.startswith("plan.")]
    precision = _precision(plans, overrides)
    reference = load.load(file, [*words, *_words({"precision": precision, "accumulate": "1"})], ranks=1).run
    planned = [load.load(file, [*words, *_words({"precision": precision, **_resolved(plan)})]).run for plan in plans]
    return reference, planned


def _mathematics(
    target: str | None, overrides: list[str], plans: list[str], text: Path
) -> tuple[Path | None, list[str]]:
    file = run_file(target)
    return (file, list(overrides)) if file else (None, [*_ragged(target or "tiny", plans, text), *overrides])


def _precision(plans: list[str], overrides: list[str]) -> str:
    """Float64 unless a precision is named; then both sides use it."""
    named = {value for plan in plans if (value := fields(plan).get("precision"))}
    named |= {word.split("=", 1)[1] for word in overrides if word.startswith("plan.precision=")}
    if len(named) > 1:
        raise InputError([Problem("the plans name different precisions", "prove one precision at a time")])
    return named.pop() if named else "fp64"


def _words(plan: dict[str, str]) -> list[str]:
    """A plan as overrides, every axis stated, so that none is left over from a run file."""
    return [f"plan.{key}={value}" for key, value in (dict.fromkeys((*AXES, "ep"), "1") | plan).items()]


def _resolved(plan: str) -> dict[str, str]:
    """A plan's words; a pipeline needs several microbatches: unless stated, twice as many as it has ranks."""
    given = fields(plan)
    pp = _number(given, "pp")
    return ({"accumulate": str(2 * pp)} if pp > 1 else {"accumulate": "1"}) | given


def _ragged(preset: str, plans: list[str], text: Path) -> list[str]:
    """Documents of very different lengths, the least batch that all plans divide, a sequence that all plans cut."""
    shapes = [_resolved(plan) for plan in plans]
    axes = ("replicate", "shard", "accumulate")
    batch = math.lcm(4, *(math.prod(_number(shape, axis) for axis in axes) for shape in shapes))
    parts = math.lcm(1, *(2 * _number(shape, "cp") * _number(shape, "tp") for shape in shapes))
    return [
        f"arch.preset={preset}",
        f"data.source={text}",
        "data.pack=documents",
        f"batch={batch}",
        f"sequence={parts * math.ceil(32 / parts)}",
        "optim.rate=1e-2",
        "optim.warmup=0",
    ]


def _number(given: dict[str, str], key: str) -> int:
    text = given.get(key, "1")
    if not text.isdecimal() or int(text) < 1:
        raise InputError([Problem(f"{key}={text} of --plan is not a count", "use whole numbers of at least 1")])
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
