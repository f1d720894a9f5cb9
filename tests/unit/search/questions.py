"""Small questions that several tests put."""

from typing import Any

from meshwright.config.presets import preset
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.question import Question


def question(
    model: str = "tiny", machines: str = "8xh100", sequence: int = 64, batch: int = 8, **fixed: Any
) -> Question:
    return Question(
        arch=preset(model),
        sequence=sequence,
        batch=batch,
        precision="bf16",
        cluster=cluster(machines),
        stack=stack_of("meshwright"),
        fixed=fixed,
    )
