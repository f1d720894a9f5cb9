"""What copies of a state in the next machine's memory cost the steps: `python benchmarks/peer_copy.py [--out FILE]`.

Two ranks, each as a machine with memory of its own (`faults.memory_every`), train Llama-3 of 1B parameters as two
replicas on one GPU, a small model where there is none. NCCL refuses two ranks on one GPU, so they speak Gloo, whose
gradients go through host memory in every step: steps are longer than with NCCL, and the copies have a busier host. So
what counts are the seconds that a save takes from training, of which there are two kinds of steps by turns: those from
the end of the saved step until the other machine has the copy, and those in which nothing is copied. `--seconds` ends
the run at a time that is known before; what was made until then is counted.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

from muon import SHAPES

NODES = 2
QUIET = "plan.replicate=2 checkpoint.every=0 eval.every=0 eval.batches=1 eval.sample_tokens=0 data.format=nanogpt"
# Tokens of a step: 4 sequences of 8,192 on both ranks together; on CPUs as many as take a while.
OF_GPU = "sequence=8192 batch=4 plan.microbatch=1 plan.precision=bf16 optim.master_weights=split"
OF_CPU = "arch.vocab=4096 arch.hidden=512 arch.heads=8 arch.ffn=1536 sequence=64 batch=2"
TEXT_TOKENS, IDS = 4_000_000, 4096  # of the text, which is drawn at random: a tokenizer would take a while
WARM_UP = 3  # steps that are not counted
EVERY = 100  # steps between copies that are asked about
ASIDE_SECONDS = 0.02  # between two looks at what has become of a copy
SHARE = 0.02  # of the time, that copies may take


def words_of(shape: str, every: int, steps: int, text: Path, more: list[str]) -> list[str]:
    """The run, as `meshwright train` takes it; `more` is said last."""
    preset, *model = SHAPES[shape]
    own = [f"faults.memory_every={every}", f"steps={steps}", f"data.source={text}"]
    around = (OF_CPU if shape == "small" else OF_GPU).split()
    return [f"arch.preset={preset}", *model, *QUIET.split(), *around, *own, *more]


def draw_text(file: Path) -> None:
    """Tokens without a meaning, as nanoGPT keeps them."""
    file.write_bytes(array("H", random.Random(1).choices(range(IDS), k=TEXT_TOKENS)).tobytes())


def be_rank(words: list[str]) -> None:
    """A rank of the run, which speaks Gloo."""
    from meshwright.cli.main import main as meshwright
    from meshwright.train import world

    world.backend_of = lambda place, device, store: "gloo"
    sys.exit(meshwright(["train", *words]))


def be_machine(number: int, port: int, folder: Path, words: list[str]) -> None:
    """What `meshwright launch --node-rank` does with one rank; when copies have arrived is written beside the run."""
    from meshwright.config import load
    from meshwright.launch import node
    from meshwright.runtime.place import MEMORY

    place, run = node.NodePlace(number, NODES, 1, "127.0.0.1", port), load.load(None, words, ranks=NODES).run
    with node.keeping(run, place, folder, lambda text: print(text, file=sys.stderr, flush=True)) as memory:
        threading.Thread(target=note_copies, args=(memory, folder.parent / f"copied.{number}"), daemon=True).start()
        threads = str(max((os.cpu_count() or 1) // NODES, 1))
        around = {**os.environ, MEMORY: str(memory), "OMP_NUM_THREADS": threads}
        command = [sys.executable, __file__, "--rank", *words, "--folder", str(folder)]
        sys.exit(node.start(command, place, around, run.faults.grace_seconds))


def note_copies(memory: Path, file: Path) -> None:
    """Write down when each copy is on the other machine, by the clock of the records."""
    from meshwright.runtime.parts import copy_note

    seen = None
    while True:
        note, now = copy_note(memory), time.monotonic()
        if note is not None and note != seen:
            seen = note
            with open(file, "a") as lines:
                lines.write(json.dumps({"step": note.step, "at": now, "failed": note.failed}) + "\n")
        time.sleep(ASIDE_SECONDS)


def trained(words: list[str], seconds: float, home: Path) -> list[int | None]:
    """Both machines until they have ended, or until their time is over; exit codes."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = tried.getsockname()[1]
    orders = [[str(number), str(port), str(home / "run"), *words] for number in range(NODES)]
    command = [sys.executable, __file__, "--machine"]
    started = [subprocess.Popen([*command, *order], start_new_session=True) for order in orders]
    deadline = time.monotonic() + seconds
    while any(each.poll() is None for each in started) and time.monotonic() < deadline:
        time.sleep(ASIDE_SECONDS)
    codes = [each.poll() for each in started]
    for each in started:  # a machine's ranks die with it
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
        each.wait()
    return codes


