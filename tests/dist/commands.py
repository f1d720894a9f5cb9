"""The program as a user runs it: a process, its exit code, what it printed."""

import os
import subprocess
import sys
from pathlib import Path

SMALL = ("arch.preset=tiny", "sequence=32", "batch=4", "steps=3", "held.batches=1", "held.sample_tokens=4")


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """A user's environment with a cache of its own and nothing of the test run's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "OMPI", "OMP_"))}
    return kept | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"} | extra


def meshwright(*words: str, folder: Path, seconds: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        cwd=folder,
        env=environment(folder, **extra),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
