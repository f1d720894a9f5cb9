"""MPI: Open MPI's mpirun as the starter. No message travels by MPI.

mpirun that is asked to end sleeps before it tells the ranks, as long again before it kills them, and reads nothing of
what they say meanwhile; its exit code is 1 then. It passes SIGUSR2 on at once. So the script becomes a process of ours,
which has mpirun pass that on, and ends with the ranks' own exit code.
"""

import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.launch.node import as_asked
from meshwright.runtime.failure import ASKS
from meshwright.runtime.ranks import end_with_parent
from meshwright.spec.problem import mistake

LOOK_SECONDS = 0.05
UP_SECONDS = 3.0  # in which mpirun may have no ranks yet; a signal that comes then would be lost


def launch(job: LaunchJob) -> Launch:
    """A script that becomes what starts mpirun, and its list of machines."""
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
    """Ranks one after another on each machine, none of which is killed at once when another has left."""
    address = "127.0.0.1" if first == "localhost" else first
    words = [
        *(sys.executable, "-m", "meshwright.launch.mpi"),
        "mpirun",
        *("-np", str(job.run.plan.world), "--hostfile", str(job.out / "hosts")),
        *("--map-by", f"ppr:{job.per_node}:node", "--bind-to", "none"),
        *("--mca", "odls_base_sigkill_timeout", str(math.ceil(job.save_seconds / 2))),  # twice what it sleeps; else 1 s
        *("--wdir", str(job.where), "-x", f"MASTER_ADDR={address}"),
        *job.train(),
    ]
    return "\n".join(["#!/bin/bash", f"exec {shlex.join(words)}"]) + "\n"


def run(command: Sequence[str]) -> int:
    """Run mpirun to its end, and return its exit code; a request to end reaches the ranks at once.

    A second Ctrl-C does not wait for the save.
    """
    asked = list[int]()
    for number in (*ASKS, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    began, told = time.monotonic(), False
    # A session of its own: what a terminal sends to all processes of this one, mpirun would take for itself.
    mpirun = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent)
    while (code := mpirun.poll()) is None:
        if asked.count(signal.SIGINT) > 1:
            mpirun.kill()
        elif asked and not told and time.monotonic() - began > UP_SECONDS:
            told = True
            mpirun.send_signal(ASKS[-1])
        time.sleep(LOOK_SECONDS)
    return as_asked(code if code >= 0 else 128 - code, asked)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
