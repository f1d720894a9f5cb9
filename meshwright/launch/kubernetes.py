"""Kubernetes: Kubeflow's TrainJob (Trainer v2) or PyTorchJob (v1), a JobSet, or a plain indexed Job.

In each a pod is a machine. All ranks leave when one is lost, so all pods end, and all start again: after exit codes 10
and 11, and when a pod is evicted, but not after a mistake that would only happen again.

What the pods of Kubernetes, Kubeflow and Volcano have in common comes first.
"""

from typing import Any

import msgspec

from meshwright.config import load
from meshwright.launch.job import Launch, LaunchFile, LaunchJob, mounted, pod_word, yaml_documents
from meshwright.runtime.failure import Exit
from meshwright.runtime.place import DEFAULT_PORT
from meshwright.spec.problem import mistake

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


RUNTIME = "torch-distributed"  # that Kubeflow's Trainer comes with; its replicated job and container are named node
NODE = "node"


def launch(job: LaunchJob) -> Launch:
    """One file: the run file as a ConfigMap, and the job."""
    text = yaml_documents([run_map(job), *KINDS[job.target.kind](job)])
    name = f"{job.target.kind}.yaml"
    return Launch(
        files=(LaunchFile(name=name, text=text),),
        command=("kubectl", "apply", "-f", str(job.out / name)),
        checks=(("kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", str(job.out / name)),),
    )


def train_job(job: LaunchJob) -> list[dict[str, Any]]:
    """Kubeflow Trainer v2. Its runtime says where rank 0 is; restarts are the runtime's JobSet's."""
    patch = {
        "terminationGracePeriodSeconds": job.save_seconds,
        "volumes": volumes(job),
        "containers": [{"name": NODE, "volumeMounts": mounts(job)}],
    }
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": patch}}}}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": metadata(job),
            "spec": {
                "runtimeRef": {"name": RUNTIME},
                "trainer": {
                    "image": job.target.image,
                    "command": words(job),
                    "numNodes": job.nodes,
                    "numProcPerNode": job.per_node,
                    "resourcesPerNode": resources(job),
                },
                "runtimePatches": [
                    {
                        "manager": "meshwright.launch/files",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                    }
                ],
            },
        }
    ]


def pytorch_job(job: LaunchJob) -> list[dict[str, Any]]:
    """Kubeflow's training operator. OnFailure: its ExitCode policy would take 10 and 11 for mistakes that stay.

    It starts again after every code but 0, so a run that people have stopped must end with that.
    """
    again = "OnFailure" if job.target.requeues else "Never"  # a kubelet starts again before anybody counts
    body = pod(job, [*words(job), "--stop-is-done"], again, "pytorch")
    del body["restartPolicy"]  # the replica's is the pod's
    replica = {"restartPolicy": again, "template": {"spec": body}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(job),
            "spec": {
                "nprocPerNode": str(job.per_node),
                "runPolicy": {"backoffLimit": job.target.requeues, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def job_set(job: LaunchJob) -> list[dict[str, Any]]:
    """All pods are made anew after a fault, and none after a mistake; one alone where the others do without it."""
    inner = indexed(job, f"{job.label}-{NODE}-0-0.{job.label}")
    if not job.has_launchers:
        inner["backoffLimit"] = 0  # one lost pod is a lost job: the set starts all again
    mistake_stays = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(job),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.label},
                "failurePolicy": {"maxRestarts": job.target.requeues, "rules": [mistake_stays]},
                "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": inner}}],
            },
        }
    ]


def plain_job(job: LaunchJob) -> list[dict[str, Any]]:
    """An indexed Job, and the Service by which its pods have names."""
    spec = indexed(job, f"{job.label}-0.{job.label}")
    spec["template"]["spec"]["subdomain"] = job.label
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": job.label}}
    about = metadata(job)
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec},
    ]


def indexed(job: LaunchJob, address: str) -> dict[str, Any]:
    """A Job whose pods know their number."""
    stays = {
        "action": "FailJob",
        "onExitCodes": {"containerName": NODE, "operator": "NotIn", "values": [*RESUMABLE, 137, 143]},
    }
    moved = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.target.requeues * job.nodes,  # which counts pods, and all of them end together
        "podFailurePolicy": {"rules": [moved, stays]},
        "template": {
            "metadata": {"labels": {"app": job.label}},
            "spec": pod(job, words(job, address, DEFAULT_PORT), "Never"),
        },
    }


KINDS = {"trainjob": train_job, "pytorchjob": pytorch_job, "jobset": job_set, "job": plain_job}


def require_kind(kind: str) -> None:
    """A kind that can be written."""
    if kind not in KINDS:
        raise mistake(f"--kind {kind} is not known", f"use one of {', '.join(KINDS)}")