def figures(home: Path, every: int) -> dict[str, Any]:
    """What each copy took from training, by the records of rank 0 and the arrivals on both machines."""
    from meshwright.runtime.records import StepRecord, read_line

    lines = (home / "run" / "steps.rank0.jsonl").read_bytes().splitlines()
    steps = [each for each in map(read_line, lines) if isinstance(each, StepRecord)]
    arrived: dict[int, list[float]] = {}
    for number in range(NODES):
        for line in (home / f"copied.{number}").read_text().splitlines():
            said = json.loads(line)
            if said["failed"]:
                raise RuntimeError(f"a copy failed: {said['failed']}")
            arrived.setdefault(said["step"], []).append(said["at"])
    spans = [(step, max(ats)) for step, ats in sorted(arrived.items()) if len(ats) == NODES]
    if not spans:
        sys.exit("no copy was whole on both machines in the time there was: give it more --seconds")
    beside: dict[int, list[float]] = {step: [] for step, _ in spans}
    quiet = list[float]()
    for made in steps[WARM_UP:]:
        if made.step >= spans[-1][0] + every:
            break  # the copy of a later save may be on its way, of whose arrival nobody knows
        saved = next((step for step, until in spans if step <= made.step and made.began < until), None)
        (quiet if saved is None else beside[saved]).append(made.seconds)
    if not quiet:
        sys.exit(f"every step had a copy beside it: raise --every, which is {every}")
    usual = statistics.median(quiet)
    ends = {made.step: made.ended for made in steps}
    copies = [
        {
            "step": step,
            "seconds_until_copied": until - ends[step],
            "step_seconds_beside": beside[step],
            "seconds_lost": sum(beside[step]) - usual * len(beside[step]),
        }
        for step, until in spans
    ]
    lost = statistics.median(each["seconds_lost"] for each in copies)
    return {
        "step_seconds": usual,
        "step_seconds_quiet": quiet,
        "tokens": steps[-1].tokens,
        "copies": copies,
        "seconds_lost_median": lost,
        f"share_of_{EVERY}_steps": lost / (EVERY * usual),
        "step_seconds_from_which_the_share_is_kept": max(lost, 0.0) / (SHARE * EVERY),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value", help="said last, for example optim.state_dtype=bf16")
    parser.add_argument("--only", choices=("small", "llama3-1b"), help="default: by the device")
    parser.add_argument("--every", type=int, default=8, help="steps between copies here, so that there are several")
    parser.add_argument("--steps", type=int, default=33)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which the run is ended")
    parser.add_argument("--out", type=Path, default=Path("results/peer_copy.json"))
    options = parser.parse_args()
    import torch

    from meshwright.config import load
    from meshwright.runtime.run_folder import HOST_MEMORY, state_bytes

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    shape = options.only or ("llama3-1b" if gpu else "small")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        draw_text(home / "text.bin")
        words = words_of(shape, options.every, options.steps, home / "text.bin", options.words)
        run = load.load(None, words, ranks=NODES).run
        needed, free = 4 * state_bytes(run), shutil.disk_usage(HOST_MEMORY).free  # two saves, each twice
        if needed > free:
            sys.exit(f"{HOST_MEMORY} has {free:,} of {needed:,} bytes: try optim.state_dtype=bf16")
        codes = trained(words, options.seconds, home)
        found = {
            "gpu": gpu,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "torch": str(torch.__version__),
            "words": [word for word in words if not word.startswith("data.source")],
            "exit_codes": codes,
            "state_bytes": state_bytes(run),
            **figures(home, options.every),
        }
    text = json.dumps(found, indent=1) + "\n"
    options.out.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2:])
    if sys.argv[1:2] == ["--machine"]:
        own, at, place, *rest = sys.argv[2:]
        be_machine(int(own), int(at), Path(place), rest)
    main()
