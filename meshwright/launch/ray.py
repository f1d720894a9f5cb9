"""Ray: a driver that reserves machines as a placement group and runs one actor for each rank."""

import sys

import msgspec

from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.launch.ray_driver import RayJob


def launch(job: LaunchJob) -> Launch:
    """The driver's orders as JSON: no code is generated."""
    orders = RayJob(
        nodes=job.nodes,
        per_node=job.per_node,
        gpus=job.gpus,
        cpus=max(job.target.cpus, 1),
        where=str(job.where),
        command=job.train(),
        save_seconds=job.save_seconds,
    )
    file = job.out / "ray.json"
    text = msgspec.json.format(msgspec.json.encode(orders), indent=2).decode() + "\n"
    return Launch(
        files=(LaunchFile(name="ray.json", text=text),),
        command=(sys.executable, "-m", "meshwright.launch.ray_driver", str(file)),
        note="run it where a Ray cluster is reachable (RAY_ADDRESS), or by `ray job submit -- …`",
    )
