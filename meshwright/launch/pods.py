"""Pods that hold a machine's ranks each: what Kubernetes, Kubeflow and Volcano have in common."""

from typing import Any

import msgspec

from meshwright.config import load
from meshwright.launch.job import LaunchJob, mounted
from meshwright.launch.quoting import pod_word
from meshwright.runtime.failure import Exit

FILES = "/etc/meshwright"  # where pods find the run file
CONTAINER = "node"
MEET_SECONDS = 600.0  # images are pulled on each machine by itself, and names are known when a pod is there
RESUMABLE = (int(Exit.PREEMPTED), int(Exit.RESUMABLE))


def run_map(job: LaunchJob) -> dict[str, Any]:
    """The run file, as a ConfigMap."""
    faults = msgspec.structs.replace(job.run.faults, meet_seconds=max(job.run.faults.meet_seconds, MEET_SECONDS))
    text = load.write(msgspec.structs.replace(job.run, faults=faults))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job), "data": {"run.toml": text}}


def metadata(job: LaunchJob) -> dict[str, Any]:
    """A name, and a namespace where one is said."""
    said = job.target.namespace
    return {"name": job.label, **({"namespace": said} if said else {}), "labels": {"app": job.label}}


def words(job: LaunchJob, address: str = "", port: int = 0) -> list[str]:
    """What a pod runs; no shell reads it, and Kubernetes replaces nothing in it."""
    meet = ["--master", f"{address}:{port}"] if address else []
    return [pod_word(word) for word in (*job.node(f"{FILES}/run.toml"), "--node-rank", "auto", *meet)]


def resources(job: LaunchJob) -> dict[str, Any]:
    """GPUs and cores of a pod."""
    vendor = "amd.com/gpu" if job.card.startswith("mi") else "nvidia.com/gpu"
    limits = {vendor: str(job.gpus)} if job.gpus else {}
    cpus = {"cpu": str(job.target.cpus * job.per_node)} if job.target.cpus else {}
    return {**({"limits": limits} if limits else {}), **({"requests": limits | cpus} if limits or cpus else {})}


def volumes(job: LaunchJob) -> list[dict[str, Any]]:
    """The run file, the run folder, and shared memory, of which a pod has 64 MB unless it is mounted."""
    return [
        {"name": "run-file", "configMap": {"name": job.label}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": mounted(job)[0]}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def mounts(job: LaunchJob) -> list[dict[str, Any]]:
    """Where they are."""
    return [
        {"name": "run-file", "mountPath": FILES, "readOnly": True},
        {"name": "runs", "mountPath": mounted(job)[1]},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def container(job: LaunchJob, name: str, command: list[str]) -> dict[str, Any]:
    """A machine's ranks."""
    return {
        "name": name,
        "image": job.target.image,
        "command": command,
        "workingDir": mounted(job)[1],
        "resources": resources(job),
        "volumeMounts": mounts(job),
    }


def pod(job: LaunchJob, command: list[str], restart: str, name: str = CONTAINER) -> dict[str, Any]:
    """The pod of one machine, with time to save before it is killed."""
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": job.save_seconds,
        "containers": [container(job, name, command)],
        "volumes": volumes(job),
    }
