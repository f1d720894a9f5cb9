"""Saving and loading beside the raw disk: `python benchmarks/checkpoint.py [--only disk|run|copies] [--folder DISK]`.

`disk`: tensors of a model's shapes (three fp32 kinds, on the GPU where there is one) are saved and loaded. By turns,
plain bytes of the same size are written and flushed, and read, to and from the same disk, whose system is told to
forget them. `run`: `meshwright train` of that model; how long each save pauses it, by the run's own records. On a GPU
the model is Llama-3 of 1B parameters (18 GB), else a small one (327 MB).

`copies`, only if asked for: what a step takes without and with in-memory checkpoints whose parts go to the next machine
(two machines of one rank each on this one, by `launch --node-rank`), and without and with `checkpoint.remote` (a folder
of the same disk). Runs are made by turns, `--times` of each; of each pair of neighbours the ratio of median steps is
taken, so that a machine which is busy for a while is busy for both. It needs a quiet machine.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import format
from meshwright.checkpoint import read as restore
from meshwright.checkpoint.format import Progress
from meshwright.checkpoint.read import StepReader
from meshwright.checkpoint.state import TensorShard
from meshwright.checkpoint.storage import THREADS, side_by_side
from meshwright.checkpoint.write import Saver
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.place import cores
from meshwright.runtime.records import SaveRecord, StepRecord, read_line
from meshwright.spec.params import count, params
from meshwright.spec.plan import AXES
from meshwright.verify import integrity

SMALL = (
    "tiny arch.vocab=8192 arch.layers=6 arch.hidden=512 arch.heads=8 arch.kv_heads=4 arch.head_dim=64 arch.ffn=1536 "
    "sequence=64 batch=2 checkpoint.every=6"
)
# As the row llama3-1b of benchmarks/gpu.py.
LARGE = (
    "tiny arch.vocab=128256 arch.layers=16 arch.heads=32 arch.kv_heads=8 arch.context=8192 arch.rope_theta=500000.0 "
    "arch.hidden=2048 arch.ffn=8192 sequence=8192 batch=2 plan.precision=bf16 plan.compile=true "
    "optim.master_weights=split checkpoint.every=100"
)
QUIET = "eval.every=0 eval.batches=1 eval.sample_tokens=0 data.source=stdlib plan.replicate=1 checkpoint.keep_last=1"
KINDS = ("weight", "first", "second")
BLOCK = 4 * 2**20
RATES = ("raw_write_bytes_per_second", "save_bytes_per_second", "raw_read_bytes_per_second", "load_bytes_per_second")
WARM_UP = 3  # steps that are not counted
OFTEN = 5  # steps between the saves whose copies are measured
# Without and with; `{}` is a folder of the run's own.
COPIED: dict[str, tuple[str, str]] = {
    "next_machine": (
        "checkpoint.every=0 plan.shard=2 plan.zero=3",
        f"checkpoint.every=0 plan.shard=2 plan.zero=3 faults.memory_every={OFTEN}",
    ),
    "remote": (f"checkpoint.every={OFTEN}", f"checkpoint.every={OFTEN} checkpoint.remote=file://{{}}/remote"),
}


def run_of(words: str, steps: int) -> Run:
    """A run file of the words; the model's name is the first."""
    preset, *rest = words.split()
    return load.load(None, [f"arch.preset={preset}", *QUIET.split(), *rest, f"steps={steps}"], ranks=1).run


def alone(device: torch.device) -> Mesh:
    """A mesh of one rank, which speaks to nobody."""
    nobody: Any = None
    place: dict[str, int] = dict.fromkeys(AXES, 0)
    return Mesh(dense=nobody, expert=nobody, fine=nobody, device=device, rank=0, world=1, data_rank=0, place=place)


def held(run: Run, device: torch.device) -> list[TensorShard]:
    """The state of a model: its weights and two moments."""
    return [
        TensorShard(
            f"{kind}/{param.name}", param.shape, tuple((0, length) for length in param.shape),
            torch.randn(param.shape, device=device), writes=True,
        )
        for kind in KINDS for param in params(run.arch)
    ]  # fmt: skip


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def raw_write(file: Path, content: memoryview, size: int) -> float:
    """Seconds to write so many bytes in order and flush them."""
    with open(file, "wb", buffering=0) as target:
        began = time.perf_counter()
        for begin in range(0, size, BLOCK):
            target.write(content[: min(BLOCK, size - begin)])
        os.fsync(target.fileno())
        return time.perf_counter() - began


