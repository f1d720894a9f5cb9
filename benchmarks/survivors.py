"""Live survivors: ranks killed at random while replicas train on, beside the same run undisturbed.

Every time is taken from the records of the runs themselves. Kills come at random moments, so in every phase; some take
two replicas at once, or a rank again while it comes back. Parts can be made one by one, and add to the record:

    python benchmarks/survivors.py --only kills --kills 100
    python benchmarks/survivors.py --only healthy --pairs 3
    python benchmarks/survivors.py --only goodput
    python benchmarks/survivors.py --only machines --losses 5
    python benchmarks/survivors.py --only eight --losses 3

The last two have two machines, network namespaces with a cable between them, and need root: ranks are killed, whole
machines are, and the cable is pulled. The last one has eight ranks, more than small machines have cores: no times of it
are kept.

The machine may be busy: its load is beside each part.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.cost import goodput
from meshwright.runtime.failure import Exit
from meshwright.runtime.records import EventRecord, Record, StepRecord, read_line
from meshwright.runtime.run_folder import STOP

RESULT = Path(__file__).parents[1] / "results" / "survivors.json"
RANKS = 4
RUN = [
    *("arch.preset=tiny", "sequence=64", "batch=16", "plan.microbatch=1", "plan.grad_accum=4"),
    *("plan.deterministic=true", "eval.every=20", "eval.batches=1", "eval.sample_tokens=0", "checkpoint.every=20"),
]
PLANS = {
    "4 replicas": ["plan.replicate=4"],
    "2 replicas of 2 shards": ["plan.replicate=2", "plan.shard=2", "plan.zero=3"],
}
REPLICAS = {"4 replicas": [[0], [1], [2], [3]], "2 replicas of 2 shards": [[0, 1], [2, 3]]}
EIGHT = ["plan.replicate=4", "plan.shard=2", "plan.zero=3", "plan.grad_accum=2"]
KILLED_STEPS, HEALTHY_STEPS, LAST_STEPS = 120, 40, 10  # none is killed in the last steps, before which it would be back
BETWEEN_SECONDS, FAILURES_SECONDS = 1.0, 60.0  # means: from a return to a kill, and between failures
TWO, AGAIN, AGAIN_SECONDS = 0.15, 0.25, 1.0  # chances of two kills at once, and of one on the way back
MOST_SECONDS, ENDLESS = 1200.0, 100_000
EIGHT_STEPS = 60
MACHINE_STEPS, APART_STEPS = 240, 3  # of a run on two machines, and steps that one makes before the other comes back
TAIL_BYTES = 1 << 14  # of records, which hold the newest steps


def command(folder: Path, plan: str, steps: int, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "meshwright", "train", *RUN, *PLANS[plan], f"steps={steps}", *words),
        *("--ranks", str(RANKS), "--folder", str(folder)),
    ]


def read(folder: Path, rank: int) -> list[Record]:
    """Whole lines of a rank's records so far."""
    file = folder / f"steps.rank{rank}.jsonl"
    return [read_line(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []


def steps_of(folder: Path, rank: int) -> list[StepRecord]:
    return [record for record in read(folder, rank) if isinstance(record, StepRecord)]


def newest(folder: Path, rank: int) -> int:
    """The last step of a rank's records, by their end alone: they are looked at often."""
    file = folder / f"steps.rank{rank}.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as records:
        records.seek(max(file.stat().st_size - TAIL_BYTES, 0))
        found = re.findall(rb'"kind":"step","step":(\d+)', records.read())
    return int(found[-1]) if found else 0


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def processes(launcher: int) -> dict[int, int]:
    """The processes of the ranks below a launcher."""
    try:
        children = [int(each) for each in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        names = {child: Path(f"/proc/{child}/comm").read_text().strip() for child in children}
    except OSError:
        return {}
    return {int(name[4:]): child for child, name in names.items() if re.fullmatch(r"rank\d+", name)}


class Killer:
    """Kills ranks of one run, and waits each time until they are back."""

    def __init__(
        self, run: subprocess.Popen[bytes], folder: Path, plan: str, steps: int, chance: random.Random
    ) -> None:
        self.run, self.folder, self.replicas, self.steps, self.chance = run, folder, REPLICAS[plan], steps, chance
        self.deadline = time.monotonic() + MOST_SECONDS
        self.kills: list[dict[str, Any]] = []
        self.killed = collections.Counter[int]()  # by rank of the replica that fell

    def is_running(self) -> bool:
        return self.run.poll() is None and time.monotonic() < self.deadline

    def until_whole(self) -> bool:
        """Until every rank trains; False when it is over, or nearly."""
        while self.is_running():
            made = [newest(self.folder, rank) for rank in range(RANKS)]
            if max(made) > self.steps - LAST_STEPS:
                return False
            if min(made) >= max(made) - 1 > 0 and len(processes(self.run.pid)) == RANKS:
                return True
            time.sleep(0.1)
        return False

    def strike(self, most: int) -> None:
        """Kill one rank, or two of different replicas where two can be spared; perhaps once more on its way back."""
        now, wants_two = processes(self.run.pid), self.chance.random() < TWO
        if len(now) < RANKS:
            return
        two = wants_two and len(self.replicas) > 2 and most > 1
        fallen = self.chance.sample(self.replicas, 2 if two else 1)
        witness = next(replica for replica in self.replicas if replica not in fallen)[0]
        before, told = newest(self.folder, witness), self.back(witness)
        for replica in fallen:
            self.kill(now, self.chance.choice(replica), before, "two at once" if two else "alone")
            self.killed.update(replica)
        is_again = not two and len(self.kills) < most and self.chance.random() < AGAIN
        if is_again:
            time.sleep(self.chance.uniform(0.0, AGAIN_SECONDS))
            rank, later = self.chance.choice(fallen[0]), processes(self.run.pid)
            if rank in later and later[rank] != now[rank] and self.is_running():
                self.kill(later, rank, newest(self.folder, witness), "coming back")
                self.killed.update(fallen[0])
        while self.is_running() and self.back(witness) < told + len(fallen):
            time.sleep(0.05)

    def kill(self, now: dict[int, int], rank: int, step: int, how: str) -> None:
        os.kill(now[rank], signal.SIGKILL)
        self.kills.append({"rank": rank, "after_step": step, "how": how})

    def back(self, witness: int) -> int:
        """Replicas that a survivor has seen come back."""
        return sum(isinstance(each, EventRecord) and each.what == "back" for each in read(self.folder, witness))

    def healthy_unchanged(self) -> bool:
        """Whether no process was started but in the place of a replica that was killed."""
        logs = [(self.folder / "logs" / f"rank{rank}.txt").read_text() for rank in range(RANKS)]
        started = [sum(line.startswith("attempt") for line in log.splitlines()) for log in logs]
        return all(count <= 1 + self.killed[rank] for rank, count in enumerate(started))


def disturbed(
    home: Path, plan: str, steps: int, gap: float, most: int, chance: random.Random, seconds: float = MOST_SECONDS
) -> dict[str, Any]:
    """A run whose ranks are killed at random; it is asked to stop after some seconds if it has not ended."""
    load, folder = os.getloadavg()[0], home / f"killed-{time.monotonic_ns()}"
    words = command(folder, plan, steps, "faults.live=true")
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    killer, began = Killer(run, folder, plan, steps, chance), time.monotonic()
    killer.deadline = began + seconds
    while len(killer.kills) < most and killer.until_whole():
        time.sleep(min(chance.expovariate(1 / gap), max(killer.deadline - time.monotonic(), 0)))
        if killer.until_whole():
            killer.strike(most)
    try:
        said = run.communicate(timeout=max(killer.deadline - time.monotonic(), 0))[1].decode()
    except subprocess.TimeoutExpired:
        (folder / STOP).touch()
        said = run.communicate()[1].decode()
    if run.returncode not in (Exit.DONE, Exit.INTERRUPTED):
        return {"plan": plan, "kills": killer.kills, "failed": said[-2000:], "exit_code": run.returncode}
    made = [steps_of(folder, rank) for rank in range(RANKS)]
    most_of = [max(each[number].recovery_seconds for each in made) for number in range(min(map(len, made)))]
    spent = goodput.account(read(folder, 0))
    steps = steps if run.returncode == Exit.DONE else max(record.step for record in made[0])
    return {
        "plan": plan,
        "kills": killer.kills,
        "steps": steps,
        "steps_lost": sum(len(records) - len({record.step for record in records}) for records in made)
        + sum(steps - len({record.step for record in records}) for records in made),
        "phases": phases(folder),
        "interruption_seconds": [seconds for seconds in most_of if seconds > 0],
        "step_median_seconds": statistics.median(record.seconds for record in made[0]),
        "healthy_processes_unchanged": killer.healthy_unchanged(),
        **{"attempts": spent.attempts, "seconds": spent.wall, "goodput": spent.goodput, "badput": spent.badput},
        **({"sha256": digest(folder)} if run.returncode == Exit.DONE else {}),
        "load": [load, os.getloadavg()[0]],
    }


class MachineKiller:
    """Two launchers, each on a machine of its own, of which ranks, all, or the cable between them are lost."""

    def __init__(self, here: Any, home: Path, plan: list[str], ranks: int, steps: int, chance: random.Random) -> None:
        self.here, self.home, self.ranks, self.steps, self.chance = here, home, ranks, steps, chance
        self.folder = home / "run"
        words = [*RUN, *plan, f"steps={steps}", "faults.live=true", "faults.meet_seconds=120"]
        shape = ["--ranks-per-node", str(ranks // 2), "--folder", str(self.folder)]
        self.command = [sys.executable, "-m", "meshwright", "launch", *words, *shape]
        self.machines = [self.start(number) for number in (0, 1)]
        self.deadline = time.monotonic() + MOST_SECONDS
        self.losses: list[dict[str, Any]] = []

    def start(self, number: int) -> subprocess.Popen[bytes]:
        return self.here.launch(number, self.command, self.home, os.environ)

    def newest(self) -> list[int]:
        return [newest(self.folder, rank) for rank in range(self.ranks)]

    def wait(self, is_there: Any) -> bool:
        """Until something is so; False when the run is over, or nearly, or hangs."""
        while time.monotonic() < self.deadline and max(self.newest()) < self.steps - LAST_STEPS:
            if is_there():
                return True
            time.sleep(0.1)
        return False

    def until_whole(self) -> bool:
        def is_whole() -> bool:
            made, there = self.newest(), [processes(machine.pid) for machine in self.machines]
            return min(made) >= max(made) - 1 > 0 and sum(map(len, there)) == self.ranks

        return self.wait(is_whole)

    def strike(self, how: str) -> None:
        """Lose something, and have it back once the others have gone on."""
        number, before = self.chance.randrange(2), max(self.newest())
        loss = {"how": how, "machine": number, "after_step": before}
        if how == "rank":
            ranks = processes(self.machines[number].pid)
            os.kill(ranks[self.chance.choice(sorted(ranks))], signal.SIGKILL)
        elif how == "machine":
            for process in descendants(self.machines[number].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.machines[number].communicate()
        else:
            self.here.pull_cable()
        self.losses.append(loss)
        self.wait(lambda: max(self.newest()) >= before + APART_STEPS)
        if how == "machine":
            self.machines[number] = self.start(number)
        elif how == "cable":
            self.here.plug_in()

    def end(self) -> tuple[list[int], str]:
        """Exit codes, and what was said last."""
        said = [machine.communicate(timeout=MOST_SECONDS)[1].decode() for machine in self.machines]
        return [machine.returncode for machine in self.machines], "\n".join(said)[-3000:]


def descendants(process: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(below for child in children for below in descendants(int(child)))]


def machines_lost(
    home: Path, plan: list[str], ranks: int, steps: int, most: int, chance: random.Random
) -> dict[str, Any]:
    """A run on two machines, some of which are lost and come back."""
    import two_nodes  # beside this file, and only where it is run

    load, place = os.getloadavg()[0], home / f"machines-{time.monotonic_ns()}"
    place.mkdir()
    with two_nodes.machines() as here:
        killer = MachineKiller(here, place, plan, ranks, steps, chance)
        try:
            for number in range(most):
                if not killer.until_whole():
                    break
                time.sleep(chance.uniform(0.0, BETWEEN_SECONDS))
                killer.strike(HOW[number % len(HOW)])
            killer.until_whole()
            codes, said = killer.end()
        finally:
            for machine in killer.machines:
                for process in descendants(machine.pid) if machine.poll() is None else ():
                    os.kill(process, signal.SIGKILL)
    done = {"losses": killer.losses, "load": [load, os.getloadavg()[0]]}
    if codes != [Exit.DONE, Exit.DONE]:
        return done | {"failed": said, "exit_codes": codes}
    made = [steps_of(killer.folder, rank) for rank in range(ranks)]
    for loss in killer.losses:
        after = range(loss["after_step"] + 1, loss["after_step"] + 1 + APART_STEPS)
        cuts = [each.recovery_seconds for records in made for each in records if each.step in after]
        loss["interruption_seconds"] = max(cuts, default=0.0)
    return done | {
        "steps": steps,
        "steps_lost": sum(steps - len({record.step for record in records}) for records in made),
        "step_median_seconds": statistics.median(record.seconds for record in made[0]),
        "sha256": digest(killer.folder),
    }


HOW = ("machine", "rank", "cable")


def eight_ranks(home: Path, most: int, chance: random.Random) -> dict[str, Any]:
    """The same with eight ranks, of which so few cores can say only what is lost, and not how quickly."""
    made = machines_lost(home, EIGHT, 8, EIGHT_STEPS, most, chance)
    for loss in made["losses"]:
        loss.pop("interruption_seconds", None)
    made.pop("step_median_seconds", None)
    return {"plan": EIGHT, "ranks": 8, **made, "same_bits": made.get("sha256") == undisturbed(home, EIGHT_STEPS)}


def phases(folder: Path) -> dict[str, int]:
    """In which phases ranks were when they were killed, as the supervisor saw it."""
    kept = [json.loads(file.read_text()) for file in (folder / "faults").glob("*.json")]
    return dict(collections.Counter(each["phase"] or "start" for each in kept))


def undisturbed(home: Path, steps: int) -> str:
    """The digest of the model that nobody disturbed, by plain replicas."""
    folder = home / f"undisturbed-{steps}"
    if not folder.exists():
        subprocess.run(command(folder, "4 replicas", steps), check=True, capture_output=True)
    return digest(folder)


def healthy(home: Path) -> dict[str, Any]:
    """The median step without and with live replicas, one after the other."""
    load, medians = os.getloadavg()[0], dict[str, float]()
    for live in ("false", "true"):
        folder = home / f"healthy-{time.monotonic_ns()}"
        words = (f"faults.live={live}", "eval.every=0", "checkpoint.every=0")
        subprocess.run(command(folder, "4 replicas", HEALTHY_STEPS, *words), check=True, capture_output=True)
        medians[live] = statistics.median(record.seconds for record in steps_of(folder, 0)[2:])
    return {
        "step_seconds_plain": medians["false"],
        "step_seconds_live": medians["true"],
        "load": [load, os.getloadavg()[0]],
    }


def table(record: dict[str, Any]) -> str:
    """The figures in words, for the page."""
    runs = [run for run in record["killed"] if "failed" not in run]
    kills, failed = sum(len(run["kills"]) for run in record["killed"]), len(record["killed"]) - len(runs)
    cuts = [seconds for run in runs for seconds in run["interruption_seconds"]]
    step = statistics.median(run["step_median_seconds"] for run in runs)
    how = collections.Counter(kill["how"] for run in record["killed"] for kill in run["kills"])
    ratios = sorted(pair["step_seconds_live"] / pair["step_seconds_plain"] for pair in record["healthy"])
    again = sum(run["attempts"] - 1 for run in runs)
    rows = [
        (f"ranks killed ({how['two at once']} of them two at once, {how['coming back']} on the way back)", f"{kills}"),
        ("runs that ended otherwise, or began again from a checkpoint", f"{failed + again} of {len(record['killed'])}"),
        ("steps lost", f"{sum(run['steps_lost'] for run in runs)}"),
        ("models that differ from the undisturbed one's", f"{sum(not run['same_bits'] for run in runs)}"),
        (
            "interruption by a loss or a return, median and longest",
            f"{statistics.median(cuts):.2f} s, {max(cuts):.2f} s",
        ),
        ("the same, total seconds ÷ kills", f"{sum(cuts) / kills:.2f} s"),
        ("a step, median", f"{step:.2f} s"),
        ("a healthy step, ÷ that of plain replicas: median", f"{statistics.median(ratios):.2f}"),
        (f"the same, of {len(ratios)} interleaved pairs: from, to", f"{ratios[0]:.2f}, {ratios[-1]:.2f}"),
    ]
    for run in record["goodput"]:
        each = run["seconds"] / max(len(run["kills"]), 1)
        what = f"goodput of a run of {run['seconds']:.0f} s that loses a rank every {each:.0f} s"
        rows.append((what, f"{run['goodput']:.1%}"))
        lost = {name: share for name, share in run["badput"].items() if round(100 * share, 1)}
        rows.append(("what the rest was", ", ".join(f"{name} {share:.1%}" for name, share in lost.items())))
    parts = [part for each in (record["killed"], record["healthy"], record["goodput"]) for part in each]
    loads = sorted(load for part in parts for load in part.get("load", ()))
    rows.append(
        (f"load of the machine's {record['machine']['cpus']} cores: from, to", f"{loads[0]:.0f}, {loads[-1]:.0f}")
    )
    return "\n".join(["| | |", "|---|--:|", *(f"| {what} | {figure} |" for what, figure in rows)])


def machine_table(record: dict[str, Any]) -> str:
    """The figures of two machines in words, for the page."""
    made = record["machines"]
    runs = [run for run in made if "failed" not in run]
    rows = [("runs of 4 ranks on two machines that ended otherwise", f"{len(made) - len(runs)} of {len(made)}")]
    words = {"machine": "machines killed", "rank": "ranks killed", "cable": "cables pulled"}
    for how in HOW:
        cuts = [loss["interruption_seconds"] for run in runs for loss in run["losses"] if loss["how"] == how]
        figure = f"{len(cuts)}: {statistics.median(cuts):.1f} s, {max(cuts):.1f} s" if cuts else "none"
        rows.append((f"{words[how]}: until the others went on, median and longest", figure))
    rows.append(("steps lost", f"{sum(run['steps_lost'] for run in runs)}"))
    differ = sum(not run["same_bits"] for run in runs)
    rows.append(("models that differ from the undisturbed one's", f"{differ} of {len(runs)}"))
    rows.append(("a step, median", f"{statistics.median(run['step_median_seconds'] for run in runs):.2f} s"))
    for run in record.get("eight", ()):
        how = collections.Counter(words[loss["how"]] for loss in run["losses"])
        what = ", ".join(f"{count} {word}" for word, count in how.items())
        figure = "failed" if "failed" in run else f"{run['steps_lost']} steps lost, same bits: {run['same_bits']}"
        rows.append((f"8 ranks, 4 replicas of 2 shards: {what}", figure))
    return "\n".join(["| | |", "|---|--:|", *(f"| {what} | {figure} |" for what, figure in rows)])


def told(record: dict[str, Any]) -> str:
    """The figures in a sentence, for the README."""
    runs = [run for run in record["killed"] if "failed" not in run]
    kills, cuts = sum(len(run["kills"]) for run in runs), [cut for run in runs for cut in run["interruption_seconds"]]
    equal, lost = sum(run["same_bits"] for run in runs), sum(run["steps_lost"] for run in runs)
    return (
        f"[{kills} ranks killed at random](results/survivors.json): {lost} steps lost, "
        f"{equal} of {len(record['killed'])} models bit-identical to the undisturbed one's,\n"
        f"{statistics.median(cuts):.2f} s of standstill at the median and {max(cuts):.1f} s at most "
        f"(4 ranks, {record['machine']['cpus']} cores that others used too)."
    )


def main() -> None:
    """Measure what is asked for, and add it to the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("kills", "healthy", "goodput", "machines", "eight"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--losses", type=int, default=5, help="of machines, ranks and the cable, in one run")
    parser.add_argument("--seconds", type=float, default=900.0, help="of the run whose goodput is measured")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    record |= {"machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": version("torch")}}
    record |= {"run": RUN, "ranks": RANKS}
    chance = random.Random(f"{options.seed}/{len(record.get('killed', []))}/{options.only}")
    parts = {part: record.setdefault(part, []) for part in ("killed", "healthy", "goodput", "machines", "eight")}

    def keep(part: str, made: dict[str, Any]) -> None:
        parts[part].append(made)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(made), flush=True)

    with tempfile.TemporaryDirectory() as name:
        home, left = Path(name), options.kills
        while options.only in (None, "kills") and left > 0:
            plan = list(PLANS)[len(parts["killed"]) % 2]
            made = disturbed(home, plan, KILLED_STEPS, BETWEEN_SECONDS, left, chance)
            left -= len(made["kills"])
            keep("killed", made | {"same_bits": made.get("sha256") == undisturbed(home, KILLED_STEPS)})
        if options.only in (None, "machines"):
            plan = list(PLANS)[len(parts["machines"]) % 2]
            again = random.Random(f"{options.seed}/{len(parts['machines'])}")
            made = machines_lost(home, PLANS[plan], RANKS, MACHINE_STEPS, options.losses, again)
            keep(
                "machines",
                {"plan": plan} | made | {"same_bits": made.get("sha256") == undisturbed(home, MACHINE_STEPS)},
            )
        if options.only in (None, "eight"):
            keep("eight", eight_ranks(home, options.losses, random.Random(f"{options.seed}/{len(parts['eight'])}")))
        for _ in range(options.pairs if options.only in (None, "healthy") else 0):
            keep("healthy", healthy(home))
        if options.only in (None, "goodput"):
            seconds = options.seconds
            keep("goodput", disturbed(home, "4 replicas", ENDLESS, FAILURES_SECONDS, ENDLESS, chance, seconds))
    if parts["killed"] and parts["healthy"] and parts["goodput"]:
        print(table(record))
    if parts["machines"]:
        print(machine_table(record))


if __name__ == "__main__":
    main()
