"""The program as a user runs it: its words, its exit code, what it printed."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import forked

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Ranks of a crowded machine start minutes apart; who tests how long others are waited for says so after this.
PATIENT = "faults.meet_seconds=300"
# A first block and a last one: whatever else a verb does, each block of the preset's six costs as much again.
TINY = ("arch.preset=tiny", "arch.layers=2")
SMALL = (*TINY, "sequence=32", "batch=4", "steps=3", "eval.batches=1", "eval.sample_tokens=4", PATIENT)


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """A user's environment with a cache of its own and nothing of the test run's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "OMPI"))}
    return kept | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"} | extra


def script(name: str) -> ModuleType:
    """A script of benchmarks/, as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_text(folder: Path) -> None:
    """A little text of a user's own, in my/."""
    (folder / "my").mkdir()
    lines = [f"line {number}: the quick brown fox jumps over {number * 7 % 13} dogs" for number in range(900)]
    (folder / "my" / "text.txt").write_text("\n".join(lines))


def with_reference(folder: Path, *words: str) -> Path:
    """A user's folder with a little text, and what a run that nobody disturbs makes of it, in reference/."""
    folder.mkdir(exist_ok=True)
    write_text(folder)
    done = meshwright("train", *words, "--folder", "reference", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


def meshwright(*words: str, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder and wait for it."""
    return forked.run(words, folder, environment(folder, **extra))
