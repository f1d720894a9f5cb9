"""MPI: Open MPI's mpirun as the starter. No message travels by MPI."""

import shlex

from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.spec.problem import mistake


def launch(job: LaunchJob) -> Launch:
    """A script that becomes mpirun, and its list of machines."""
    if job.nodes > 1 and len(job.target.hosts) != job.nodes:
        what = f"{job.nodes} machines are needed, and {len(job.target.hosts)} are named"
        raise mistake(what, "name them, the first being rank 0's: --hosts node0,node1")
    hosts = job.target.hosts or ("localhost",)
    lines = [f"{host} slots={job.per_node}" for host in hosts]
    files = (
        LaunchFile(name="mpirun.sh", text=script(job, hosts[0]), executable=True),
        LaunchFile(name="hosts", text="\n".join(lines) + "\n"),
    )
    return Launch(files=files, command=(str(job.out / "mpirun.sh"),))


def script(job: LaunchJob, first: str) -> str:
    """Ranks one after another on each machine, and the time that a save takes before Open MPI kills them."""
    address = "127.0.0.1" if first == "localhost" else first
    words = [
        "mpirun",
        *("-np", str(job.run.plan.world), "--hostfile", str(job.out / "hosts")),
        *("--map-by", f"ppr:{job.per_node}:node", "--bind-to", "none"),
        *("--mca", "odls_base_sigkill_timeout", str(job.save_seconds)),  # else 1 s after SIGTERM
        *("--wdir", str(job.where), "-x", f"MASTER_ADDR={address}"),
        *job.train(),
    ]
    return "\n".join(["#!/bin/bash", f"exec {shlex.join(words)}"]) + "\n"
