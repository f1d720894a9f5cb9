"""What is written for Volcano, held to its Job as its API describes it: names of keys, their types, known words."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from meshwright.config import load
from meshwright.launch.job import LaunchJob, Target
from meshwright.launch.volcano import volcano_job

Event = Literal["*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed"]
Action = Literal["AbortJob", "RestartJob", "RestartTask", "RestartPod", "TerminateJob", "CompleteJob", "ResumeJob"]


class Policy(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """What follows an event or an exit code, of which a policy has one."""

    action: Action
    event: Event | None = None
    exit_code: int | None = None
    timeout: str | None = None


class Pod(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A pod's template; what is in it is Kubernetes' own."""

    spec: dict[str, Any]
    metadata: dict[str, Any] = {}


class Task(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """Pods that are alike."""

    name: str
    replicas: int
    template: Pod
    policies: list[Policy] = []
    min_available: int | None = None
    max_retry: int | None = None


class Spec(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A job."""

    scheduler_name: str
    min_available: int
    tasks: list[Task]
    max_retry: int = 3
    plugins: dict[str, list[str]] = {}
    policies: list[Policy] = []
    queue: str = ""
    priority_class_name: str = ""
    ttl_seconds_after_finished: int | None = None


class VolcanoJob(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """All of it."""

    api_version: Literal["batch.volcano.sh/v1alpha1"]
    kind: Literal["Job"]
    metadata: dict[str, Any]
    spec: Spec


def written(**said: Any) -> dict[str, Any]:
    run = load.load(None, ["arch.preset=tiny", "batch=16", "plan.replicate=16"], ranks=16).run
    target = Target(volume="runs:/shared", **said)
    return volcano_job(
        LaunchJob(
            run=run, nodes=2, per_node=8, gpus=8, folder=Path("/shared/r"), where=Path("/shared"), out=Path("/out"),
            save_seconds=30, target=target,
        )
    )  # fmt: skip


@pytest.mark.parametrize("requeues", [0, 50])
def test_every_key_is_one_of_volcanos(requeues):
    spec = msgspec.convert(written(requeues=requeues), VolcanoJob).spec
    (task,) = spec.tasks
    assert spec.min_available == task.replicas == 2  # all or none
    assert all((policy.event is None) != (policy.exit_code is None) for policy in (*spec.policies, *task.policies))
    restarts = {policy.exit_code for policy in spec.policies if policy.action == "RestartJob"}
    assert restarts == ({None, 10, 11, 137, 143} if requeues else set())


def test_a_misspelt_key_and_an_unknown_word_are_refused():
    for spec in ({"minAvailabel": 2}, {"policies": [{"event": "PodLost", "action": "RestartJob"}]}):
        job = written()
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(job | {"spec": job["spec"] | spec}, VolcanoJob)
