"""Every fault that the run is said to survive, injected; then a soak: one fault a minute, and the weights compared.

Takes about an hour. `--quick` does the same with one try each and a soak of two minutes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from faults import RUN, read
from prove_saves import MODELS, cuts, disks, reshard
from two_nodes import lacking, lose, machines
from two_nodes import train as train_on

from meshwright.config import load
from meshwright.cost.goodput import account, kept
from meshwright.verify.rehearse import FAULTS, model_digest, rehearse

RESULT = Path(__file__).parents[1] / "results" / "prove.json"
PHASES = ("start", "data", "forward", "backward", "collective", "optimizer", "save", "eval")
OURS = [sys.executable, "-m", "meshwright", "train", *RUN]
PAUSES = ("", "pause:1:1:forward", "pause:0:4:save")  # nothing; a slow first step; a save of twenty seconds
SEED = 5


def healed(tries: int, say: Callable[[str], None]) -> list[dict[str, object]]:
    """Each fault in a copy of the run: is it named, are the weights the same?"""
    found: list[dict[str, object]] = []
    run = load.load(None, RUN, default_ranks=2).run
    for fault in FAULTS:
        for _ in range(tries):
            with tempfile.TemporaryDirectory() as folder:
                result = rehearse(run, fault, Path(folder), lambda text: None)
            told = next((line for line in result.verdict if line.startswith(("what:", "warning"))), "")
            found.append(
                {
                    "fault": fault,
                    "same_weights": result.same_weights,
                    "recovery_seconds": result.recovery_seconds,
                    "lost_steps": result.lost_steps,
                    "exit_codes": list(result.exit_codes),
                    "told": told,
                }
            )
            say(f"{fault}: {'the same weights' if result.same_weights else 'OTHER WEIGHTS'}. {told}")
    return found


def in_every_phase(kind: str, say: Callable[[str], None]) -> dict[str, list[int]]:
    """SIGTERM, or SIGKILL, to a rank in each phase; the exit codes of the command until the run was done."""
    found = {}
    for phase in PHASES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            words = ["steps=12", "eval.every=5", "--folder", str(folder), "--json"]
            inject, codes = f"{kind}:1:5:{phase}", []
            while not codes or codes[-1] in (10, 11):
                done = subprocess.run(
                    [*OURS, *words, "--inject", inject], capture_output=True, timeout=300, check=False
                )
                codes.append(done.returncode)
                inject = ""
            found[phase] = codes
        say(f"{kind} in {phase}: exit codes {codes}")
    return found


def accusations(runs: int, say: Callable[[str], None]) -> list[str]:
    """Verdicts on runs in which nothing is wrong, some of them with a slow first step or a slow save."""
    wrong: list[str] = []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as name:
            inject = PAUSES[number % len(PAUSES)] if number < 2 * len(PAUSES) else ""
            words = ["steps=10", "--folder", f"{name}/run", "--json", "--inject", inject]
            done = subprocess.run([*OURS, *words], capture_output=True, text=True, timeout=300, check=False)
            told = [line for line in done.stderr.splitlines() if line.startswith(("what:", "warning: step"))]
            if done.returncode != 0 or told:
                wrong.append(f"exit code {done.returncode}, {inject or 'undisturbed'}: {'; '.join(told)}")
                say(wrong[-1])
    say(f"{len(wrong)} accusations in {runs} clean runs")
    return wrong


def nodes(say: Callable[[str], None]) -> dict[str, object]:
    """One of two machines is lost: how soon the other says so, and whether it ends alone with the same weights."""
    if why := lacking():
        return {"skipped": why}
    words = [*RUN, "steps=200", "plan.deterministic=true", "plan.microbatch=1"]
    found: dict[str, object] = {}
    for how in ("kill", "cable"):
        with tempfile.TemporaryDirectory() as name, machines() as here:
            loss = lose(here, how, words, Path(name), os.environ)
            ((code, _),) = train_on(here, 1, words, Path(name), os.environ)
            subprocess.run(
                [sys.executable, "-m", "meshwright", "train", *words, "--folder", f"{name}/reference", "--json"],
                capture_output=True, timeout=300, check=True,
            )  # fmt: skip
            found[how] = {
                "seconds_to_the_end": loss.seconds,
                "exit_codes": [loss.code, code],
                "told": next((line for line in loss.said.splitlines() if line.startswith("what:")), ""),
                "same_weights": model_digest(Path(name) / "run") == model_digest(Path(name) / "reference"),
            }
        say(f"node lost ({how}): {found[how]}")
    return found


class Soak:
    """A run that is disturbed once a minute in one way or another until it is done."""

    def __init__(self, folder: Path, steps: int, gap: float, say: Callable[[str], None]) -> None:
        self.folder, self.gap, self.say = folder, gap, say
        self.words = [f"steps={steps}", "checkpoint.every=20", "plan.deterministic=true", "--folder", str(folder)]
        self.random = random.Random(SEED)
        self.faults: list[str] = []

    def run(self) -> None:
        """The same command again for as long as it is asked to end, or everything is killed."""
        code = None
        while code != 0:
            with open(self.folder.with_suffix(".log"), "w+") as log:
                launcher = subprocess.Popen([*OURS, *self.words], stdout=log, stderr=log)
                code = self._disturb(launcher)
                log.seek(0)
                assert code in (0, 10, 11, -9), f"exit code {code}: {log.read()[-2000:]}"

    def _disturb(self, launcher: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return launcher.wait(self.gap)
            except subprocess.TimeoutExpired:
                self._fault(launcher)

    def _fault(self, launcher: subprocess.Popen[bytes]) -> None:
        kind = self.random.choice(("kill", "kill", "stop", "term", "power"))
        children = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        ranks = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("rank")]
        if not ranks:
            return
        self.faults.append(kind)
        self.say(f"soak: {kind}")
        if kind == "term":
            launcher.terminate()
        elif kind == "power":
            for pid in (launcher.pid, *children):
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(self.random.choice(ranks), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def soak(minutes: float, say: Callable[[str], None]) -> dict[str, object]:
    """As many steps as fill the time; the reference makes them undisturbed."""
    with tempfile.TemporaryDirectory() as name:
        pilot = Soak(Path(name) / "pilot", 300, 1e6, say)
        pilot.run()
        made = kept(read(pilot.folder))
        steps = int(60 * minutes / (sum(record.seconds for record in made[50:]) / len(made[50:])))
        say(f"soak: {steps} steps")
        reference, disturbed = (
            Soak(Path(name) / "reference", steps, 1e6, say),
            Soak(Path(name) / "run", steps, 60.0, say),
        )
        reference.run()
        disturbed.run()
        spent = account(read(disturbed.folder))
        return {
            "minutes": spent.wall / 60,
            "faults": disturbed.faults,
            "steps": steps,
            "same_weights": model_digest(reference.folder) == model_digest(disturbed.folder),
            "goodput": spent.goodput,
            "badput": spent.badput,
            "attempts": spent.attempts,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, help="of the soak")
    parser.add_argument("--only", choices=["healed", "phases", "clean", "reshard", "cuts", "disks", "nodes", "soak"])
    options = parser.parse_args()

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    parts: dict[str, Callable[[], object]] = {
        "healed": lambda: healed(1 if options.quick else 3, say),
        "phases": lambda: {kind: in_every_phase(kind, say) for kind in ("term", "kill")},
        "clean": lambda: {"runs": (runs := 5 if options.quick else 50), "accusations": accusations(runs, say)},
        "reshard": lambda: {name: reshard(name, say) for name in list(MODELS)[: 1 if options.quick else None]},
        "cuts": lambda: cuts(say, most=4 if options.quick else 200),
        "disks": lambda: disks(say),
        "nodes": lambda: nodes(say),
        "soak": lambda: soak(options.minutes or (2 if options.quick else 10), say),
    }
    for name, prove in parts.items():
        if options.only in (None, name):
            keep(name, prove())


def keep(name: str, found: object) -> None:
    """Put one part into the record; another part may have been put there meanwhile."""
    whole = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**whole, name: found}, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