def raw_read(file: Path, threads: int) -> float:
    """Seconds to read a file from the disk, every byte once, by so many threads."""
    forget([file])
    size, descriptor = file.stat().st_size, os.open(file, os.O_RDONLY)
    share = -(-size // threads)

    def part(number: int) -> None:
        room = memoryview(bytearray(BLOCK))
        for begin in range(number * share, min((number + 1) * share, size), BLOCK):
            os.preadv(descriptor, [room], begin)

    seconds = seconds_of(lambda: side_by_side(part, range(threads), threads))
    os.close(descriptor)
    return seconds


def forget(files: list[Path]) -> None:
    """Have the next read come from the disk; below a virtual one there may be a cache that does not."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk(run: Run, times: int, folder: Path) -> dict[str, Any]:
    """Saves beside raw writes, and loads beside raw reads, by turns; rates are medians.

    The shares are medians of neighbours' ratios, so that a machine which is busy for a while is busy for both.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    state, records = held(run, device), list[SaveRecord]()
    size = sum(each.tensor.nbytes for each in state)
    home, plain, content = folder / "run" / "checkpoints", folder / "plain", memoryview(os.urandom(BLOCK))
    saver = Saver(home, run, alone(device), state, print, note=records.append)
    saver.prepare()
    writes, reads, threaded, loads = [], [], [], []
    for step in range(1, times + 1):
        writes.append(raw_write(plain, content, size))
        reads.append(raw_read(plain, 1))
        threaded.append(raw_read(plain, THREADS))
        plain.unlink()
        saver.save(Progress(step=step, samples=step, seed=1, updates=1.0, loss_scale=1.0, streak=0.0))
        saver.settle()
        loads.append(load_again(home / format.name(step), state))
    saver.close()
    newest = home / format.name(times)
    forget([*newest.iterdir()])
    checked = seconds_of(lambda: integrity.verify_step(newest))
    best = [min(pair) for pair in zip(reads, threaded, strict=True)]
    saves = [record.seconds for record in records]
    return {
        "parameters": count(run.arch),
        "checkpoint_bytes": size,
        "raw_write_bytes_per_second": size / statistics.median(writes),
        "save_bytes_per_second": size / statistics.median(saves),
        "save_share_of_raw": statistics.median(raw / own for raw, own in zip(writes, saves, strict=True)),
        "save_bound_by": [record.bound for record in records],
        "save_pause_seconds": [record.pause for record in records],
        "raw_read_bytes_per_second": size / statistics.median(best),
        "load_bytes_per_second": size / statistics.median(loads),
        "load_share_of_raw": statistics.median(raw / own for raw, own in zip(best, loads, strict=True)),
        "verify_bytes_per_second": size / checked,
    }


def load_again(step: Path, state: list[TensorShard]) -> float:
    """Seconds to read a step from the disk into the state."""
    forget([*step.iterdir()])

    def work() -> None:
        with StepReader(step, pinned=state[0].tensor.is_cuda) as reader:
            restore.fill(reader, state)

    return seconds_of(work)


def pauses(words: str, steps: int, folder: Path) -> dict[str, Any]:
    """A run as a user would start it: what its saves cost it."""
    preset, *rest = words.split()
    command = [sys.executable, "-m", "meshwright", "train", f"arch.preset={preset}", *QUIET.split(), *rest]
    done = subprocess.run(
        [*command, f"steps={steps}", "--ranks", "1", "--folder", str(folder), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"exit_code": done.returncode, "error": done.stderr[-2000:]}
    records = [read_line(line) for line in (folder / "steps.rank0.jsonl").read_bytes().splitlines()]
    made = [record for record in records if isinstance(record, StepRecord)][WARM_UP:]
    saved = [record for record in records if isinstance(record, SaveRecord)]
    usual = statistics.median(record.seconds for record in made)
    paused = [record.pause for record in saved]
    return {
        "exit_code": done.returncode,
        "step_seconds": usual,
        "saved_steps": [record.saved for record in saved],
        "saved_bytes_per_second": [record.bytes / record.seconds for record in saved],
        "bound_by": [record.bound for record in saved],
        "pause_seconds": paused,
        "pause_share_of_the_run": sum(paused) / sum(record.seconds for record in made),
        "postponed": [line for line in done.stderr.splitlines() if "postponed" in line],
    }


def copies(words: str, steps: int, times: int, folder: Path) -> dict[str, Any]:
    """What copies cost a step, by turns without and with them."""
    found: dict[str, Any] = {}
    for kind, variants in COPIED.items():
        pairs, loads = list[list[float]](), list[float]()
        for number in range(times):
            pair = []
            for variant, more in enumerate(variants):
                home = folder / f"{kind}-{number}-{variant}"
                home.mkdir()
                pair.append(median_step(f"{words} {more.format(home)}", steps, home, nodes=2 - (kind == "remote")))
            pairs.append(pair)
            loads.append(os.getloadavg()[0])
        ratios = sorted(with_copies / without for without, with_copies in pairs)
        found[kind] = {
            "words": variants,
            "step_seconds": pairs,
            "ratio_median": statistics.median(ratios),
            "ratio_from_to": [ratios[0], ratios[-1]],
            "load_average": loads,
        }
    return found


def median_step(words: str, steps: int, folder: Path, nodes: int) -> float:
    """The median step of a run, of one rank or of so many machines with one each."""
    preset, *rest = words.split()
    quiet = [word for word in QUIET.split() if nodes == 1 or not word.startswith("plan.")]
    shape = [f"arch.preset={preset}", *quiet, *rest, f"steps={steps}", "--folder", str(folder / "run")]
    commands = [["train", *shape, "--ranks", "1"]]
    if nodes > 1:
        with socket.socket() as tried:
            tried.bind(("127.0.0.1", 0))
            master = f"127.0.0.1:{tried.getsockname()[1]}"
        machine = ["launch", *shape, "--nodes", str(nodes), "--ranks-per-node", "1", "--master", master]
        commands = [[*machine, "--node-rank", str(number)] for number in range(nodes)]
    around = {**os.environ, "OMP_NUM_THREADS": str(max(cores() // nodes, 1))}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *each], env=around, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for each in commands
    ]  # fmt: skip
    said = [each.communicate()[1] for each in started]
    if any(each.returncode for each in started):
        raise RuntimeError("\n".join(said)[-2000:])
    records = [read_line(line) for line in (folder / "run" / "steps.rank0.jsonl").read_bytes().splitlines()]
    return statistics.median(record.seconds for record in records[WARM_UP:] if isinstance(record, StepRecord))


def rows(record: dict[str, Any]) -> list[str]:
    """The record as docs/checkpoints.md has it."""
    disk, run = record["disk"], record["run"]
    pause, share = statistics.median(run["pause_seconds"][1:]), run["pause_share_of_the_run"]
    return [
        f"| a save pauses training for | {1000 * pause:.0f} ms, all saves {100 * share:.1f} % of the run |",
        f"| rate of a save ÷ raw write and flush | {disk['save_share_of_raw']:.2f} |",
        f"| rate of a load ÷ raw read | {disk['load_share_of_raw']:.2f} |",
        f"| raw write · save · raw read · load, GB/s | {' · '.join(f'{disk[name] / 1e9:.2f}' for name in RATES)} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value", help="another model, for example arch.layers=24")
    parser.add_argument("--only", choices=("disk", "run", "copies"))
    parser.add_argument("--steps", type=int, default=0, help="of the run (default 24, on a GPU 260)")
    parser.add_argument("--times", type=int, default=0, help="saves and loads (default 5, on a GPU 2)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="default: results/checkpoint.json, of copies results/copies.json")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    words = " ".join([LARGE if gpu else SMALL, *options.words])
    steps, times = options.steps or (260 if gpu else 24), options.times or (2 if gpu else 5)
    found: dict[str, Any] = {
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "gpu": gpu,
        "words": words,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.only == "copies":
            found["copies"] = copies(words, steps, times, Path(name))
        if options.only in (None, "disk"):
            found["disk"] = disk(run_of(words, steps), times, Path(name))
        if options.only in (None, "run"):
            found["run"] = pauses(words, steps, Path(name) / "trained")
    text = json.dumps(found, indent=2) + "\n"
    (options.out or Path(f"results/{'copies' if options.only == 'copies' else 'checkpoint'}.json")).write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
