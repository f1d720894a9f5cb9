"""What the checks before a start on several machines take: two seconds are allowed.

    python benchmarks/doctor.py

Ranks of 2 and of 4 machines, all of them on this one: each is told to be a machine of its own, looks at it as the first
rank of a machine does (limits, versions, adapters, the GPU driver), and meets the others (folders, names, versions, who
can reach rank 0). Timed from when all are there: the slowest rank, the median and the worst of several starts. Beside
it, all of `meshwright doctor`, with its trial writes and the link of every pair. Results: results/doctor.json.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from meshwright import __version__

STARTS = 9
ALLOWED = 2.0
ROOT = Path(__file__).parents[1]


def rank_main(rank: int, world: int, port: int, folder: Path) -> None:
    """One rank: wait until all are there, then check, and say how long it took."""
    from meshwright.runtime import doctor, meeting
    from meshwright.runtime.devices import gpu_health
    from meshwright.runtime.place import Place

    place = Place(
        rank=rank, world=world, local_rank=0, local_world=1, address="127.0.0.1", port=port, launcher="torchrun",
        node=str(rank),
    )  # fmt: skip
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < world:
        time.sleep(0.002)
    began = time.monotonic()
    meeting.meet(place, folder, f"benchmark-{rank}", 60.0, lambda text: None)
    met = time.monotonic()
    facts = doctor.look(())
    seen = gpu_health()
    doctor.findings([facts], [], dict(os.environ))
    looked = time.monotonic()
    print(json.dumps({"meeting": met - began, "machine": looked - met, "gpus": None if seen is None else len(seen)}))


def start(world: int) -> dict[str, float]:
    """One start: the slowest rank's seconds."""
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen([*words, str(rank), str(world), str(port), name], stdout=subprocess.PIPE, text=True)
            for port in [free_port()]
            for rank in range(world)
        ]
        said = [json.loads(each.communicate(timeout=120)[0]) for each in ranks]
    return {key: max(each[key] for each in said) for key in ("meeting", "machine")} | {
        "all": max(each["meeting"] + each["machine"] for each in said)
    }


def whole_doctor(world: int) -> float:
    """Seconds of `meshwright doctor` by as many ranks, each a machine; torch's import among them."""
    port = str(free_port())
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        ranks = []
        for rank in range(world):
            place = {
                "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
                "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            command = [sys.executable, "-m", "meshwright", "doctor", "--folder", name, "--json"]
            ranks.append(subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, text=True))
        said = [each.communicate(timeout=300)[0] for each in ranks]
        seconds = time.monotonic() - began
    told = json.loads(said[0])
    pairs = world * (world - 1) // 2
    assert (len(told["ranks"]), len(told["links"])) == (world, pairs), "the ranks did not find each other"
    return seconds


def table(record: dict[str, Any]) -> str:
    """The record as the page shows it."""
    lines = ["| machines | checks, median | worst | of it the meeting | the machine |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, each in record["seconds"].items():
        figures = (each["all"]["median"], each["all"]["worst"], each["meeting"]["median"], each["machine"]["median"])
        cells = " | ".join(f"{figure:.2f} s" for figure in figures)
        lines.append(f"| {name.split()[0]} | {cells} |")
    return "\n".join(lines)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as wire:
        wire.bind(("127.0.0.1", 0))
        return wire.getsockname()[1]


def main() -> int:
    """Measure; exit 1 when the checks took longer than they may."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = {}
    for world in (2, 4):
        starts = [start(world) for _ in range(STARTS)]
        found[f"{world} machines"] = {
            key: {
                "median": round(statistics.median(one[key] for one in starts), 4),
                "worst": round(max(one[key] for one in starts), 4),
            }
            for key in ("all", "meeting", "machine")
        } | {"whole_doctor": round(whole_doctor(world), 2)}
    result = {
        "meshwright": __version__, "cores": os.cpu_count(), "starts": STARTS, "allowed_seconds": ALLOWED,
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(), "seconds": found,
    }  # fmt: skip
    file = ROOT / "results" / "doctor.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file.read_text(), end="")
    return 0 if all(each["all"]["worst"] <= ALLOWED for each in found.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        sys.exit(main())
