"""A fault on purpose, in a short copy of a run: is it seen, is it healed, and are the weights the same afterwards?"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from meshwright.config import check, load
from meshwright.config.run import Run
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import require_folder
from meshwright.runtime.ranks import end_with_parent
from meshwright.runtime.records import AttemptRecord, Record, StepRecord, read_line
from meshwright.spec.problem import InputError, mistake
from meshwright.spec.units import plural

Say = Callable[[str], None]
STEPS, SAVE_EVERY, FAULT_STEP = 12, 4, 7
COPY = "rehearsal.toml"  # the short run; beside it a folder for each copy
LAST_LINES = 5  # of a run that failed by itself
SECONDS = 600.0  # for one of the runs
REPORTED = ("what:", "where:", "since:", "cause:", "do:", "details:", "warning")  # lines that report a fault
# What is injected and in which phase, and what the reference for it leaves out as well.
FAULTS = {
    "kill": "kill::{step}:backward",
    "term": "term::{step}:forward",
    "hang": "hang::{step}:forward",
    "sleep": "sleep::{step}:optimizer",
    "lock": "lock::{step}:forward",
    "data": "data::{step}",
    "skip": "skip::{step}",
    "cross": "cross::{step}",
    "nan": "nan::{step}",
    "flip": "flip::{step}:forward",
    "matmul": "matmul::{step}",
}
REFERENCE = {"nan": "inf::{step}"}  # the batch is passed over in both: one cannot train on it
SEEN_AGAIN = (Exit.PREEMPTED, Exit.RESUMABLE, Exit.HARDWARE)  # codes after which the same command resumes


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one fault."""

    fault: str
    recovery_seconds: float  # from the last step before the fault to the first one after it
    lost_steps: int  # that had to be made again
    same_weights: bool  # as a run that nobody disturbed
    exit_codes: tuple[int, ...]  # one for each time the command was given
    verdict: tuple[str, ...]  # the lines that reported the fault
    digest: str  # sha256 of the model that came out
    reference: str  # and of the undisturbed one


def short(run: Run) -> Run:
    """A run of the same shape that takes a moment, in deterministic mode where its plan can have it."""
    if run.plan.staleness:
        stale = f"plan.staleness = {run.plan.staleness}"
        what = f"a rehearsal compares weights, and with {stale} no two runs end with the same"
        raise mistake(what, "rehearse with plan.staleness = 0, which meets the same faults", "plan.staleness")
    warm = min(run.optim.freeze_step, SAVE_EVERY)  # of what is compressed afterwards, also saved and lost
    brief = msgspec.structs.replace(
        run,
        steps=STEPS,
        optim=msgspec.structs.replace(run.optim, freeze_step=warm),
        eval=msgspec.structs.replace(run.eval, every=0, batches=1, sample_tokens=0),
        log=msgspec.structs.replace(run.log, every=1, writers=()),
        checkpoint=msgspec.structs.replace(run.checkpoint, every=SAVE_EVERY, keep_last=3),
        faults=msgspec.structs.replace(run.faults, compare_every=SAVE_EVERY, check_matmuls_every=1),
    )
    exact = msgspec.structs.replace(brief, plan=msgspec.structs.replace(run.plan, deterministic=True))
    return brief if check.problems(exact) else exact


def rehearse(run: Run, fault: str, folder: Path, say: Say) -> Rehearsal:
    """Run a copy undisturbed, then with the fault, giving the same command again for as long as that helps."""
    brief = short(run)
    require_folder(folder, "name another --folder")
    file = folder / COPY
    file.write_text(load.write(brief), encoding="utf-8")
    say(f"undisturbed: {STEPS} steps on {plural(brief.plan.world, 'rank')}, saved every {SAVE_EVERY}")
    quiet = REFERENCE.get(fault, "").format(step=FAULT_STEP)
    code, said = _train(file, folder / "undisturbed", quiet, say, fresh=True)
    if code != Exit.DONE:
        raise _refusal("the undisturbed run", code, said)
    say(f"{fault}: in step {FAULT_STEP}")
    codes, words = [], ""
    injected = FAULTS[fault].format(step=FAULT_STEP)
    for _ in range(3):
        code, said = _train(file, folder / fault, injected, say, fresh=not codes)
        if code == Exit.INPUT:
            raise _refusal(f"the run with {fault}", code, said)
        codes.append(code)
        words += said
        injected = ""
        if code not in SEEN_AGAIN:
            break
    return _judged(fault, folder, tuple(codes), words)


def _train(file: Path, folder: Path, injected: str, say: Say, fresh: bool) -> tuple[int, str]:
    """The command a person would give; what an earlier rehearsal left in the folder is set aside, not judged."""
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--folder", str(folder), "--json"]
    command += ["--inject", injected, *(["--fresh"] if fresh else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, preexec_fn=end_with_parent
    )
    for line in done.stderr.splitlines():
        if line.startswith(REPORTED):
            say(f"  {line}")
    return done.returncode, done.stderr


def _refusal(which: str, code: int, said: str) -> InputError:
    """A run that fails by itself says nothing of a fault."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip() and not line.startswith("details:")]
    text = f"{which} ended with exit code {code}: {' | '.join(lines[-LAST_LINES:])}"
    return mistake(text, "put that right; with --folder the logs are kept")


def _judged(fault: str, folder: Path, codes: tuple[int, ...], words: str) -> Rehearsal:
    records = [read_line(line) for line in (folder / fault / "steps.rank0.jsonl").read_bytes().splitlines()]
    seconds, lost = recovery(records)
    digest, reference = (model_digest(folder / name) for name in (fault, "undisturbed"))
    return Rehearsal(
        fault=fault,
        recovery_seconds=seconds,
        lost_steps=lost,
        same_weights=codes[-1] == Exit.DONE and digest == reference != "",
        exit_codes=codes,
        verdict=tuple(line for line in words.splitlines() if line.startswith(REPORTED)),
        digest=digest,
        reference=reference,
    )


def recovery(records: list[Record]) -> tuple[float, int]:
    """Seconds without a step around the first restart, and the steps that it went back; zeros if there was none."""
    again = next((n for n, record in enumerate(records) if n and isinstance(record, AttemptRecord)), None)
    if again is None:
        return 0.0, 0
    before = [record for record in records[:again] if isinstance(record, StepRecord)]
    after = [record for record in records[again:] if isinstance(record, StepRecord)]
    if not before or not after:
        return 0.0, 0
    return after[0].at - before[-1].at, before[-1].step - records[again].step


def model_digest(folder: Path) -> str:
    """sha256 of a finished run's weights; empty if it has none."""
    files = sorted((folder / "model").glob("*.safetensors"))
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest() if files else ""
