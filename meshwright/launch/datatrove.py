"""datatrove as the engine that prepares data: its executors (local, Slurm, Ray) run the parts, retry and keep count."""

import sys
from pathlib import Path

from meshwright.launch.job import RUN_FILE, Launch, LaunchFile

NAME = "prepare.py"
SCRIPT = '''\
"""Tokenise a run's text by datatrove: python {name} local | slurm PARTITION | ray

Each task makes one part of the pieces; a task that is done is not done again, and nor is a piece.
"""

import os
import subprocess
import sys

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.pipeline.base import PipelineStep

WORDS = {words!r}
TASKS, CPUS, TIME = {parts}, {cpus}, {time!r}
LOGS, CACHE, WHERE = {logs!r}, {cache!r}, {where!r}


class Tokenise(PipelineStep):
    name, type = "meshwright data prepare", "Tokenizer"

    def run(self, data=None, rank=0, world_size=1):
        own = {{**os.environ, "XDG_CACHE_HOME": CACHE}}
        subprocess.run([*WORDS, "--part", f"{{rank}}/{{world_size}}"], check=True, env=own, cwd=WHERE)
        yield from ()


def main(kind, partition=""):
    common = {{"pipeline": [Tokenise()], "tasks": TASKS, "logging_dir": LOGS}}
    if kind == "slurm":
        SlurmPipelineExecutor(**common, time=TIME, partition=partition, cpus_per_task=CPUS).run()
    elif kind == "ray":
        RayPipelineExecutor(**common, cpus_per_task=CPUS).run()
    else:
        LocalPipelineExecutor(**common, workers=max((os.cpu_count() or 1) // CPUS, 1)).run()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["local"]))
'''


def array(out: Path, cache: Path, parts: int, cpus: int, limit: str) -> Launch:
    """A script of datatrove's; the interpreter that runs it has datatrove, and may be another than meshwright's."""
    words = [sys.executable, "-m", "meshwright", "data", "prepare", str(out / RUN_FILE), "--workers", str(cpus)]
    text = SCRIPT.format(
        name=NAME, words=words, parts=parts, cpus=cpus, time=limit, logs=str(out / "logs"), cache=str(cache.parent),
        where=str(Path.cwd()),
    )  # fmt: skip
    return Launch(files=(LaunchFile(name=NAME, text=text),), command=("python", str(out / NAME), "local"))
