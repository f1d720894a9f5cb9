"""Parses a task as SkyPilot does, and says what it understood. Run by the judge's own interpreter."""

import json
import sys

import sky

task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(
    json.dumps(
        {
            "nodes": task.num_nodes,
            "accelerators": resources.accelerators,
            "recovery": resources.job_recovery,
            "run": task.run,
            "name": task.name,
        },
        default=str,
    )
)
