"""SkyPilot: a managed job on whatever cloud has the cards, recovered after preemption and exit codes 10 and 11."""

import shlex
from typing import Any

from meshwright.launch.job import Launch, LaunchFile, LaunchJob, mounted, yaml
from meshwright.launch.kubernetes import RESUMABLE
from meshwright.spec.problem import mistake

REMOTE = "~/meshwright-run.toml"
# What SkyPilot calls the catalogue's cards.
CARDS = {
    "a100-80g": "A100-80GB", "a100-40g": "A100", "h100": "H100", "h200": "H200", "b200": "B200", "l4": "L4",
    "l40s": "L40S", "a10g": "A10G", "a10": "A10", "t4": "T4", "v100-16g": "V100", "v100-32g": "V100-32GB",
    "mi300x": "MI300X", "gh200": "GH200",
}  # fmt: skip


def launch(job: LaunchJob) -> Launch:
    """A task file."""
    file = str(job.out / "task.yaml")
    return Launch(
        files=(LaunchFile(name="task.yaml", text=yaml(task(job))),),
        command=("sky", "jobs", "launch", "--yes", "--detach-run", file),  # else it shows the log until the job ends
    )


def task(job: LaunchJob) -> dict[str, Any]:
    """What is recovered keeps its run folder: a volume, or a bucket that is mounted."""
    bucket, path = mounted(job, "machines of a cloud", "BUCKET:/PATH, a bucket or a volume of SkyPilot's")
    if job.gpus and job.card not in CARDS:
        what = f"SkyPilot's name of {job.card} is not known" if job.card else "no cluster is named"
        raise mistake(what, f"add --cluster with one of {', '.join(CARDS)}, or --cpu")
    wanted: dict[str, Any] = {"accelerators": {CARDS[job.card]: job.gpus}} if job.gpus else {}
    wanted["job_recovery"] = {
        "strategy": "FAILOVER",
        "max_restarts_on_errors": 0,  # what is resumable is recovered by its code, and nothing else is tried again
        "recover_on_exit_codes": list(RESUMABLE),
    }
    # The home folder is expanded where it runs; every other word is quoted.
    words = [*job.node("RUN_FILE"), "--node-rank", "auto"]
    command = " ".join('"$HOME/meshwright-run.toml"' if word == "RUN_FILE" else shlex.quote(word) for word in words)
    return {
        "name": job.label,
        "num_nodes": job.nodes,
        "resources": wanted,
        "file_mounts": {REMOTE: str(job.file), path: {"name": bucket, "mode": "MOUNT"}},
        "run": f"exec {command}\n",
    }
