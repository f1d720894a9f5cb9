"""How long a fault holds up training: kill -9 beside torchrun in the same run, and how soon a hang has a name.

Every time is taken from the records of the runs themselves. The machine may be busy: what counts is the ratio.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshwright.runtime.records import AttemptRecord, Record, StepRecord, read_line
from meshwright.verify.rehearse import FAULTS

RESULT = Path(__file__).parents[1] / "results" / "faults.json"
RUN = [
    "arch.preset=tiny",
    "sequence=32",
    "batch=4",
    "eval.every=0",
    "eval.batches=1",
    "eval.sample_tokens=0",
    "checkpoint.every=5",
]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "5", "-m", "meshwright"]
REPEATS = 5
HANGS = ("hang", "sleep", "lock", "data", "skip", "cross")
SECONDS = 180.0


def start(launcher: list[str], folder: Path, *words: str) -> subprocess.Popen[str]:
    """The same training under one launcher or the other."""
    return subprocess.Popen(
        [sys.executable, *launcher, "train", *RUN, *words, "--folder", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )


def read(folder: Path) -> list[Record]:
    """Whole lines of the first rank's records so far."""
    file = folder / "steps.rank0.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [read_line(line) for line in lines]


def steps_of(records: list[Record], attempt: int) -> list[StepRecord]:
    """The steps of one attempt, counted from 1."""
    found: list[list[StepRecord]] = []
    for record in records:
        if isinstance(record, AttemptRecord):
            found.append([])
        elif isinstance(record, StepRecord):
            found[-1].append(record)
    return found[attempt - 1] if len(found) >= attempt else []


def wait_for_step(folder: Path, attempt: int, least: int) -> StepRecord:
    """Until an attempt has made so many steps."""
    deadline = time.monotonic() + SECONDS
    while len(steps := steps_of(read(folder), attempt)) < least:
        assert time.monotonic() < deadline, f"attempt {attempt} made {len(steps)} steps"
        time.sleep(0.02)
    return steps[least - 1]


def last_rank(pid: int, ours: bool) -> int:
    """The process of rank 1 below a launcher: ours by its name, torchrun's by its place among the children."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    if ours:
        return next(child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "rank1")
    return children[-1]


def recovery(launcher: list[str], folder: Path) -> dict[str, float]:
    """Kill rank 1 in the middle; seconds until a step is made again, and steps that had to be made again."""
    process = start(launcher, folder, "steps=100000")
    wait_for_step(folder, 1, 12)
    killed_at = time.monotonic()
    os.kill(last_rank(process.pid, ours=launcher == ["-m", "meshwright"]), signal.SIGKILL)
    again = wait_for_step(folder, 2, 1)
    before = max(record.step for record in steps_of(read(folder), 1))
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    return {"seconds": again.at - killed_at, "lost_steps": before - again.step + 1}


def hang(kind: str, folder: Path) -> dict[str, object]:
    """From the last step before a hang to its verdict, and whom it names."""
    process = start(
        ["-m", "meshwright"], folder, "steps=12", "--inject", FAULTS[kind].format(step=7).replace("::", ":1:")
    )
    process.communicate(timeout=SECONDS)
    (file,) = (folder / "faults").glob("hang-*/verdict.json")
    said_at = file.stat().st_mtime - time.time() + time.monotonic()
    last = max(record.at for record in steps_of(read(folder), 1))
    verdict = json.loads(file.read_text())
    return {
        "kind": kind,
        "seconds": said_at - last,
        "right": verdict["rank"] == 1 and " 1 " in verdict["what"][:8],
        "phase": verdict["phase"],
        "what": verdict["what"],
    }


def measure() -> dict[str, object]:
    """Both launchers in turn, then each kind of hang."""
    both: dict[str, list[dict[str, float]]] = {"meshwright": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(REPEATS):
            for launcher, words in (("meshwright", ["-m", "meshwright"]), ("torchrun", TORCHRUN)):
                both[launcher].append(recovery(words, Path(name) / f"{launcher}{number}"))
                print(launcher, both[launcher][-1], flush=True)
        hangs = [hang(kind, Path(name) / kind) for kind in HANGS]
    ours, theirs = (statistics.median(each["seconds"] for each in both[name]) for name in ("meshwright", "torchrun"))
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "save_every": 5,
        "kill": both,
        "kill_seconds": {"meshwright": ours, "torchrun": theirs},
        "ratio": ours / theirs,
        "hangs": hangs,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = measure()
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({key: found[key] for key in ("kill_seconds", "ratio", "hangs")}, indent=2))


if __name__ == "__main__":
    main()
