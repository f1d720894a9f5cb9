"""Live survivors: ranks killed at random while replicas train on, beside the same run undisturbed.

Every time is taken from the records of the runs themselves; kills come at random moments, so in every phase. A
kill waits until all replicas are there again. The machine may be busy: its load is in the result.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshwright.runtime.records import EventRecord, Record, StepRecord, read_line

RESULT = Path(__file__).parents[1] / "results" / "survivors.json"
RANKS = 4
RUN = [
    *("arch.preset=tiny", "sequence=64", "batch=16", "plan.replicate=4", "plan.microbatch=1", "plan.grad_accum=4"),
    *("plan.deterministic=true", "eval.every=20", "eval.batches=1", "eval.sample_tokens=0", "checkpoint.every=20"),
]
HEALTHY_STEPS, PAIRS = 30, 3
SECONDS = 900.0


def command(folder: Path, steps: int, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "meshwright", "train", *RUN, f"steps={steps}", *words),
        *("--ranks", str(RANKS), "--folder", str(folder)),
    ]


def read(folder: Path, rank: int = 0) -> list[Record]:
    """Whole lines of a rank's records so far."""
    file = folder / f"steps.rank{rank}.jsonl"
    return [read_line(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []


def steps_of(folder: Path, rank: int = 0) -> list[StepRecord]:
    return [record for record in read(folder, rank) if isinstance(record, StepRecord)]


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def processes(launcher: int) -> dict[str, int]:
    """The ranks below a launcher, by their names."""
    try:
        children = [int(each) for each in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    except OSError:
        return {}
    return {name: child for child, name in names.items() if name.startswith("rank")}


def disturbed(folder: Path, steps: int, gap: float, kills: int, chance: random.Random) -> dict[str, object]:
    """A run whose ranks are killed at random, one after another, with a mean gap between them."""
    run = subprocess.Popen(
        command(folder, steps, "faults.live=true"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    done, pids, deadline = [], dict[str, int](), time.monotonic() + SECONDS
    others_kept = True
    while run.poll() is None and time.monotonic() < deadline:
        made = steps_of(folder)
        is_whole = all(len(steps_of(folder, rank)) >= len(made) - 1 > 0 for rank in range(RANKS))
        if len(done) == kills or not is_whole or len(made) > steps - 10:
            time.sleep(0.1)
            continue
        if done:
            time.sleep(chance.expovariate(1 / gap))
        now = processes(run.pid)
        if len(now) < RANKS or run.poll() is not None:
            continue
        if done:
            others_kept &= all(now[name] == pid for name, pid in pids.items() if name != done[-1]["rank"])
        victim = chance.choice(sorted(now))
        step = len(steps_of(folder, (int(victim[4:]) + 1) % RANKS))
        os.kill(now[victim], signal.SIGKILL)
        pids = now
        done.append({"rank": victim, "after_step": step})
        # Until the survivors say that it is back.
        other = (int(victim[4:]) + 1) % RANKS
        before = sum(isinstance(each, EventRecord) and each.what == "back" for each in read(folder, other))
        while run.poll() is None and time.monotonic() < deadline:
            if sum(isinstance(each, EventRecord) and each.what == "back" for each in read(folder, other)) > before:
                break
            time.sleep(0.05)
    if run.poll() is None:
        run.kill()
    words = run.communicate()[1].decode()
    assert run.returncode == 0, words[-2000:]
    made = [steps_of(folder, rank) for rank in range(RANKS)]
    lost = [max(each[number].recovery_seconds for each in made) for number in range(min(map(len, made)))]
    cuts = sorted(seconds for seconds in lost if seconds > 0)
    summary = json.loads((folder / "summary.json").read_text())
    numbers = [record.step for record in made[0]]
    return {
        "kills": done,
        "steps": steps,
        "steps_lost": len(numbers) - len(set(numbers)) + steps - len(set(numbers)),
        "interruptions_seen": len(cuts),
        "interruption_median_seconds": statistics.median(cuts) if cuts else None,
        "interruption_longest_seconds": cuts[-1] if cuts else None,
        "step_median_seconds": statistics.median(record.seconds for record in made[0]),
        "healthy_processes_unchanged": others_kept,
        "attempts": summary["attempts"],
        "seconds": summary["seconds"],
        "goodput": summary["goodput"],
        "badput": summary["badput"],
        "sha256": digest(folder),
    }


def healthy(folder: Path) -> dict[str, object]:
    """The step without and with live replicas, in turn."""
    medians: dict[str, list[float]] = {"false": [], "true": []}
    for number in range(PAIRS):
        for live in medians:
            home = folder / f"healthy-{number}-{live}"
            words = (f"faults.live={live}", "eval.every=0", "checkpoint.every=0")
            subprocess.run(command(home, HEALTHY_STEPS, *words), check=True, capture_output=True)
            medians[live].append(statistics.median(record.seconds for record in steps_of(home)[2:]))
    ratios = [live / plain for plain, live in zip(medians["false"], medians["true"], strict=True)]
    return {
        "step_seconds_plain": medians["false"],
        "step_seconds_live": medians["true"],
        "ratio_median": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gap", type=float, default=1.0, help="mean seconds between a replica's return and a kill")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder, load = Path(home), os.getloadavg()
        subprocess.run(command(folder / "undisturbed", options.steps), check=True, capture_output=True)
        reference = digest(folder / "undisturbed")
        chance = random.Random(options.seed)
        kills = disturbed(folder / "killed", options.steps, options.gap, options.kills, chance)
        record = {
            "machine": {
                **{"cpus": os.cpu_count(), "ranks": RANKS, "platform": platform.platform()},
                **{"load_before": load, "load_after": os.getloadavg()},
            },
            "run": RUN,
            "seed": options.seed,
            "undisturbed_sha256": reference,
            "same_bits": kills["sha256"] == reference,
            "killed": kills,
            "healthy": healthy(folder),
        }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
