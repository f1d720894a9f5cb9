"""Slurm: a batch script that trains, saves before its time is up, and queues itself again until the run is done."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.launch import node
from meshwright.launch.job import AGAIN, RUN_FILE, Launch, LaunchFile, LaunchJob, label
from meshwright.runtime.place import FIRST_PORT, PORTS
from meshwright.spec.problem import Problem

ANSWER_SECONDS = 20.0  # of sinfo; a controller that is away is no reason to write no file
GRES = re.compile(r"gpu(?::[^:,(]+)?:(\d+)")
# Ranks are tasks of one step.
RANKS = """\
srun --distribution=block --wait=0 --kill-on-bad-exit=0@CPUS@ "$here/rank.sh"
code=$?
"""
# Each machine has a step of its own, with a launcher in it that starts its ranks: one that is lost is started again
# while others go on, unless it falls time and again. Bash has the code of a step by the time that it is gone.
MACHINES = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
master=${hosts[0]}:$(( @FIRST_PORT@ + SLURM_JOB_ID % @PORTS@ ))
declare -A running=() began=() falls=()
codes=" "
start() {
  srun --nodes=1 --ntasks=1 --nodelist="${hosts[$1]}" --no-kill@CPUS@ "$here/node.sh" "$1" "$master" &
  running[$1]=$! began[$1]=$SECONDS
}
for machine in "${!hosts[@]}"; do start "$machine"; done
while [ ${#running[@]} -gt 0 ]; do
  sleep 1
  for machine in "${!running[@]}"; do
    if kill -0 "${running[$machine]}" 2>/dev/null; then continue; fi
    wait "${running[$machine]}"
    code=$?
    unset "running[$machine]"
    if [ $(( SECONDS - began[$machine] )) -ge @LASTED@ ]; then falls[$machine]=0; fi
    falls[$machine]=$(( ${falls[$machine]:-0} + 1 ))
    case $code in
    0|1|2|3|10|12|13|14|130) codes="$codes$code " ;;
    *)
      if [ ${#running[@]} -gt 0 ] && [ "${falls[$machine]}" -le @MOST_FRUITLESS@ ]; then
        echo "exit code $code of machine $machine (${hosts[$machine]}): started again"
        start "$machine"
      else
        codes="$codes$code "
      fi ;;
    esac
  done
done
# Of several codes the one that says most; whoever was lost when the others had finished is not missed.
for code in @ORDER@; do
  if [ "$code" = 0 ] && [ ! -e "$folder/summary.json" ]; then continue; fi
  case $codes in *" $code "*) break ;; esac
done
"""
# What a script does around them. A job that was cancelled is no longer RUNNING and stays so; what brings no newer
# checkpoint is not tried for ever.
AROUND = """\
newest() { find "$folder/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort -V | tail -n 1; }

if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -f "$here/fruitless"; fi
before=$(newest)
@START@
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
LASTED = 600  # seconds after which the falls of a machine's launcher before are no longer held against it
# As of a machine's own ranks (launch/node.py), behind the end that nothing is missing from; and how killed steps end.
ORDER = (0, *map(int, node.ORDER), 137, 143)


def launch(job: LaunchJob) -> Launch:
    """A batch script and what each rank, or each machine, runs."""
    own = LaunchFile(name="node.sh", text=node_script(job), executable=True)
    rank = LaunchFile(name="rank.sh", text=script(job, shlex.join(job.train())), executable=True)
    files = (LaunchFile(name="job.sbatch", text=batch(job), executable=True), own if job.has_launchers else rank)
    # The log's name has no user's words in it, and its folder is an argument: Slurm replaces %x and the like in names.
    command = ("sbatch", f"--chdir={job.out}", str(job.out / "job.sbatch"))
    return Launch(files=files, command=command, checks=(("sbatch", "--test-only", *command[1:]),))


def batch(job: LaunchJob) -> str:
    """The batch script: what is asked for, then the ranks, then whether to come back."""
    said = job.target
    cpus = max(said.cpus, 1) * job.per_node if job.has_launchers else said.cpus
    asked = {
        "job-name": job.label,
        "nodes": job.nodes,
        "ntasks-per-node": 1 if job.has_launchers else job.per_node,
        "gpus-per-node": job.gpus,
        "cpus-per-task": cpus,
        "partition": said.partition,
        "account": said.account,
        "time": said.time,
        "signal": f"TERM@{job.save_seconds}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    lines += ["#SBATCH --no-kill"] if job.has_launchers else []  # a machine that is lost does not end the others
    around = AROUND.replace("@START@", MACHINES if job.has_launchers else RANKS)
    for name, value in {
        "CPUS": f" --cpus-per-task={cpus}" if cpus else "",  # which srun takes over from sbatch no more
        "CODES": "|".join(map(str, AGAIN)),
        "MOST_FRUITLESS": str(job.run.faults.restarts),
        "REQUEUES": str(said.requeues),
        "FIRST_PORT": str(FIRST_PORT),
        "PORTS": str(PORTS),
        "LASTED": str(LASTED),
        "ORDER": " ".join(map(str, ORDER)),
    }.items():
        around = around.replace(f"@{name}@", value)
    own = [f"here={shlex.quote(str(job.out))}", f"folder={shlex.quote(str(job.folder))}"]
    again = "--requeue" if said.requeues else "--no-requeue"  # which Slurm does by itself when a machine is lost
    return "\n".join(["#!/bin/bash", *lines, f"#SBATCH {again}", "", "set -u", *own, "", around])


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


def node_script(job: LaunchJob) -> str:
    """What a machine runs, whose number and meeting place are the script's arguments."""
    return script(job, f'{shlex.join(job.node(str(job.file), sys.executable))} --node-rank "$1" --master "$2"')


def script(job: LaunchJob, command: str) -> str:
    """Becomes the command: no shell stands between the launcher's signals and it."""
    lines = [
        "#!/bin/bash",
        "# Activate an environment or load modules here.",
        f"cd -- {shlex.quote(str(job.where))} || exit 2",
        f"exec {command}",
    ]
    return "\n".join(lines) + "\n"


def problems(job: LaunchJob) -> Iterator[Problem]:
    """What this cluster's own words refuse; nothing where there is no Slurm to ask."""
    lines, wanted = sinfo() or [], job.target.partition
    found = [*partition_problems(wanted, lines)]
    yield from found
    if found or not lines:
        return
    here = [gres for name, gres in lines if not wanted or name in wanted.split(",")]
    most = max((gpus_of(gres) for gres in here), default=0)
    if job.gpus > most:
        what = f"{job.gpus} GPUs of a machine are asked for, and {wanted or 'this Slurm'} has machines of {most}"
        yield Problem(what, "use --ranks-per-node, another --partition, or --cpu to train on CPUs")


def partition_problems(wanted: str, lines: list[tuple[str, str]]) -> Iterator[Problem]:
    """A partition that this cluster does not have; `lines` are its own words."""
    names = sorted({name for name, _ in lines})
    if wanted and names and not set(wanted.split(",")) <= set(names):
        yield Problem(f"there is no partition {wanted}", f"use one of {', '.join(names)} (sinfo lists them)")


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
