"""Volcano: a gang-scheduled Job, started again as a whole after exit codes 10 and 11."""

from typing import Any

from meshwright.launch import kubernetes
from meshwright.launch.job import Launch, LaunchFile, LaunchJob, yaml_documents
from meshwright.runtime.place import DEFAULT_PORT

TASK = "node"


def launch(job: LaunchJob) -> Launch:
    """One file: the run file as a ConfigMap, and the job."""
    text = yaml_documents([kubernetes.run_map(job), volcano_job(job)])
    return Launch(
        files=(LaunchFile(name="volcano.yaml", text=text),),
        command=("kubectl", "apply", "-f", str(job.out / "volcano.yaml")),
        checks=(("kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", str(job.out / "volcano.yaml")),),
    )


def volcano_job(job: LaunchJob) -> dict[str, Any]:
    """All pods are scheduled or none; the env plugin numbers them, the svc plugin gives them names."""
    address = f"{job.label}-{TASK}-0.{job.label}"
    again = "RestartPod" if job.has_launchers else "RestartJob"  # the first is one of Volcano's since 1.11
    action = again if job.target.requeues else "TerminateJob"  # maxRetry = 0 is Volcano's word for its usual 3
    restarts = [{"exitCode": code, "action": action} for code in (*kubernetes.RESUMABLE, 137, 143)]
    task = {
        "name": TASK,
        "replicas": job.nodes,
        "template": {"spec": kubernetes.pod(job, kubernetes.words(job, address, DEFAULT_PORT), "Never", TASK)},
        "policies": [{"event": "TaskCompleted", "action": "CompleteJob"}],
    }
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": kubernetes.metadata(job),
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": job.nodes,
            "maxRetry": max(job.target.requeues, 1),
            "plugins": {"env": [], "svc": []},
            "policies": [{"event": "PodEvicted", "action": action}, *restarts],
            "tasks": [task],
        },
    }
