"""torchrun: one script, started on every machine with that machine's number."""

import shlex

from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.runtime.place import DEFAULT_PORT

# torchrun ends with 1 whatever a rank's code was, and would start ranks again that were asked to end.
ALONE = "faults.memory_every needs `./node.sh NUMBER`, which starts the ranks itself; no script for torchrun is written"
NOTE = "torchrun turns exit codes 10 and 11 into 1; `./node.sh NUMBER` starts the same ranks and passes them on"

LIVE = "faults.live: node.sh alone, which starts a lost rank again by itself; start it again on a machine that was lost"


def launch(job: LaunchJob) -> Launch:
    """The line of each machine, by torchrun and by ourselves."""
    python, *train = job.train()
    sizes = ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.per_node)]
    torchrun = [python, "-m", "torch.distributed.run", *sizes]
    number, host = where(job)
    by_torchrun = f"{shlex.join(torchrun)} {number} --master-addr {host} --master-port {DEFAULT_PORT}"
    by_us = f"{shlex.join(job.node(str(job.file), python))} {number} --master {host}:{DEFAULT_PORT}"
    torchrun_file = LaunchFile(
        name="torchrun.sh", text=script(job, f"{by_torchrun} {shlex.join(train)}"), executable=True
    )
    files, note = [torchrun_file, LaunchFile(name="node.sh", text=script(job, by_us), executable=True)], NOTE
    if job.has_launchers:  # torchrun starts all ranks again at once, or none
        del files[0]
        note = LIVE if job.run.faults.live else ALONE
    own = ("0",) if job.nodes > 1 else ()
    return Launch(files=tuple(files), command=(str(job.out / files[0].name), *own), note=note)


def where(job: LaunchJob) -> tuple[str, str]:
    """A machine's number and the first machine, as the script knows them: its arguments, unless they are known now."""
    number = "0" if job.nodes == 1 else '"${1:?the number of this machine, from 0}"'
    if job.target.hosts or job.nodes == 1:
        return f"--node-rank {number}", shlex.quote(next(iter(job.target.hosts), "127.0.0.1"))
    return f"--node-rank {number}", '"${2:?the name of the first machine}"'


def script(job: LaunchJob, command: str) -> str:
    """Becomes the command, below the folder that the run's paths are relative to."""
    return "\n".join(["#!/bin/bash", f"cd -- {shlex.quote(str(job.where))} || exit 2", f"exec {command}"]) + "\n"
