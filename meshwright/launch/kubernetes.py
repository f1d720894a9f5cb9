"""Kubernetes: Kubeflow's TrainJob (Trainer v2) or PyTorchJob (v1), a JobSet, or a plain indexed Job.

In each a pod is a machine. All ranks leave when one is lost, so all pods end, and all start again: after exit codes 10
and 11, and when a pod is evicted, but not after a mistake that would only happen again.
"""

from typing import Any

from meshwright.launch import pods
from meshwright.launch.job import Launch, LaunchFile, LaunchJob
from meshwright.launch.quoting import yaml_documents
from meshwright.runtime.place import DEFAULT_PORT
from meshwright.spec.problem import mistake

RUNTIME = "torch-distributed"  # that Kubeflow's Trainer comes with; its replicated job and container are named node
NODE = "node"


def launch(job: LaunchJob) -> Launch:
    """One file: the run file as a ConfigMap, and the job."""
    text = yaml_documents([pods.run_map(job), *KINDS[job.target.kind](job)])
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
        "volumes": pods.volumes(job),
        "containers": [{"name": NODE, "volumeMounts": pods.mounts(job)}],
    }
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": patch}}}}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": pods.metadata(job),
            "spec": {
                "runtimeRef": {"name": RUNTIME},
                "trainer": {
                    "image": job.target.image,
                    "command": pods.words(job),
                    "numNodes": job.nodes,
                    "numProcPerNode": job.per_node,
                    "resourcesPerNode": pods.resources(job),
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
    pod = pods.pod(job, [*pods.words(job), "--stop-is-done"], again, "pytorch")
    del pod["restartPolicy"]  # the replica's is the pod's
    replica = {"restartPolicy": again, "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": pods.metadata(job),
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
            "metadata": pods.metadata(job),
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
    about = pods.metadata(job)
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec},
    ]


def indexed(job: LaunchJob, address: str) -> dict[str, Any]:
    """A Job whose pods know their number."""
    stays = {
        "action": "FailJob",
        "onExitCodes": {"containerName": NODE, "operator": "NotIn", "values": [*pods.RESUMABLE, 137, 143]},
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
            "spec": pods.pod(job, pods.words(job, address, DEFAULT_PORT), "Never"),
        },
    }


KINDS = {"trainjob": train_job, "pytorchjob": pytorch_job, "jobset": job_set, "job": plain_job}


def require_kind(kind: str) -> None:
    """A kind that can be written."""
    if kind not in KINDS:
        raise mistake(f"--kind {kind} is not known", f"use one of {', '.join(KINDS)}")
