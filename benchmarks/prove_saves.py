"""What must never be lost: a state handed from every plan to every other, saves that are killed, disks that fail."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import RUN

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.runtime.place import Place
from meshwright.runtime.ranks import run_ranks
from meshwright.verify.rehearse import model_digest

Say = Callable[[str], None]
OURS = [sys.executable, "-m", "meshwright", "train", *RUN]
SECONDS = 600.0

# Every axis and products of two, on up to four ranks; three ranks cut nothing evenly.
DENSE = (
    "replicate=1", "replicate=2", "shard=2,zero=1", "shard=2,zero=3", "tp=2", "cp=2", "cp=2,zero=3",
    "pp=2,grad_accum=2", "pp=2,schedule=zbv,grad_accum=4", "replicate=3", "shard=3,zero=1", "shard=3,zero=3",
    "replicate=2,shard=2,zero=3", "shard=4,zero=2", "tp=4", "shard=2,zero=3,tp=2", "pp=2,tp=2,grad_accum=2",
    "pp=2,shard=2,zero=3,grad_accum=2", "cp=2,tp=2", "cp=2,shard=2,zero=3",
)  # fmt: skip
MIXTURE = (
    "replicate=1", "shard=2,zero=1,ep=2", "tp=2", "shard=2,zero=3", "replicate=2,ep=2", "shard=3,zero=3",
    "shard=4,zero=3,ep=2", "shard=2,zero=3,tp=2,ep=2", "replicate=2,shard=2,zero=3,ep=2", "shard=4,zero=3",
)  # fmt: skip
GPT = ("arch.norm=layer", "arch.positions=learned", "arch.mlp=gelu_tanh", "arch.bias=true", "arch.tied=true")
MODELS = {
    "llama": (DENSE, ("arch.preset=tiny",)),
    "gpt, tied, odd vocabulary": (DENSE, ("arch.preset=tiny", "arch.vocab=301", "arch.kv_heads=8", *GPT)),
    "mixture": (MIXTURE, ("arch.preset=tiny-moe",)),
}


def planned(plan: str, words: tuple[str, ...]) -> Run:
    """The same mathematics under one of the plans."""
    common = ("sequence=32", "batch=24", "steps=2", "checkpoint.every=2", "eval.every=0", "plan.precision=fp64")
    return load.load(None, [*words, *common, *(f"plan.{word}" for word in plan.split(","))]).run


def take_up(place: Place, run: Run, cache: Path, sources: list[Path], target: Path | None) -> None:
    """One rank: go on from each source in turn, and see that it is the same state; save the last one again."""
    from meshwright.data.prepare import prepare
    from meshwright.train.build import build
    from meshwright.train.loop import train
    from meshwright.train.saving import digest_of, holdings, restore, saving
    from meshwright.train.world import world

    with world(run, place) as mesh:
        state = build(run, prepare(run, cache, lambda text: None), mesh)
        if not sources:
            list(train(run, state, mesh, target))
        for source in sources:
            for holding in holdings(state, run, mesh):
                holding.tensor.zero_()  # what is found afterwards was read
            found = restore(state, run, mesh, source, lambda text: None)
            assert found is not None, f"nothing in {source}"
            assert digest_of(state, run, mesh) == found.state, f"{source} is another state"
        if sources and target is not None:
            with saving(run, state, mesh, target) as save:
                save(state)
        state.loader.close()


def reshard(name: str, say: Say) -> dict[str, object]:
    """Save one state under every plan; have every plan take up every save."""
    plans, words = MODELS[name]
    runs = {plan: planned(plan, words) for plan in plans}
    pairs = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run_ranks(take_up, 1, (runs["replicate=1"], folder / "cache", [], folder / "begun"), SECONDS)
        homes = {plan: folder / plan for plan in plans}
        for plan, run in runs.items():
            run_ranks(take_up, run.plan.world, (run, folder / "cache", [folder / "begun"], homes[plan]), SECONDS)
        states = {_state(home) for home in (folder / "begun", *homes.values())}
        assert len(states) == 1, "the plans save different states"
        for plan, run in runs.items():
            run_ranks(take_up, run.plan.world, (run, folder / "cache", list(homes.values()), None), SECONDS)
            pairs += len(homes)
            say(f"reshard {name}: {plan} takes up {len(homes)} saves; {pairs} pairs")
    return {"plans": len(plans), "pairs": pairs, "same_state": pairs, "state": states.pop()}


def _state(home: Path) -> str:
    return json.loads((home / "checkpoints" / "step-2" / "manifest.json").read_text())["state"]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command of a user, to its end."""
    command = [*OURS, "plan.deterministic=true", *words, "--folder", str(folder), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def cuts(say: Say, most: int = 200) -> dict[str, object]:
    """kill -9 before each thing that a save does to the disk, on each rank; the run must end with the same weights."""
    found: dict[str, object] = {}
    words = ("steps=7", "arch.layers=1")  # few tensors: each is a point of its own
    with tempfile.TemporaryDirectory() as place:
        assert train(Path(place) / "reference", *words).returncode == 0
        wanted = model_digest(Path(place) / "reference")
        for rank in (0, 1):
            points, same = 0, 0
            for number in range(1, most):
                folder = Path(place) / f"cut{rank}-{number}"
                done = train(folder, *words, "--inject", f"cut:{rank}:1:{number}")
                if "SIGKILL" not in done.stderr:
                    break  # the save has fewer points than that
                points += 1
                same += done.returncode == 0 and model_digest(folder) == wanted
            found[f"rank {rank}"] = {"points": points, "same_weights": same}
            say(f"kill at every write point of rank {rank}: {same} of {points} with the same weights")
    return found


@contextmanager
def full(place: Path) -> Iterator[None]:
    """A disk without a byte left."""
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
    yield
    ballast.unlink()


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """A disk that nothing can be written to."""
    deadline = time.monotonic() + SECONDS
    while subprocess.run(["mount", "-o", "remount,ro", str(place)], stderr=subprocess.DEVNULL, check=False).returncode:
        assert time.monotonic() < deadline, "the disk is never without a file that is being written"
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)


