"""The proof that stopping changes nothing: a run, and the same run stopped and resumed, to the last bit.

In deterministic mode the proof holds across another number of replicas and shards too. No torch in this process.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import check, load
from meshwright.config.presets import preset_names
from meshwright.config.run import Run
from meshwright.runtime.ranks import Remote, run_ranks
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, mistake

STEPS, STOP = 6, 3  # of a proof, and after which it is interrupted
LONGEST = 600.0  # seconds that one run of a proof may take
DIGESTS = "digests.json"
DRIVE = Remote("meshwright.verify.evidence", "drive")  # by name: this process never imports torch
SHORT = (f"steps={STEPS}", "eval.every=0", "eval.batches=1", "eval.sample_tokens=0", "checkpoint.every=0")


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """One resumed run, beside the run that was never stopped."""

    plan: str
    passed: bool
    first_difference: int | None  # the first step whose state differs
    state: str  # the logical digest after the last step


class ResumeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was stopped, beside one that was not."""

    passed: bool
    steps: int
    stopped_after: int
    state: str  # of the run that was never stopped, after its last step
    continuations: tuple[Continuation, ...]


def runs(target: str | None, overrides: list[str], folder: Path) -> list[Run]:
    """A short form of a run under deterministic plans of several degrees; the first is the one that is stopped."""
    file, words = None, []
    if target in preset_names():
        words = [f"arch.preset={target}"]
    elif target is not None:
        file = Path(target) / "run.toml" if Path(target).is_dir() else Path(target)
    run = load.load(file, [*words, *overrides, *SHORT], default_ranks=1).run
    parts = next(count for count in (4, 2, 1) if run.batch % count == 0)  # global microbatches, the same in all plans
    if parts == 1:
        raise mistake(f"batch = {run.batch} is odd, and cannot be shared", "use an even batch", "batch")
    plans = [_plan(run, parts, replicate=2), _plan(run, parts), _plan(run, parts, shard=2, zero=3)]
    if parts == 4:
        plans.append(_plan(run, parts, replicate=2, shard=2, zero=3))
    planned = [msgspec.structs.replace(run, plan=plan) for plan in plans]
    if found := [problem for each in planned for problem in check.problems(each)]:
        raise InputError(found)
    return planned


def _plan(run: Run, parts: int, **axes: Any) -> Plan:
    data = axes.get("replicate", 1) * axes.get("shard", 1)
    microbatch, precision = run.batch // parts, run.plan.precision
    return Plan(microbatch=microbatch, grad_accum=parts // data, precision=precision, deterministic=True, **axes)


def prove(planned: list[Run], cache: Path, folder: Path, say: Callable[[str], None]) -> ResumeReport:
    """Run without a stop, stop after a few steps, resume under each plan, and compare every step's digest."""
    proof = folder / "proof"
    shutil.rmtree(proof, ignore_errors=True)
    reference, stopped = proof / "reference", proof / "stopped"
    for place in (reference, stopped):
        place.mkdir(parents=True)
    say(f"{STEPS} steps without a stop: {planned[0].plan}")
    whole = _driven(planned[0], cache, reference, STEPS)
    say(f"stopped after step {STOP}, the state saved; digest {_driven(planned[0], cache, stopped, STOP)[STOP]}")
    found = []
    for number, run in enumerate(planned):
        place = proof / f"continued{number}"
        shutil.copytree(stopped, place)
        continued = _driven(run, cache, place, STEPS)
        wanted = {step: digest for step, digest in whole.items() if step > STOP}
        wrong = [step for step, digest in wanted.items() if continued.get(step) != digest]
        found.append(
            Continuation(
                plan=str(run.plan),
                passed=not wrong and continued.keys() == wanted.keys(),
                first_difference=min(wrong, default=None),
                state=continued.get(STEPS, ""),
            )
        )
        words = "the same bits" if found[-1].passed else f"DIFFERS from step {found[-1].first_difference}"
        say(f"resumed under {run.plan}: {words}; digest {found[-1].state}")
    say(f"without a stop: digest {whole[STEPS]}")
    shutil.rmtree(proof)
    return ResumeReport(
        passed=all(each.passed for each in found),
        steps=STEPS,
        stopped_after=STOP,
        state=whole[STEPS],
        continuations=tuple(found),
    )


def _driven(run: Run, cache: Path, folder: Path, until: int) -> dict[int, str]:
    """Resume in a folder until a step, and return the digest of every step from there."""
    run_ranks(DRIVE, run.plan.world, (run, cache, folder, until), LONGEST)
    return msgspec.json.decode((folder / DIGESTS).read_bytes(), type=dict[int, str])
