"""Ray: a driver that reserves machines as a placement group, with a bundle for each, and runs one actor for each rank.

In each actor is the rank's process: signals, exit codes and torch's store are then what they are under every launcher.
"""

import importlib
import math
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.launch.node import FALL_SECONDS, NodePlace, as_asked, exit_code
from meshwright.runtime.failure import ASKS, Exit
from meshwright.runtime.ranks import die_with_parent

PLACE_SECONDS = 600.0  # until a cluster has the machines
LOOK_SECONDS = 0.5


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
        command=(sys.executable, "-m", "meshwright.launch.ray", str(file)),
        note="run it where a Ray cluster is reachable (RAY_ADDRESS), or by `ray job submit -- …`",
    )


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver is to start."""

    nodes: int
    per_node: int
    gpus: int  # of a machine
    cpus: int  # of a rank
    where: str
    command: list[str]
    save_seconds: int


class RankActor:
    """One rank, on the machine where Ray has put it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Where others reach this machine, and a port that nobody has now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return _ray().util.get_node_ip_address(), free.getsockname()[1]

    def start(self, command: list[str], where: str, own: dict[str, str]) -> None:
        """Begin. The GPU that Ray gave this actor is the only one that the rank sees."""
        told = ["env", *(f"{name}={value}" for name, value in own.items())]
        self.process = subprocess.Popen([*told, *command], cwd=where, preexec_fn=die_with_parent)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        assert self.process is not None, "started"
        return self.process.poll()

    def stop(self) -> None:
        """Ask the rank to save and end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


def _ray() -> Any:
    """Ray, which only this file needs."""
    return importlib.import_module("ray")


def drive(job: RayJob) -> int:
    """Reserve the machines, run the ranks to their end, and return the exit code that says most."""
    ray, groups = _ray(), importlib.import_module("ray.util.placement_group")
    ray.init(log_to_driver=True, ignore_reinit_error=True)
    bundle = {"CPU": float(job.cpus * job.per_node), **({"GPU": float(job.gpus)} if job.gpus else {})}
    group = groups.placement_group([bundle] * job.nodes, strategy="STRICT_SPREAD" if job.nodes > 1 else "STRICT_PACK")
    try:
        if not group.wait(PLACE_SECONDS):
            print(f"Ray has no {job.nodes} machines of {bundle}; see `ray status`", file=sys.stderr)
            return 2
        return _run(job, group)
    finally:
        groups.remove_placement_group(group)
        ray.shutdown()


def _run(job: RayJob, group: Any) -> int:
    ray = _ray()
    inside = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    gpus = job.gpus / job.per_node
    remote = ray.remote(num_cpus=job.cpus, num_gpus=gpus)(RankActor)
    actors = [
        remote.options(
            scheduling_strategy=inside(placement_group=group, placement_group_bundle_index=rank // job.per_node)
        ).remote()
        for rank in range(job.nodes * job.per_node)
    ]
    address, port = ray.get(actors[0].address.remote())
    places = [NodePlace(node, job.nodes, job.per_node, address, port) for node in range(job.nodes)]
    asked: list[int] = []
    for number in (*ASKS, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    ray.get(
        [
            actor.start.remote(job.command, job.where, places[rank // job.per_node].environment(rank % job.per_node))
            for rank, actor in enumerate(actors)
        ]
    )
    return as_asked(exit_code(_wait(job, actors, asked)), asked)


def _wait(job: RayJob, actors: list[Any], asked: list[int]) -> list[int]:
    """Exit codes of all; an actor that is gone was killed. A request to end is passed on once, a second Ctrl-C ends."""
    ray, told, deadline = _ray(), False, math.inf
    codes: list[int | None] = [None] * len(actors)
    while None in codes and time.monotonic() < deadline:
        for rank, actor in enumerate(actors):
            if codes[rank] is None:
                try:
                    codes[rank] = ray.get(actor.poll.remote())
                except ray.exceptions.RayError:
                    codes[rank] = -signal.SIGKILL
        if asked and not told:
            told, deadline = True, time.monotonic() + job.save_seconds
            for actor in actors:
                actor.stop.remote()
        if asked.count(signal.SIGINT) > 1:
            break
        if any(codes) and deadline == math.inf:
            deadline = time.monotonic() + FALL_SECONDS  # the others leave by themselves
        time.sleep(LOOK_SECONDS)
    return [-signal.SIGKILL if code is None else code for code in codes]


def require_ray() -> None:
    """The driver is run by an interpreter that has Ray."""
    if find_spec("ray") is None:
        remedy = "run: pip install ray, or start it by a Python that has both"
        print(f"{sys.executable} has no Ray; {remedy}", file=sys.stderr)
        sys.exit(Exit.INPUT)


if __name__ == "__main__":
    require_ray()
    sys.exit(drive(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RayJob)))