FAULTS = {"full": (full, "No space left on device"), "read-only": (read_only, "Read-only file system")}


def disks(say: Say) -> dict[str, object]:
    """A checkpoint disk that fills up, or becomes read-only, for a while; needs root."""
    if os.geteuid() != 0:
        return {"skipped": "mounting a small disk needs root"}
    words = ("steps=300", "checkpoint.every=10")
    with tempfile.TemporaryDirectory() as place:
        assert train(Path(place) / "reference", *words).returncode == 0
        wanted = model_digest(Path(place) / "reference")
        return {fault: disk(fault, Path(place) / fault, words, wanted, say) for fault in FAULTS}


def disk(fault: str, folder: Path, words: tuple[str, ...], wanted: str, say: Say) -> dict[str, object]:
    """Begin a run, give its checkpoints a small disk of their own, go on, and have the disk fail for two seconds."""
    assert train(folder, *words, "--inject", "term:0:8").returncode == 10
    place = folder / "checkpoints"
    kept = folder.parent / f"{fault}-kept"
    place.rename(kept)
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "small", str(place)], check=True)
    try:
        subprocess.run(["cp", "-a", f"{kept}/.", str(place)], check=True)
        command = [*OURS, "plan.deterministic=true", *words, "--folder", str(folder), "--json"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        before = set(os.listdir(place))
        while set(os.listdir(place)) == before and running.poll() is None:
            time.sleep(0.05)
        make, told = FAULTS[fault]
        with make(place):
            time.sleep(2.0)
        _, said = running.communicate(timeout=SECONDS)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    failed = said.count(told)
    same = running.returncode == 0 and model_digest(folder) == wanted
    say(f"disk {fault}: {failed} saves failed and were told, exit code {running.returncode}, same weights: {same}")
    return {"failed_saves_told": failed, "exit_code": running.returncode, "same_weights": same}
