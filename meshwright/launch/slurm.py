"""Slurm: a batch script that trains, saves before its time is up, and queues itself again until the run is done."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.launch.job import AGAIN, RUN_FILE, Launch, LaunchFile, LaunchJob
from meshwright.launch.quoting import label
from meshwright.spec.problem import Problem

ANSWER_SECONDS = 20.0  # of sinfo; a controller that is away is no reason to write no file
GRES = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")
# What a script does after srun. A job that was cancelled is no longer RUNNING and stays so; what brings no newer
# checkpoint is not tried for ever.
AFTER = """\
newest() { find "$folder/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort -V | tail -n 1; }

if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -f "$here/fruitless"; fi
before=$(newest)
srun --distribution=block --wait=0 --kill-on-bad-exit=0@CPUS@ "$here/rank.sh"
code=$?

fruitless=0
if [ "$(newest)" = "$before" ]; then fruitless=$(( $(cat "$here/fruitless" 2>/dev/null || echo 0) + 1 )); fi
echo "$fruitless" > "$here/fruitless"
case $code in
@CODES@)
  state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
  if [ "$state" != RUNNING ]; then
    echo "exit code $code: the job is $state, and is not queued again"
  elif [ "$fruitless" -gt @MOST_FRUITLESS@ ]; then
    echo "exit code $code: $fruitless starts in a row brought no newer checkpoint; not queued again"
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge @REQUEUES@ ]; then
    echo "exit code $code: queued again @REQUEUES@ times, the limit; sbatch starts it once more"
  else
    echo "exit code $code: queued again"
    scontrol requeue "$SLURM_JOB_ID"
  fi ;;
esac
exit $code
"""


def launch(job: LaunchJob) -> Launch:
    """A batch script and what each rank runs."""
    files = (
        LaunchFile(name="job.sbatch", text=batch(job), executable=True),
        LaunchFile(name="rank.sh", text=rank_script(job), executable=True),
    )
    # The log's name has no user's words in it, and its folder is an argument: Slurm replaces %x and the like in names.
    command = ("sbatch", f"--chdir={job.out}", str(job.out / "job.sbatch"))
    return Launch(files=files, command=command, checks=(("sbatch", "--test-only", *command[1:]),))


def batch(job: LaunchJob) -> str:
    """The batch script: what is asked for, then the ranks, then whether to come back."""
    said = job.target
    asked = {
        "job-name": job.label,
        "nodes": job.nodes,
        "ntasks-per-node": job.per_node,
        "gpus-per-node": job.gpus,
        "cpus-per-task": said.cpus,
        "partition": said.partition,
        "account": said.account,
        "time": said.time,
        "signal": f"TERM@{job.save_seconds}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    after = AFTER
    for name, value in {
        "CPUS": f" --cpus-per-task={said.cpus}" if said.cpus else "",  # which srun takes over from sbatch no more
        "CODES": "|".join(map(str, AGAIN)),
        "MOST_FRUITLESS": str(job.run.faults.restarts),
        "REQUEUES": str(said.requeues),
    }.items():
        after = after.replace(f"@{name}@", value)
    own = [f"here={shlex.quote(str(job.out))}", f"folder={shlex.quote(str(job.folder))}"]
    again = "--requeue" if said.requeues else "--no-requeue"  # which Slurm does by itself when a machine is lost
    return "\n".join(["#!/bin/bash", *lines, f"#SBATCH {again}", "", "set -u", *own, "", after])


def array(name: str, out: Path, cache: Path, parts: int, cpus: int, partition: str, limit: str) -> Launch:
    """An array job that makes the tokens of a run, a part of the pieces in each task; what is lost may be repeated."""
    asked = {
        "job-name": label(name, "data"), "array": f"0-{parts - 1}", "ntasks": 1, "cpus-per-task": cpus,
        "partition": partition, "time": limit, "open-mode": "append", "output": "%x-%A_%a.log",
    }  # fmt: skip
    words = [sys.executable, "-m", "meshwright", "data", "prepare", str(out / RUN_FILE), "--workers", str(cpus)]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in asked.items() if value),
        "#SBATCH --requeue",
        "# Activate an environment or load modules here.",
        f"export XDG_CACHE_HOME={shlex.quote(str(cache.parent))}",
        f"cd -- {shlex.quote(str(Path.cwd()))} || exit 2",
        f'exec {shlex.join(words)} --part "$SLURM_ARRAY_TASK_ID/{parts}"',
    ]
    command = ("sbatch", f"--chdir={out}", str(out / "data.sbatch"))
    files = (LaunchFile(name="data.sbatch", text="\n".join(lines) + "\n", executable=True),)
    return Launch(files=files, command=command, checks=(("sbatch", "--test-only", *command[1:]),))


def rank_script(job: LaunchJob) -> str:
    """What a rank runs: `exec`, so that no shell stands between the launcher's signals and it."""
    lines = [
        "#!/bin/bash",
        "# Activate an environment or load modules here.",
        f"cd -- {shlex.quote(str(job.where))} || exit 2",
        f"exec {shlex.join(job.train())}",
    ]
    return "\n".join(lines) + "\n"


def problems(job: LaunchJob) -> Iterator[Problem]:
    """What this cluster's own words refuse; nothing where there is no Slurm to ask."""
    lines = sinfo()
    if lines is None:
        return
    names = sorted({name for name, _ in lines})
    wanted = job.target.partition
    if wanted and not set(wanted.split(",")) <= set(names):
        yield Problem(f"there is no partition {wanted}", f"use one of {', '.join(names)} (sinfo lists them)")
        return
    here = [gres for name, gres in lines if not wanted or name in wanted.split(",")]
    most = max((gpus_of(gres) for gres in here), default=0)
    if job.gpus > most:
        what = f"{job.gpus} GPUs of a machine are asked for, and {wanted or 'this Slurm'} has machines of {most}"
        yield Problem(what, "use --ranks-per-node, another --partition, or --cpu to train on CPUs")


def sinfo() -> list[tuple[str, str]] | None:
    """Each partition with what its machines have besides cores; None: nobody answers."""
    if shutil.which("sinfo") is None:
        return None
    command = ["sinfo", "--noheader", "--format", "%R|%G"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    lines = [line.partition("|") for line in answer.stdout.splitlines() if "|" in line]
    return [(name.strip(), gres.strip()) for name, _, gres in lines] if answer.returncode == 0 else None


def gpus_of(gres: str) -> int:
    """GPUs of a machine as Slurm writes them: gpu:8, gpu:h100:8(S:0-1), gpu:a:2,gpu:b:2."""
    return sum(map(int, GRES.findall(gres)))
